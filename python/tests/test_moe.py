"""Layers with experts, against a plain model that lets every expert compute every token and masks the results."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from conftest import Programs

import libzero

WIDTH, EXPERTS, TOKENS = 12, 4, 15


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 20), torch.nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def words(ep_size: int = 1, k: int = 1, **more: Any) -> dict[str, Any]:
    """Without draws: ranks as threads share torch's generator."""
    plain = {"min_capacity": 0, "use_rts": False, "top2_2nd_expert_sampling": False, "drop_policy": "position"}
    return {"num_experts": EXPERTS, "ep_size": ep_size, "k": k, **plain, **more}


class Net(torch.nn.Module):
    def __init__(self, **layer: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = torch.nn.Linear(8, WIDTH)
        self.blocks = torch.nn.ModuleList(libzero.MoE(WIDTH, lambda c: Expert(), **layer) for _ in range(2))
        self.last = torch.nn.Linear(WIDTH, 4)
        with torch.no_grad():
            for block in self.blocks:
                block.gate["wg"].weight.mul_(4)  # experts are chosen unequally

    def forward(self, x: torch.Tensor, masked: bool = False) -> torch.Tensor:
        h, loss = torch.tanh(self.first(x)), torch.zeros(())
        for block in self.blocks:
            y, l_aux, _ = by_mask(block, h) if masked else block(h)
            h, loss = h + y, loss + 0.1 * l_aux
        return loss + self.last(h).square().mean()


def by_mask(layer: libzero.MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rules in plain torch, without draws."""
    o, n = layer._words, len(x)
    gates = torch.softmax(x @ layer.gate["wg"].weight.T, 1)
    order = torch.sort(gates.detach(), dim=1, descending=True, stable=True).indices.tolist()
    if o["k"] == 2:  # first choices take places before second ones
        choices = [(s, c) for c in range(2) for s in range(n)]
    else:
        choices = [(s, c) for s in range(n) for c in range(o["k"])]
    capacity = -(-n * o["k"] // EXPERTS) if o["drop_tokens"] else n * o["k"]
    counts, first, kept = torch.zeros(EXPERTS), torch.zeros(EXPERTS), torch.zeros(n, EXPERTS)
    for s, c in choices:
        e = order[s][c]
        kept[s, e] = float(counts[e] < capacity)
        counts[e] += 1
        first[e] += c == 0
    weights = gates * kept
    if o["k"] > 1:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).eps)
    y = torch.stack([weights[:, e : e + 1] * layer.experts[str(e)](x) for e in range(EXPERTS)]).sum(0)
    balanced = first if o["k"] == 2 else counts
    l_aux = (gates.mean(0) * balanced / n).sum() * EXPERTS / (o["k"] if o["k"] > 2 else 1)
    if o["use_residual"]:
        shares = torch.softmax(layer.coefficient(x), -1)
        y = y * shares[:, :1] + layer.mlp(x) * shares[:, 1:]
    return y, l_aux, counts.long()


def batch(rank: int, step: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return conftest.config(stage, optimizer={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}, **more)


def train(engine: libzero.Engine, steps: int = 3, begin: int = 0) -> list[float]:
    losses = []
    for step in range(begin, begin + steps):
        loss = engine(batch(engine.comm.rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def close(a: torch.Tensor | None, b: torch.Tensor | None, what: str, tolerance: float = 1e-6) -> None:
    assert a is not None and b is not None, what
    assert (a.double() - b.double()).norm() <= tolerance * b.double().norm() + 1e-12, what


# ---- without an engine ----
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"use_residual": True}, {"drop_tokens": False}])
def test_a_plain_module_computes_the_rules(k: int, more: dict[str, Any]) -> None:
    net = Net(**words(k=k, **more))
    reference = copy.deepcopy(net)
    layer, x = net.blocks[0], torch.randn(3, 5, WIDTH, requires_grad=True)
    y, l_aux, counts = layer(x)
    masked, their_aux, their_counts = by_mask(layer, x.view(15, WIDTH))
    assert y.shape == x.shape and l_aux.shape == () and counts.dtype == torch.int64
    close(y.view(15, WIDTH), masked, "output")
    close(l_aux, their_aux, "auxiliary loss")
    assert counts.tolist() == their_counts.tolist() == layer.last_counts.tolist()
    most = 15 if "drop_tokens" in more else -(-15 * k // EXPERTS)
    assert layer.last_kept == sum(min(count, most) for count in counts.tolist())
    torch.autograd.backward(net(batch(0)))
    torch.autograd.backward(reference(batch(0), masked=True))
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        close(mine.grad, theirs.grad, name)


def test_names_copies_and_the_unused() -> None:
    expert = Expert()
    layer = libzero.MoE(WIDTH, expert, EXPERTS, use_residual=True)
    names = ["gate.wg.weight", *(f"experts.{c}.{p}" for c in range(EXPERTS) for p, _ in expert.named_parameters())]
    dense = [f"mlp.{p}" for p, _ in expert.named_parameters()]
    assert list(layer.state_dict()) == [*names, *dense, "coefficient.weight", "coefficient.bias"]
    assert layer.mlp is expert
    for c in range(EXPERTS):
        copied = layer.experts[str(c)]
        assert copied is not expert and torch.equal(copied.up.weight, expert.up.weight)
        assert copied.up.weight.data_ptr() != expert.up.weight.data_ptr()
    used = torch.tensor([1] * 10 + [0] * 5)
    x = torch.randn(TOKENS, WIDTH)
    y, _, counts = libzero.MoE(WIDTH, expert, EXPERTS, k=2, drop_tokens=False)(x, used)
    assert counts.sum() == 20 and y[10:].eq(0).all() and not y[:10].eq(0).all(1).any()


def test_an_expert_may_return_a_tuple_and_takes_no_rows() -> None:
    class Pair(Expert):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), None

    seen: list[int] = []
    layer = libzero.MoE(WIDTH, lambda c: Pair(), EXPERTS, use_residual=True)
    for expert in layer.experts.values():
        expert.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    layer(torch.randn(1, WIDTH))[0].sum().backward()
    assert sorted(seen) == [0, 0, 0, 1]
    assert all(p.grad is not None for p in layer.parameters())


def test_the_gate_computes_in_fp32_under_autocast() -> None:
    layer, x = Net(**words()).blocks[0], torch.randn(5000, WIDTH)
    assert isinstance(layer, libzero.MoE)
    _, l_aux, counts = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        _, same, others = layer(x)
        gates = torch.softmax(torch.nn.functional.linear(x, layer.gate["wg"].weight), 1)  # type: ignore[arg-type]
    assert torch.equal(same, l_aux) and torch.equal(counts, others)
    assert not torch.equal(torch.bincount(gates.argmax(1), minlength=EXPERTS), counts), "bf16 would choose the same"


def test_copies_and_pickles() -> None:
    layer = libzero.MoE(WIDTH, Expert(), EXPERTS, k=2, top2_2nd_expert_sampling=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._layer is not layer._layer
        x = torch.randn(TOKENS, WIDTH)
        assert torch.equal(layer(x)[0], other(x)[0])
    assert "k=2" in repr(layer)


def test_faults_without_an_engine() -> None:
    with pytest.raises(libzero.ConfigError) as wrong:
        libzero.MoE(WIDTH, Expert(), 4, ep_size=3, k=5, capacity_factor=0, noisy_gate_policy="RSample")
    for part in (
        "ep_size: got 3, expected a divisor of 4 experts",
        "k: got 5, expected 1 to 4",
        "capacity_factor: got 0, expected a number above 0",
        "noisy_gate_policy: got RSample, expected None or Jitter for k 5",
    ):
        assert part in str(wrong.value)
    with pytest.raises(libzero.ConfigError, match="num_experts: got 'four', expected a whole number"):
        libzero.MoE(WIDTH, Expert(), "four")  # type: ignore[arg-type]
    with pytest.raises(libzero.ConfigError, match="forward with ep_size 2 needs the ranks of an Engine"):
        libzero.MoE(WIDTH, Expert(), 4, ep_size=2)(torch.randn(3, WIDTH))
    with pytest.raises(libzero.ConfigError, match=r"expert\(0\): got int, expected a torch.nn.Module"):
        libzero.MoE(WIDTH, lambda c: c, 4)  # type: ignore[arg-type,return-value]
    with pytest.raises(libzero.ConfigError, match="expert: got list, expected a torch.nn.Module or a function"):
        libzero.MoE(WIDTH, [Expert()], 4)  # type: ignore[arg-type]
    with pytest.raises(libzero.ConfigError, match=r"expected floating-point values of shape \[.., 12\]"):
        libzero.MoE(WIDTH, Expert(), 4)(torch.randn(3, 7))
    with pytest.raises(libzero.ConfigError, match="an expert returned a tensor of shape"):
        libzero.MoE(WIDTH, torch.nn.Linear(WIDTH, 5))(torch.randn(3, WIDTH))

    class Wrong(Expert):
        def forward(self, x: torch.Tensor) -> Any:
            if x.size(0) == 5:
                raise KeyError("in an expert")
            return None

    with pytest.raises(libzero.ConfigError, match="expert 0 returned NoneType, expected a tensor"):
        libzero.MoE(WIDTH, Wrong())(torch.randn(3, WIDTH))
    with pytest.raises(KeyError, match="in an expert"):
        libzero.MoE(WIDTH, Wrong())(torch.randn(5, WIDTH))


# ---- over ranks ----
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ep_size", "k"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)])
def test_training_equals_a_dense_reference(stage: int, ep_size: int, k: int) -> None:
    layer = words(ep_size, k, use_residual=k == 2)
    nets = [Net(**layer) for _ in range(2)]
    reference = Net(**{**layer, "ep_size": 1})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        losses = [reference(batch(rank, step), masked=True) for rank in range(2)]
        torch.autograd.backward(losses[0] / 2 + losses[1] / 2)
        gradients = {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}
        optimizer.step()
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()]))
        expected.append(([loss.item() for loss in losses], gradients, norm.item()))

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(nets[comm.rank], config(stage))
        for step, (losses, gradients, norm) in enumerate(expected):
            loss = engine(batch(comm.rank, step))
            assert loss.item() == pytest.approx(losses[comm.rank], rel=1e-6)
            engine.backward(loss)
            for name, gradient in gradients.items():
                close(engine.gradient(name), gradient, f"step {step}, gradient of {name}")
            assert engine.step().grad_norm == pytest.approx(norm, rel=1e-6)
        for name, p in reference.named_parameters():
            close(engine.parameter_state(name), p.detach(), name)

    libzero.run_ranks(2, body)


@pytest.mark.parametrize("k", [1, 2])
def test_states_have_the_same_bits_at_every_stage_and_degree(k: int) -> None:
    """On 2 ranks, where an expert's gradient is one sum of two for both degrees."""
    seen = set()
    for stage in range(4):
        for ep_size in (1, 2):
            nets = [Net(**words(ep_size, k)) for _ in range(2)]

            def body(comm: libzero.Communicator, stage: int = stage, nets: list[Net] = nets) -> Any:
                engine = libzero.Engine(nets[comm.rank], config(stage))
                return train(engine), engine.full_state_dict()

            (losses, state), (others, _) = libzero.run_ranks(2, body)
            seen.add((*losses, *others, *(value.numpy().tobytes() for value in state.values())))
    assert len(seen) == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_an_expert_that_gets_no_token(stage: int) -> None:
    nets = [Net(**words(2)) for _ in range(2)]
    weight = nets[0].blocks[0].gate["wg"].weight.detach().clone()
    weight[3] = weight[2]  # of equal gates the lower one is taken

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(nets[comm.rank], config(stage))
        for step in range(3):
            engine.set_parameter_state("blocks.0.gate.wg.weight", "master", weight)
            tokens = [TOKENS, 0][(comm.rank + step) % 2]  # nor has one rank any
            loss = engine.module.blocks[0](torch.tanh(engine.module.first(batch(comm.rank, step, tokens))))[0].sum()
            engine.backward(loss)
            assert engine.module.blocks[0].last_counts[3] == 0
            gradient, other = (engine.gradient(f"blocks.0.experts.{c}.up.weight") for c in (3, 0))
            assert gradient is not None and gradient.eq(0).all()
            assert other is not None and not other.eq(0).all()
            engine.step()

    libzero.run_ranks(2, body)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_are_whole_and_experts_of_other_ranks_are_named(stage: int) -> None:
    nets = [Net(**words(2)) for _ in range(2)]

    def body(comm: libzero.Communicator) -> dict[str, torch.Tensor]:
        net = nets[comm.rank]
        engine = libzero.Engine(net, config(stage))
        train(engine)
        state = engine.state_dict()
        for name, p in net.named_parameters():
            close(state[name], engine.parameter_state(p), name, 0)
        mine, other = 2 * comm.rank, 2 * (1 - comm.rank)
        with engine.gathered_parameters():
            assert torch.equal(net.blocks[1].experts[str(mine)].up.weight, state[f"blocks.1.experts.{mine}.up.weight"])
            with pytest.raises(RuntimeError, match=f"expert {other} of blocks.1 lives on rank {1 - comm.rank}"):
                net.blocks[1].experts[str(other)].up.weight.sum()
        with engine.gathered_parameters("blocks.0.experts.1.*", modify=True), torch.no_grad():
            if comm.rank == 0:
                net.blocks[0].experts["1"].down.bias.fill_(7)
        assert engine.parameter_state("blocks.0.experts.1.down.bias").eq(7).all()
        groups = engine.mesh.experts(2)
        assert (groups.expert.rank, groups.expert.size, groups.data.size) == (comm.rank, 2, 1)
        engine.close()
        with pytest.raises(libzero.ConfigError, match="needs the ranks of an Engine"):
            net.blocks[0](torch.randn(3, WIDTH))
        return state

    states = libzero.run_ranks(2, body)
    whole = Net(**words(1))
    whole.load_state_dict(states[1])
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_checkpoints_load_with_another_degree(saved: int, loaded: int, tmp_path: Path) -> None:
    nets = {ep: [Net(**words(ep)) for _ in range(2)] for ep in (1, 2)}

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(nets[saved][comm.rank], config(2))
        train(engine)
        engine.save_checkpoint(tmp_path, "three")
        expected = train(engine, begin=3), engine.full_state_dict()
        other = libzero.Engine(nets[loaded][comm.rank], config(3))
        assert other.load_checkpoint(tmp_path) == "three"
        assert train(other, begin=3) == expected[0]
        for name, value in other.full_state_dict().items():
            assert torch.equal(value, expected[1][name]), name

    libzero.run_ranks(2, body)


def test_degrees_that_do_not_fit_the_ranks() -> None:
    nets = [Net(**words(4)) for _ in range(2)]

    def body(comm: libzero.Communicator) -> None:
        with pytest.raises(libzero.ConfigError, match="ep_size 4, expected a divisor of 2 ranks and of 4 experts"):
            libzero.Engine(nets[comm.rank], config(1))
        mesh = libzero.Mesh.of(config(1))
        with pytest.raises(libzero.ConfigError, match="ep_size"):
            mesh.experts(3)

    libzero.run_ranks(2, body)


def test_a_model_of_build_has_the_values_of_an_ordinary_one() -> None:
    made: list[Net] = []
    for _ in range(2):
        torch.manual_seed(4)
        made.append(libzero.build(lambda: Unscaled(**words(2))))
    torch.manual_seed(4)
    plain = Unscaled(**words())

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(made[comm.rank], config(3))
        for name, p in plain.named_parameters():
            assert torch.equal(engine.parameter_state(name), p), name

    libzero.run_ranks(2, body)


class Unscaled(Net):
    def __init__(self, **layer: Any) -> None:
        torch.nn.Module.__init__(self)
        self.first = torch.nn.Linear(8, WIDTH)
        self.blocks = torch.nn.ModuleList(libzero.MoE(WIDTH, lambda c: Expert(), **layer) for _ in range(2))
        self.last = torch.nn.Linear(WIDTH, 4)


# ---- processes, where each rank draws from a generator of its own ----
@pytest.mark.nightly
def test_draws_recomputation_and_compilation(programs: Programs) -> None:
    out = programs.ranks("""
        import hashlib
        from torch.utils.checkpoint import checkpoint
        from test_moe import Net, batch, config as settings, words

        DRAWS = {"use_rts": True, "top2_2nd_expert_sampling": True, "use_residual": True}

        def run(stage, ep_size, k=1, how="", **more):
            torch._dynamo.reset()
            net = Net(**words(ep_size, k, **{**DRAWS, **more}))
            engine = libzero.Engine(net, settings(stage))
            if how == "compiled":
                libzero.compile(engine, backend="eager")
            elif how == "whole":
                engine.module = torch.compile(net, backend="eager")
            elif how:
                for block in net.blocks:
                    inner = block.forward
                    block.forward = lambda x, f=inner: checkpoint(f, x, use_reentrant=how == "reentrant")
            torch.manual_seed(20 + engine.comm.rank)
            losses = []
            for step in range(3):
                loss = engine(batch(engine.comm.rank, step))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            next_draw, state = torch.rand(1).item(), engine.full_state_dict()
            text = repr((losses, next_draw, [value.tolist() for value in state.values()]))
            parts = engine.comm.all_gather_bytes(text.encode())
            engine.close()
            return hashlib.sha256(b"".join(parts)).hexdigest()[:12]

        import torch._dynamo
        for k, more in ((1, {"noisy_gate_policy": "RSample"}), (1, {"noisy_gate_policy": "Jitter"}), (2, {})):
            seen = {(stage, ep, how): run(stage, ep, k, how, **more)
                    for stage in (0, 3) for ep in (1, 2)
                    for how in ("", "saved", "reentrant", "compiled", "whole")}
            seen |= {(stage, 2, ""): run(stage, 2, k, **more) for stage in (1, 2)}
            assert len({found for (_, _, how), found in seen.items() if how != "reentrant"}) == 1, seen
            # It sums the gradients of a segment's input in another order.
            assert len({found for (_, _, how), found in seen.items() if how == "reentrant"}) == 1, seen
        assert run(0, 1, noisy_gate_policy="Jitter") != run(0, 1), "no noise was drawn"
        print("all equal", flush=True)
    """)
    assert out.count("all equal") == 2, out


# ---- DeepSpeed's interface ----
@pytest.mark.parametrize("stage", [conftest.nightly("0"), conftest.nightly("2"), "3"])
def test_a_program_of_the_tutorial(stage: str, tmp_path: Path) -> None:
    program = tmp_path / "tutorial.py"
    program.write_text(TUTORIAL)
    out = conftest.under_the_runner(tmp_path, str(program), stage)
    assert out.count("all is well") == 2, out


TUTORIAL = """
import importlib
import sys
import deepspeed, torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import has_moe_layers, is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups

stage = int(sys.argv[-1])

class Net(torch.nn.Module):
    def __init__(self, ep_size):
        super().__init__()
        torch.manual_seed(3)
        fc3 = torch.nn.Linear(12, 12)
        self.layers = torch.nn.ModuleList(
            [MoE(hidden_size=12, expert=fc3, num_experts=n, ep_size=ep_size, use_residual=True, k=1, min_capacity=0,
                 noisy_gate_policy="RSample") for n in (2, 4)])
        self.last = torch.nn.Linear(12, 5)

    def forward(self, x):
        for layer in self.layers:
            x, _, _ = layer(x)
        return self.last(x)

def train(ep_size, groups_of_experts, count=3, load=None):
    net = Net(ep_size)
    parameters = list(net.parameters())
    if groups_of_experts:
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "parameters"})
        assert [group["name"] for group in parameters] == ["parameters", f"ep_size_{ep_size}"]
        assert [group.get("moe", False) for group in parameters] == [False, True]
        assert all(is_moe_param(p) for p in parameters[1]["params"])
        assert not any(is_moe_param(p) for p in parameters[0]["params"])
    settings = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
                "gradient_clipping": 1.0, "zero_optimization": {"stage": stage,
                "stage3_gather_16bit_weights_on_model_save": True}}
    engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=parameters, config=settings)
    if load:
        engine.load_checkpoint(load, load_module_only=True)
    torch.manual_seed(7 + engine.global_rank)
    losses = []
    for _ in range(count):
        loss = torch.nn.functional.cross_entropy(engine(torch.randn(16, 12)), torch.randint(0, 5, (16,)))
        engine.backward(loss)
        engine.step()
        losses.append((loss.item(), engine.get_global_grad_norm()))
    return engine, losses

engine, losses = train(2, True)
assert has_moe_layers(engine.module) == (True, 2) and engine.has_moe_layers and engine.num_experts == [2, 4]
layer, first = engine.module.layers[1], 2 * engine.global_rank
local = layer.deepspeed_moe.experts.deepspeed_experts
assert len(local) == 2 and all(local[i] is layer.experts[str(first + i)] for i in range(2))
assert train(2, False)[1] == losses
assert groups._get_expert_parallel_world_size("ep_size_2") == 2 == groups._get_max_expert_size()
assert groups._get_expert_parallel_rank("ep_size_2") == engine.global_rank
assert groups._get_expert_data_parallel_world_size("ep_size_2") == 1
assert train(1, True)[1] == losses
assert groups._get_expert_data_parallel_rank("ep_size_1") == engine.global_rank
assert groups._get_expert_parallel_world_size("ep_size_1") == 1 == groups._get_max_expert_size()
try:  # of an engine before the last one
    groups._get_expert_parallel_world_size("ep_size_2")
    raise AssertionError("the group ep_size_2 of an earlier engine")
except ValueError as fault:
    assert "expected one of ['ep_size_1']" in str(fault), fault
try:
    engine.module_state_dict()
    raise AssertionError("module_state_dict() of divided experts")
except ValueError as fault:
    assert "experts divided over ranks" in str(fault)
for wrong in ("deepspeed.moe.sharded_moe", "deepspeed.moe.layer"):
    try:
        importlib.import_module(wrong).MOELayer()
        raise AssertionError(wrong)
    except NotImplementedError as fault:
        assert "deepspeed.moe.layer.MoE" in str(fault), fault
for name in ("group", "group_ranks", "src_rank", "ranks"):
    try:
        getattr(groups, f"_get_expert_parallel_{name}")()
        raise AssertionError(name)
    except NotImplementedError as fault:
        assert "is not built" in str(fault) and "mesh.experts(ep_size)" in str(fault)
engine.save_checkpoint("saved", tag="a")
engine.save_16bit_model("saved")
state = torch.load("saved/pytorch_model.bin")
whole = Net(1)
whole.load_state_dict(state)
names = [name for name in state if "experts.3" in name]
assert names == ["layers.1.experts.3.weight", "layers.1.experts.3.bias"], names
loaded, _ = train(2, True, count=0, load="saved")
for name, value in state.items():
    found = deepspeed.utils.safe_get_full_fp32_param(loaded.module.get_parameter(name))
    assert torch.equal(found, value), name
bad = {**state, "more": torch.ones(1)}
try:
    loaded.load_module_state_dict({"module": bad})
    raise AssertionError("an unexpected key")
except RuntimeError as fault:
    assert "more" in str(fault)
try:
    loaded.load_module_state_dict({"module": state}, custom_load_fn=lambda src, dst: dst.load_state_dict(src))
    raise AssertionError("a custom_load_fn")
except ValueError as fault:
    assert "custom_load_fn" in str(fault) and "experts divided over ranks" in str(fault)
print("all is well", flush=True)
"""


def test_what_of_deepspeeds_layer_is_not_built() -> None:
    from libzero.deepspeed.moe.layer import MoE
    from libzero.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    with pytest.raises(NotImplementedError, match="enable_expert_tensor_parallelism is not built"):
        MoE(WIDTH, Expert(), 2, enable_expert_tensor_parallelism=True)
    with pytest.raises(ValueError, match="expected a dict, or a list of them"):
        split("all")  # type: ignore[arg-type]
    layer = MoE(WIDTH, Expert(), 2, use_tutel=True)
    inside = layer.deepspeed_moe
    assert inside.l_aux is None and inside.exp_counts is None
    with pytest.raises(AttributeError, match=r"MoE.deepspeed_moe.gate.timers is not built, expected one of .*'wg'"):
        inside.gate.timers  # noqa: B018
    with pytest.raises(AttributeError, match=r"gate.capacity_factor can be read only. Hint: the words of MoE"):
        inside.gate.capacity_factor = 2.0
    _, l_aux, counts = layer(hidden_states=torch.randn(TOKENS, WIDTH))
    assert inside.l_aux is l_aux and l_aux.requires_grad and inside.exp_counts is counts
    assert copy.deepcopy(layer).deepspeed_moe.l_aux is None
    with pytest.raises(libzero.ConfigError, match=r"ep_size 2 before deepspeed.initialize\(\)"):
        MoE(WIDTH, Expert(), 2, 2).deepspeed_moe.experts.deepspeed_experts  # noqa: B018
    parts: Callable[[float | None], list[dict[str, Any]]] = lambda most: split(
        {"params": list(layer.parameters()), "lr": 1.0}, most
    )
    assert [len(group["params"]) for group in parts(None)] == [1, 8]
    sizes = [[p.numel() for p in group["params"]] for group in parts(260)[1:]]
    assert sizes == [[240, 20], [240, 12], [240, 20], [240, 12]]
    assert all(group["lr"] == 1.0 for group in parts(260))
