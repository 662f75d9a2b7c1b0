"""The engine's optimizer as a torch.optim.Optimizer, and a program's optimizer in an engine."""

from __future__ import annotations

import functools
import json
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from libzero import _native
from libzero._carried import kept_in_groups
from libzero._updates import Updates, before_engine
from libzero._whole import HeldStates, load, names_of_states, state_dict_for_torch, wanted
from libzero.errors import ConfigError

if TYPE_CHECKING:
    from libzero.engine import Engine

_FIXED = ("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "lr_decay")
_NUMBERS = ("betas", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "alpha", "rho")
"""Of the built-in rules, which may change from step to step."""


def _set_numbers(
    engine: _native.Engine, members: Sequence[int], group: Mapping[str, Any], known: dict[str, Any], where: str
) -> None:
    """[local] Gives the engine what has changed in a group since `known`. members: the engine's groups.

    ConfigError for what no rule can change while it trains.
    """
    for key, value in known.items():
        if group[key] == value:
            continue
        if key not in _NUMBERS:
            raise ConfigError(
                f"{where}[{key!r}] got {group[key]!r}, expected {value!r}: it cannot change while training."
            )
        named = zip(("beta1", "beta2"), group[key], strict=True) if key == "betas" else [(key, group[key])]
        for name, number in list(named):
            for i in members:
                engine.set_number(i, name, float(number))
        known[key] = group[key]


def _moved(groups: Sequence[Mapping[str, Any]], start: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[local] The numbers of each group that are others than at the start."""
    return [{key: group[key] for key, value in fixed.items() if group[key] != value}
            for group, fixed in zip(groups, start, strict=True)]  # fmt: skip


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """[local] In place where the program has made it a tensor, which it may hold."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


_MOVED = "libzero.moved"


def _with_moved(kept: list[dict[str, Any]], moved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**values, _MOVED: more} if more else values for values, more in zip(kept, moved, strict=True)]


def _put_back(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """[local] Of _moved(), from a checkpoint."""
    for key, value in numbers.items():
        group[key] = tuple(value) if isinstance(value, list) else value


NUMBERS_OF_RULE = {
    "Adam": ("weight_decay", "betas", "eps"),
    "AdamW": ("weight_decay", "betas", "eps"),
    "Lion": ("weight_decay", "betas"),
    "SGD": ("weight_decay", "momentum", "dampening", "nesterov"),
    "Adagrad": ("weight_decay", "eps", "lr_decay"),
    "RMSprop": ("weight_decay", "eps", "momentum", "alpha", "centered"),
    "NAdam": ("weight_decay", "betas", "eps", "momentum_decay", "decoupled_weight_decay"),
    "RAdam": ("weight_decay", "betas", "eps", "decoupled_weight_decay"),
    "Adamax": ("weight_decay", "betas", "eps"),
    "Adadelta": ("weight_decay", "eps", "rho"),
    "Muon": ("weight_decay", "betas", "eps", "momentum", "nesterov"),
}
"""What the groups of a built-in rule have besides lr. Schedulers of torch look there for a momentum to move."""


class Optimizer(torch.optim.Optimizer):
    """Interface for torch's schedulers: `param_groups[i]["lr"]` takes effect at the engine's next step.

    Group 0 has the parameters that no pattern of libzero.parameter_groups matches, group i + 1 those of the i-th
    pattern. Other numbers take effect in the same way. Optimizer states belong to the engine and its checkpoints.
    """

    def __init__(self, engine: _native.Engine, module: torch.nn.Module) -> None:
        effective = engine.options().effective()
        kind = json.loads(effective.get("optimizer.type") or "null")
        own = NUMBERS_OF_RULE.get(kind, ())
        keys = dict.fromkeys((*_FIXED, *own))
        shown = {key: json.loads(effective[f"optimizer.params.{key}"]) for key in keys}
        shown["betas"] = tuple(shown["betas"])
        patterns: list[dict[str, Any]] = json.loads(effective["libzero.parameter_groups"])
        groups: list[dict[str, Any]] = [{"params": [], "pattern": "*", "lr": engine.lr(0), **shown}]
        for i, overrides in enumerate(patterns):
            decay = overrides.get("weight_decay")
            changed = {} if decay is None else {"weight_decay": decay}
            group = {"params": [], "pattern": overrides["pattern"], "lr": engine.lr(i + 1)}
            groups.append({**group, **shown, **changed})
        for name, parameter in module.named_parameters():
            groups[engine.parameter_group(name)]["params"].append(parameter)
        self._engine = engine
        self._module = module
        self._names = {name: parameter for name, parameter in module.named_parameters(remove_duplicate=False)}
        self._held = {id(parameter) for parameter in self._names.values()}
        self._look_up_modules()
        self._scheduled = effective.get("scheduler.type", "") not in ("", "null", '""')
        super().__init__(groups, {"lr": engine.lr(0), **shown})
        self.defaults = {key: self.defaults[key] for key in ("lr", *own)}
        self._owner: Callable[[], Engine | None] = lambda: None
        self._has_states = False
        self._flagged = list(module.parameters())
        self.forget_counts()
        self.trained = {name for name, p in module.named_parameters() if p.requires_grad}
        """Names of the parameters that have states: those that are trained or were."""
        self._fixed = [{key: group[key] for key in keys} for group in self.param_groups]
        self._start = [dict(fixed) for fixed in self._fixed]

    def belong_to(self, engine: Engine) -> None:
        """[local] Whose updates these are."""
        self._owner = owner = weakref.ref(engine)

        def names(parameter: torch.Tensor) -> Sequence[str]:
            found = owner()
            return () if found is None or found.closed else names_of_states(found, parameter)

        self.state = HeldStates(names, {})  # type: ignore[assignment]

    def _engine_of_it(self) -> Engine:
        engine = self._owner()
        if engine is None:
            raise ConfigError("[Optimizer] cannot use the optimizer: its engine is gone, or not complete yet")
        return engine

    def forget_counts(self, equal: bool = True) -> None:
        """[local] After a load. equal: all trained parameters have had as many updates."""
        self.counts_are_equal = equal
        self._flags = [p.requires_grad for p in self._flagged]

    def look_at_flags(self) -> None:
        """[local] Notes parameters that were frozen or unfrozen since the engine was made."""
        if (flags := [p.requires_grad for p in self._flagged]) != self._flags:
            self.counts_are_equal, self._flags = False, flags
            self.trained.update(name for name, p in self._module.named_parameters() if p.requires_grad)

    def require_equal_counts(self) -> None:
        """[local] ConfigError where parameters were frozen for some updates: the engine counts those of each."""
        self.look_at_flags()
        if not self.counts_are_equal:
            raise ConfigError(
                "[state_dict] parameters were frozen or unfrozen while the engine trained, and the numbers of their "
                "updates are in checkpoints alone. Hint: engine.save_checkpoint(dir, tag)."
            )

    def _push(self) -> None:
        """Passes the program's learning rates and other numbers to the engine."""
        for i, (group, fixed) in enumerate(zip(self.param_groups, self._fixed, strict=True)):
            _set_numbers(self._engine, [i], group, fixed, f"[Optimizer] param_groups[{i}]")
            rate = float(group["lr"])
            if rate != self._engine.lr(i):
                self._engine.set_lr(i, rate)

    def _look_up_modules(self) -> None:
        modules = list(self._module.modules())
        self._parameters_of = [(module._parameters, list(map(id, module._parameters.values()))) for module in modules]
        self._children_of = [(module._modules, tuple(module._modules.values())) for module in modules]

    def _look_at_parameters(self) -> None:
        """ConfigError for parameters that were tied since the engine was made.

        Tells the engine of those that were registered since then, which step() refuses.
        """
        # In every step, so without named_parameters(), which takes ten times as long.
        moved = any(tuple(children.values()) != before for children, before in self._children_of)
        if not moved and all(list(map(id, held.values())) == before for held, before in self._parameters_of):
            return
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if id(parameter) not in self._held:
                self._engine.refresh_parameters(self._module)
                return
            before = self._names.get(name, parameter)
            if before is not parameter:
                other = next(other for other, each in self._names.items() if each is parameter)
                raise ConfigError(
                    f"[Engine] parameter {name} is now {other}, but the Engine was made with a parameter of its own "
                    f"there, which would be saved under this name. Hint: tie weights before the Engine is made."
                )
        self._look_up_modules()

    def _prepare_save(self) -> None:
        """What the program has set since the last step: a scheduler of torch moves the rates after it."""
        self._push()
        self._look_at_parameters()

    def _pull(self) -> None:
        """Reads the engine's learning rates, after its own schedule or a checkpoint changed them."""
        for i, group in enumerate(self.param_groups):
            group["lr"] = self._engine.lr(i)

    def _pull_unless_set(self) -> None:
        """After a load that leaves the program's rates: they may not have reached the engine yet."""
        if self._scheduled:
            self._pull()
        else:
            self._push()

    def _kept(self) -> list[dict[str, Any]]:
        """What schedulers keep in the groups, as torch's state dict of an optimizer has it."""
        kept = kept_in_groups(self.param_groups, tuple(self._fixed[0]))
        return _with_moved(kept, _moved(self.param_groups, self._start))

    def _restore(self, kept: list[dict[str, Any]]) -> None:
        for group, values in zip(self.param_groups, kept, strict=False):
            _put_back(group, values.get(_MOVED, {}))
            group.update({key: value for key, value in values.items() if key != _MOVED})

    def step(self, closure: Callable[[], float] | None = None) -> _native.StepResult:  # type: ignore[override]
        """[collective] The same as Engine.step(); torch's schedulers require this method."""
        if closure is not None:
            raise ConfigError("[Optimizer::step] got a closure, expected none: the engine runs backward().")
        self._push()
        self._look_at_parameters()
        self.look_at_flags()
        result = self._engine.step()
        if self._scheduled:
            self._pull()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: step() clears the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Refused, since one rank alone may ask: the states are sharded. [collective] under
        torch.distributed.checkpoint.state_dict: whole states."""
        if (how := wanted()) is not None:
            return state_dict_for_torch(self._engine_of_it(), self, how)
        raise ConfigError(
            "[Optimizer::state_dict] the states are sharded. Hint: engine.save_checkpoint(dir, tag), or on all ranks "
            "engine.full_optimizer_state_dict() or get_optimizer_state_dict() of torch.distributed.checkpoint."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """[collective] Whole states in torch's form, those of rank 0. Between steps."""
        load(self._engine_of_it(), self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the engine's parameters are those of its model."""
        if hasattr(self, "_fixed"):
            raise ConfigError("[Optimizer::add_param_group] the engine's parameters are those of its model.")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ConfigError(
            "[Optimizer] got a GradScaler, expected none. Hint: the fp16 block of the configuration, or "
            "libzero.loss_scaling for autocast."
        )

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("[Optimizer] cannot be copied or pickled. Hint: engine.save_checkpoint(dir, tag).")


_RULE = ("betas", "eps", "momentum", "dampening", "nesterov", "weight_decay", "lr_decay", "bias_correction", "amsgrad")
"""What a rule of the engine has; a group's other keys are a scheduler's or the program's."""
_ELSEWHERE = "the states are in the engine's checkpoints: engine.save_checkpoint(dir, tag), engine.load_checkpoint(dir)"
_NO_STATES = "cannot load the states of an optimizer of torch: there are none in it. Hint: engine.load_checkpoint(dir)."


class ProgramOptimizer(torch.optim.Optimizer):
    """A program's optimizer in an engine: what Engine(optimizer=) makes of the program's object, which stays the same
    object, of its own class too. step() is the engine's.

    Its groups drive the engine, so that a scheduler of torch over either object does. Numbers may change from step to
    step, flags such as `nesterov` not. The states are the engine's.
    """

    optimizer: torch.optim.Optimizer
    """The program's optimizer. It has no states."""
    _where = "Engine"
    """The beginning of messages."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self._begin(optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        groups = self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults  # where schedulers look for the rule's numbers
        self.optimizer = optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it: the engine calls step()
        self._numbers = [{key: group[key] for key in _RULE if key in group} for group in groups]
        self._start = [dict(numbers) for numbers in self._numbers]
        self._engine: Engine | None = None
        self._members: list[list[int]] = []
        self._listed: list[list[int]] = []
        self._scheduled = False
        self._has_states = self._zeroing = False

    def bind(self, engine: Engine, updates: Updates, scheduled: bool) -> None:
        """[local] engine: whose updates these are. scheduled: it moves rates."""
        self._engine, self._members, self._scheduled = engine, updates.members, scheduled
        self.state = HeldStates(lambda p: names_of_states(engine, p), self.state)  # type: ignore[assignment]
        self._listed = self._parameters()
        if updates.rule is not None:  # the program's optimizer reads all of its numbers at each step
            self._numbers = [{} for _ in self.param_groups]
            self._start = [{} for _ in self.param_groups]

    @property
    def engine(self) -> Engine:
        """[local] The engine. ConfigError before there is one."""
        if self._engine is None:
            raise ConfigError(f"[{self._where}] cannot use the optimizer: its engine is not complete yet")
        return self._engine

    def step(self, closure: Callable[[], float] | None = None) -> _native.StepResult:  # type: ignore[override]
        """[collective] The same as Engine.step()."""
        if closure is not None:
            raise ConfigError(
                f"[{self._where}] optimizer.step: got a closure, expected none: the engine runs backward()"
            )
        engine = self.engine
        self.push()
        result = engine._groups.step()
        self._has_states = True
        self.pull()
        return result

    def _parameters(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _look_at_groups(self) -> None:
        if len(self.param_groups) != len(self._members):
            raise ConfigError(
                f"[{self._where}] optimizer.add_param_group: got {len(self.param_groups)} groups, expected the "
                f"{len(self._members)} that the engine was made with. Hint: add the group before; "
                "its parameters are not trained while they are frozen with requires_grad_(False)."
            )
        if self._parameters() != self._listed:
            pairs = zip(self._parameters(), self._listed, strict=True)
            changed = [g for g, (now, then) in enumerate(pairs) if now != then]
            raise ConfigError(
                f"[{self._where}] param_groups{changed}: got other parameters than the engine was made with, expected "
                "the same in the same order. Hint: a group for each set of parameters that is treated in one way, "
                "whose numbers may change."
            )

    def push(self) -> None:
        """[local] The program's rates to the engine: before a step, and before a save."""
        inner = self.engine._groups.param_groups
        self._look_at_groups()
        for group, fixed, members in zip(self.param_groups, self._numbers, self._members, strict=True):
            _set_numbers(self.engine._native, members, group, fixed, f"[{self._where}] param_groups")
            if self._scheduled:
                if members and "lr" in group and group["lr"] != inner[members[0]]["lr"]:
                    raise ConfigError(
                        f"[{self._where}] param_groups: lr got {group['lr']!r}, expected {inner[members[0]]['lr']!r}: "
                        "the engine's schedule moves the rates. Hint: leave the block scheduler out, or the program's "
                        "changes."
                    )
                continue
            for i in members if "lr" in group else ():
                inner[i]["lr"] = float(group["lr"])

    def pull(self) -> None:
        """[local] The engine's rates to the groups: after a step of its own schedule, or a checkpoint."""
        if not self._scheduled:
            return
        for group, members in zip(self.param_groups, self._members, strict=True):
            if members and "lr" in group:
                _set_rate(group, self.engine._groups.param_groups[members[0]]["lr"])

    def kept(self) -> list[dict[str, Any]]:
        """[local] What schedulers keep in the groups, such as initial_lr."""
        kept = kept_in_groups(self.param_groups, ("weight_decay", "name", "moe"))
        return _with_moved(kept, _moved(self.param_groups, self._start))

    def restore(self, kept: Iterable[Mapping[str, Any]]) -> None:
        """[local] The same from a checkpoint; numbers of the rule stay unless the program had moved them."""
        self._has_states = True
        for group, fixed, values in zip(self.param_groups, self._numbers, kept, strict=False):
            _put_back(group, values.get(_MOVED, {}))
            group.update({key: value for key, value in values.items() if key not in fixed and key != _MOVED})

    # What the engine calls before a save and after a load.
    def _prepare_save(self) -> None:
        self.push()
        self.engine._groups._prepare_save()

    def _look_at_parameters(self) -> None:
        self.engine._groups._look_at_parameters()

    def _push(self) -> None:
        self.push()
        self.engine._groups._push()

    def _pull(self) -> None:
        inner = self.engine._groups
        inner._pull()
        for group, members in zip(self.param_groups, self._members, strict=True):
            if members and "lr" in group:
                _set_rate(group, inner.param_groups[members[0]]["lr"])

    def _pull_unless_set(self) -> None:
        if self._scheduled:
            self._pull()
        else:
            self._push()

    _kept = kept
    _restore = restore

    def zero_grad(self, set_to_none: bool = True) -> None:
        """[local] On all ranks: drops the gradients since the last step(), which clears them, too.

        Then the zero_grad() of the program's class, if it has one of its own, finds none.
        """
        self.engine._native.discard_gradients()
        own: Any = (before_engine(self.optimizer) or type(self.optimizer)).zero_grad
        if own is torch.optim.Optimizer.zero_grad or self._zeroing:  # its super().zero_grad() is this one
            return
        self._zeroing = True
        try:
            own(self.optimizer, **({} if set_to_none else {"set_to_none": False}))
        finally:
            self._zeroing = False

    def state_dict(self) -> dict[str, Any]:
        """[local] The groups, with numbers in place of parameters, and where the states are.

        Frameworks put it into files of their own, perhaps on one rank alone; load_state_dict() takes it back. The
        states are sharded, and in the engine's checkpoints. [collective] under torch.distributed.checkpoint.state_dict:
        whole states.
        """
        if (how := wanted()) is not None:
            return state_dict_for_torch(self.engine, self, how)
        groups, count = [], 0
        for group in self.param_groups:
            numbers = list(range(count, count + len(group["params"])))
            count += len(numbers)
            groups.append({key: value for key, value in group.items() if key != "params"} | {"params": numbers})
        return {"state": {}, "param_groups": groups, "libzero": _ELSEWHERE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """[local] What state_dict() gave, for the same groups: their rates.

        [collective] Between steps: whole states in torch's form, those of rank 0, with the numbers of the groups.
        NotImplementedError where they lack.
        """
        if state_dict.get("libzero") != _ELSEWHERE or state_dict.get("state"):
            held = (p for group in self.param_groups for p in group["params"])
            has_states = any(names_of_states(self.engine, p) for p in held)
            if has_states and not state_dict.get("state"):
                raise NotImplementedError(_NO_STATES)
            load(self.engine, self, state_dict)
            self._has_states = True
            return
        both = (state_dict["param_groups"], self.param_groups)
        sizes = [[len(group["params"]) for group in groups] for groups in both]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"[{self._where}] optimizer.load_state_dict: got groups of {sizes[0]} parameters, expected {sizes[1]}"
            )
        if not self._scheduled:
            for group, stored in zip(self.param_groups, state_dict["param_groups"], strict=True):
                _set_rate(group, float(stored["lr"]))

    @property
    def train(self) -> Callable[[], None]:
        """[collective] Where the program's class has it: a schedule-free optimizer moves the weights. Between steps."""
        return self._mode("train")

    @property
    def eval(self) -> Callable[[], None]:
        """The same."""
        return self._mode("eval")

    def _mode(self, name: str) -> Callable[[], None]:
        own = before_engine(self.optimizer) or type(self.optimizer)
        if not hasattr(own, name):  # frameworks ask
            raise AttributeError(f"{own.__name__} has no {name}()")

        def switch() -> None:
            rule = self.engine._rule
            if rule is None:
                raise ConfigError(
                    f"[{self._where}] cannot call {own.__name__}.{name}(): the engine's own rule updates the "
                    "parameters. Hint: a subclass with a step() of its own."
                )
            self.push()
            rule.switch(name, self.engine)

        return switch

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            f"[{self._where}] cannot copy or pickle the optimizer. Hint: engine.save_checkpoint(dir, tag)."
        )


P = TypeVar("P", bound=ProgramOptimizer)
_OF_A_CLASS = ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__init__", "__annotations__")


def same_object(optimizer: torch.optim.Optimizer, kind: type[P]) -> P:
    """[local] The program's object itself, of a class that is also `kind`: its step() is the engine's."""
    own = before_engine(optimizer) or type(optimizer)
    was_wrapped = optimizer.__dict__.pop("step", None)  # a scheduler of torch calls what it found
    names: dict[str, Any] = {"__module__": own.__module__, "_was": own}
    for base in reversed(kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]):
        names.update((name, value) for name, value in vars(base).items() if name not in _OF_A_CLASS)
    # Python gives an object another class only where that one's first base is its own, whose names then come first.
    made: Any = optimizer
    made.__class__ = types.new_class(own.__name__, (own, kind), exec_body=lambda space: space.update(names))
    made._begin(made)
    made._patch_step_function()
    if was_wrapped is not None:
        step: Any = functools.partial(type(made).step, made)
        step._wrapped_by_lr_sched = True
        made.step = step
    return made  # type: ignore[no-any-return]
