"""The engine and the optimizer of libzero.deepspeed, with loops of plain torch as the reference."""

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from conftest import Programs, batch, config, network, without

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
    model = network()
    unknown = torch.optim.LBFGS(model.parameters())
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


# ---- backward() of torch ----
def plain_steps(steps: int, accumulate: int, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        for micro in range(accumulate):
            (loss_of(model, step * accumulate + micro) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def expect_close(engine: Any, expected: torch.nn.Module, tolerance: float = 1e-6) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for ours, theirs in zip(engine.module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().float(), theirs.detach().float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_of_torch_is_one_of_the_engine(stage: int) -> None:
    for steps in (1, 2):
        engine, _, _, _ = deepspeed.initialize(
            model=network(), config=config(stage, gradient_accumulation_steps=steps)
        )
        for micro in range(3 * steps):
            loss = loss_of(engine, micro)
            if micro % 3 == 2:
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
        assert engine.global_steps == 3
        expect_close(engine, plain_steps(3, steps, 1 / steps))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_of_torch_of_what_is_no_loss(stage: int) -> None:
    """Of an output with a gradient of its own, of the module past the engine, of several losses on one graph."""
    reference = network()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(stage))
    weights = torch.randn(4, 4)
    for step in range(3):
        for model, update in ((reference, optimizer), (engine, engine)):
            run = engine.module if step == 1 and model is engine else model
            output = run(batch(0, step))
            # A gradient that is only returned begins nothing.
            penalty = torch.autograd.grad(output.sum(), batch(0, step).requires_grad_(), allow_unused=True)
            assert penalty == (None,)
            output.sum().backward(retain_graph=True)
            output.backward(weights)
            update.step()
            update.zero_grad()
    assert engine.global_steps == 3
    expect_close(engine, reference)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_backward_of_the_losses_of_several_engines(stage: int) -> None:
    references = [network(1), network(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01) for m in references]
    engines = [deepspeed.initialize(model=network(seed), config=config(stage))[0] for seed in (1, 2)]
    for step in range(2):
        (loss_of(references[0], step) + loss_of(references[1], step) * 0.5).backward()
        (loss_of(engines[0], step) + loss_of(engines[1], step) * 0.5).backward()
        for update in (*optimizers, *engines):
            update.step()
            update.zero_grad()
    for engine, reference in zip(engines, references, strict=True):
        expect_close(engine, reference)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fp16_takes_a_backward_of_torch_only_of_a_scaled_loss(stage: int) -> None:
    settings = config(stage, fp16={"enabled": True, "initial_scale_power": 4}, gradient_accumulation_steps=2)
    engines = [deepspeed.initialize(model=network(), config=settings)[0] for _ in range(2)]
    for micro in range(4):
        engines[0].backward(loss_of(engines[0], micro, torch.float16))
        scaled = engines[1].scale(loss_of(engines[1], micro, torch.float16))
        assert scaled.dtype == torch.float32
        scaled.backward()
        for engine in engines:
            engine.step()
    first, second = (engine._engine.state_dict() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(RuntimeError, match=r"of a loss that is not scaled, .*engine\.scale\(loss\)\.backward"):
        loss_of(engines[1], 0, torch.float16).backward()
    with pytest.raises(AssertionError, match="got a loss of 16 elements"):
        engines[1].scale(engines[1](batch().half()))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_of_torch_that_fails_is_dropped(stage: int) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("a fault of the model")

    class Late(torch.nn.Module):
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            for layer in self.layers[1:]:
                x = layer(Fails.apply(x) if self.fails else x)
            return x

    model = Late()
    engine, _, _, _ = deepspeed.initialize(model=model, config=config(stage))
    for step in range(3):
        if step == 1:
            model.fails = True
            with pytest.raises(RuntimeError, match="a fault of the model"):
                loss_of(engine, 7).backward()
            model.fails = False
        loss_of(engine, step).backward()
        engine.step()
    expect_close(engine, plain_steps(3, 1))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_of_torch_through_checkpointing(reentrant: bool, stage: int) -> None:
    class Recomputed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            return x

    engine, _, _, _ = deepspeed.initialize(model=Recomputed(), config=config(stage))
    for step in range(2):
        loss: torch.Tensor = engine(batch(0, step).requires_grad_()).square().mean()
        loss.backward()
        engine.step()
    expect_close(engine, plain_steps(2, 1))


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_pass_through_an_engine_that_does_not_train(stage: int) -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=without("optimizer", config(stage)))
    reference = network()
    ours, theirs = (batch().requires_grad_() for _ in range(2))
    for model, x in ((engine, ours), (reference, theirs)):
        for _ in range(2):
            model(x).square().mean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    # They are the program's, as in torch.
    torch.testing.assert_close(engine.module[4].bias.grad, reference[4].bias.grad)


# ---- the program counts ----
@pytest.mark.parametrize("stage", range(4))
def test_the_program_says_when_a_step_ends(stage: int) -> None:
    """Whatever gradient_accumulation_steps is; each loss is divided by it."""
    for configured in (1, 2):
        engine, _, _, _ = deepspeed.initialize(
            model=network(), config=config(stage, gradient_accumulation_steps=configured)
        )
        for micro in range(6):
            engine.set_gradient_accumulation_boundary(micro % 3 == 2)
            loss = loss_of(engine, micro)
            loss.backward() if micro == 4 else engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() == (micro % 3 == 2)
            engine.step()
        assert engine.global_steps == 2 and engine.micro_steps == 6
        expect_close(engine, plain_steps(2, 3, 1 / configured))


def test_the_engine_counts_again_after_a_step_of_the_programs() -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(1))
    for micro in range(4):
        loss = loss_of(engine, micro)  # as accelerate: the forward comes before the boundary is known
        engine.set_gradient_accumulation_boundary(micro != 1)
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 3
    engine.backward(loss_of(engine))
    with pytest.raises(libzero.ConfigError, match=r"got a second loss before step\(\)"):
        engine.backward(loss_of(engine))


@pytest.mark.parametrize("stage", range(4))
def test_losses_inside_of_no_sync_and_of_one_reduction(stage: int) -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(stage))
    if stage >= 2:
        with pytest.raises(AssertionError, match=f"stage {stage}: gradients are sharded"), engine.no_sync():
            pass
    if stage == 0:
        with pytest.raises(NotImplementedError, match="stage 0"), engine.coalesce_grad_reduction():
            pass
    for step in range(2):
        inside = engine.no_sync() if stage == 0 or (stage == 1 and step == 0) else engine.coalesce_grad_reduction()
        with inside:
            for micro in range(2):
                engine.backward(loss_of(engine, 2 * step + micro))
            with pytest.raises(AssertionError, match="cannot step within"):
                engine.step()
        engine.step()
    assert engine.global_steps == 2
    expect_close(engine, plain_steps(2, 2))


