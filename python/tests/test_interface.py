"""The calls of the native interface, their errors, and side effects that they must not have."""

import copy
import io
import json
import logging
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, Programs, batch, config, find_zero, network

import libzero
from libzero._build import TESTED_TORCH, TORCH


def one_step(engine: libzero.Engine, step: int = 0) -> libzero.StepResult:
    engine.backward(engine(batch(0, step)).square().mean())
    return engine.step()


def test_configurations_come_as_path_dict_text_and_options(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(2)))
    forms: list[Any] = [file, str(file), config(2), json.dumps(config(2)), libzero.Options(file)]
    for form in forms:
        with libzero.Engine(network(), form) as engine:
            assert json.loads(engine.options.effective()["zero_optimization.stage"]) == 2


def test_errors_have_the_library_s_classes_and_texts(tmp_path: Path) -> None:
    with pytest.raises(libzero.ConfigError, match=r"zero_optimization/stage: got 7.*\n(.*\n)*1 error") as wrong:
        libzero.Options({"zero_optimization": {"stage": 7}})
    assert isinstance(wrong.value, ValueError) and wrong.value.code == 2
    with pytest.raises(libzero.IoError) as missing:
        libzero.Options(tmp_path / "none.json")
    assert isinstance(missing.value, OSError)
    engine = libzero.Engine(network(), config())
    with pytest.raises(libzero.IoError) as no_checkpoint:
        engine.load_checkpoint(tmp_path / "nothing")
    assert no_checkpoint.value.code == 3
    with pytest.raises(libzero.ConfigError, match="held by another Engine"):
        libzero.Engine(engine.module, config())
    engine.close()
    with pytest.raises(libzero.ConfigError, match="was closed"):
        engine.step()
    with pytest.raises(TypeError, match="torch.nn.Module"):
        libzero.Engine(torch.zeros(3), config())  # type: ignore[arg-type]
    with pytest.raises(libzero.ConfigError, match="no shape yet"):
        libzero.Engine(torch.nn.LazyLinear(3), config())


def test_a_failed_peer_is_a_comm_error_that_names_it() -> None:
    def body(comm: libzero.Communicator) -> int:
        if comm.rank == 1:
            comm.abort("of a test")
            return -2
        with pytest.raises(libzero.CommError, match="of a test") as lost:
            comm.barrier()
        return lost.value.rank

    assert libzero.run_ranks(2, body) == [1, -2]


