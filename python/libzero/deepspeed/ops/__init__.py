"""deepspeed.ops: optimizers that a program hands to initialize(); the engine does their updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from libzero.deepspeed._refuse import module_getattr

Params: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class EngineOptimizer(torch.optim.Optimizer):
    """Parameter groups and numbers of one rule, for initialize(optimizer=)."""

    kind: str
    """The rule's name in a configuration: "Adam"."""

    def refuse_unless(self, accepted: bool, argument: str, reason: str) -> None:
        """NotImplementedError that names an argument whose value the engine has no rule for."""
        if not accepted:
            raise NotImplementedError(f"cannot make {type(self).__name__}: {argument} is not built: {reason}")

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Refused: the engine updates."""
        raise NotImplementedError(
            f"cannot call {type(self).__name__}.step(): the engine updates the parameters. "
            "Hint: deepspeed.initialize(optimizer=optimizer), then engine.step()."
        )


from libzero.deepspeed.ops import adagrad, adam, lion  # noqa: E402

__all__ = ["EngineOptimizer", "Params", "adagrad", "adam", "lion"]

__getattr__ = module_getattr("deepspeed.ops")
