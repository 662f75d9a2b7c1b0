"""The optimizer that initialize() returns, and how a program's optimizer becomes the engine's configuration."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch

from libzero._updates import MAY_DIFFER, CannotTakeOver, Updates, before_engine, grouped, run_own_step
from libzero._updates import client_updates as updates_of_client
from libzero.deepspeed import _names
from libzero.deepspeed._refuse import AssertedConfigError, NotBuiltError, module_getattr, refusal
from libzero.deepspeed.ops import EngineOptimizer
from libzero.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from libzero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from libzero.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from libzero.deepspeed.runtime._loss_scale import DynamicLossScaler, LossScaleConfig, LossScaler, LossScalerBase, Scale
from libzero._native import StepResult
from libzero.engine import Engine
from libzero.errors import ConfigError
from libzero.optimizer import NUMBERS_OF_RULE, ProgramOptimizer, same_object

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedOptimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "ZeROOptimizer",
]

ModelParameters: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]]



class DeepSpeedOptimizer(ProgramOptimizer):
    """The program's optimizer, or one of the class that the configuration names; see ProgramOptimizer."""

    overflow: bool = False
    """[local] The last step was skipped: a gradient was not finite."""
    _where = "deepspeed"

    def __init__(self, optimizer: torch.optim.Optimizer, *unused: Any, **words: Any) -> None:
        if unused or words:
            raise NotImplementedError(f"cannot make {type(self).__name__}. Hint: deepspeed.initialize() returns it.")
        super().__init__(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        super()._begin(optimizer)
        self._scale: Scale | None = None

    def bind(self, engine: Engine, updates: Updates, scheduled: bool) -> None:
        """[local] engine: whose updates these are. scheduled: it moves rates."""
        super().bind(engine, updates, scheduled)
        self._scale = Scale(engine)

    def step(self, closure: Callable[[], float] | None = None) -> StepResult:  # type: ignore[override]
        """[collective] The engine's update; engine.step() calls it."""
        result = super().step(closure)
        self.overflow = result.overflow
        if result.overflow:
            self._read_scale().overflowed_at = result.global_step - 1
        return result

    def _read_scale(self) -> Scale:
        self.engine  # noqa: B018  # the error before initialize() returns
        assert self._scale is not None
        return self._scale

    @property
    def loss_scaler(self) -> LossScalerBase:
        """[local] The engine's loss scale, to read."""
        scale = self._read_scale()
        return DynamicLossScaler(scale) if scale.dynamic else LossScaler(scale)

    @property
    def loss_scale_config(self) -> LossScaleConfig:
        """[local] The same under the names of DeepSpeed's stage 0."""
        return LossScaleConfig(self._read_scale())

    @property
    def dynamic_loss_scale(self) -> bool:
        """[local] fp16 with a scale that moves."""
        return self._read_scale().dynamic

    def needs_scaler(self) -> bool:
        """[local] fp16, or autocast to it: a loss has to be scaled before its backward()."""
        return self._read_scale().scaled

    @property
    def cur_scale(self) -> float:
        """[local] The loss scale of the next backward()."""
        return self.engine.loss_scale

    @property
    def loss_scale(self) -> float:
        """[local] The same."""
        return self.engine.loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """[local] Nothing between steps: step() does it. NotImplementedError where gradients would be lost."""
        if self.engine._native.micro_batches() > 0:
            raise NotImplementedError(
                "cannot drop gradients that backward() has accumulated. Hint: leave zero_grad() out before step()."
            )

    def state_dict(self) -> dict[str, Any]:
        """[local] As ProgramOptimizer's, with values of the engine under DeepSpeed's names."""
        effective, scale = self.engine.options.effective(), self._read_scale()
        values = {
            "dynamic_loss_scale": scale.dynamic,
            "cur_scale": scale.now,
            "cur_iter": scale.steps,
            "overflow": self.overflow,
            "clip_grad": json.loads(effective["gradient_clipping"]),
            "zero_stage": json.loads(effective["zero_optimization.stage"]),
            "ds_version": _names.VERSION,
        }
        return {**super().state_dict(), **values}

    @property
    def parameter_offload(self) -> Offload:
        """[local] See Offload. AttributeError below stage 3, as in DeepSpeed."""
        if self.engine.options.effective()["zero_optimization.stage"] != "3":
            raise AttributeError("DeepSpeedOptimizer.parameter_offload: the stage is not 3")
        return Offload(self.engine.module)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(refusal("DeepSpeedOptimizer", name))

class Offload:
    """What TRL looks for before it generates with gathered parameters: the module and its hooks, of which there are
    none. The engine unshards parameters by operators."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = _Module(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """[local] Nothing: there are no hooks."""

    _register_hooks_recursively = _register_deepspeed_module


class _Module:
    """The module, with the one method that DeepSpeed adds to it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """[local] None: the engine notices a parameter's use anywhere."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ZeROOptimizer(DeepSpeedOptimizer):
    """The same: one optimizer serves all stages. The classes below say by isinstance() what DeepSpeed would have."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Of stage 3."""


class BF16_Optimizer(ZeROOptimizer):
    """Of stage 1 with bf16 and gradients that are accumulated in fp32, without offload."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """Of stage 0 with a recipe, where the wrapped optimizer is FusedAdam."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """Of stage 0 with a recipe, where it is another one."""


def wrapped(optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> DeepSpeedOptimizer:
    """[local] What initialize() returns for an optimizer: the same object at stage 0 in fp32.

    config: effective values by key.
    """
    stage, recipe = (json.loads(config["zero_optimization.stage"]), _recipe(config))
    if stage == 0:
        if recipe is None:
            return same_object(optimizer, DeepSpeedOptimizer)
        return FP16_Optimizer(optimizer) if isinstance(optimizer, FusedAdam) else FP16_UnfusedOptimizer(optimizer)
    if stage == 3:
        return DeepSpeedZeroOptimizer_Stage3(optimizer)
    fp32 = json.loads(config["data_types.grad_accum_dtype"]) == "fp32"
    resident = json.loads(config["zero_optimization.offload_optimizer.device"]) in (None, "none")
    return (BF16_Optimizer if stage == 1 and recipe == "bf16" and fp32 and resident else DeepSpeedZeroOptimizer)(
        optimizer
    )


def _recipe(config: Mapping[str, Any]) -> str | None:
    return next((name for name in ("fp16", "bf16") if json.loads(config[f"{name}.enabled"]) is True), None)


def numbers_of(kind: str) -> list[str]:
    """[local] What the groups of the configuration's optimizer show besides lr and weight_decay, by its type."""
    numbers = [key for key in NUMBERS_OF_RULE[kind] if key != "weight_decay"]
    return [*numbers, "bias_correction"] if kind in ("Adam", "AdamW") else numbers


def configured(groups: list[dict[str, Any]], config: Mapping[str, Any], block: Mapping[str, Any]) -> Any:
    """[local] The optimizer that the configuration names, over these groups, the same objects.

    config: effective values by key. block: what the program wrote.
    """
    kind = json.loads(config["optimizer.type"])
    on_cpu = json.loads(config["zero_optimization.offload_optimizer.device"]) not in (None, "none")
    if kind in ("Adam", "AdamW"):
        decoupled = bool(json.loads(config["optimizer.params.adam_w_mode"]))
        made: Any = DeepSpeedCPUAdam(groups, adamw_mode=decoupled) if on_cpu else FusedAdam(
            groups, adam_w_mode=decoupled
        )
        if _params(block).get("torch_adam") is True:
            made = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups)
    elif kind == "Lion":
        made = (DeepSpeedCPULion if on_cpu else FusedLion)(groups)
    elif kind == "Adagrad":
        made = (DeepSpeedCPUAdagrad if on_cpu else torch.optim.Adagrad)(groups)
    else:
        made = getattr(torch.optim, kind)(groups, lr=0.0)  # groups have their own
    made.param_groups = groups
    return made


