"""Metrics of rank 0 as CSV files and for TensorBoard, as the configuration's blocks say."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from libzero.deepspeed._refuse import module_getattr

__all__ = ["MonitorMaster"]

Event: TypeAlias = tuple[str, float, int]


class MonitorMaster:
    """Writes events (tag, value, samples) where csv_monitor or tensorboard is enabled. All calls are local.

    On other ranks than 0 nothing is opened. ImportError where tensorboard is enabled and not installed.
    """

    def __init__(self, config: Mapping[str, Any], rank: int) -> None:
        self._csv: Path | None = None
        self._board: Any = None
        blocks = {key: config.get(key, {}) for key in ("csv_monitor", "tensorboard")}
        self.enabled = any(block.get("enabled") is True for block in blocks.values())
        if rank != 0:
            return
        folders = {
            key: os.path.join(block.get("output_path", ""), block.get("job_name", "DeepSpeedJobName"))
            for key, block in blocks.items()
            if block.get("enabled") is True
        }
        if "csv_monitor" in folders:
            self._csv = Path(folders["csv_monitor"])
            self._csv.mkdir(parents=True, exist_ok=True)
        if "tensorboard" in folders:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folders["tensorboard"])
        self._begun: set[Path] = set()

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Appends them: one CSV file for each tag, with a heading once in a run."""
        for tag, value, samples in event_list:
            if self._csv is not None:
                file = self._csv / (tag.replace("/", "_").replace(" ", "_") + ".csv")
                with file.open("a", newline="") as stream:
                    rows = csv.writer(stream)
                    if file not in self._begun:
                        self._begun.add(file)
                        rows.writerow(["step", tag.rsplit("/", 1)[-1]])
                    rows.writerow([samples, value])
            if self._board is not None:
                self._board.add_scalar(tag, value, samples)
        if self._board is not None:
            self._board.flush()


__getattr__ = module_getattr("deepspeed.monitor.monitor")
