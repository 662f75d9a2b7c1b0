"""DeepSpeed's schedules. The engine computes them: a schedule here is its description, and shows the rates."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from libzero.deepspeed._refuse import module_getattr

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

__all__ = [*VALID_LR_SCHEDULES, "VALID_LR_SCHEDULES", "EngineSchedule", "schedule_class"]


class EngineSchedule:
    """One of the five schedules over `optimizer`, with the parameters of the configuration's block "scheduler".

    Hand it to initialize(lr_scheduler=). engine.step() moves the rates; step() here does nothing. All calls are local.
    """

    by_name: ClassVar[dict[str, type[EngineSchedule]]] = {}
    names: ClassVar[tuple[str, ...]] = ()
    """Parameters that may be given by position."""

    def __init_subclass__(cls) -> None:
        EngineSchedule.by_name[cls.__name__] = cls

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any, **params: Any) -> None:
        if len(args) > len(self.names):
            raise TypeError(f"{type(self).__name__}: got {len(args)} numbers, expected at most {len(self.names)}")
        self.optimizer = optimizer
        self.params = {**dict(zip(self.names, args, strict=False)), **params}
        self.params.pop("verbose", None)

    @property
    def config(self) -> dict[str, Any]:
        """The block "scheduler"."""
        return {"type": type(self).__name__, "params": self.params}

    def get_lr(self) -> list[float]:
        """The rates of the next step, by parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The same: the engine moves them within step()."""
        return self.get_lr()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Nothing: engine.step() does it. NotImplementedError for a jump."""
        if last_batch_iteration is not None:
            raise NotImplementedError(
                f"cannot jump to update {last_batch_iteration}: {type(self).__name__} moves with engine.step(). "
                "Hint: engine.load_checkpoint() restores its place."
            )

    def state_dict(self) -> dict[str, Any]:
        """Empty: checkpoints of the engine hold its place."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: checkpoints of the engine hold its place."""


class WarmupLR(EngineSchedule):
    """From warmup_min_lr to warmup_max_lr, then constant."""

    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")


class WarmupDecayLR(EngineSchedule):
    """As WarmupLR, then down to 0 at total_num_steps."""

    names = ("total_num_steps", *WarmupLR.names)


class WarmupCosineLR(EngineSchedule):
    """From warmup_min_ratio of the optimizer's rate to all of it, then along a cosine to cos_min_ratio."""

    names = (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
        "last_batch_iteration",
    )


class LRRangeTest(EngineSchedule):
    """Grows from lr_range_test_min_lr."""

    names = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    )


class OneCycle(EngineSchedule):
    """Up from cycle_min_lr to cycle_max_lr and down again, then decay."""

    names = ("cycle_min_lr", "cycle_max_lr")


def schedule_class(name: str) -> type[EngineSchedule]:
    """[local] The class of a schedule's name. ValueError for another name."""
    if name not in EngineSchedule.by_name:
        raise ValueError(f"scheduler.type: got {name!r}, expected one of {', '.join(VALID_LR_SCHEDULES)}")
    return EngineSchedule.by_name[name]


__getattr__ = module_getattr("deepspeed.runtime.lr_schedules")
