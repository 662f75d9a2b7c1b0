"""The engine and the optimizer of libzero.deepspeed, with loops of plain torch as the reference."""

import importlib
from typing import Any

import pytest
import torch
from conftest import batch, config, network

import libzero
import libzero.deepspeed as deepspeed
from libzero.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from libzero.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from libzero.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from libzero.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig, LossScaler
from libzero.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from libzero.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from libzero.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

FP16, BF16 = {"fp16": {"enabled": True, "loss_scale_window": 2}}, {"bf16": {"enabled": True}}
FP32_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


def without(key: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != key}


def loss_of(model: Any, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    loss: torch.Tensor = model(batch(0, step).to(dtype)).float().square().mean()
    return loss


# ---- the optimizer ----
@pytest.mark.parametrize(
    ("stage", "more", "kind"),
    [
        (0, FP16, FP16_Optimizer),
        (0, BF16, FP16_Optimizer),
        (1, BF16, DeepSpeedZeroOptimizer),
        (1, FP32_SUMS, BF16_Optimizer),
        (2, FP32_SUMS, DeepSpeedZeroOptimizer),
        (3, {}, DeepSpeedZeroOptimizer_Stage3),
        (3, BF16, DeepSpeedZeroOptimizer_Stage3),
    ],
)
def test_the_optimizer_has_deepspeeds_class_and_wraps_the_rules(stage: int, more: Any, kind: type) -> None:
    _, optimizer, _, _ = deepspeed.initialize(model=network(), config=config(stage, **more))
    assert type(optimizer) is kind and isinstance(optimizer, DeepSpeedOptimizer)
    assert isinstance(optimizer, ZeROOptimizer) == (stage > 0)
    assert type(optimizer.optimizer) is deepspeed.ops.adam.FusedAdam
    assert optimizer.optimizer.param_groups is optimizer.param_groups


def test_the_wrapped_optimizer_is_the_programs_or_the_configurations() -> None:
    model = network()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = without("optimizer", config(0, **BF16))
    _, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=mine, config=settings)
    assert type(optimizer) is FP16_UnfusedOptimizer and optimizer.optimizer is mine
    for words, kind in (
        ({"type": "Adam"}, deepspeed.ops.adam.FusedAdam),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW),
        ({"type": "SGD", "params": {"lr": 0.5}}, torch.optim.SGD),
        ({"type": "Adagrad"}, torch.optim.Adagrad),
        ({"type": "Lion"}, deepspeed.ops.lion.FusedLion),
    ):
        engine, optimizer, _, _ = deepspeed.initialize(model=network(), config=config(1, optimizer=words))
        assert optimizer is not None and type(optimizer.optimizer) is kind
        assert optimizer.optimizer.param_groups[0]["lr"] == engine.get_lr()[0]
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    _, optimizer, _, _ = deepspeed.initialize(model=network(), config={**config(2), "zero_optimization": offload})
    assert optimizer is not None and type(optimizer.optimizer) is deepspeed.ops.adam.DeepSpeedCPUAdam


def test_without_zero_and_recipe_the_optimizer_is_the_programs_object() -> None:
    settings = without("optimizer", config(0))
    model, plain = network(), network()
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (mine, theirs)]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=mine, lr_scheduler=schedulers[0], config=settings
    )
    assert optimizer is mine and engine.optimizer is mine and isinstance(mine, torch.optim.AdamW)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
        theirs.zero_grad()
        loss_of(plain, step).backward()
        theirs.step()
        schedulers[1].step()
    assert engine.get_lr() == schedulers[1].get_last_lr()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)
    _, optimizer, _, _ = deepspeed.initialize(model=network(), config=config(0))
    assert isinstance(optimizer, deepspeed.ops.adam.FusedAdam)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_loss_scale_is_read_from_the_optimizer(stage: int) -> None:
    scale = {"enabled": True, "loss_scale_window": 2, "initial_scale_power": 8, "hysteresis": 1, "min_loss_scale": 4}
    engine, optimizer, _, _ = deepspeed.initialize(model=network(), config=config(stage, fp16=scale))
    assert optimizer is not None and optimizer.dynamic_loss_scale and optimizer.needs_scaler()
    scaler, numbers = optimizer.loss_scaler, optimizer.loss_scale_config
    assert isinstance(scaler, DynamicLossScaler) and scaler.dynamic and isinstance(numbers, LossScaleConfig)
    assert (scaler.scale_window, scaler.min_scale, scaler.scale_factor, scaler.delayed_shift) == (2, 4, 2.0, 1)
    seen = []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        engine.backward(loss_of(engine, dtype=torch.float16) * factor)
        engine.step()
        assert scaler.cur_scale == scaler.loss_scale == numbers.cur_scale == optimizer.cur_scale == engine.cur_scale
        seen.append((scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, numbers.last_overflow_iter))
    assert seen == [(256, 1, -1, -1), (512, 2, -1, -1), (256, 3, 2, 2), (256, 4, 2, 2)]
    state = optimizer.state_dict()
    assert state["cur_scale"] == 256 and state["cur_iter"] == 4 and state["dynamic_loss_scale"] is True
    optimizer.load_state_dict(state)
    _, fixed, _, _ = deepspeed.initialize(
        model=network(), config=config(stage, fp16={"enabled": True, "loss_scale": 128})
    )
    assert fixed is not None and type(fixed.loss_scaler) is LossScaler and fixed.loss_scaler.loss_scale == 128
    assert fixed.dynamic_loss_scale is False and fixed.loss_scale_config.scale_window is None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
        ("runtime.bf16_optimizer", "BF16_Optimizer"),
        ("runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("runtime.fp16.loss_scaler", "LossScaleConfig"),
    ],
)
def test_parts_of_the_engine_are_not_made_by_the_program(module: str, name: str) -> None:
    found = getattr(importlib.import_module(f"libzero.deepspeed.{module}"), name)
    with pytest.raises(NotImplementedError, match=f"cannot make {name}"):
        found(torch.optim.SGD(network().parameters(), lr=0.1), 1, static=2)


# ---- errors that are assertions in DeepSpeed ----
def test_errors_that_are_assertions_in_deepspeed_are_both() -> None:
    both = (libzero.ConfigError, AssertionError)

    def raised(call: Any, *words: Any, **more: Any) -> BaseException:
        with pytest.raises(AssertionError) as caught:
            call(*words, **more)
        return caught.value

    assert isinstance(raised(deepspeed.initialize, model=None, config=config(1)), both)
    assert isinstance(raised(deepspeed.initialize, model=network()), both)
    unknown = torch.optim.Rprop(network().parameters())
    model = network()
    unknown = torch.optim.Rprop(model.parameters())
    refused = raised(deepspeed.initialize, model=model, optimizer=unknown, config=without("optimizer", config(1)))
    assert isinstance(refused, NotImplementedError)
    zero = {"stage": 2, "ignore_unused_parameters": False}
    engine, _, _, _ = deepspeed.initialize(model=network(), config={**config(2), "zero_optimization": zero})
    assert isinstance(raised(engine.backward, engine.module[0](batch()).sum()), both)
    evaluates, _, _, _ = deepspeed.initialize(model=network(), config=without("optimizer", config(1)))
    assert isinstance(raised(evaluates.step), both)


def test_the_cache_of_partitions_may_be_emptied_at_any_time() -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(3))
    engine.empty_partition_cache()
    engine.backward(loss_of(engine))
    engine.empty_partition_cache()
    engine.step()
    assert engine.global_steps == 1
