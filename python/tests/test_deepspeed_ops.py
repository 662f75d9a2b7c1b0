"""Optimizers of deepspeed.ops without an engine."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch, config, network

import libzero.deepspeed as deepspeed
from libzero.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from libzero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from libzero.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

nn = torch.nn


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> nn.Module:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(model(batch(0, step)).square().mean())
        optimizer.step()
        schedule.step()
    return model


def two_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    rest = [*model[0].parameters(), *model[2].parameters()]
    return [{"params": rest}, {"params": model[4].parameters(), "lr": 5e-3, "weight_decay": 0.0}]


def assert_same(ours: nn.Module, theirs: nn.Module, tolerance: float = 2e-6) -> None:
    for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other, atol=tolerance, rtol=tolerance, msg=name)


class PlainLion(torch.optim.Optimizer):
    """By the paper's lines."""

    def __init__(self, params: Any, **numbers: Any) -> None:
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                first, second = group["betas"]
                c = first * m + (1 - first) * p.grad
                p.copy_(p - group["lr"] * (c.sign() + group["weight_decay"] * p))
                m.copy_(second * m + (1 - second) * p.grad)


ADAM = {"lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
LION = {"lr": 2e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}
ADAGRAD = {"lr": 2e-2, "eps": 1e-8, "weight_decay": 0.1}
PAIRS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "CPUAdam": (lambda p: DeepSpeedCPUAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
    "CPUAdam, decay in the gradient": (
        lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, **ADAM),
        lambda p: torch.optim.Adam(p, **ADAM),
    ),
    "FusedAdam": (lambda p: FusedAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
    "FusedAdam, decay in the gradient": (
        lambda p: FusedAdam(p, adam_w_mode=False, **ADAM),
        lambda p: torch.optim.Adam(p, **ADAM),
    ),
    "CPUAdagrad": (lambda p: DeepSpeedCPUAdagrad(p, **ADAGRAD), lambda p: torch.optim.Adagrad(p, **ADAGRAD)),
    "CPULion": (lambda p: DeepSpeedCPULion(p, **LION), lambda p: PlainLion(p, **LION)),
    "FusedLion": (lambda p: FusedLion(p, **LION), lambda p: PlainLion(p, **LION)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_without_an_engine_updates_by_its_rule(name: str) -> None:
    """Two groups of different numbers, a schedule of torch, and a state dict in the middle."""
    ours, theirs = PAIRS[name]
    model, plain = network(), network()
    optimizer = ours(two_groups(model))
    trained(model, optimizer, 3)
    again = copy.deepcopy(model)
    other = ours(two_groups(again))
    other.load_state_dict(optimizer.state_dict())
    assert_same(trained(again, other, 2), trained(model, optimizer, 2), 0)
    reference = theirs(two_groups(plain))
    trained(plain, reference, 3)
    assert_same(again, trained(plain, reference, 2))


def test_an_update_without_bias_correction() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = DeepSpeedCPUAdam([p], lr=0.1, bias_correction=False, betas=(0.9, 0.96), eps=0.0)
    p.grad = torch.tensor([3.0, -4.0])

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 7.0

    with torch.no_grad():
        assert optimizer.step(closure) == 7.0
    # sqrt(0.04 g^2) = 0.2 |g|, so that a first step is 0.1 * 0.1 g / 0.2 |g|.
    torch.testing.assert_close(p.detach(), torch.tensor([0.95, -1.95]))
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("decoupled", [True, False])
def test_tensors_of_any_layout_are_updated(decoupled: bool) -> None:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    p, twin = nn.Parameter(values.t().clone(memory_format=torch.preserve_format)), nn.Parameter(values.t().contiguous())
    assert not p.is_contiguous()
    optimizer = DeepSpeedCPUAdam([p], adamw_mode=decoupled, **ADAM)
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)([twin], **ADAM)
    for step in range(3):
        for grad in (values.t() * (step + 1), torch.ones(()).expand(4, 3)):
            p.grad, twin.grad = grad, grad.contiguous()
            optimizer.step()
            plain.step()
    torch.testing.assert_close(p, twin, atol=2e-6, rtol=2e-6)


def test_states_keep_their_dtype() -> None:
    """bf16 parameters: an update in fp32 that is rounded once; fp32 states, also after a state dict."""
    p = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16())
    exact = nn.Parameter(p.detach().float())
    optimizer, plain = DeepSpeedCPUAdam([p], lr=0.01), torch.optim.AdamW([exact], lr=0.01, weight_decay=0)
    for step in range(3):
        p.grad = torch.full_like(p, 0.3 + step)
        exact.grad = p.grad.float()
        exact.data = p.detach().float()
        optimizer.step()
        plain.step()
        assert torch.equal(p.detach(), exact.detach().bfloat16())
    other = DeepSpeedCPUAdam([p], lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[p]["exp_avg"].dtype is torch.float32
    assert torch.equal(other.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
    assert copy.deepcopy(DeepSpeedCPUAdam([p], adamw_mode=False)).adam_w_mode is False
    assert copy.deepcopy(DeepSpeedCPULion([p], fp32_optimizer_states=False)).fp32_optimizer_states is False
    for narrow in (
        DeepSpeedCPUAdam([p], fp32_optimizer_states=False),
        DeepSpeedCPULion([p], fp32_optimizer_states=False),
        FusedAdam([p]),
        FusedLion([p]),
    ):
        narrow.step()
        assert narrow.state[p]["exp_avg"].dtype is torch.bfloat16


def test_rows_of_a_sparse_gradient_are_updated() -> None:
    table, plain = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3, sparse=True)
    plain.load_state_dict(table.state_dict())
    optimizer = DeepSpeedCPUAdagrad(table.parameters(), lr=0.1)
    reference = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for words in ([0, 2, 2], [2, 5, 0]):
        for each, rule in ((table, optimizer), (plain, reference)):
            rule.zero_grad()
            torch.autograd.backward(each(torch.tensor(words)).square().sum())
            rule.step()
    torch.testing.assert_close(table.weight, plain.weight)
    for refused in (FusedAdam(table.parameters()), FusedLion(table.parameters())):
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            refused.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_subgroup_has_states_of_its_own_and_is_taken_back(decoupled: bool) -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    twin = nn.Parameter(p.detach().clone())
    optimizer = DeepSpeedCPUAdam([p], adamw_mode=decoupled, **ADAM)
    plain = (torch.optim.AdamW if decoupled else torch.optim.Adam)([twin], **ADAM)
    with pytest.raises(RuntimeError, match="subgroup 3, expected one with an update: it has not been initialized"):
        optimizer.rollback_subgroup(3)
    for step in range(4):
        twin.grad = p.grad = torch.tensor([0.5, 1.0, -1.0]) * (step + 1)
        if step == 2:
            before = p.detach().clone()
            optimizer.step_subgroup(3)
            optimizer.rollback_subgroup(3)
            torch.testing.assert_close(p.detach(), before)
        optimizer.step_subgroup(3)
        plain.step()
    torch.testing.assert_close(p, twin, atol=2e-6, rtol=2e-6)
    assert list(optimizer.state) == [3] and optimizer.state[3]["step"] == 4  # type: ignore[comparison-overlap,index]
    two = DeepSpeedCPUAdam([p, twin])
    with pytest.raises(ValueError, match="got gradients of 2 parameters, expected one"):
        two.step_subgroup(0)


def test_what_has_no_rule_is_refused_and_an_engine_updates_alone() -> None:
    p = nn.Parameter(torch.ones(2))
    for make in (DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad):
        with pytest.raises(RuntimeError, match="amsgrad"):
            make([p], amsgrad=True)
    with pytest.raises(RuntimeError, match="amsgrad"):
        DeepSpeedCPUAdam([{"params": [p], "amsgrad": True}])
    settings = config(1)
    del settings["optimizer"]
    model = network()
    optimizer = DeepSpeedCPUAdam(model.parameters())
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    with pytest.raises(NotImplementedError, match=r"DeepSpeedCPUAdam.step\(\): the engine updates"):
        optimizer.step()
    with pytest.raises(NotImplementedError, match="step_subgroup: the engine updates"):
        optimizer.step_subgroup(0)
    engine.destroy()


@pytest.mark.parametrize("make", [DeepSpeedCPUAdam, DeepSpeedCPULion])
def test_states_have_the_dtype_of_the_masters(make: Any) -> None:
    """With fp32_optimizer_states=False: bf16 with bf16_master_weights_and_grads, else fp32, as in DeepSpeed."""
    masters = {"enabled": True, "bf16_master_weights_and_grads": True}
    bytes_of = {}
    for narrow in (True, False):
        for block in (masters, {"enabled": True}):
            settings = {key: value for key, value in config(2).items() if key != "optimizer"}
            model = network()
            optimizer = make(model.parameters(), fp32_optimizer_states=not narrow)
            engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={**settings, "bf16": block})
            held = {(row.tier, row.purpose): row.current for row in engine._engine.memory().rows}
            bytes_of[narrow, len(block)] = held["device", "optimizer states"]
            engine.destroy()
    assert bytes_of[True, 2] * 2 == bytes_of[False, 2] == bytes_of[True, 1] == bytes_of[False, 1] > 0


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_takes_each_class_over(name: str, stage: int) -> None:
    make, plain = PAIRS[name]
    settings = {key: value for key, value in config(stage).items() if key != "optimizer"}
    model, reference = network(), network()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=settings)
    theirs = plain(reference.parameters())
    for step in range(4):
        engine.backward(engine(batch(0, step)).square().mean())
        engine.step()
        theirs.zero_grad()
        torch.autograd.backward(reference(batch(0, step)).square().mean())
        theirs.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert_same(model, reference)
    engine.destroy()