def with_own_numbers(updates: Updates, model: torch.nn.Module, numbers: Mapping[str, Any]) -> bool:
    """[local] Whether a group has another number than the configuration: then the optimizer's step() is run."""
    rule = [key for key in numbers if key not in MAY_DIFFER]
    if all(group[key] == numbers[key] for group in updates.groups for key in rule):
        return False
    try:
        run_own_step(updates, model)
    except CannotTakeOver as fault:
        raise NotBuiltError(str(fault)) from None
    return True


def _params(block: Mapping[str, Any]) -> Mapping[str, Any]:
    params = block.get("params")
    return params if isinstance(params, Mapping) else {}


def _block_of_ops(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The block "optimizer" of one of deepspeed.ops, whose rule the engine has."""
    of = before_engine(optimizer) or type(optimizer)
    own: Any = optimizer
    if not (issubclass(of, EngineOptimizer) and of.__module__.startswith(EngineOptimizer.__module__)) or not own.kind:
        return None
    params = {"adam_w_mode": own.adam_w_mode} if hasattr(optimizer, "adam_w_mode") else {}
    # The program's argument: states have the masters' dtype. That of the fused classes is for use without an engine.
    if not vars(own).get("fp32_optimizer_states", True):
        params["fp32_optimizer_states"] = False
    return {"type": own.kind, "params": params}


def client_updates(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Updates:
    """[local] Of a program's optimizer. ConfigError where its groups do not fit the model.

    NotImplementedError where the engine would not do what it does.
    """
    try:
        return updates_of_client(optimizer, model, _block_of_ops)
    except CannotTakeOver as fault:
        raise NotBuiltError(str(fault)) from None


def config_updates(
    model_parameters: ModelParameters | None, model: torch.nn.Module, numbers: Mapping[str, Any]
) -> Updates:
    """[local] Of the configuration's optimizer with its `numbers`, over parameters or groups of the program."""
    given = list(model.parameters()) if model_parameters is None else list(model_parameters)
    if given and isinstance(given[0], dict):
        groups = [{**numbers, **group} for group in given]  # type: ignore[dict-item]
        for group in groups:
            group["params"] = list(group["params"])
    else:
        groups = [{"params": given, **numbers}]
    return grouped(groups, model)


__getattr__ = module_getattr("deepspeed.runtime.base_optimizer")