# ---- parameters ----
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("how", ["optimizer", "model_parameters"])
def test_a_trainable_parameter_in_no_group_is_not_updated(how: str, stage: int) -> None:
    """And is not part of the norm. An empty group keeps its place."""

    def listed(model: Any) -> list[dict[str, Any]]:
        groups = [{"params": [], "lr": 0.5}, {"params": [model[2].weight, model[2].bias]}]
        return [*groups, {"params": [model[4].weight], "lr": 0.02}]

    words = {"lr": 0.01, "weight_decay": 0.1}
    reference, model = network(), network()
    optimizer = torch.optim.AdamW(listed(reference), **words)
    settings = config(stage, gradient_clipping=0.05, optimizer={"type": "AdamW", "params": words})
    more: dict[str, Any] = {"model_parameters": listed(model)}
    if how == "optimizer":
        settings, more = without("optimizer", settings), {"optimizer": torch.optim.AdamW(listed(model), **words)}
    engine, wrapped, _, _ = deepspeed.initialize(model=model, config=settings, **more)
    assert wrapped is not None and [len(group["params"]) for group in wrapped.param_groups] == [0, 2, 1]
    assert model[0].weight.requires_grad
    for step in range(3):
        loss_of(reference, step).backward()
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(mine, 0.05)
        optimizer.step()
        reference.zero_grad()
        engine.backward(loss_of(engine, step))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    assert engine.get_lr() == [0.5, 0.01, 0.02]
    expect_close(engine, reference, 1e-5)


@pytest.mark.parametrize("stage", range(4))
def test_requires_grad_may_change_between_micro_batches(stage: int) -> None:
    """The gradients that arrived count."""
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(stage, gradient_accumulation_steps=3))
    reference = network()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(2):
        for micro in range(3):
            for model in (reference, engine.module):
                model[0].requires_grad_(micro != 1)  # frozen for one micro-batch
                model[4].requires_grad_(micro > 0)  # from the second on
            (loss_of(reference, 3 * step + micro) / 3).backward()
            engine.backward(loss_of(engine, 3 * step + micro))
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps == 2
    expect_close(engine, reference)


