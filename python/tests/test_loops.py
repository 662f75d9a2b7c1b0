"""Loops as programs write them, at every stage on two ranks: the parameters of a plain torch loop."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from conftest import config
from torch import nn

import libzero
from libzero import deepspeed

State: TypeAlias = dict[str, torch.Tensor]
Loss: TypeAlias = Callable[[Any, int, int], torch.Tensor]
"""loss_of(model, rank, step)"""
RANKS = 2
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
every_stage = pytest.mark.parametrize("stage", range(4))


def draw(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + 20 * step + rank))


def mean_of(losses: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)).mean()


def by_loop(start: nn.Module, loss_of: Loss, steps: int = 4, ranks: int = RANKS) -> State:
    """Plain torch over the data of all ranks."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(mean_of(loss_of(model, rank, step) for rank in range(ranks)))
        optimizer.step()
    return model.state_dict()


def by_engine(start: nn.Module, loss_of: Loss, stage: int, steps: int = 4, ranks: int = RANKS) -> State:
    models = [copy.deepcopy(start) for _ in range(ranks)]

    def body(comm: libzero.Communicator) -> State:
        with libzero.Engine(models[comm.rank], config(stage, **SGD)) as engine:
            for step in range(steps):
                engine.backward(loss_of(models[comm.rank], comm.rank, step))
                engine.step()
            return engine.state_dict()

    states = libzero.run_ranks(ranks, body)
    for state in states[1:]:
        require_close(state, states[0], 0.0)
    return states[0]


def require_close(found: State, wanted: State, tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=tolerance, msg=named(name))


def named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def require_moved(start: nn.Module, after: State, *names: str) -> None:
    """Else a loop that trains nothing would agree with itself."""
    for name in names:
        assert (after[name] - start.state_dict()[name]).abs().max() > 1e-3, name


# ---- what a loss reads ----------------------------------------------------------------------------


@every_stage
def test_a_penalty_on_weights_reads_them_outside_of_forward(stage: int) -> None:
    """Norms, a product and a pull towards the first values."""
    torch.manual_seed(3)
    start = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))
    anchors = [p.detach().clone() for p in start.parameters()]

    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        fit = (model(draw(rank, step, 5, 6)) - 1).square().mean()
        pull = sum((p - anchor).square().sum() for p, anchor in zip(model.parameters(), anchors, strict=True))
        sizes = torch.stack([p.norm() for p in model.parameters()]).sum()
        middle = model[2].weight
        spread = (middle.t() @ middle - torch.eye(24)).square().mean()
        return fit + 0.1 * pull + 0.02 * sizes + spread  # type: ignore[no-any-return]

    wanted = by_loop(start, loss_of)
    require_moved(start, wanted, "0.weight", "2.weight", "4.bias")
    require_close(by_engine(start, loss_of, stage), wanted)


class Repeats(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 2)
        self.block = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = x + self.block(x)
        return self.last(x)  # type: ignore[no-any-return]


def repeated(model: Any, rank: int, step: int) -> torch.Tensor:
    """Rank 0 runs the block once, rank 1 runs it three times."""
    return model(draw(rank, step, 4, 6), 1 + 2 * rank).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", range(3))
def test_ranks_may_run_a_block_another_number_of_times_below_stage_3(stage: int) -> None:
    start = Repeats(16)
    require_close(by_engine(start, repeated, stage), by_loop(start, repeated))


@pytest.mark.parametrize("width", [2, 48])
def test_blocks_that_ranks_run_another_number_of_times_at_stage_3(width: int) -> None:
    """Right, or an error of both ranks. A small block and a large one, for they are gathered in other ways."""
    start = Repeats(width)
    wanted = by_loop(start, repeated)
    models = [copy.deepcopy(start) for _ in range(RANKS)]

    def body(comm: libzero.Communicator) -> str:
        engine = libzero.Engine(models[comm.rank], config(3, **SGD))
        try:
            for step in range(4):
                engine.backward(repeated(models[comm.rank], comm.rank, step))
                engine.step()
            require_close(engine.state_dict(), wanted)
        except (libzero.CommError, RuntimeError) as error:  # torch's, where a forward raised it
            return str(error)
        return ""

    errors = libzero.run_ranks(RANKS, body)
    assert errors == ["", ""] or all("got different calls" in error for error in errors), errors


# ---- what parameters may be -----------------------------------------------------------------------


