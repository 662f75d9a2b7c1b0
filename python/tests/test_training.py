"""Stages, ranks, launchers and plain torch agree."""

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import Programs, batch, config, network, nightly, no_large_files, plain

import libzero
from libzero.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def test_stages_and_ranks_as_threads_agree(train: Callable[..., list[float]]) -> None:
    def rank(stage: int) -> Callable[[libzero.Communicator], tuple[str, list[float]]]:
        def body(comm: libzero.Communicator) -> tuple[str, list[float]]:
            engine = libzero.Engine(models[comm.rank], config(stage))
            losses = train(engine)
            return engine.state_hash(), losses

        return body

    hashes, losses = set(), []
    for stage in range(4):
        models = [network(), network(2)]  # rank 0's values count
        results = libzero.run_ranks(2, rank(stage))
        hashes |= {each[0] for each in results}
        losses.append([each[1] for each in results])
    assert len(hashes) == 1
    assert losses[1:] == losses[:-1]

    model = network()
    expected = plain(model, 4, lambda m, step: torch.cat([m(batch(r, step)) for r in (0, 1)]).square().mean())
    both = [sum(pair) / 2 for pair in zip(*losses[0], strict=True)]
    assert both == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("recipe", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}])
def test_recipes_agree_over_stages(recipe: dict[str, Any]) -> None:
    hashes = set()
    for stage in (0, 3):
        model = network()
        with libzero.Engine(model, config(stage, **recipe)) as engine:
            dtype = model[0].weight.dtype
            for step in range(3):
                engine.backward(engine(batch(0, step).to(dtype)).float().square().mean())
                engine.step()
            hashes.add(engine.state_hash())
    assert len(hashes) == 1


class Routed(torch.nn.Module):
    """Two branches, weighted by a router that computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.router = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x.to(self.router.weight.dtype)).softmax(-1).to(x.dtype)
        return torch.stack([branch(x) for branch in self.branches], -1).mul(share.unsqueeze(-2)).sum(-1)


def test_a_router_stays_fp32_and_resumes_at_another_world_size(tmp_path: Path) -> None:
    settings = config(3, bf16={"enabled": True}, libzero={"keep_fp32": ["router.*"]})

    def train(engine: libzero.Engine, steps: int = 2) -> None:
        for step in range(steps):
            loss = engine(batch(engine.comm.rank, step).bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()

    def two(comm: libzero.Communicator) -> dict[str, torch.Tensor]:
        model = Routed()
        with libzero.Engine(model, settings) as engine:
            train(engine)
            single = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
            assert single == {"router.weight", "router.bias"}
            state = engine.state_dict()  # what forward reads
            engine.save_checkpoint(tmp_path, "two")
            engine.save_16bit_model(tmp_path)
            with pytest.raises(RuntimeError, match=r"branches.0.\w+ of BFloat16 and a tensor of Float.*keep_fp32"):
                engine(batch())
            return state | {f"master {name}": p for name, p in engine.full_state_dict().items()}

    state = libzero.run_ranks(2, two)[0]
    for name in ("router.weight", "router.bias"):
        assert torch.equal(state[name], state[f"master {name}"])
        assert not torch.equal(state[name].bfloat16().float(), state[name])
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(p, state[name]) and p.dtype == state[name].dtype for name, p in written.items())
    assert written["branches.0.weight"].dtype == torch.bfloat16

    model = Routed()
    with libzero.Engine(model, config(1, bf16={"enabled": True}, libzero={"keep_fp32": "router.*"})) as one:
        one.load_checkpoint(tmp_path)
        masters = one.full_state_dict()
        assert all(torch.equal(p, state[f"master {name}"]) for name, p in masters.items())
        assert torch.equal(model.router.weight, state["router.weight"])
        train(one)
        assert torch.equal(model.router.weight, one.full_state_dict()["router.weight"])
    model = Routed()
    with libzero.Engine(model, config(2, bf16={"enabled": True})) as rounded:  # what was trained has fp32 masters
        rounded.load_checkpoint(tmp_path)
        assert torch.equal(model.router.weight, state["router.weight"].bfloat16())


WORKER = """
    dist = "dist" in os.environ.get("MODE", "")
    if dist:
        torch.distributed.init_process_group("gloo")
    engine = libzero.Engine(network(), config(3))
    for step in range(4):
        engine.backward(engine(batch(engine.comm.rank, step)).square().mean())
        engine.step()
    if dist:
        ones = torch.ones(3)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [2, 2, 2]
    digest = engine.state_hash()
    if engine.comm.rank == 0:
        print("hash", digest, engine.comm.size)
