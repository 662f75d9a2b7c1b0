"""The engine's optimizer as a torch.optim.Optimizer: hyperparameters can be read, learning rates can be set."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from libzero import _native
from libzero._carried import kept_in_groups
from libzero.errors import ConfigError

_FIXED = ("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "lr_decay")


class Optimizer(torch.optim.Optimizer):
    """Interface for torch's schedulers: `param_groups[i]["lr"]` takes effect at the engine's next step.

    Group 0 has the parameters that no pattern of libzero.parameter_groups matches, group i + 1 those of the i-th
    pattern. Other hyperparameters are read-only. Optimizer states belong to the engine and its checkpoints.
    """

    def __init__(self, engine: _native.Engine, module: torch.nn.Module) -> None:
        effective = engine.options().effective()
        shown = {key: json.loads(effective[f"optimizer.params.{key}"]) for key in _FIXED}
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
        self._fixed = [{key: group[key] for key in _FIXED} for group in self.param_groups]

    def _push(self) -> None:
        """Passes the program's learning rates to the engine."""
        for i, (group, fixed) in enumerate(zip(self.param_groups, self._fixed, strict=True)):
            for key, value in fixed.items():
                if group[key] != value:
                    raise ConfigError(
                        f"[Optimizer] param_groups[{i}][{key!r}] got {group[key]!r}, expected {value!r}: only lr may "
                        f"be changed. Hint: set optimizer.params.{key} in the configuration"
                        + (", cycle_momentum=False for this scheduler." if key in ("betas", "momentum") else ".")
                    )
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
        return kept_in_groups(self.param_groups, _FIXED)

    def _restore(self, kept: list[dict[str, Any]]) -> None:
        for group, values in zip(self.param_groups, kept, strict=False):
            group.update(values)

    def step(self, closure: Callable[[], float] | None = None) -> _native.StepResult:  # type: ignore[override]
        """[collective] The same as Engine.step(); torch's schedulers require this method."""
        if closure is not None:
            raise ConfigError("[Optimizer::step] got a closure, expected none: the engine runs backward().")
        self._push()
        self._look_at_parameters()
        result = self._engine.step()
        if self._scheduled:
            self._pull()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: step() clears the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Refused: the states are sharded."""
        raise ConfigError("[Optimizer::state_dict] the states are sharded. Hint: engine.save_checkpoint(dir, tag).")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: the states are sharded."""
        raise ConfigError("[Optimizer::load_state_dict] the states are sharded. Hint: engine.load_checkpoint(dir).")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the engine's parameters are those of its model."""
        if hasattr(self, "_fixed"):
            raise ConfigError("[Optimizer::add_param_group] the engine's parameters are those of its model.")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ConfigError("[Optimizer] got a GradScaler, expected none. Hint: the fp16 block of the configuration.")

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("[Optimizer] cannot be copied or pickled. Hint: engine.save_checkpoint(dir, tag).")