@pytest.mark.parametrize("stage", range(4))
def test_what_was_frozen_at_first_trains_from_the_middle_of_a_step(stage: int) -> None:
    model, reference = network(), network()
    model[4].requires_grad_(False)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01),
        config=without("optimizer", config(stage, gradient_accumulation_steps=2)),
    )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    reference[4].requires_grad_(False)
    for micro in range(4):
        if micro == 1:
            model[4].requires_grad_(True)
            reference[4].requires_grad_(True)
        (loss_of(reference, micro) / 2).backward()
        engine.backward(loss_of(engine, micro))
        engine.step()
        if micro % 2:
            optimizer.step()
            optimizer.zero_grad()
    expect_close(engine, reference)


OFFLOADS = [
    (1, {}),
    (2, {"offload_optimizer": {"device": "cpu"}}),
    (3, {}),
    (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    (3, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
]


@pytest.mark.parametrize(("stage", "offload"), OFFLOADS)
def test_states_are_set_between_backward_and_step(stage: int, offload: dict[str, Any], tmp_path: Any) -> None:
    utils = deepspeed.utils
    blocks = {name: {**block, "nvme_path": str(tmp_path)} for name, block in offload.items()}
    settings = {**config(stage), "zero_optimization": {"stage": stage, **blocks}}
    engine, _, _, _ = deepspeed.initialize(model=network(), config=settings)
    reference = network()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    weight, expected = engine.module[2].weight, reference[2].weight
    for step in range(3):
        loss_of(reference, step).backward()
        engine.backward(loss_of(engine, step))
        if step == 1:
            value, moment = torch.full((32, 32), 0.125), torch.full((32, 32), 0.01)
            utils.safe_set_full_fp32_param(weight, value)
            utils.safe_set_full_optimizer_state(weight, moment, "exp_avg_sq")
            found = utils.safe_get_full_fp32_param(weight)
            assert found is not None and torch.equal(found, value)
            with deepspeed.zero.GatheredParameters(weight):
                assert torch.equal(weight, value)  # at once
            with torch.no_grad():
                expected.copy_(value)
                optimizer.state[expected]["exp_avg_sq"].copy_(moment)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    expect_close(engine, reference)


# ---- checkpoints, and a second engine ----
@pytest.mark.parametrize("stage", range(4))
def test_a_save_between_micro_batches_is_without_their_gradients(stage: int, tmp_path: Any) -> None:
    settings = config(stage, gradient_accumulation_steps=2)
    engine, _, _, _ = deepspeed.initialize(model=network(), config=settings)
    for micro in range(5):
        if micro == 3:  # one of two
            engine.save_checkpoint(tmp_path)
        engine.backward(loss_of(engine, micro))
        engine.step()
    engine.backward(loss_of(engine, 5))
    engine.step()
    expect_close(engine, plain_steps(3, 2, 1 / 2))
    again, _, _, _ = deepspeed.initialize(model=network(2), config=settings)
    again.load_checkpoint(tmp_path)
    assert again.global_steps == 1
    for micro in range(2, 6):
        again.backward(loss_of(again, micro))
        again.step()
    first, second = engine._engine.state_dict(), again._engine.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("stage", range(4))
def test_a_second_engine_takes_the_model_over(stage: int) -> None:
    model = network()
    first, _, _, _ = deepspeed.initialize(model=model, config=config(stage))
    first.backward(loss_of(first))
    first.step()
    first.backward(loss_of(first, 1))  # its gradient is dropped with the engine
    reference = plain_steps(1, 1)
    second, _, _, _ = deepspeed.initialize(model=model, config=config(stage))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(2):
        loss_of(reference, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        second.backward(loss_of(second, step))
        second.step()
    expect_close(second, reference)
    with pytest.raises(libzero.ConfigError, match="closed"):
        first.step()


@pytest.mark.parametrize("stage", range(4))
def test_a_model_keeps_its_values_when_a_program_drops_the_engine(stage: int) -> None:
    """As Lightning's test() after fit(); with the model the engine ends too."""
    model = network()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config(stage))
    engine.backward(loss_of(engine))
    engine.step()
    native = weakref.ref(engine._engine)
    del engine, optimizer
    gc.collect()
    assert (native() is not None) == (stage == 3)
    reference = plain_steps(1, 1)
    again, _, _, _ = deepspeed.initialize(model=model, config=without("optimizer", config(stage)))
    assert native() is None
    torch.testing.assert_close(loss_of(again, 1), loss_of(reference, 1), atol=1e-6, rtol=1e-6)
    native = weakref.ref(again._engine)
    del again, model
    gc.collect()
    assert native() is None


def test_states_that_are_in_host_memory_stay_there(caplog: pytest.LogCaptureFixture) -> None:
    kinds = deepspeed.zero.offload_config
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(3))
    engine.backward(loss_of(engine))
    before, memory = engine._engine.state_hash(), engine._engine.memory()
    engine.offload_states(include=[kinds.OffloadStateTypeEnum.optim_states], device=kinds.OffloadDeviceEnum.cpu)
    assert engine._engine.memory() == memory
    engine.reload_states()
    assert engine._engine.state_hash() == before
    engine.step()
    with pytest.raises(ValueError, match="got the device"):
        engine.offload_states(device=kinds.OffloadDeviceEnum.nvme)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    offloaded, _, _, _ = deepspeed.initialize(model=network(), config={**config(3), "zero_optimization": zero})
    with pytest.raises(AssertionError, match="offload_param says where"):
        offloaded.offload_states()


RANKS = """
from libzero import deepspeed

def loss_of(model, rank, step, dtype=torch.float32):
    return model(batch(rank, step).to(dtype)).float().square().mean()

def plain(steps, micros, factor, frozen=lambda step: False, rated=lambda model: model.parameters()):
    model = network()
    optimizer = torch.optim.AdamW(rated(model), lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        for micro in range(micros):
            for rank in (0, 1):
                model[4].requires_grad_(not frozen(step * micros + micro))
                (loss_of(model, rank, step * micros + micro) * factor / 2).backward()
        optimizer.step()
        model.zero_grad()
    return model

def compare(engine, expected, what):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for ours, theirs in zip(engine.module.parameters(), expected.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
for stage in range(4):
    def engine_of(model=None, **more):
        model = network() if model is None else model
        return deepspeed.initialize(model=model, config=config(stage, **more))[0]

    # backward() of torch, the program counts
    engine = engine_of()
    for micro in range(4):
        engine.set_gradient_accumulation_boundary(micro % 2 == 1)
        loss_of(engine, rank, micro).backward()
        engine.step()
    compare(engine, plain(2, 2, 1), f"counted by the program, stage {stage}")

    # divided, and frozen for one micro-batch; a save in between
    engine = engine_of(gradient_accumulation_steps=3)
    for micro in range(6):
        engine.module[4].requires_grad_(micro % 3 != 1)
        if micro == 4:
            engine.save_checkpoint("saved", f"stage{stage}")
        loss_of(engine, rank, micro).backward()
        engine.step()
    compare(engine, plain(2, 3, 1 / 3, lambda micro: micro % 3 == 1), f"divided, stage {stage}")

    # one backward of two engines, and another engine of the first one's model
    engines = [engine_of(), engine_of()]
    sum(loss_of(each, rank, 0) for each in engines).backward()
    for each in engines:
        each.step()
        compare(each, plain(1, 1, 1), f"two engines, stage {stage}")
    engine = engine_of(engines[0].module)
    compare(engine, plain(1, 1, 1), f"taken over, stage {stage}")

    # only some parameters in groups
    model = network()
    groups = lambda model: [p for name, p in model.named_parameters() if not name.startswith("2")]
    engine = deepspeed.initialize(model=model, model_parameters=groups(model), config=config(stage))[0]
    for step in range(2):
        engine.backward(loss_of(engine, rank, step))
        engine.step()
    compare(engine, plain(2, 1, 1, rated=groups), f"some parameters, stage {stage}")

    # states between backward and step
    engine = engine_of()
    engine.backward(loss_of(engine, rank, 0))
    weight = engine.module[2].weight
    deepspeed.utils.safe_set_full_fp32_param(weight, torch.full((32, 32), 0.5))
    engine.step()
    found = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert (found - 0.5).abs().max() < 2e-3 and not found.eq(0.5).all()
engine = engine_of(checkpoint={"tag_validation": "Fail"})
try:
    engine.save_checkpoint("saved", f"rank{rank}")
except AssertionError as refused:
    print("refused:", refused)
print("done", flush=True)
"""


def test_two_ranks_train_as_a_plain_loop(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(programs.folder)
    out = programs.ranks(RANKS)
    assert out.count("done") == 2 and out.count("refused:") == 2, out
