"""The engine's optimizer as a torch.optim.Optimizer: its numbers may be read, and its learning rates be set."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from libzero import _native
from libzero.errors import ConfigError

_FIXED = ("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "lr_decay")


class Optimizer(torch.optim.Optimizer):
    """What torch's schedulers drive: `param_groups[i]["lr"]` acts at the engine's next step.

    Group 0 has the parameters that no pattern of libzero.parameter_groups matches, group i + 1 those of the i-th. Other
    numbers of a group are shown, and cannot be changed. The states are the engine's: checkpoints hold them.
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
        self._scheduled = effective.get("scheduler.type", "") not in ("", "null", '""')
        super().__init__(groups, {"lr": engine.lr(0), **shown})
        self._fixed = [{key: group[key] for key in _FIXED} for group in self.param_groups]

    def _push(self) -> None:
        """The program's numbers to the engine."""
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

    def _pull(self) -> None:
        """The engine's numbers to the program: after its own schedule or a checkpoint moved them."""
        for i, group in enumerate(self.param_groups):
            group["lr"] = self._engine.lr(i)

    def step(self, closure: Callable[[], float] | None = None) -> _native.StepResult:  # type: ignore[override]
        """[collective] Engine.step(), as schedulers expect it."""
        if closure is not None:
            raise ConfigError("[Optimizer::step] got a closure, expected none: the engine runs backward().")
        self._push()
        result = self._engine.step()
        if self._scheduled:
            self._pull()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: step() does it."""

    def state_dict(self) -> dict[str, Any]:
        """Refused: the states are sharded."""
        raise ConfigError("[Optimizer::state_dict] the states are sharded. Hint: engine.save_checkpoint(dir, tag).")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: the states are sharded."""
        raise ConfigError("[Optimizer::load_state_dict] the states are sharded. Hint: engine.load_checkpoint(dir).")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: the engine's parameters are those of its model."""
        if hasattr(self, "_fixed"):
            raise ConfigError("[Optimizer::add_param_group] the engine's parameters are those of its model.")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ConfigError("[Optimizer] got a GradScaler, expected none. Hint: the fp16 block of the configuration.")

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("[Optimizer] cannot be copied or pickled. Hint: engine.save_checkpoint(dir, tag).")