"""


def hash_of(out: str) -> str:
    return next(line.split("hash ")[1] for line in out.splitlines() if "hash " in line)


def expected_hash(train: Callable[..., list[float]]) -> str:
    models = [network(), network()]

    def body(comm: libzero.Communicator) -> str:
        engine = libzero.Engine(models[comm.rank], config(3))
        train(engine)
        return engine.state_hash()

    return libzero.run_ranks(2, body)[0] + " 2"


def test_under_zero_run(programs: Programs, train: Callable[..., list[float]]) -> None:
    assert hash_of(programs.ranks(WORKER)) == expected_hash(train)


@pytest.mark.nightly
def test_ranks_draw_their_own_dropout_at_every_stage(programs: Programs) -> None:
    """Each rank draws other masks. A plain loop that draws both ranks' masks has the same losses."""
    out = programs.ranks("""
        import json
        from conftest import plain

        def dropping():
            layers = list(network())
            return torch.nn.Sequential(*layers[:2], torch.nn.Dropout(0.5), *layers[2:])

        def loss_of(model, rank, step):
            torch.manual_seed(10 * step + rank)
            return model(batch(rank, step)).square().mean()

        found = []
        for stage in range(4):
            engine = libzero.Engine(dropping(), config(stage))
            comm, losses = engine.comm, []
            for step in range(4):
                loss = loss_of(engine, comm.rank, step)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found.append((engine.state_hash(), comm.all_gather_bytes(json.dumps(losses).encode())))
            engine.close()
        assert found == found[:1] * 4, found
        if comm.rank == 0:
            model = dropping()
            losses = plain(model, 4, lambda m, step: (loss_of(m, 0, step) + loss_of(m, 1, step)) / 2)
            first, second = (json.loads(each) for each in found[0][1])
            assert all(abs((a + b) / 2 - c) < 1e-5 for a, b, c in zip(first, second, losses, strict=True))
            print("agreed")
    """)
    assert "agreed" in out


@pytest.mark.parametrize("mode", [nightly(""), "dist"])
def test_under_torchrun(
    programs: Programs, train: Callable[..., list[float]], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", mode)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--standalone"]
    assert hash_of(programs.run(WORKER, *launcher)) == expected_hash(train)


def test_the_programs_process_group_ends_before_the_interpreter(programs: Programs) -> None:
    # Its threads abort the process if they drop a tensor later. Functions run in reverse order at the end.
    program = programs.write("")
    Path(program).write_text(
        "import atexit, sys\n"
        "import torch.distributed as dist\n"
        "atexit.register(lambda: print('at the end', dist.is_initialized(), flush=True))\n"
        "import libzero\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0, world_size=1)\n"
        "import torch.distributed.nn.functional\n"
    )
    environment = programs.environment()
    words = [sys.executable, program, str(programs.folder / "store")]
    out = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    assert out == "at the end False\n"


@pytest.mark.nightly
def test_over_a_process_group_without_a_launcher(programs: Programs, train: Callable[..., list[float]]) -> None:
    out = programs.run("""
        import torch.multiprocessing as mp

        def rank(i, port):
            torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=i, world_size=2)
            engine = libzero.Engine(network(), config(3))
            assert engine.comm.transport == "c10d"
            for step in range(4):
                engine.backward(engine(batch(i, step)).square().mean())
                engine.step()
            digest = engine.state_hash()
            if i == 0:
                print("hash", digest, engine.comm.size, flush=True)
            engine.close()
            torch.distributed.destroy_process_group()

        if __name__ == "__main__":
            import socket
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            mp.spawn(rank, (port,), nprocs=2)
    """)
    assert hash_of(out) == expected_hash(train)


