"""deepspeed.utils.timer: clocks of programs. engine.times() of libzero says where the engine's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.utils.logging import log_dist, logger

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"]


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """[local] The mean without this part of the smallest and of the largest numbers; 0 of none."""
    if not 0 <= trim_percent <= 1:
        raise AssertionError(f"trim_percent: got {trim_percent}, expected 0 to 1")
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0


class SynchronizedWallClockTimer:
    """Timers by name: timers("fwd").start(). Each waits for the device's work when it starts and stops."""

    class Timer:
        """One of them. AssertionError for a start while it runs, and for a stop while it does not."""

        def __init__(self, name: str) -> None:
            self.name_, self.started_ = name, False
            self._began, self._seconds = 0.0, list[float]()

        def start(self) -> None:
            """Begins an interval."""
            if self.started_:
                raise AssertionError(f"{self.name_}: the timer has already been started")
            get_accelerator().synchronize()
            self._began, self.started_ = time.perf_counter(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Ends it."""
            if not self.started_:
                raise AssertionError(f"{self.name_}: the timer is not started")
            get_accelerator().synchronize()
            self._seconds.append(time.perf_counter() - self._began)
            self.started_ = False

        def reset(self) -> None:
            """Forgets all intervals."""
            self.started_ = False
            self._seconds.clear()

        def elapsed(self, reset: bool = True) -> float:
            """The milliseconds of all intervals; one that runs is continued."""
            runs = self.started_
            if runs:
                self.stop()
            found = 1000 * sum(self._seconds)
            if reset:
                self.reset()
            if runs:
                self.start()
            return found

        def mean(self) -> float:
            """The milliseconds of an interval, without a tenth at each end."""
            return 1000 * trim_mean(self._seconds, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        """By name."""
        return self.timers

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """The device's memory as text."""
        device, gib = get_accelerator(), 1 << 30
        return (
            f" | mem_allocated: {device.memory_allocated() / gib:.4f} GB"
            f" | max_mem_allocated: {device.max_memory_allocated() / gib:.4f} GB"
        )

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Logs the milliseconds of some, divided by `normalizer`, on these ranks (None: rank 0)."""
        parts = [f"{name}: {self(name).elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers]
        log_dist(" | ".join(["time (ms)", *parts]), ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean of some, by name; as in DeepSpeed a thousandfold of mean()."""
        return {name: self(name).mean() * 1000 / normalizer for name in names if name in self.timers}


class NoopTimer:
    """The same names without a clock."""

    class Timer:
        """One of them."""

        def start(self) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            """0"""
            return 0

        def mean(self) -> float:
            """0"""
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """None of them."""
        return {}

    def log(self, names: Sequence[str], **kwargs: Any) -> None:
        """Nothing."""

    def get_mean(self, names: Sequence[str], **kwargs: Any) -> None:
        """Nothing."""


class ThroughputTimer:
    """Samples per second of a program's steps, without the first `start_step` ones.

    config: an object with `enabled` and `synchronized`. stop(global_step=True) ends a step of batch_size samples.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.config, self.batch_size = config, 1 if batch_size is None else batch_size
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.started, self._began = False, 0.0

    def update_epoch_count(self) -> None:
        """A new epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begins a micro-batch."""
        if self.config.enabled:
            self.started = True
            self._began = self._now() if self.global_step_count >= self.start_step else 0.0

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends it."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self._began:
            return
        seconds = self._now() - self._began
        self.total_elapsed_time += seconds
        self.step_elapsed_time += seconds
        if not global_step:
            return
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                f"CurrSamplesPerSec={self.batch_size / max(self.step_elapsed_time, 1e-6)}"
            )
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Of the steps that are counted; negative infinity before there is one."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")


__getattr__ = module_getattr("deepspeed.utils.timer")
