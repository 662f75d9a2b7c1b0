"""Programs with layers of experts that are rarer: against plain loops, one token and one expert at a time."""

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from conftest import Programs
from test_moe import EXPERTS, TOKENS, WIDTH, Expert, Net, batch, by_mask, close, config, train, words
from torch.utils.checkpoint import CheckpointError, checkpoint

import libzero
from libzero import deepspeed


def by_loop(layer: libzero.MoE, x: torch.Tensor, capacity: int, likeliest: bool = False) -> tuple[torch.Tensor, int]:
    """Output, and how many choices are kept: an expert's likeliest tokens, or the first ones. Not for k = 2."""
    k = layer.k
    gates = torch.softmax(x.float() @ layer.gate["wg"].weight.float().T, 1)
    takers: list[list[int]] = [[] for _ in range(EXPERTS)]
    for s in range(len(x)):
        for e in gates[s].argsort(descending=True)[:k].tolist():
            takers[e].append(s)
    for e in range(EXPERTS):
        order = sorted(takers[e], key=lambda s: -gates[s, e].item()) if likeliest else takers[e]
        takers[e] = sorted(order[:capacity])
    weights = torch.zeros_like(gates)
    for e, tokens in enumerate(takers):
        weights[tokens, e] = 1
    weights = weights * gates
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).eps)
    y = torch.zeros_like(x)
    for e, tokens in enumerate(takers):
        if tokens:
            rows = weights[tokens, e : e + 1].to(x.dtype) * expert(layer, e)(x[tokens])
            y = y.index_add(0, torch.tensor(tokens), rows)
    return y, sum(map(len, takers))


def expert(layer: libzero.MoE, c: int) -> torch.nn.Module:
    return layer.experts[str(c)]


def layer_of(**more: Any) -> libzero.MoE:
    torch.manual_seed(6)
    layer = libzero.MoE(WIDTH, more.pop("expert", lambda c: Expert()), **words(**more))
    with torch.no_grad():
        layer.gate["wg"].weight.mul_(4)  # type: ignore[operator]
    return layer


def compare(layer: libzero.MoE, x: torch.Tensor, capacity: int, likeliest: bool = False) -> int:
    """Output and all gradients; returns how many choices are kept."""
    other, mine, theirs = copy.deepcopy(layer), x.clone().requires_grad_(), x.clone().requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(8)).to(x.dtype)
    torch.manual_seed(7)
    y = layer(mine)[0]
    torch.manual_seed(7)
    expected, kept = by_loop(other, theirs, capacity, likeliest)
    close(y, expected, "output")
    torch.autograd.backward(y, direction)
    torch.autograd.backward(expected, direction)
    close(mine.grad, theirs.grad, "x")
    for (name, p), q in zip(layer.named_parameters(), other.parameters(), strict=True):
        close(p.grad, torch.zeros_like(q) if q.grad is None else q.grad, name)
    assert layer.last_kept == kept
    return kept