def test_two_engines_train_through_each_other() -> None:
    def run(stage: int) -> tuple[str, str]:
        g, d = network(1), network(2)
        back = torch.nn.Linear(4, 8)
        with torch.no_grad():
            back.weight.copy_(torch.arange(32.0).view(8, 4) / 32), back.bias.zero_()
        eg, ed = libzero.Engine(g, config(stage)), libzero.Engine(d, config(stage))
        for step in range(3):
            fake = back(eg(batch(0, step)))
            ed.backward(ed(fake.detach()).square().mean())
            ed.step()
            eg.backward(ed(fake).square().mean())
            eg.step()
        return eg.state_hash(), ed.state_hash()

    assert run(3) == run(0)


def test_build_allocates_nothing_and_gives_the_eager_values() -> None:
    eager = network().state_dict()
    torch.manual_seed(1)
    model = libzero.build(unseeded, config())
    with pytest.raises(RuntimeError):
        model[0].weight.untyped_storage().data_ptr()
    engine = libzero.Engine(model, config(3))
    values = engine.state_dict()
    assert list(values) == list(eager)
    assert all(torch.equal(values[name], eager[name]) for name in eager)


def test_build_of_buffers_and_reads_before_an_engine() -> None:
    def make() -> torch.nn.Sequential:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))  # has torch.tensor(0)
        model.register_buffer("table", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.register_buffer("old", torch.Tensor([5, 6]))
        model.register_buffer("numpy", torch.from_numpy(numpy.arange(3)))
        return model

    torch.manual_seed(1)
    eager = make().state_dict()
    torch.manual_seed(1)
    model = libzero.build(make)
    weight = model[0].weight
    for read in (
        lambda: weight.sum(),
        lambda: model(torch.zeros(2, 4)),
        lambda: weight.detach().clone(),
        lambda: weight.data.fill_(1.0),
        lambda: weight.data.copy_(torch.ones(4, 4)),
        lambda: model.to(torch.bfloat16),
        lambda: copy.deepcopy(model),
        lambda: weight.detach().numpy()[0],
    ):
        with pytest.raises(RuntimeError, match="Hint: construct an Engine"):
            read()
    values = libzero.Engine(model, config(3)).state_dict()
    assert all(torch.equal(values[name], eager[name]) for name in eager)
    torch.manual_seed(1)
    on_cpu = libzero.Engine(libzero.build(make, device="cpu"), config(3)).state_dict()
    assert all(torch.equal(on_cpu[name], eager[name]) for name in eager)
    with pytest.raises(libzero.ConfigError, match="got the device meta, expected cpu or cuda"):
        libzero.build(make, device="meta")


def unseeded() -> torch.nn.Sequential:
    nn = torch.nn
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


class Reads(torch.nn.Module):
    """Reads a parameter while it is built."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.read = torch.nn.Parameter(read(self.layer.weight.data).float())


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda w: w.t().contiguous(),
    "reshape": lambda w: w.t().reshape(-1),
    "double": lambda w: w.double().float(),
    "half": lambda w: w.half(),
    "bfloat16": lambda w: w.to(torch.bfloat16),
    "type_as": lambda w: w.type_as(torch.ones(1, dtype=torch.float64)),
    "flatten": lambda w: w.t().flatten(),
    "ravel": lambda w: w.t().ravel(),
    "expand": lambda w: w.unsqueeze(0).expand(2, 6, 6).contiguous(),
    "clone": lambda w: w.detach().clone(),
    "repeat": lambda w: w.repeat(2, 1),
    "chunk": lambda w: w.chunk(2, 1)[1].contiguous(),
    "channels_last": lambda w: w.view(1, 6, 2, 3).to(memory_format=torch.channels_last),
    "every second column": lambda w: w[:, ::2].contiguous(),
    "cat": lambda w: torch.cat([w, w]),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "numpy": lambda w: torch.from_numpy(w.numpy().copy()),
}


@pytest.mark.parametrize("form", FORMS)
def test_build_of_a_module_that_reads_its_parameters(form: str) -> None:
    torch.manual_seed(5)
    wanted = Reads(FORMS[form]).state_dict()
    for stage in range(4):
        torch.manual_seed(5)
        with libzero.Engine(libzero.build(lambda: Reads(FORMS[form])), config(stage)) as engine:
            found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Drawn(torch.nn.Module):
    """Initial values from all over torch: of torch.nn.init, by index, from numpy, of layers that draw by themselves."""

    def __init__(self) -> None:
        super().__init__()
        nn, init = torch.nn, torch.nn.init
        self.square, self.small, self.turned = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        init.orthogonal_(self.square.weight), init.trunc_normal_(self.small.weight, std=0.02)
        self.turned.weight.data = self.turned.weight.data.t().contiguous()
        self.sparse, self.eye = nn.Parameter(torch.full((6, 6), 0.5)), nn.Parameter(torch.empty(6, 6))
        init.sparse_(self.sparse.data, 0.5), init.eye_(self.eye)
        with torch.no_grad():
            self.small.bias[2:].mul_(2), self.small.bias[0].uniform_(), self.square.bias.copy_(self.small.bias)
        own = torch.Generator().manual_seed(9)
        self.of_generator = nn.Parameter(init.kaiming_normal_(torch.empty(6, 6), generator=own))
        self.of_numpy = nn.Parameter(torch.from_numpy(numpy.linspace(0, 1, 6, dtype=numpy.float32)))
        self.made = nn.Parameter(torch.stack([torch.rand(6), torch.zeros(6), torch.randperm(6).float()]))
        self.copied, self.tied = copy.deepcopy(self.square), nn.Linear(6, 6)
        self.tied.weight = self.square.weight
        self.rows, self.memory = nn.Embedding(7, 6, padding_idx=2), nn.LSTM(6, 4, 2)
        self.heads, self.norm = nn.MultiheadAttention(6, 2), nn.BatchNorm1d(6)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.spectral = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("drawn", torch.rand(6))
        self.apply(lambda m: m.weight.data.add_(0.5) if isinstance(m, nn.BatchNorm1d) else None)


@pytest.mark.parametrize("stage", range(4))
def test_build_draws_what_an_eager_module_draws(stage: int) -> None:
    torch.manual_seed(5)
    wanted, after = Drawn().state_dict(), torch.rand(2)
    torch.manual_seed(5)
    with libzero.Engine(libzero.build(Drawn), config(stage)) as engine:
        assert torch.equal(torch.rand(2), after)
        found = engine.state_dict()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    with pytest.raises(ZeroDivisionError):
        libzero.build(lambda: [torch.nn.Linear(2, 2), 1 / 0])  # type: ignore[type-var]
    assert torch.nn.Linear(2, 2).weight.untyped_storage().data_ptr()  # modules have memory again


def test_build_of_a_module_that_is_converted() -> None:
    for convert in (torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double, torch.nn.Module.float):

        def make(convert: Callable[[torch.nn.Module], torch.nn.Module] = convert) -> torch.nn.Module:
            return convert(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))).float()

        torch.manual_seed(5)
        wanted = make().state_dict()
        torch.manual_seed(5)
        with libzero.Engine(libzero.build(make), config(3)) as engine:
            assert all(torch.equal(engine.state_dict()[name], value) for name, value in wanted.items())


def test_build_of_a_module_that_seeds() -> None:
    def make() -> torch.nn.Module:
        layers = [torch.nn.Linear(6, 6)]
        for seed in (5, 5, 6):  # 5 is also the seed outside
            torch.manual_seed(seed)
            layers.append(torch.nn.Linear(6, 6))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            layers.append(torch.nn.Linear(6, 6))
        return torch.nn.Sequential(*layers, torch.nn.Linear(6, 6))

    torch.manual_seed(5)
    wanted, after = make().state_dict(), torch.rand(2)
    torch.manual_seed(5)
    with libzero.Engine(libzero.build(make), config(3)) as engine:
        assert all(torch.equal(engine.state_dict()[name], value) for name, value in wanted.items())
        assert torch.equal(torch.rand(2), after)
    assert isinstance(torch.random.default_generator, torch.Generator)


@pytest.mark.parametrize("read", [torch.Tensor.data_ptr, lambda w: w.untyped_storage().data_ptr()])
def test_build_refuses_what_reads_memory_without_an_operator(read: Callable[[torch.Tensor], Any]) -> None:
    def make() -> torch.nn.Module:
        layer = torch.nn.Linear(6, 6)
        read(layer.weight.data)
        return layer

    with pytest.raises(libzero.ConfigError, match=r"\[zero::build\] cannot read a parameter that has no values yet"):
        libzero.build(make)


def test_build_of_a_module_that_copies_one_that_an_engine_has_sharded() -> None:
    torch.manual_seed(5)
    teacher = torch.nn.Linear(6, 6)
    wanted = teacher.weight.detach().clone()

    def make() -> torch.nn.Module:
        student = torch.nn.Linear(6, 6)
        student.weight.data.copy_(teacher.weight.data)
        return student

    with libzero.Engine(teacher, config(3)), libzero.Engine(libzero.build(make), config(3)) as engine:
        assert torch.equal(engine.state_dict()["weight"], wanted)


def test_autocast_and_functional_call_and_double_backward() -> None:
    def run(stage: int) -> str:
        model = network()
        engine = libzero.Engine(model, config(stage))
        x = batch().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.func.functional_call(model, dict(model.named_parameters()), (x,)).float().square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        engine.backward(loss + slope.square().sum())
        engine.step()
        return engine.state_hash()

    assert run(3) == run(0)


def test_checkpoints_in_the_background(tmp_path: Path) -> None:
    """Hold the state of their call; close() completes one; weights of both formats are read without an engine."""
    decoupled = config(2, checkpoint={"writer": {"decoupled": True}})

    def train(engine: libzero.Engine, steps: range) -> None:
        for step in steps:
            engine.backward(engine(batch(engine.comm.rank, step)).square().mean())
            engine.step()

    def rank(comm: libzero.Communicator) -> tuple[str, str, str]:
        with libzero.Engine(models[comm.rank], decoupled) as engine:
            train(engine, range(2))
            before = engine.logical_hash()
            engine.save_checkpoint(tmp_path, "first", user_state={"at": 2})
            assert engine.checkpoint_pending
            train(engine, range(2, 4))
            assert engine.finish_checkpoint() == "first"
            assert not engine.checkpoint_pending
            assert engine.global_samples == 4 * 2 * 4
            engine.save_checkpoint(tmp_path, "second")
            after = engine.logical_hash()
        with libzero.Engine(network(), config(3)) as other:
            assert other.load_checkpoint(tmp_path, "first") == "first"
            assert other.user_state == {"at": 2}
            assert other.global_samples == 2 * 2 * 4
            loaded = other.logical_hash()
            assert other.load_checkpoint(tmp_path) == "second"
            assert other.logical_hash() == after
        return before, after, loaded

    models = [network(), network()]
    for before, after, loaded in libzero.run_ranks(2, rank):
        assert before == loaded != after
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "second")
    for name, value in models[0].named_parameters():
        assert torch.equal(weights[name], value.detach())


def test_background_saves_that_fail(tmp_path: Path) -> None:
    """Are an IoError, or with save_errors "warn" only the third; the engine trains on from the state it had."""
    for errors in ("throw", "warn"):
        settings = {"checkpoint": {"writer": {"decoupled": True}}, "libzero": {"save_errors": errors}}
        with libzero.Engine(network(), config(2, **settings)) as engine:

            def train(engine: libzero.Engine, step: int) -> None:
                engine.backward(engine(batch(0, step)).square().mean())
                engine.step()

            train(engine, 0)
            engine.save_checkpoint(tmp_path / errors, "first")
            assert engine.finish_checkpoint() == "first"
            expected = engine.logical_hash()
            for failed in range(1, 4):
                throws = errors == "throw" or failed == 3
                with no_large_files():
                    engine.save_checkpoint(tmp_path / errors, f"failed{failed}")
                    with pytest.raises(libzero.IoError) if throws else contextlib.nullcontext():
                        assert engine.finish_checkpoint() == ""
                assert not engine.checkpoint_pending
            assert engine.logical_hash() == expected
            train(engine, 1)
            engine.save_checkpoint(tmp_path / errors, "second")
            assert engine.finish_checkpoint() == "second"
            assert engine.load_checkpoint(tmp_path / errors) == "second"
        assert sorted(each.name for each in (tmp_path / errors).iterdir() if each.is_dir()) == ["first", "second"]


def test_weights_for_other_libraries(tmp_path: Path) -> None:
    """What torch.load and safetensors files hold is what the model has; an engine takes it back."""

    def rank(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(3)) as engine:
            engine.backward(engine(batch(comm.rank)).square().mean())
            engine.step()
            report = engine.export_weights(tmp_path / "weights.pt", format="pt")
            assert report.tensors == 6
            engine.export_weights(tmp_path / "hf", dtype="bf16")
            whole = engine.full_state_dict()
        if comm.rank == 0:
            read = torch.load(tmp_path / "weights.pt", weights_only=True)
            assert read.keys() == whole.keys()
            assert all(torch.equal(read[name], whole[name]) for name in whole)
        comm.barrier()
        with libzero.Engine(network(5), config(2)) as other:
            found = other.load_weights(tmp_path / "weights.pt")
            assert sorted(found.taken) == sorted(name for name, _ in models[0].named_parameters())
            again = other.full_state_dict()
            assert all(torch.equal(again[name], whole[name]) for name in again)
            assert len(other.import_weights(tmp_path / "hf").converted) == 6
            rounded = other.full_state_dict()
            assert all(torch.equal(rounded[name], whole[name].bfloat16().float()) for name in rounded)
            with pytest.raises(libzero.ConfigError, match="weight"):
                other.import_weights(tmp_path / "hf", prefix="model.")
            with pytest.raises(libzero.ConfigError, match="untie 0.bias: is not stored"):
                other.import_weights(tmp_path / "hf", untie=["0.bias"])
            # All states, and the steps.
            engine_hash = other.logical_hash()
            other.export_weights(tmp_path / "universal", format="universal")
        with libzero.Engine(network(6), config(1)) as third:
            third.import_weights(tmp_path / "universal", optimizer=True)
            assert third.logical_hash() == engine_hash

    models = [network(), network()]
    libzero.run_ranks(2, rank)


def test_some_weights_go_out_and_come_back(tmp_path: Path) -> None:
    """A part of the model in a file of another name next to others, as safetensors reads it; nothing else is read."""
    safetensors = pytest.importorskip("safetensors.torch")
    chosen, file = ["0.bias", "0.weight", "4.bias"], tmp_path / "some" / "part.safetensors"

    def rank(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(3)) as engine:
            extra = {"note.txt": "\u00e9\n", "raw.bin": b"\xff\x00"}
            report = engine.export_weights(
                tmp_path / "some", dtype="", only=["0.*", "4.bias"], stem="part", extra_files=extra
            )
            assert sorted(report.files) == ["note.txt", "part.safetensors", "raw.bin"] and report.tensors == 3
            whole = engine.full_state_dict()
        if comm.rank == 0:
            read = safetensors.load_file(file)
            assert sorted(read) == chosen and all(torch.equal(read[name], whole[name]) for name in read)
            assert (tmp_path / "some" / "note.txt").read_text(encoding="utf-8") == "\u00e9\n"
            assert (tmp_path / "some" / "raw.bin").read_bytes() == b"\xff\x00"
        comm.barrier()
        with libzero.Engine(network(5), config(2)) as other:
            before = other.full_state_dict()
            with pytest.raises(libzero.ConfigError, match="4.bias"):
                other.import_weights(file, only="0.*")
            found = other.import_weights(file, only=["0.*", "4.bias"])
            assert sorted(found.taken) == chosen and found.missing == []
            after = other.full_state_dict()
            if comm.rank == 0:
                assert all(torch.equal(after[name], (whole if name in chosen else before)[name]) for name in after)

    models = [network(), network()]
    libzero.run_ranks(2, rank)


def test_an_export_changes_what_it_writes_and_not_the_model(tmp_path: Path) -> None:
    """Low-rank factors merged into the file of a run that trains them; an error of the program is one of the export."""
    safetensors = pytest.importorskip("safetensors.torch")
    factors = [torch.randn(32, 2), torch.randn(2, 8)]
    product = (factors[0] @ factors[1]).flatten()

    def merge(begin: int, values: torch.Tensor) -> None:
        assert values.dtype == torch.float32 and values.dim() == 1
        values += product[begin : begin + len(values)]

    def fail(begin: int, values: torch.Tensor) -> None:
        raise ValueError("no factors here")

    def rank(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(3)) as engine:
            before = engine.state_hash()
            engine.export_weights(tmp_path / "merged", change={"0.weight": merge})
            with pytest.raises(Exception, match="no factors here"):
                engine.export_weights(tmp_path / "failed", change={"0.weight": fail})
            with pytest.raises(libzero.ConfigError, match="change for 9.weight"):
                engine.export_weights(tmp_path / "other", change={"9.weight": merge})
            assert engine.state_hash() == before
            whole = engine.full_state_dict()
        if comm.rank == 0:
            read = safetensors.load_file(tmp_path / "merged" / "model.safetensors")
            whole["0.weight"] += product.view(32, 8)
            assert read.keys() == whole.keys() and all(torch.equal(read[name], whole[name]) for name in whole)
            assert sorted(each.name for each in tmp_path.iterdir()) == ["merged"]

    models = [network(), network()]
    libzero.run_ranks(2, rank)


def test_weights_alone_begin_another_run(tmp_path: Path) -> None:
    def rank(comm: libzero.Communicator) -> None:
        with libzero.Engine(network(), config(3)) as engine:
            for _ in range(2):
                engine.backward(engine(batch(comm.rank)).square().mean())
                engine.step()
            engine.save_checkpoint(tmp_path, "all", user_state={"at": 2})
            engine.save_checkpoint(tmp_path, "weights", weights_only=True)
            whole = engine.full_state_dict()
            report = engine.save_16bit_model(tmp_path / "out")
            assert report.tensors == len(list(engine.module.parameters()))
        if comm.rank == 0:
            read = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
            assert all(torch.equal(read[name].float(), whole[name]) for name in whole)
        comm.barrier()
        sgd = {**config(1), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        with libzero.Engine(network(5), sgd) as other:
            with pytest.raises(libzero.ConfigError, match="weights_only"):
                other.load_checkpoint(tmp_path, "all")
            with pytest.raises(libzero.ConfigError, match="holds weights only"):
                other.load_checkpoint(tmp_path, "weights")
            assert other.load_checkpoint(tmp_path, weights_only=True) == "weights"
            assert other.global_step == 0 and other.user_state is None
            found = other.full_state_dict()
            assert all(torch.equal(found[name], whole[name]) for name in found)
        with libzero.Engine(network(5), config(2)) as again:
            assert again.load_checkpoint(tmp_path) == "all"
            assert again.global_step == 2 and again.user_state == {"at": 2}
        wider = torch.nn.Sequential(network(5), torch.nn.Linear(2, 3))
        with libzero.Engine(wider, config(2)) as part:
            with pytest.raises(libzero.ConfigError, match="1.bias: not in the checkpoint"):
                part.load_checkpoint(tmp_path, "all", partial="0.*")

    libzero.run_ranks(2, rank)
