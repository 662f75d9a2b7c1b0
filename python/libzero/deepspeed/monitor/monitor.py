"""Metrics of rank 0 as CSV files and for TensorBoard, as the configuration's blocks say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from libzero import _native
from libzero._native import Options
from libzero.deepspeed._refuse import module_getattr

__all__ = ["MonitorMaster"]

Event: TypeAlias = tuple[str, float, int]


class MonitorMaster:
    """[local] Writes events (tag, value, samples) where csv_monitor or tensorboard is enabled; on rank 0 only.

    IoError if a file cannot be written.
    """

    def __init__(self, options: Options, rank: int) -> None:
        self._monitor = _native.Monitor(options, rank)
        effective = options.effective()
        self.enabled = any(effective[f"{block}.enabled"] == "true" for block in ("csv_monitor", "tensorboard"))
        """The configuration's; the same on every rank. Rank 0 writes."""

    def write_events(self, event_list: Iterable[Event]) -> None:
        """They are in the files when it returns."""
        by_samples: dict[int, list[tuple[str, float]]] = {}
        for tag, value, samples in event_list:
            by_samples.setdefault(samples, []).append((tag, float(value)))
        for samples, values in by_samples.items():
            self._monitor.write(values, samples)


__getattr__ = module_getattr("deepspeed.monitor.monitor")