def test_run_ranks_raises_what_a_rank_raises() -> None:
    def body(comm: libzero.Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("of rank 1")
        comm.barrier()

    with pytest.raises(KeyError, match="of rank 1"):
        libzero.run_ranks(3, body)


def test_collectives() -> None:
    def body(comm: libzero.Communicator) -> tuple[list[float], list[float], list[bytes], int]:
        mine = torch.full((2,), float(comm.rank + 1))
        out = torch.zeros(4)
        work = comm.all_gather(out, mine)
        work.wait()
        assert work.done()
        comm.all_reduce(mine).wait()
        rows = torch.arange(3.0) + 10 * comm.rank  # 1 row stays, 2 go to the other rank; it gets 0 from rank 1
        counts = [[1, 2], [0, 3]]
        numels = [counts[0][comm.rank], counts[1][comm.rank]]
        taken = torch.zeros(sum(numels))
        comm.all_to_all(taken, rows, out_numels=numels, in_numels=counts[comm.rank]).wait()
        assert taken.tolist() == [[0.0], [1.0, 2.0, 10.0, 11.0, 12.0]][comm.rank]
        with pytest.raises(ValueError, match="expected both or none"):
            comm.all_to_all(taken, rows, in_numels=counts[comm.rank])
        half = comm.split(comm.rank, 0)
        assert half is not None and half.size == 1 and comm.split(-1, 0) is None
        pair = comm.split(0, 0, name="tp")
        assert pair is not None
        pair.all_reduce(torch.ones(4)).wait()
        assert comm.stats()["by_op"]["tp.all_reduce"] == (1, 16)
        sent = comm.stats()["by_op"]["all_gather"][1]
        return out.tolist(), mine.tolist(), comm.all_gather_bytes(b"%d" % comm.rank), sent

    expected = ([1, 1, 2, 2], [3, 3], [b"0", b"1"], 8)
    assert libzero.run_ranks(2, body) == [expected, expected]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sum_over_tokens_is_divided_by_the_tokens_of_all_ranks(stage: int) -> None:
    """The loss of padded sequences: 4 rows count on rank 0 and 1 on rank 1."""
    counts, models = [4, 1], [network(), network()]

    def summed(model: torch.nn.Module, rank: int) -> torch.Tensor:
        return model(batch(rank))[: counts[rank]].square().sum()  # type: ignore[no-any-return]

    reference = network()
    torch.autograd.backward((summed(reference, 0) + summed(reference, 1)) / sum(counts))

    def body(comm: libzero.Communicator) -> torch.Tensor | None:
        engine = libzero.Engine(models[comm.rank], config(stage))
        with pytest.raises(libzero.ConfigError, match="got -1 tokens"):
            engine.backward(summed(engine.module, comm.rank), tokens=-1)
        engine.backward(summed(engine.module, comm.rank), tokens=counts[comm.rank])
        gradient = engine.gradient("0.weight")
        engine.step()
        return gradient

    for found in libzero.run_ranks(2, body):
        torch.testing.assert_close(found, reference[0].weight.grad)


class Forwarding(torch.nn.Module):
    """Passes unknown attributes on to a part, such as one that torch.compile wrapped, as many wrappers do."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = torch.compile(torch.nn.Linear(8, 8), backend="eager") if inner is None else inner
        self.head = torch.nn.Linear(8, 1)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", range(4))
def test_a_wrapper_around_a_compiled_part_has_all_its_parameters(stage: int) -> None:
    reference = Forwarding()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    engine = libzero.Engine(Forwarding(), config(stage))
    for step in range(3):
        reference(batch(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        one_step(engine, step)
    found = engine.state_dict()
    assert list(found) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


def test_a_wrapper_around_experts_is_none_of_their_layers() -> None:
    models = [Forwarding(libzero.MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2)) for _ in range(2)]
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}

    def body(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(3), comm=comm) as engine:
            found = engine.state_dict()
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    libzero.run_ranks(2, body)


def test_names_that_look_like_patterns_are_names() -> None:
    """Keys of a ModuleDict are free."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2) for name in ("a?", "ab", "c*", "c_long")})
    engine = libzero.Engine(model, config(3))
    assert engine._selected(model["a?"]) == [r"a\?.weight", r"a\?.bias"]
    assert engine._selected(["a?.weight", model["c*"].bias]) == ["a?.weight", r"c\*.bias"]
    for part in model.values():
        with engine.gathered_parameters(part), engine.gathered_parameters([part.bias]):
            pass


def test_torch_schedulers_drive_the_rate() -> None:
    reference = network()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    engine = libzero.Engine(network(), config())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, engine.optimizer)]
    for step in range(6):
        reference(batch(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert one_step(engine, step).lr == schedules[0].get_last_lr()[0]
        for schedule in schedules:
            schedule.step()
    for ours, theirs in zip(engine.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_rates_of_groups_and_numbers_that_are_fixed() -> None:
    groups = [{"pattern": "*bias", "lr": 0.5, "weight_decay": 0.0}]
    engine = libzero.Engine(network(), config(libzero={"parameter_groups": groups}))
    first, biases = engine.optimizer.param_groups
    assert (biases["lr"], biases["weight_decay"], len(biases["params"]), len(first["params"])) == (0.5, 0.0, 3, 3)
    before = engine.state_dict()
    first["lr"] = biases["lr"] = 0.0
    one_step(engine)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), engine.state_dict().values(), strict=True))
    biases["lr"] = 0.1
    one_step(engine)
    changed = [name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["0.bias", "2.bias", "4.bias"]
    first["nesterov"] = True
    with pytest.raises(libzero.ConfigError, match="nesterov.* got True, expected False: it cannot change"):
        one_step(engine)


def test_the_configuration_s_scheduler_shows_in_param_groups() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_type": "linear"}}
    engine = libzero.Engine(network(), config(scheduler=schedule))
    rates = []
    for step in range(3):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        assert one_step(engine, step).lr == rates[-1]
    assert rates == sorted(rates) and rates[0] < rates[2]
    engine.optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(libzero.ConfigError, match="scheduler"):
        one_step(engine)


def test_gathered_parameters_at_two_ranks() -> None:
    models = [network(1, 512), network(2, 512)]
    plain = network(1, 512)

    def body(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        engine = libzero.Engine(model, config())
        with pytest.raises(RuntimeError, match="sharded"):
            torch.save(model.state_dict(), io.BytesIO())
        with engine.gathered_parameters(model[2]):
            assert torch.equal(torch.frombuffer(model[2].weight.detach().numpy(), dtype=torch.float32),
                               plain[2].weight.detach().view(-1))  # fmt: skip
        with engine.gathered_parameters(["0.*", model[4].bias], modify=True), torch.no_grad():
            if comm.rank == 0:
                model[0].weight.fill_(3.0)
        values = engine.state_dict()
        assert values["0.weight"].eq(3).all() and torch.equal(values["2.weight"], plain[2].weight)
        full = engine.full_state_dict()
        assert (set(full) == set(values)) == (comm.rank == 0)
        with pytest.raises(libzero.ConfigError, match="2.weight"):
            with engine.gathered_parameters("2.weigth"):
                pass

    libzero.run_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("device", ["", "cpu", "nvme"])
def test_states_by_parameter_are_those_of_torch(stage: int, device: str, tmp_path: Path) -> None:
    """Read after three steps; set to other values; then both continue with equal values."""
    reference = network()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)

    def step_reference(step: int) -> None:
        torch.cat([reference(batch(rank, step)) for rank in (0, 1)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        step_reference(step)
    expected = {
        name: {"master": p.detach().clone(), **{k: v.clone() for k, v in optimizer.state[p].items() if k != "step"}}
        for name, p in reference.named_parameters()
    }
    for p in reference.parameters():
        p.data.mul_(0.5)
        optimizer.state[p]["exp_avg"].fill_(0.01)
        optimizer.state[p]["exp_avg_sq"].add_(1)
    for step in range(3, 5):
        step_reference(step)
    models = [network(), network()]

    def body(comm: libzero.Communicator) -> dict[str, torch.Tensor]:
        settings = config(stage)
        if device and stage:
            settings["zero_optimization"]["offload_optimizer"] = {"device": device, "nvme_path": str(tmp_path)}
        engine = libzero.Engine(models[comm.rank], settings)

        def train(step: int) -> None:
            engine.backward(engine(batch(comm.rank, step)).square().mean())
            engine.step()

        for step in range(3):
            train(step)
        masters = engine.full_state_dict()
        for name, states in expected.items():
            for state, values in states.items():
                whole = engine.parameter_state(name, state)
                torch.testing.assert_close(whole, values, atol=1e-6, rtol=1e-4)
                begin, own = engine.own_parameter_state(name, state)
                assert torch.equal(own, whole.flatten()[begin : begin + own.numel()])
                assert sum(map(int, comm.all_gather_bytes(str(own.numel()).encode()))) == values.numel()
                if comm.rank == 0 and state == "master":
                    assert torch.equal(whole, masters[name])
        for name, states in expected.items():
            # Rank 0's values count.
            engine.set_parameter_state(name, "master", states["master"] * 0.5 + comm.rank)
            engine.set_parameter_state(name, "exp_avg", torch.full_like(states["master"], 0.01))
            engine.set_own_parameter_state(name, "exp_avg_sq", engine.own_parameter_state(name, "exp_avg_sq")[1] + 1)
        for step in range(3, 5):
            train(step)
        # Of one rank only: all have the error, and continue.
        with pytest.raises(libzero.ConfigError, match=r"\[1\] for 0.weight, expected .* shape \[32, 8\]"):
            engine.set_parameter_state("0.weight", "master", torch.ones(1) if comm.rank else torch.ones(32, 8))
        with pytest.raises(libzero.ConfigError, match="the state asked for"):
            engine.parameter_state("0.weight" if comm.rank else "0.bias")
        return engine.full_state_dict()

    for name, value in libzero.run_ranks(2, body)[0].items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), atol=1e-6, rtol=1e-4)


def test_states_while_an_update_is_delayed() -> None:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": True, "start_step": 1}}
    with libzero.Engine(network(), config(2, zero_optimization=offload)) as engine:
        for step in range(3):
            one_step(engine, step)
        with pytest.raises(libzero.ConfigError, match=r"engine.flush\(\)"):
            engine.own_parameter_state("0.weight")
        whole = engine.parameter_state("0.weight")  # completes the update
        assert torch.equal(engine.own_parameter_state("0.weight")[1], whole.flatten())
        assert torch.equal(whole, engine.full_state_dict()["0.weight"])


def test_states_are_refused_where_they_cannot_be_right() -> None:
    engine = libzero.Engine(network(), config(1, gradient_accumulation_steps=2))
    engine.backward(engine(batch()).square().mean(), retain_graph=True)
    with pytest.raises(libzero.ConfigError, match="called within a micro-batch"):
        engine.set_parameter_state("0.weight", "master", torch.ones(32, 8))
    engine.close()
    model = network()
    model[0].requires_grad_(False)
    with libzero.Engine(model, config(3)) as engine:
        assert torch.equal(engine.parameter_state("0.weight"), network()[0].weight.detach())  # its values
        with pytest.raises(libzero.ConfigError, match="0.weight has only its values, \"master\": it is frozen"):
            engine.parameter_state("0.weight", "exp_avg")
        with engine.gathered_parameters(), pytest.raises(libzero.ConfigError, match="scope"):
            engine.set_parameter_state("2.weight", "exp_avg", torch.ones(32, 32))


def test_units_by_class_and_by_name() -> None:
    def names(units: list[Any] | None) -> list[str]:
        with libzero.Engine(torch.nn.Sequential(network(), network(2)), config(), units=units) as engine:
            return [name for name, _ in engine.units()]

    assert names(None) == ["0", "1"]
    assert names([torch.nn.Linear]) == ["0.0", "0.2", "0.4", "1.0", "1.2", "1.4"]
    assert "0.2" in names(["0.2"]) and len(names(["0.2"])) == 2
    with pytest.raises(libzero.ConfigError, match="no Conv2d"):
        names([torch.nn.Conv2d])
    named = torch.nn.Sequential()
    named.add_module("first", torch.nn.Linear(2, 2))
    named.add_module("second", torch.nn.Linear(2, 2))
    with libzero.Engine(named, config()) as engine:
        assert [name for name, _ in engine.units()] == ["first", "second"]


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    engine = libzero.Engine(model, config())
    one_step(engine)
    model[1].running_mean = model[1].running_mean.clone() + 5  # another tensor in its place
    engine.optimizer.param_groups[0]["lr"] = 0.25
    one_step(engine)
    digest, mean = engine.state_hash(), model[1].running_mean.clone()
    engine.save_checkpoint(tmp_path, "two", user_state={"position": 2})
    engine.optimizer.param_groups[0]["lr"] = 0.5
    one_step(engine)
    assert engine.state_hash() != digest
    assert engine.load_checkpoint(tmp_path) == "two"
    assert engine.state_hash() == digest and engine.global_step == 2
    assert engine.user_state == {"position": 2}
    assert engine.optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(model[1].running_mean, mean)


def test_copies_are_refused_and_state_dicts_are_not(tmp_path: Path) -> None:
    engine = libzero.Engine(network(), config())
    model = engine.module
    for attempt in (
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(model[2]),  # type: ignore[index]
        lambda: torch.save(model, io.BytesIO()),
        lambda: copy.deepcopy(engine),
        lambda: copy.deepcopy(engine.optimizer),
        lambda: engine.optimizer.state_dict(),
    ):
        with pytest.raises(libzero.ConfigError, match="Hint"):
            attempt()
    with engine.gathered_parameters():
        values = copy.deepcopy(model.state_dict())
        pytest.importorskip("safetensors.torch").save_model(model, str(tmp_path / "m.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(values.values(), engine.state_dict().values(), strict=True))
    engine.close()
    again = libzero.Engine(model, config(0))
    engine.close()  # of the former engine: the model is the new one's
    del engine
    with pytest.raises(libzero.ConfigError, match="Hint"):
        copy.deepcopy(model)
    again.close()
    copy.deepcopy(model)


def test_plans_are_those_of_the_program(tmp_path: Path) -> None:
    if (zero := find_zero()) is None:
        pytest.skip("needs the program zero")
    planned = {**config(), "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(planned))
    words = [zero, "plan", str(tmp_path / "ds.json"), "--model", "gpt2", "--world", "2", "--hosts", "1", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    theirs = [
        (p["stage"], p["offload"], p["activation_checkpointing"], p["memory"]["device"]["peak_bytes"])
        for p in json.loads(done.stdout)["plans"]
    ]
    ours = libzero.plan_all("gpt2", planned, libzero.Machine(ranks_per_host=2))
    assert [(p.stage, p.offload, p.checkpointing, p.memory.peak()) for p in ours] == theirs


def test_a_gradient_scaler_is_refused() -> None:
    engine = libzero.Engine(network(), config())
    scaler = torch.amp.GradScaler("cpu")
    engine.backward(scaler.scale(engine(batch()).sum()))
    with pytest.raises(libzero.ConfigError, match="fp16 block"):
        scaler.step(engine.optimizer)


def test_gradients_are_read_by_name_or_parameter() -> None:
    reference, model = network(), network()
    reference(batch()).square().mean().backward()
    engine = libzero.Engine(model, config())
    engine.backward(engine(batch()).square().mean())
    torch.testing.assert_close(engine.gradient("2.weight"), reference[2].weight.grad)
    begin, own = engine.own_gradient(model[0].bias)
    assert begin == 0 and own is not None and torch.equal(own, engine.gradient(model[0].bias))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="gradient"):
        model[0].weight.grad.sum()  # type: ignore[union-attr]


def test_memory_is_exact_and_prints_in_notebooks() -> None:
    engine = libzero.Engine(network(), config())
    numel = sum(-(-unit // 16) * 16 for _, unit in engine.units())  # docs/memory.md: 64 bytes
    memory = engine.memory()
    assert memory.current(purpose="parameters") == 4 * numel
    assert memory.current(purpose="optimizer states") == 8 * numel
    assert memory._repr_html_().count(f">{8 * numel:,}<") == 2 and "optimizer states" in str(memory)  # now and peak
    assert {row.tier for row in memory} == {"device"}
    planned = libzero.plan(10**6, config(), libzero.Machine(gpu=False))
    assert planned.stage == 3 and planned.memory.current(purpose="parameters") > 0
    assert len(libzero.plan_all("gpt2", config())) > 4
    with pytest.raises(libzero.ConfigError, match="gpt2"):
        libzero.plan("gtp2", config())


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", [False, True])
def test_resting_bytes_are_those_of_the_formula(stage: int, bf16: bool) -> None:
    """docs/memory.md, with its rule for padding."""
    models = [torch.nn.Sequential(network(1, 40), torch.nn.Linear(4, 4)) for _ in range(2)]
    width = 2 if bf16 else 4
    align = 64 // width
    rows = {  # bytes of an element, and the first stage that shards them
        "parameters": (width, 3),
        "gradients": (width, 2),
        "optimizer states": (8, 1),
        "master parameters": (4 if bf16 else 0, 1),
    }

    def padded(numel: int, to: int) -> int:
        return -(-numel // to) * to

    units = [sum(padded(p.numel(), align) for p in unit.parameters()) for unit in models[0]]
    numel = sum(padded(unit, 2 * align) for unit in units)

    def body(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        with libzero.Engine(model, config(stage, bf16={"enabled": bf16})) as engine:
            engine.backward(engine(torch.ones(4, 8, dtype=next(model.parameters()).dtype)).float().sum())
            engine.step()
            engine.reset_peak_memory()
            memory = engine.memory()
            expected = {row: size * numel // (2 if stage >= least else 1) for row, (size, least) in rows.items()}
            assert {row: memory.current(purpose=row) for row in rows} == expected
            assert sum(row.current for row in memory) == sum(expected.values())

    libzero.run_ranks(2, body)


def test_phases_are_ranges_of_the_profiler_and_a_trace_is_written(tmp_path: Path) -> None:
    engine = libzero.Engine(network(), config())
    engine.start_trace(tmp_path / "trace.json")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(engine)
    assert {"libzero::backward", "libzero::step"} <= {event.key for event in profile.key_averages()}
    summary = engine.stop_trace()
    assert summary.steps == 1 and Path(summary.file).stat().st_size > 100


def test_notices_reach_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "libzero"):
        libzero.Communicator.from_env()
    assert [record.levelname for record in caplog.records if "ranks: 1" in record.message] == ["INFO"]


def test_one_libtorch_in_the_process() -> None:
    maps = Path("/proc/self/maps").read_text().split()
    for name in ("libtorch_cpu.so", "libc10.so", "libgomp", "libtorch_python.so"):
        assert len({Path(word) for word in maps if Path(word).name.startswith(name)}) == 1, name
    assert any(str(Path(torch.__file__).resolve().parent) in word for word in maps if "libtorch_cpu" in word)


def test_another_torch_is_told_what_it_was_built_for(programs: Programs) -> None:
    program = programs.folder / "other.py"
    program.write_text("import torch\ntorch.__version__ = '2.99.0'\nimport libzero\n")
    done = subprocess.run([sys.executable, program], env=programs.environment(), capture_output=True, text=True)
    text = f"got torch 2.99.0, expected {TORCH}, which this libzero was built for"
    assert done.returncode != 0 and text in done.stderr


def test_another_python_is_told_what_it_was_built_for(tmp_path: Path) -> None:
    """Its extension has another name, which an interpreter does not look for."""
    package = Path(libzero.__file__).parent
    (tmp_path / "libzero").mkdir()
    for file in package.iterdir():
        if not file.name.startswith("_native."):
            (tmp_path / "libzero" / file.name).symlink_to(file)
    done = subprocess.run([sys.executable, "-c", "import libzero"], cwd=tmp_path, capture_output=True, text=True)
    soabi = sysconfig.get_config_var("SOABI")
    text = f"got a Python of {soabi}, expected {soabi}, which this libzero was built for. Hint: install"
    assert done.returncode != 0 and text in done.stderr, done.stderr


def test_a_torch_that_was_not_tested_is_tried(programs: Programs) -> None:
    assert torch.__version__.split("+")[0] in TESTED_TORCH
    assert len(libzero.check_torch()) == 4 and not any(fault for _, fault in libzero.check_torch())
    program = programs.folder / "tried.py"
    head = "import torch\ntorch.__version__ = torch.__version__.rpartition('.')[0] + '.99'\n"
    program.write_text(head + "import libzero\nprint('imported')\n")
    done = subprocess.run([sys.executable, program], env=programs.environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "imported" in done.stdout, done.stderr
    # Operators skip what libzero registers for this key.
    key, skip = "'TESTING_ONLY_GenericMode'", "torch.library.fallthrough_kernel"
    taken = f"kept = torch.library.Library('_', 'IMPL', {key})\nkept.fallback({skip}, {key})\n"
    program.write_text(head + taken + "import libzero\n")
    done = subprocess.run([sys.executable, program], env=programs.environment(), capture_output=True, text=True)
    assert done.returncode != 0 and "results may be wrong: {'deferred initialization':" in done.stderr, done.stderr


def test_types_of_the_extension(programs: Programs) -> None:
    words = [sys.executable, str(REPOSITORY / "script" / "stubs")]
    done = subprocess.run(words, env=programs.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)  # mypy reads all of torch the first time
@pytest.mark.nightly
def test_types(programs: Programs) -> None:
    pytest.importorskip("mypy")
    environment = programs.environment()
    package = Path(libzero.__file__).parent
    if package.parent.name != "site-packages":  # mypy finds those, and refuses to have them named
        environment["MYPYPATH"] = str(package.parent)
    # Not in the repository: mypy would take its configuration, and the sources without _build.py.
    words = [sys.executable, "-m", "mypy", "--strict", str(package)]
    done = subprocess.run(words, env=environment, cwd=programs.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
