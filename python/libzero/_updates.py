"""How a program's optimizer becomes an engine's: its groups, and the configuration's block or its own rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch

from libzero._model import compiled_from, exact_pattern
from libzero.errors import ConfigError
from libzero.optimizers import ClientRule, probe, rule_of

Own: TypeAlias = Callable[[torch.optim.Optimizer], dict[str, Any] | None]

MAY_DIFFER = ("params", "lr", "initial_lr", "weight_decay", "name", "moe")
"""What may differ from group to group."""
_UNUSED = ("foreach", "capturable", "fused", "set_grad_none")
"""How a rule is computed, not what."""


_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "Adam",
    torch.optim.SGD: "SGD",
    torch.optim.Adagrad: "Adagrad",
}
_RULES = {kind: rule_of(kind.step) for kind in _KINDS}


def before_engine(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """The class of a program's optimizer that has become one of the engine; None: it has not."""
    return vars(type(optimizer)).get("_was")


class CannotTakeOver(ConfigError):
    """An engine would not do what the program's optimizer does."""

    def __init__(self, optimizer: torch.optim.Optimizer, why: str, hint: str) -> None:
        of = before_engine(optimizer) or type(optimizer)
        super().__init__(f"cannot take over an optimizer of class {of.__name__}: {why}. Hint: {hint}.")


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
    rule: ClientRule | None = None
    """Of a program's optimizer whose rule is not built in; it has no block."""
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


def _built_in(optimizer: torch.optim.Optimizer, own: Own | None) -> dict[str, Any] | None:
    """The block "optimizer" without its rate and decay; None: the engine has no such rule and runs the optimizer's."""
    of = before_engine(optimizer) or type(optimizer)
    groups = optimizer.param_groups
    # A group's other keys are a scheduler's (OneCycleLR's max_lr) or the program's.
    rule = [key for key in optimizer.defaults if key not in MAY_DIFFER and key not in _UNUSED]
    numbers = [{key: group[key] for key in rule if key in group} for group in groups]
    if any(other != numbers[0] for other in numbers[1:]):
        return None
    params = numbers[0]
    if own is not None and (block := own(optimizer)) is not None:
        return {**block, "params": {**params, **block["params"]}}
    if of not in _KINDS or rule_of(of.step) is not _RULES[of]:  # a subclass has a rule of its own
        return None
    if any([params.pop(flag, False) for flag in ("amsgrad", "maximize", "differentiable")]):
        return None
    if _KINDS[of] == "Adam":
        params["adam_w_mode"] = bool(params.pop("decoupled_weight_decay", False))
    return {"type": _KINDS[of], "params": params}


def _refuse_losses(optimizer: torch.optim.Optimizer, own: Own | None) -> None:
    """CannotTakeOver where an engine would lose states of the optimizer, or leave out a part of its step()."""
    of = before_engine(optimizer) or type(optimizer)

    def refuse(why: str, hint: str) -> NoReturn:
        raise CannotTakeOver(optimizer, why, hint)

    if of is not type(optimizer):  # given to initialize() again
        held: Any = optimizer
        if held._has_states:
            refuse(
                "it has been an engine's, which has its states, and they would be lost",
                "a new optimizer; engine.load_checkpoint() continues a run",
            )
        if _built_in(optimizer, own) is None:
            refuse("it has been an engine's", "a new optimizer")
        return
    if rule_of(optimizer.step) is not rule_of(of.step):
        why = "its step() was replaced, and the engine would not call it"
        refuse(why, "a subclass with this step(), a scheduler for rates, tensor.register_hook() for gradients")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        why = "it has hooks of step(), and the engine would not call them"
        refuse(why, "register them once the engine is made, with its optimizer")
    trained = sum(_has_history(state) for state in optimizer.state.values())
    if trained:
        why = f"it has states of {trained} parameters, which would be lost"
        refuse(why, "an optimizer that has not stepped or loaded; engine.load_checkpoint() continues a run")


def run_own_step(updates: Updates, model: torch.nn.Module, policy: str = "auto") -> None:
    """[local] The optimizer's own step() in place of the engine's rule. CannotTakeOver where it cannot be sharded.

    policy: the program's word for how, which the log repeats with what it changes.
    """
    optimizer = updates.optimizer
    assert optimizer is not None
    found = probe(optimizer, policy)
    if not found.groups:
        raise CannotTakeOver(optimizer, found.reason, found.hint)
    name, log = type(optimizer).__name__, logging.getLogger("libzero")
    if policy != "auto":
        what = f"; in a trial {found.reason}, and other stages and numbers of ranks differ" if found.reason else ""
        log.warning("%s: optimizer_policy is %s%s", name, policy, what)
    elif not found.exact:
        log.warning("%s: stages and numbers of ranks differ by rounding", name)
    number = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {name: number[id(p)] for name, p in compiled_from(model).named_parameters() if id(p) in number}
    whole = [g for g, policy in enumerate(found.groups) if policy == "whole"]
    updates.rule = ClientRule(optimizer, names, found.states_of_groups, whole, float(updates.base.get("lr") or 0))
    updates.block = None


def _has_history(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's states are those of updates: Adagrad has its first ones from the beginning."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(value is not None for value in state.values())


def client_updates(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, own: Own | None = None, policy: str = "auto"
) -> Updates:
    """[local] Of a program's optimizer. ConfigError where its groups do not fit the model, or it cannot be sharded.

    own: the block "optimizer" of a class that the engine has as a rule, besides those of torch; None for another one.
    """
    updates = grouped(optimizer.param_groups, model)
    updates.optimizer = optimizer
    _refuse_losses(optimizer, own)
    base = updates.base
    updates.block = _built_in(optimizer, own)
    if updates.block is None:
        run_own_step(updates, model, policy)
    elif policy != "auto":
        hint = "leave it out, or a subclass with a step() of its own"
        raise CannotTakeOver(optimizer, f"optimizer_policy is {policy}, but the engine's own rule updates it", hint)
    else:
        updates.block["params"].update(lr=float(base["lr"]), weight_decay=float(base.get("weight_decay", 0)))
    return updates


def grouped(groups: list[dict[str, Any]], model: torch.nn.Module) -> Updates:
    """The largest group is the engine's group 0; the others' parameters become one group of the engine each."""
    model = compiled_from(model)
    names = {id(p): name for name, p in model.named_parameters()}
    sizes = [len(group["params"]) for group in groups]
    if not any(sizes):
        raise ConfigError("[Engine] the optimizer has no parameters. Hint: model_parameters=model.parameters().")
    base = sizes.index(max(sizes))
    members: list[list[int]] = []
    patterns: list[dict[str, Any]] = []
    listed: set[int] = set()
    for g, group in enumerate(groups):
        mine = [0] if g == base else []
        for p in group["params"]:
            if id(p) not in names:
                raise ConfigError(
                    f"[Engine] the optimizer has a parameter of shape {tuple(p.shape)} that the model has not. "
                    "Hint: make the optimizer of model.parameters()."
                )
            listed.add(id(p))
            if g != base:
                pattern: dict[str, Any] = {"pattern": exact_pattern(names[id(p)]), "weight_decay": 0.0}
                pattern.update((key, float(group[key])) for key in ("lr", "weight_decay") if group.get(key) is not None)
                patterns.append(pattern)
                mine.append(len(patterns))
        members.append(mine)
    unlisted: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if id(p) not in listed}
    return Updates(groups, members, patterns, unlisted=unlisted)