class Odd(nn.Module):
    """No dimensions, one element, fewer elements than ranks, none; and frozen ones that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(6, 8)
        self.heat = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.zeros(1, 1))
        self.pair = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.nothing = nn.Parameter(torch.empty(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.layer(x) * self.heat.exp() + self.one, self.nothing])
        return x.sum(1) * self.pair[0] + self.pair[1]


@every_stage
def test_parameters_of_odd_sizes_train_and_come_back(stage: int, tmp_path: Path) -> None:
    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        x = draw(rank, step, 5, 6)
        return 0.1 * (model(x) - x.sum(1)).square().mean()  # type: ignore[no-any-return]

    start, ranks = Odd(), 3
    wanted = by_loop(start, loss_of, ranks=ranks)
    require_moved(start, wanted, "layer.weight", "heat", "one", "pair")
    models, others = [copy.deepcopy(start) for _ in range(ranks)], [Odd() for _ in range(ranks)]
    for other in others:
        for p in other.parameters():
            nn.init.constant_(p, 9.0)

    def body(comm: libzero.Communicator) -> tuple[State, State]:
        with libzero.Engine(models[comm.rank], config(stage, **SGD)) as engine:
            for step in range(4):
                engine.backward(loss_of(models[comm.rank], comm.rank, step))
                engine.step()
            engine.save_checkpoint(tmp_path, "t")
            trained = engine.state_dict()
        with libzero.Engine(others[comm.rank], config(stage, **SGD)) as engine:
            engine.load_checkpoint(tmp_path)
            return trained, engine.state_dict()

    for trained, loaded in libzero.run_ranks(ranks, body):
        require_close(trained, wanted)
        require_close(loaded, trained, 0.0)


@every_stage
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.arange(8, dtype=torch.uint8), "Byte"),
        (torch.tensor([True, False] * 4), "Bool"),
        (torch.ones(8, dtype=torch.complex64), "ComplexFloat"),
    ],
)
def test_a_frozen_parameter_that_is_no_float_is_named_at_construction(
    value: torch.Tensor, kind: str, stage: int
) -> None:
    model = Odd()
    model.layer.packed = nn.Parameter(value, requires_grad=False)
    with pytest.raises(libzero.ConfigError, match=rf"layer\.packed.*{kind}"):
        libzero.Engine(model, config(stage))
    del model.layer.packed
    libzero.Engine(model, config(stage)).close()  # the refusal has left nothing behind


# ---- gradients ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A tied, a frozen and a scalar parameter, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(20, 12)
        self.out = nn.Linear(12, 20, bias=False)
        self.out.weight = self.table.weight
        self.fixed = nn.Linear(12, 12).requires_grad_(False)
        self.idle = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.fixed(self.table(ids)).tanh() * self.scale)  # type: ignore[no-any-return]


@every_stage
def test_the_norm_is_that_of_clip_grad_norm_before_clipping(stage: int) -> None:
    accumulated, limit, start = 2, 0.5, Mixed()

    def loss_of(model: Any, rank: int, micro: int) -> torch.Tensor:
        ids = torch.randint(0, 20, (12,), generator=torch.Generator().manual_seed(40 * micro + rank))
        return 4 * nn.functional.cross_entropy(model(ids), ids.roll(1))

    plain, norms = copy.deepcopy(start), []
    trainable = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulated * step, accumulated * (step + 1)):
            for rank in range(RANKS):
                torch.autograd.backward(loss_of(plain, rank, micro) / RANKS / accumulated)
        norms.append(nn.utils.clip_grad_norm_(trainable, limit).item())
        optimizer.step()
    assert min(norms) > 2 * limit
    models = [copy.deepcopy(start) for _ in range(2 * RANKS)]

    def body(comm: libzero.Communicator) -> None:
        settings = config(stage, **SGD, gradient_accumulation_steps=accumulated)
        settings["gradient_clipping"] = limit
        engine = libzero.Engine(models[comm.rank], settings)
        found = []
        for micro in range(3 * accumulated):
            engine.backward(loss_of(engine.module, comm.rank, micro))
            result = engine.step()
            if result.updated:
                found.append(result.grad_norm)
        assert found == pytest.approx(norms, rel=1e-5)
        require_close(engine.state_dict(), plain.state_dict())
        layer, *_ = deepspeed.initialize(model=models[RANKS + comm.rank], config=settings)
        for micro in range(3 * accumulated):
            layer.backward(loss_of(layer, comm.rank, micro))
            layer.step()
        assert layer.get_global_grad_norm() == found[-1]

    libzero.run_ranks(RANKS, body)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * x).sum()


@pytest.mark.parametrize(("stage", "offload"), [*((s, False) for s in range(4)), *((s, True) for s in (1, 2, 3))])
def test_many_small_gradients_are_summed_in_the_dtype_that_was_asked_for(stage: int, offload: bool) -> None:
    """Sums in bf16 stop growing, so that the two dtypes tell themselves apart."""
    count, lr = 32, 32.0
    parts = torch.full((RANKS * count, 64), 0.0015)
    parts[:RANKS] = 1.0  # to which bf16 can add none of the others
    parts += draw(0, 0, 64) * 0.0001
    exact = parts.mean(0) * lr
    models = {(dtype, rank): Sums() for dtype in ("default", "fp32", "bf16") for rank in range(RANKS)}

    def error_of(dtype: str, comm: libzero.Communicator) -> float:
        zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
        more: dict[str, Any] = {} if dtype == "default" else {"data_types": {"grad_accum_dtype": dtype}}
        optimizer = {"type": "SGD", "params": {"lr": lr}}
        settings = config(optimizer=optimizer, zero_optimization=zero, bf16={"enabled": True}, **more)
        settings["gradient_accumulation_steps"] = count
        with libzero.Engine(models[dtype, comm.rank], settings) as engine:
            for micro in range(count):
                engine.backward(engine(parts[RANKS * micro + comm.rank]))
                engine.step()
            return ((1 - engine.parameter_state("weight")) / exact - 1).abs().max().item()

    def body(comm: libzero.Communicator) -> None:
        assert max(error_of(dtype, comm) for dtype in ("fp32", "default")) < 0.01
        assert error_of("bf16", comm) > 0.03  # the key has its effect

    libzero.run_ranks(RANKS, body)
