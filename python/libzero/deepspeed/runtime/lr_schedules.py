"""DeepSpeed's schedules, with its formulas.

Over an optimizer of torch step() moves its rates. A schedule that initialize(lr_scheduler=) was given is the engine's:
the engine computes the rates, and the object shows them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.logging import logger
from libzero.errors import ConfigError

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

__all__ = [
    *VALID_LR_SCHEDULES,
    "VALID_LR_SCHEDULES",
    "EngineSchedule",
    "get_lr_from_config",
    "get_torch_optimizer",
    "schedule_class",
    "update_lr",
]

PerGroup: TypeAlias = float | Sequence[float]

WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = _LOG, _LINEAR = "log", "linear"
_BETA2 = 0.99
"""The second beta that OneCycle sets together with the first, as in DeepSpeed."""


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """A rate that is a tensor stays the same tensor: compiled and captured updates read it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def update_lr(param_groups: list[dict[str, Any]], lrs: Sequence[float]) -> list[Any]:
    """[local] Sets the rates of groups; returns what they have then, the tensors themselves."""
    for group, rate in zip(param_groups, lrs, strict=True):
        _set_rate(group, rate)
    return [group["lr"] for group in param_groups]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """[local] It, or the optimizer that a wrapper holds. TypeError for another object."""
    for each in (optimizer, vars(optimizer).get("optimizer") if hasattr(optimizer, "__dict__") else None):
        if isinstance(each, torch.optim.Optimizer):
            return each
    raise TypeError(f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer")


class EngineSchedule:
    """One of the five schedules over `optimizer`, with the parameters of the configuration's block "scheduler".

    Lists have one number per parameter group. ConfigError (a ValueError) for what does not fit. The first rate is set
    at once, step() sets the next one. After initialize(lr_scheduler=) engine.step() moves the rates, and step() only
    counts. All calls are local.
    """

    by_name: ClassVar[dict[str, type[EngineSchedule]]] = {}
    names: ClassVar[tuple[str, ...]] = ()
    """The parameters."""
    lag: ClassVar[int] = 0
    """By how many updates the rates come later than those of the engine's schedule of the same numbers."""

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            EngineSchedule.by_name[cls.__name__] = cls
        every = tuple(inspect.signature(cls.__init__).parameters)
        cls.names = tuple(name for name in every[2:] if name != "verbose")

    def _begin(self, optimizer: Any, given: dict[str, Any], last_batch_iteration: int) -> None:
        """given: the parameters by name; those of None are as if not given."""
        self.optimizer = get_torch_optimizer(optimizer)
        kept = {name: value for name, value in given.items() if name in self.names and value is not None}
        defaults = inspect.signature(type(self).__init__).parameters
        self.params = {name: value for name, value in kept.items() if value != defaults[name].default}
        self.last_batch_iteration = last_batch_iteration
        self.owned = False
        """The engine moves the rates."""
        self._before = [{key: group[key] for key in ("lr", "betas") if key in group} for group in self._groups]
        for group in self._before:
            group["lr"] = float(group["lr"])

    def _start(self) -> None:
        """The first rate, where the schedule starts from the beginning."""
        if self.last_batch_iteration == -1:
            update_lr(self._groups, self._rates())
        self._last_lr = self._shown()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _shown(self) -> list[Any]:
        return [group["lr"] for group in self._groups]

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        if isinstance(value, Sequence):
            if len(value) != len(self._groups):
                raise ConfigError(
                    f"[{type(self).__name__}] {name}: got {len(value)} values, expected {len(self._groups)}, one for "
                    "each parameter group. Hint: one number is for all groups."
                )
            return [float(each) for each in value]
        return [float(value)] * len(self._groups)

    def _positive(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value != int(value):
            raise ConfigError(f"[{type(self).__name__}] {name}: got {value!r}, expected a positive integer")

    def _size(self, name: str, value: Any, least: str) -> float:
        """A number of updates that may be a fraction. least: "positive" or "not negative"."""
        known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not known or value < 0 or (value == 0 and least == "positive"):
            raise ConfigError(f"[{type(self).__name__}] {name}: got {value!r}, expected a number that is {least}")
        return float(value)

    def _rates(self) -> list[float]:
        raise NotImplementedError

    @property
    def config(self) -> dict[str, Any]:
        """The block "scheduler", which continues where this schedule is."""
        params = {name: value for name, value in self.params.items() if name != "last_batch_iteration"}
        place = self.last_batch_iteration - self.lag
        return {"type": type(self).__name__, "params": {**params, "last_batch_iteration": place}}

    def hand_over(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The engine moves the rates from now on, which begin from those that the optimizer had at first."""
        for group, before in zip(self._groups, self._before, strict=False):
            _set_rate(group, before["lr"])
            if "betas" in before:
                group["betas"] = before["betas"]
        self.owned = True
        self.optimizer = self.optimizer if optimizer is None else optimizer

    def get_lr(self) -> list[float]:
        """The rates of the next update, by parameter group."""
        return [float(rate) for rate in self._shown()] if self.owned else self._rates()

    def get_last_lr(self) -> list[Any]:
        """The same: those that the groups were given last."""
        return self.get_lr() if self.owned else self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """The next rate, or that of a place in the schedule, into the optimizer's groups.

        NotImplementedError for a place where the engine moves the rates.
        """
        if self.owned and last_batch_iteration is not None:
            raise NotImplementedError(
                f"cannot jump to update {last_batch_iteration}: {type(self).__name__} moves with engine.step(). "
                "Hint: engine.load_checkpoint() restores its place."
            )
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        if not self.owned:
            self._last_lr = update_lr(self._groups, self._rates())

    def state_dict(self) -> dict[str, Any]:
        """Its place, by DeepSpeed's name."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def placed(self, state_dict: dict[str, Any]) -> None:
        """[local] The engine has taken the place that a checkpoint has."""
        self.last_batch_iteration = state_dict.get("last_batch_iteration", self.last_batch_iteration)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the place; the next step() sets the rate. NotImplementedError for another place where the engine moves
        the rates: its checkpoints hold the place."""
        place = state_dict.get("last_batch_iteration", self.last_batch_iteration)
        if self.owned and place != self.last_batch_iteration:
            raise NotImplementedError(
                f"cannot jump to update {place}: {type(self).__name__} moves with engine.step(). "
                "Hint: engine.load_checkpoint() restores its place."
            )
        self.last_batch_iteration = place


class _Warmup(EngineSchedule):
    """What the warm-ups share."""

    lag = 1

    def _warm(self, steps: Any, kind: str) -> None:
        self._positive("warmup_num_steps", steps)
        if kind not in (_LOG, _LINEAR):
            logger.warning("%s: got warmup_type %r, expected log or linear; log is used", type(self).__name__, kind)
            kind = _LOG
            self.params.pop("warmup_type", None)
        self.warmup_num_steps = max(2, int(steps))
        self.warmup_type = kind
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    def _warmed(self) -> float:
        """The fraction of the warm-up that is done; 1 after it."""
        done = self.last_batch_iteration
        if done >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == _LOG:
            return self.inverse_log_warm_up * math.log(done + 1)
        return done / self.warmup_num_steps

    def _expect_total(self, total: float) -> None:
        """total: may be a fraction, as epochs times the length of a loader often is."""
        self._size("total_num_steps", total, "positive")
        self.total_num_steps = total
        if total < self.warmup_num_steps:
            logger.warning(
                "%s: total_num_steps %g is below warmup_num_steps %d", type(self).__name__, total, self.warmup_num_steps
            )


class WarmupLR(_Warmup):
    """From warmup_min_lr to warmup_max_lr, then constant. warmup_max_lr: each group's own rate if not given."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = _LOG,
        last_batch_iteration: int = -1,
        verbose: bool = False,
    ) -> None:
        self._begin(optimizer, locals(), last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [before["lr"] for before in self._before]
            self.params["warmup_max_lr"] = warmup_max_lr[0] if len(set(warmup_max_lr)) == 1 else warmup_max_lr
        self._warm(warmup_num_steps, warmup_type)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group("warmup_max_lr", warmup_max_lr)
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self._start()

    def _part(self) -> float:
        """Where between the two rates."""
        return self._warmed()

    def _rates(self) -> list[float]:
        part = 0.0 if self.last_batch_iteration < 0 else self._part()
        return [low + delta * part for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then down to warmup_min_lr at total_num_steps."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: float,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = _LOG,
        last_batch_iteration: int = -1,
        verbose: bool = False,
    ) -> None:
        self._size("total_num_steps", total_num_steps, "positive")  # before a rate is set
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        self._expect_total(total_num_steps)
        # The engine's own default is the optimizer's rate.
        self.params.update(total_num_steps=total_num_steps, warmup_max_lr=warmup_max_lr)

    def _part(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._warmed()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """From warmup_min_ratio of each group's rate to all of it, then along a cosine to cos_min_ratio."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: float,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = _LOG,
        last_batch_iteration: int = -1,
        verbose: bool = False,
    ) -> None:
        self._begin(optimizer, locals(), last_batch_iteration)
        self.params["total_num_steps"] = total_num_steps
        self._warm(warmup_num_steps, warmup_type)
        self._expect_total(total_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [before["lr"] for before in self._before]
        self._start()

    def get_lr_ratio(self) -> float:
        """Of the groups' own rates; 0 before the first step()."""
        done = self.last_batch_iteration
        if done < 0:
            return 0.0
        if done < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._warmed()
        decayed = (done - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, decayed))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def _rates(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class LRRangeTest(EngineSchedule):
    """Grows from lr_range_test_min_lr, at every step or in stairs of lr_range_test_step_size."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
        verbose: bool = False,
    ) -> None:
        self._begin(optimizer, locals(), last_batch_iteration)
        self._positive("lr_range_test_step_size", lr_range_test_step_size)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start()

    def _rates(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        grown = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * grown for rate in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:  # the word's name, as in DeepSpeed
        super().step(batch_iteration)


class OneCycle(EngineSchedule):
    """Up from cycle_min_lr to cycle_max_lr and down again, then decay; betas[0] moves the other way."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        verbose: bool = False,
    ) -> None:
        self._begin(optimizer, locals(), last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first_step_size = self._size("cycle_first_step_size", cycle_first_step_size, "positive")
        self.second_step_size = self._size("cycle_second_step_size", second, "not negative")
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        low, high = self._per_group("cycle_min_mom", cycle_min_mom), self._per_group("cycle_max_mom", cycle_max_mom)
        self.min_moms, self.max_moms = [(beta, _BETA2) for beta in low], [(beta, _BETA2) for beta in high]
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in self._groups)
        if cycle_momentum and not self.cycle_momentum:
            logger.warning("OneCycle: cycle_momentum has no effect: %s has no betas", type(self.optimizer).__name__)
        if self.last_batch_iteration == -1 and self.cycle_momentum:
            self._set_momentum(self.min_moms)  # as in DeepSpeed: the first update has the lowest one
        self._start()

    def _height(self) -> float:
        """Where in the cycle: 0 at its ends, 1 at the peak."""
        place = (self.last_batch_iteration + 1) % self.total_size
        rising = place <= self.first_step_size
        size = self.first_step_size if rising else self.second_step_size
        done = place if rising else self.total_size - place
        stairs = self.first_stair_count if rising else self.second_stair_count
        return done * stairs // size / stairs if stairs > 0 else done / size

    def _decayed(self) -> float:
        """The updates after the cycle, in intervals of decay_step_size; 0 without a decay."""
        after = self.last_batch_iteration - self.total_size + 1
        return after / self.decay_step_size if self.decay_step_size > 0 else 0.0

    def _rates(self) -> list[float]:
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in pairs]
        return [low / (1 + self.decay_lr_rate * self._decayed()) for low, _ in pairs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of the next update, by parameter group; None where they do not move."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            return [(high[0] - (high[0] - low[0]) * height, low[1]) for low, high in pairs]
        grown = 1 + self.decay_mom_rate * self._decayed()
        return [(high[0] * grown, high[1]) for high in self.max_moms]

    def _set_momentum(self, betas: list[tuple[float, float]]) -> None:
        for group, each in zip(self._groups, betas, strict=True):
            group["betas"] = each

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        betas = None if self.owned else self.get_mom()
        if betas is not None:
            self._set_momentum(betas)


def schedule_class(name: str) -> type[EngineSchedule]:
    """[local] The class of a schedule's name. ValueError for another name."""
    if name not in EngineSchedule.by_name:
        raise ValueError(f"scheduler.type: got {name!r}, expected one of {', '.join(VALID_LR_SCHEDULES)}")
    return EngineSchedule.by_name[name]


def get_lr_from_config(config: dict[str, Any]) -> tuple[PerGroup | None, str]:
    """[local] The highest rate that a block "scheduler" names, or None and why there is none."""
    if "type" not in config or "params" not in config:
        return None, f"the block scheduler has no {'params' if 'type' in config else 'type'}"
    names = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}
    names.update({WARMUP_LR: "warmup_max_lr", WARMUP_DECAY_LR: "warmup_max_lr"})
    if config["type"] not in names:
        known = config["type"] == WARMUP_COSINE_LR
        return None, f"{config['type']} " + ("begins from the optimizer's rates" if known else "is not a schedule")
    return config["params"][names[config["type"]]], ""


globals().update({name.upper(): name for made in EngineSchedule.by_name.values() for name in made.names})
# DeepSpeed's constants for the parameters: WARMUP_MAX_LR is "warmup_max_lr".

__getattr__ = module_getattr("deepspeed.runtime.lr_schedules")
