"""The optimizer that initialize() returns, and how a program's optimizer becomes the engine's configuration."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch

from libzero._carried import kept_in_groups
from libzero.deepspeed import _names
from libzero.deepspeed._refuse import AssertedConfigError, NotBuiltError, module_getattr, refusal
from libzero.deepspeed.ops import EngineOptimizer
from libzero.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from libzero.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from libzero.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from libzero.deepspeed.runtime._loss_scale import DynamicLossScaler, LossScaleConfig, LossScaler, LossScalerBase, Scale
from libzero.engine import Engine, StepResult, compiled_from, exact_pattern
from libzero.errors import ConfigError

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

_OWN = ("params", "lr", "initial_lr", "weight_decay", "name", "moe")
"""What may differ from group to group."""
_UNUSED = ("foreach", "capturable", "fused", "set_grad_none")
"""How a rule is computed, not what."""
_RULE = ("betas", "eps", "momentum", "dampening", "nesterov", "weight_decay", "lr_decay", "bias_correction", "amsgrad")
"""What may not change while training; a group's other keys are a scheduler's or the program's."""
_ELSEWHERE = "the states are in the engine's checkpoints: engine.save_checkpoint(dir, tag), engine.load_checkpoint(dir)"


def _rule_of(step: Any) -> Any:
    """The function behind the wrappers that torch's optimizers and schedulers put around step()."""
    step = getattr(step, "__func__", step)
    while hasattr(step, "__wrapped__") and step.__globals__["__name__"].startswith("torch.optim"):
        step = step.__wrapped__
    return step