# ---- capacity ----
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_likely_tokens_or_first_ones_are_kept(k: int, policy: str) -> None:
    layer, x = layer_of(k=k, drop_policy=policy, capacity_factor=0.5), torch.randn(TOKENS, WIDTH)
    assert compare(layer, x, -(-TOKENS * k // (2 * EXPERTS)), k == 3 and policy == "probs") < TOKENS * k


def test_likely_tokens_are_kept_by_default() -> None:
    layer = libzero.MoE(WIDTH, lambda c: Expert(), EXPERTS, k=3, capacity_factor=0.5, min_capacity=0)
    compare(layer, torch.randn(TOKENS, WIDTH), 6, likeliest=True)


def test_evaluation_has_a_capacity_of_its_own() -> None:
    layer, x = layer_of(capacity_factor=4.0, eval_capacity_factor=0.5), torch.randn(TOKENS, WIDTH)
    assert compare(layer, x, TOKENS) == TOKENS
    layer.zero_grad()
    assert compare(layer.eval(), x, 2) < TOKENS


# ---- over ranks ----
def test_merged_batches_call_an_expert_once() -> None:
    nets = [Net(**words(2, merged_batches=True)) for _ in range(2)]
    reference = Net(**words())
    losses = [reference(batch(rank), masked=True) for rank in range(2)]
    torch.autograd.backward(losses[0] / 2 + losses[1] / 2)
    calls: list[list[int]] = [[], []]

    def body(comm: libzero.Communicator) -> None:
        net = nets[comm.rank]
        for each in net.blocks[0].experts.values():
            each.register_forward_hook(lambda *given: calls[comm.rank].append(len(given[1][0])))
        engine = libzero.Engine(net, config(1))
        loss = engine(batch(comm.rank))
        assert loss.item() == pytest.approx(losses[comm.rank].item(), rel=1e-6)
        engine.backward(loss)
        for name, p in reference.named_parameters():
            close(engine.gradient(name), p.grad, name)

    libzero.run_ranks(2, body)
    assert [len(each) for each in calls] == [2, 2], calls  # two experts of this rank, not twice for two ranks


@pytest.mark.parametrize("data_first", [False, True])
def test_ranks_of_the_groups(data_first: bool) -> None:
    """As docs/parallelism.md has them, which are DeepSpeed's."""

    def body(comm: libzero.Communicator) -> None:
        mesh = libzero.Mesh.of(config(1, use_data_before_expert_parallelism=data_first))
        members = {}
        for kind, group in mesh.experts(2)._asdict().items():
            members[kind] = [int(part) for part in group.all_gather_bytes(str(comm.rank).encode())]
        near, far = [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1], [comm.rank % 2, comm.rank % 2 + 2]
        assert members == {"expert": far if data_first else near, "data": near if data_first else far}

    libzero.run_ranks(4, body)


class Twice(torch.nn.Module):
    def __init__(self, **layer: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = torch.nn.Linear(8, WIDTH)
        self.block = libzero.MoE(WIDTH, lambda c: Expert(), **layer)

    def forward(self, x: torch.Tensor, masked: bool = False) -> torch.Tensor:
        h, loss = torch.tanh(self.first(x)), torch.zeros(())
        for _ in range(2):
            y, l_aux, _ = by_mask(self.block, h) if masked else self.block(h)
            h, loss = h + y, loss + 0.1 * l_aux
        return loss + h.square().mean()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_called_twice_and_frozen_experts(stage: int, frozen: bool) -> None:
    nets, reference = [Twice(**words(2)) for _ in range(2)], Twice(**words())
    for net in (*nets, reference):
        net.block.experts.requires_grad_(not frozen)
    before = copy.deepcopy(reference.state_dict())
    optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        losses = [reference(batch(rank, step), masked=True) for rank in range(2)]
        torch.autograd.backward(losses[0] / 2 + losses[1] / 2)
        optimizer.step()

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(nets[comm.rank], config(stage))
        nets[comm.rank] = None  # type: ignore[call-overload]  # the program keeps the engine only
        gc.collect()
        train(engine, 2)
        own = [p for name, p in engine.module.named_parameters() if ".experts." in name]
        with (
            pytest.raises(libzero.ConfigError, match="modifier_rank=1 for block.experts.* ranks have different parts"),
            deepspeed.zero.GatheredParameters(own, modifier_rank=1),
        ):
            raise AssertionError("a rank may write experts that another rank does not have")
        for name, p in reference.named_parameters():
            close(engine.parameter_state(name), p.detach(), name)
            assert torch.equal(engine.parameter_state(name), before[name]) == (frozen and ".experts." in name), name

    libzero.run_ranks(2, body)


@pytest.mark.nightly
def test_an_exception_of_one_ranks_expert_ends_all_ranks(programs: Programs) -> None:
    out = programs.ranks(
        """
        from test_moe import Net, batch, config as settings, words
        net = Net(**words(2))
        engine = libzero.Engine(net, settings(2))

        def broken(module, rows):
            if engine.global_step == 1:
                raise KeyError("in an expert")

        if engine.comm.rank == 1:
            net.blocks[1].experts["2"].register_forward_pre_hook(broken)
        for step in range(3):
            engine.backward(engine(batch(engine.comm.rank, step)))
            engine.step()
        print("not reached", flush=True)
        """,
        rc=None,
        timeout=120,
    )
    assert "in an expert" in out and "root cause   rank 1 of 2" in out and "not reached" not in out, out


# ---- experts ----
def test_experts_with_dropout_and_recomputation() -> None:
    def make(c: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 20), torch.nn.Dropout(0.5), torch.nn.Linear(20, WIDTH))

    layer, x = layer_of(expert=make), torch.randn(TOKENS, WIDTH)
    recomputed = copy.deepcopy(layer)
    compare(layer, x, 4)
    torch.manual_seed(7)
    y = checkpoint(recomputed, x.requires_grad_(), use_reentrant=False)[0]
    torch.autograd.backward(y, torch.randn(x.shape, generator=torch.Generator().manual_seed(8)))
    for (name, p), q in zip(recomputed.named_parameters(), layer.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad), name


def test_recomputation_without_the_generators_state() -> None:
    x = torch.randn(2000, WIDTH, requires_grad=True)
    plain = layer_of()
    torch.autograd.backward(checkpoint(plain, x, use_reentrant=False, preserve_rng_state=False)[0].sum())
    drawn = layer_of(noisy_gate_policy="RSample", drop_tokens=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        torch.autograd.backward(checkpoint(drawn, x, use_reentrant=False, preserve_rng_state=False)[0].sum())


def test_an_expert_that_cannot_take_0_rows_is_named() -> None:
    class Largest(Expert):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.max(0).values)

    x = torch.randn(1, WIDTH).expand(8, WIDTH)  # all choose one expert, so that others have no rows
    with pytest.raises(libzero.ConfigError, match=r"expert \d was called with 0 rows, .*must accept: IndexError") as e:
        layer_of(expert=lambda c: Largest())(x)
    assert isinstance(e.value.__cause__, IndexError)

    class Lost(Expert):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise libzero.CommError("a peer is gone") if len(x) == 0 else KeyError("of rows")

    with pytest.raises((libzero.CommError, KeyError), match="a peer is gone|of rows"):
        layer_of(expert=lambda c: Lost())(x)
    with pytest.raises(libzero.CommError, match="a peer is gone"):
        layer_of(expert=lambda c: Lost())(x[:0])


def test_the_outputs_dtype_is_that_of_x() -> None:
    layer, x = layer_of(), torch.randn(TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)[0]
        expected, _ = by_loop(layer, x, 4)
        assert expert(layer, 0)(x).dtype == torch.bfloat16
    assert y.dtype == torch.float32
    close(y, expected, "under autocast", 0.02)
    compare(layer_of().double(), torch.randn(TOKENS, WIDTH, dtype=torch.float64), 4)

    class Wide(Expert):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).double()

    mixed = layer_of(expert=lambda c: Wide() if c == 2 else Expert())(x)[0]
    assert mixed.dtype == torch.float32


def test_a_module_as_expert_under_build_is_allocated_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "libzero"):
        libzero.build(lambda: libzero.MoE(WIDTH, lambda c: Expert(), EXPERTS))
        libzero.MoE(WIDTH, Expert(), EXPERTS)
        assert not caplog.messages
        libzero.build(lambda: libzero.MoE(WIDTH, Expert(), EXPERTS))
    assert len(caplog.messages) == 1 and "give a function that makes expert c" in caplog.messages[0]
