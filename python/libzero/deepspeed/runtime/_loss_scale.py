"""The loss scale of an engine, to read: `optimizer.loss_scaler` and `optimizer.loss_scale_config`.

The engine moves it. Each value is that of the moment when it is read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from libzero.engine import Engine

__all__ = ["DynamicLossScaler", "LossScaleConfig", "LossScaler", "LossScalerBase"]


class Scale:
    """The numbers of an engine's loss scale."""

    def __init__(self, engine: Engine) -> None:
        effective = engine.options.effective()
        self._engine = engine
        self._numbers = {key[5:]: json.loads(value) for key, value in effective.items() if key.startswith("fp16.")}
        self.scaled = bool(self._numbers["enabled"]) or effective["libzero.loss_scaling"] == "true"
        """fp16, or autocast to it."""
        self.overflowed_at = -1
        """The number of the last step that was skipped, from 0; -1: none since initialize()."""

    @property
    def dynamic(self) -> bool:
        """[local] It moves."""
        return self.scaled and not self._numbers["loss_scale"]

    def number(self, key: str) -> Any:
        """[local] A key of the block fp16."""
        return self._numbers[key]

    @property
    def now(self) -> float:
        """[local] Of the next backward(); 1 without fp16."""
        return self._engine.loss_scale

    @property
    def steps(self) -> int:
        """[local] Steps so far, skipped ones included."""
        return self._engine.global_step


class LossScalerBase:
    """What `optimizer.loss_scaler` has in every recipe."""

    dynamic = False

    def __init__(self, scale: Any = None, *unused: Any, **words: Any) -> None:
        if not isinstance(scale, Scale):
            raise NotImplementedError(
                f"cannot make {type(self).__name__}: the engine scales losses. Hint: the block fp16 of the "
                "configuration; engine.backward(loss) or engine.scale(loss)."
            )
        self._scale = scale

    @property
    def cur_scale(self) -> float:
        """[local] The loss scale of the next backward()."""
        return self._scale.now

    loss_scale = cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """[local] The loss times the scale."""
        return loss.float() * self.cur_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> NoReturn:
        """Refused: the engine has to know of it."""
        raise NotImplementedError("cannot call loss_scaler.backward(). Hint: engine.backward(loss).")

    def update_scale(self, overflow: bool) -> NoReturn:
        """Refused: the engine moves the scale."""
        raise NotImplementedError("cannot call loss_scaler.update_scale(): the engine's step() moves the scale.")


class LossScaler(LossScalerBase):
    """A fixed scale: fp16.loss_scale; 1 without fp16."""


class DynamicLossScaler(LossScalerBase):
    """A scale that moves."""

    dynamic = True
    scale_factor = 2.0
    dtype = torch.float16

    @property
    def cur_iter(self) -> int:
        """[local] Steps so far, skipped ones included."""
        return self._scale.steps

    @property
    def last_overflow_iter(self) -> int:
        """[local] The last step that was skipped, from 0; -1: none since initialize()."""
        return self._scale.overflowed_at

    @property
    def scale_window(self) -> int:
        """[local] Clean steps after which the scale doubles."""
        return int(self._scale.number("loss_scale_window"))

    @property
    def min_scale(self) -> float:
        """[local] The smallest scale."""
        return float(self._scale.number("min_loss_scale"))

    @property
    def delayed_shift(self) -> int:
        """[local] The hysteresis: overflows before the scale is halved."""
        return int(self._scale.number("hysteresis"))

    @property
    def consecutive_hysteresis(self) -> bool:
        """[local] A clean step restores the hysteresis."""
        return bool(self._scale.number("consecutive_hysteresis"))


class LossScaleConfig:
    """The same as `optimizer.loss_scale_config` has it: None where the scale does not move."""

    def __init__(self, scale: Any = None, *unused: Any, **words: Any) -> None:
        if not isinstance(scale, Scale):
            raise NotImplementedError(
                "cannot make LossScaleConfig: the engine scales losses. Hint: the block fp16 of the configuration."
            )
        self._scale = scale

    @property
    def use_grad_scaling(self) -> bool:
        """[local] fp16."""
        return self._scale.scaled

    @property
    def dynamic_loss_scale(self) -> bool:
        """[local] The scale moves."""
        return self._scale.dynamic

    @property
    def cur_scale(self) -> float:
        """[local] The loss scale of the next backward()."""
        return self._scale.now

    @property
    def cur_iter(self) -> int:
        """[local] Steps so far, skipped ones included."""
        return self._scale.steps

    @property
    def last_overflow_iter(self) -> int | None:
        """[local] The last step that was skipped, from 0; -1: none since initialize()."""
        return self._scale.overflowed_at if self.dynamic_loss_scale else None

    @property
    def scale_factor(self) -> float | None:
        """[local] By which the scale moves."""
        return DynamicLossScaler.scale_factor if self.dynamic_loss_scale else None

    @property
    def scale_window(self) -> int | None:
        """[local] Clean steps after which the scale doubles."""
        return int(self._scale.number("loss_scale_window")) if self.dynamic_loss_scale else None

    @property
    def min_loss_scale(self) -> float | None:
        """[local] The smallest scale."""
        return float(self._scale.number("min_loss_scale")) if self.dynamic_loss_scale else None