_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "Adam",
    torch.optim.SGD: "SGD",
    torch.optim.Adagrad: "Adagrad",
}
_RULES = {kind: _rule_of(kind.step) for kind in _KINDS}


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """`param_groups[i]["lr"]` acts at the next step; the other numbers are fixed. The states are the engine's.

    Its groups are those of the program's optimizer, the same objects, so that a scheduler of torch over either drives
    the engine.
    """

    overflow: bool = False
    """[local] The last step was skipped: a gradient was not finite."""
    optimizer: torch.optim.Optimizer
    """The program's optimizer, or the one that the configuration names: its class and its groups. It has no states."""

    def __init__(self, optimizer: torch.optim.Optimizer, *unused: Any, **words: Any) -> None:
        if unused or words:
            raise NotImplementedError(f"cannot make {type(self).__name__}. Hint: deepspeed.initialize() returns it.")
        super().__init__(optimizer.param_groups, {})
        self._begin(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        groups = self.param_groups = optimizer.param_groups
        self.optimizer = optimizer
        self._numbers = [{key: group[key] for key in _RULE if key in group} for group in groups]
        self._engine: Engine | None = None
        self._scale: Scale | None = None
        self._members: list[list[int]] = []
        self._scheduled = False
        self._has_states = False

    def bind(self, engine: Engine, updates: Updates, scheduled: bool) -> None:
        """[local] engine: whose updates these are. scheduled: it moves rates."""
        self._engine, self._members, self._scheduled = engine, updates.members, scheduled
        self._scale = Scale(engine)

    @property
    def engine(self) -> Engine:
        """[local] The engine. ConfigError before initialize() has made it."""
        if self._engine is None:
            raise ConfigError("[deepspeed] cannot use the optimizer: initialize() has not returned yet")
        return self._engine

    def step(self, closure: Callable[[], float] | None = None) -> StepResult:  # type: ignore[override]
        """[collective] The engine's update; engine.step() calls it."""
        if closure is not None:
            raise ConfigError("[deepspeed] optimizer.step: got a closure, expected none: the engine runs backward()")
        engine = self.engine
        self.push()
        result = engine.step()
        self._has_states = True
        self.overflow = result.overflow
        if result.overflow:
            self._read_scale().overflowed_at = result.global_step - 1
        self.pull()
        return result

    def _look_at_groups(self) -> None:
        if len(self.param_groups) != len(self._members):
            raise ConfigError(
                f"[deepspeed] optimizer.add_param_group: got {len(self.param_groups)} groups, expected the "
                f"{len(self._members)} that initialize() found. Hint: add the group before initialize(); "
                "its parameters are not trained while they are frozen with requires_grad_(False)."
            )

    def push(self) -> None:
        """[local] The program's rates to the engine: before a step, and before a save."""
        engine = self.engine
        self._look_at_groups()
        if not self._scheduled:
            for group, fixed, members in zip(self.param_groups, self._numbers, self._members, strict=True):
                for key, value in fixed.items():
                    if group[key] != value:
                        raise ConfigError(
                            f"[deepspeed] param_groups: {key} got {group[key]!r}, expected {value!r}: only lr may be "
                            "changed while training. Hint: cycle_momentum=False for a scheduler of torch."
                        )
                for i in members:
                    engine.optimizer.param_groups[i]["lr"] = float(group["lr"])
        else:
            for group, members in zip(self.param_groups, self._members, strict=True):
                if members and group["lr"] != engine.optimizer.param_groups[members[0]]["lr"]:
                    raise ConfigError(
                        f"[deepspeed] param_groups: lr got {group['lr']!r}, expected "
                        f"{engine.optimizer.param_groups[members[0]]['lr']!r}: the engine's schedule moves the rates. "
                        "Hint: leave the block scheduler out, or the program's changes."
                    )

    def pull(self) -> None:
        """[local] The engine's rates to the groups: after a step of its own schedule, or a checkpoint."""
        if self._scheduled:
            for group, members in zip(self.param_groups, self._members, strict=True):
                if members:
                    group["lr"] = self.engine.optimizer.param_groups[members[0]]["lr"]

    def kept(self) -> list[dict[str, Any]]:
        """[local] What schedulers keep in the groups, such as initial_lr."""
        return kept_in_groups(self.param_groups, ("weight_decay", "name", "moe"))

    def restore(self, kept: Iterable[Mapping[str, Any]]) -> None:
        """[local] The same from a checkpoint; the numbers of the rule stay."""
        self._has_states = True
        for group, fixed, values in zip(self.param_groups, self._numbers, kept, strict=False):
            group.update({key: value for key, value in values.items() if key not in fixed})

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
        """[local] fp16: a loss has to be scaled before its backward()."""
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
        """[local] The groups, with numbers in place of parameters, values of the engine, and where the states are.

        Frameworks put it into files of their own; load_state_dict() takes it back. The states are sharded, and in the
        engine's checkpoints only.
        """
        groups, count = [], 0
        for group in self.param_groups:
            numbers = list(range(count, count + len(group["params"])))
            count += len(numbers)
            groups.append({key: value for key, value in group.items() if key != "params"} | {"params": numbers})
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
        return {"state": {}, "param_groups": groups, **values, "libzero": _ELSEWHERE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """[local] What state_dict() gave, for the same groups: their rates. NotImplementedError for states."""
        if state_dict.get("libzero") != _ELSEWHERE or state_dict.get("state"):
            raise NotImplementedError(
                "cannot load the states of an optimizer of torch: they are sharded. Hint: engine.load_checkpoint(dir)."
            )
        both = (state_dict["param_groups"], self.param_groups)
        sizes = [[len(group["params"]) for group in groups] for groups in both]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"[deepspeed] optimizer.load_state_dict: got groups of {sizes[0]} parameters, expected {sizes[1]}"
            )
        if not self._scheduled:
            for group, stored in zip(self.param_groups, state_dict["param_groups"], strict=True):
                group["lr"] = stored["lr"]

    @property
    def parameter_offload(self) -> Offload:
        """[local] See Offload. AttributeError below stage 3, as in DeepSpeed."""
        if self.engine.options.effective()["zero_optimization.stage"] != "3":
            raise AttributeError("DeepSpeedOptimizer.parameter_offload: the stage is not 3")
        return Offload(self.engine.module)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(refusal("DeepSpeedOptimizer", name))

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("[deepspeed] cannot copy or pickle the optimizer. Hint: engine.save_checkpoint(dir, tag).")


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
            return _same(optimizer)
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


def _same(optimizer: torch.optim.Optimizer) -> DeepSpeedOptimizer:
    """The object itself, of a class that is also its own: step() is the engine's."""
    own = _before_same(optimizer) or type(optimizer)
    was_wrapped = optimizer.__dict__.pop("step", None)  # a scheduler of torch calls what it found
    made: Any = optimizer
    made.__class__ = type(own.__name__, (DeepSpeedOptimizer, own), {"__module__": own.__module__, "_was": own})
    made._begin(made)
    made._patch_step_function()
    if was_wrapped is not None:
        step: Any = functools.partial(type(made).step, made)
        step._wrapped_by_lr_sched = True
        made.step = step
    return made  # type: ignore[no-any-return]


def _before_same(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """The class of a program's optimizer that _same() has made one of the engine; None: it has not."""
    return vars(type(optimizer)).get("_was")


def configured(groups: list[dict[str, Any]], config: Mapping[str, Any], block: Mapping[str, Any]) -> Any:
    """[local] The optimizer that the configuration names, over these groups, the same objects.

    config: effective values by key. block: what the program wrote.
    """
    kind = json.loads(config["optimizer.type"])
    on_cpu = json.loads(config["zero_optimization.offload_optimizer.device"]) not in (None, "none")
    if kind.startswith("Adam"):
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
        made = torch.optim.SGD(groups, lr=0.0)  # groups have their own
    made.param_groups = groups
    return made


def _params(block: Mapping[str, Any]) -> Mapping[str, Any]:
    params = block.get("params")
    return params if isinstance(params, Mapping) else {}


@dataclass
class Updates:
    """What the engine's configuration says about updates, and the groups that the program sees."""

    groups: list[dict[str, Any]]
    members: list[list[int]]
    """Groups of the engine, by group of the program; empty for an empty group."""
    patterns: list[dict[str, Any]] = field(default_factory=list)
    """libzero.parameter_groups"""
    block: dict[str, Any] | None = None
    """The block "optimizer"; None: that of the configuration"""
    unlisted: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that are in no group, by name: they are never updated."""
    optimizer: torch.optim.Optimizer | None = None
    """The program's, or one of the class that the configuration names; None: the engine only evaluates."""

    @property
    def base(self) -> dict[str, Any]:
        """The program's group whose parameters are in the engine's group 0."""
        return self.groups[next(g for g, members in enumerate(self.members) if 0 in members)]

    def scheduled(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """The block "scheduler" for the engine's groups, for which lists have one number per group of the program.

        Only WarmupCosineLR begins from the groups' own rates; the others set the rates of all groups.
        """
        if block["type"] != "WarmupCosineLR":
            for pattern in self.patterns:
                pattern.pop("lr", None)
        owner = {i: g for g, members in enumerate(self.members) for i in members}
        params = dict(block["params"])
        for key, value in params.items():
            if isinstance(value, list | tuple) and len(value) > 1:
                params[key] = [value[owner[i]] for i in range(len(owner))]
        return {**block, "params": params}


def _kind(optimizer: torch.optim.Optimizer, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The block "optimizer" without its rate and decay. NotImplementedError for a rule that the engine has not."""
    kind = _taken_over(optimizer)
    if isinstance(optimizer, EngineOptimizer):
        block: dict[str, Any] = {"type": optimizer.kind, "params": dict(numbers)}
        if hasattr(optimizer, "adam_w_mode"):
            block["params"]["adam_w_mode"] = optimizer.adam_w_mode
        return block
    params = dict(numbers)
    for flag in ("amsgrad", "maximize", "differentiable"):
        if params.pop(flag, False):
            raise NotImplementedError(f"cannot take over {type(optimizer).__name__}: {flag} is not built")
    if kind == "Adam":
        params["adam_w_mode"] = bool(params.pop("decoupled_weight_decay", False))
    return {"type": kind, "params": params}


def _taken_over(optimizer: torch.optim.Optimizer) -> str:
    """The rule's name. NotImplementedError where the engine would run another rule, or leave out a part of step()."""
    if (before := _before_same(optimizer)) is not None:  # given to initialize() again
        held: Any = optimizer
        if held._has_states:
            raise NotBuiltError(
                f"cannot take over an optimizer of class {before.__name__}: it has been an engine's, which has its "
                "states, and they would be lost. Hint: a new optimizer; engine.load_checkpoint() continues a run."
            )
        return _KINDS.get(before, "")
    of = type(optimizer)
    name = of.__name__

    def refuse(why: str, hint: str) -> NoReturn:
        raise NotBuiltError(f"cannot take over an optimizer of class {name}: {why}. Hint: {hint}.")

    built = issubclass(of, EngineOptimizer) and of.__module__.startswith(EngineOptimizer.__module__)
    if of not in _KINDS and not built:
        base = next((kind for kind in (*_KINDS, EngineOptimizer) if isinstance(optimizer, kind)), None)
        why = "its rule is not built" if base is None else f"a subclass of {base.__name__} may have another rule"
        known = "Adam, AdamW, SGD or Adagrad of torch.optim, those of deepspeed.ops"
        refuse(why, f"{known}, or the block optimizer of the configuration")
    if isinstance(optimizer, DeepSpeedCPUAdam | DeepSpeedCPUAdagrad | DeepSpeedCPULion):
        if not optimizer.fp32_optimizer_states:
            refuse("fp32_optimizer_states=False is not built: the engine's states are fp32", "leave it out")
    expected = _RULES[of] if of in _KINDS else _rule_of(EngineOptimizer.step)
    if _rule_of(optimizer.step) is not expected:
        why = "its step() was replaced, and the engine would not call it"
        refuse(why, "a scheduler for rates, tensor.register_hook() for gradients")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        why = "it has hooks of step(), and the engine would not call them"
        refuse(why, "register them with the optimizer that initialize() returns")
    trained = sum(_has_history(state) for state in optimizer.state.values())
    if trained:
        why = f"it has states of {trained} parameters, which would be lost"
        refuse(why, "an optimizer that has not stepped or loaded; engine.load_checkpoint() continues a run")
    return _KINDS.get(of, "")


def _has_history(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's states are those of updates: Adagrad has its first ones from the beginning."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(value is not None for value in state.values())


def client_updates(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Updates:
    """[local] Of a program's optimizer. ConfigError where its groups do not fit the model or each other."""
    groups = optimizer.param_groups
    updates = _grouped(groups, model)
    updates.optimizer = optimizer
    # A group's other keys are a scheduler's (OneCycleLR's max_lr) or the program's.
    rule = [k for k in optimizer.defaults if k not in _OWN and k not in _UNUSED]
    numbers = [{k: group[k] for k in rule if k in group} for group in groups]
    for other in numbers[1:]:
        for key, value in numbers[0].items():
            if other.get(key) != value:
                raise ConfigError(
                    f"[deepspeed] cannot take over the optimizer: {key} is {value!r} in one group and "
                    f"{other.get(key)!r} in another. Hint: only lr and weight_decay may differ."
                )
    base = updates.base
    updates.block = _kind(optimizer, numbers[0])
    updates.block["params"].update(lr=float(base["lr"]), weight_decay=float(base.get("weight_decay", 0)))
    return updates


def config_updates(
    model_parameters: ModelParameters | None, model: torch.nn.Module, numbers: Mapping[str, Any]
) -> Updates:
    """[local] Of the configuration's optimizer with its `numbers`, over parameters or groups of the program."""
    given = list(model.parameters()) if model_parameters is None else list(model_parameters)
    if given and isinstance(given[0], dict):
        groups = [{**numbers, **group} for group in given]  # type: ignore[dict-item]
        for group in groups:
            group["params"] = list(group["params"])
            for key in numbers:
                if key not in _OWN and group[key] != numbers[key]:
                    raise ConfigError(
                        f"[deepspeed] model_parameters: {key} got {group[key]!r}, expected {numbers[key]!r}, as the "
                        "configuration says. Hint: only lr and weight_decay may differ."
                    )
    else:
        groups = [{"params": given, **numbers}]
    return _grouped(groups, model)


def _grouped(groups: list[dict[str, Any]], model: torch.nn.Module) -> Updates:
    """The largest group is the engine's group 0; the others' parameters become one group of the engine each."""
    model = compiled_from(model)
    names = {id(p): name for name, p in model.named_parameters()}
    sizes = [len(group["params"]) for group in groups]
    if not any(sizes):
        raise ConfigError("[deepspeed] the optimizer has no parameters. Hint: model_parameters=model.parameters().")
    base = sizes.index(max(sizes))
    members: list[list[int]] = []
    patterns: list[dict[str, Any]] = []
    listed: set[int] = set()
    for g, group in enumerate(groups):
        mine = [0] if g == base else []
        for p in group["params"]:
            if id(p) not in names:
                raise ConfigError(
                    f"[deepspeed] the optimizer has a parameter of shape {tuple(p.shape)} that the model has not. "
                    "Hint: make the optimizer of model.parameters()."
                )
            listed.add(id(p))
            if g != base:
                decay = float(group.get("weight_decay", 0))
                name = exact_pattern(names[id(p)])
                patterns.append({"pattern": name, "lr": float(group["lr"]), "weight_decay": decay})
                mine.append(len(patterns))
        members.append(mine)
    unlisted: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if id(p) not in listed}
    return Updates(groups, members, patterns, unlisted=unlisted)


__getattr__ = module_getattr("deepspeed.runtime.base_optimizer")
