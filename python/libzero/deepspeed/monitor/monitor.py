"""Metrics of rank 0 as CSV files, for TensorBoard, Weights & Biases and Comet, as the configuration's blocks say."""

from __future__ import annotations

import csv
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from libzero import _native
from libzero._native import Options
from libzero.config import as_options
from libzero.deepspeed._refuse import module_getattr

__all__ = [
    "CometMonitor",
    "EventsLogScheduler",
    "Monitor",
    "MonitorMaster",
    "TensorBoardMonitor",
    "WandbMonitor",
    "check_comet_availability",
    "check_tb_availability",
    "check_wandb_availability",
    "csvMonitor",
]

Event: TypeAlias = tuple[str, Any, int]

SERVICES = {"wandb": "wandb", "comet": "comet_ml"}
"""Blocks of services, and the package that each needs."""

_OLDEST_COMET = (3, 41, 0)


def services(config: Mapping[str, Any]) -> list[str]:
    """[local] The blocks of services that are enabled. ImportError where the package of one is not installed."""
    blocks = {name: config.get(name) for name in SERVICES}
    enabled = [name for name, block in blocks.items() if isinstance(block, Mapping) and block.get("enabled") is True]
    for name in enabled:
        _require(name)
    return enabled


def _require(name: str) -> None:
    package = SERVICES[name]
    found = importlib.util.find_spec(package)
    if found is None or found.loader is None or found.origin is None:  # a folder of runs may have the package's name
        hint = f"Hint: pip install {package.replace('_', '-')}, or {name}.enabled false."
        raise ImportError(f"[deepspeed] {name}.enabled: got true, and the package {package} is not installed. {hint}")


def check_wandb_availability() -> None:
    """[local] ImportError where the package wandb is not installed."""
    _require("wandb")


def check_comet_availability() -> None:
    """[local] ImportError where the package comet_ml is not installed, or is older than 3.41.0."""
    _require("comet")
    version = importlib.import_module("comet_ml").__version__
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST_COMET:
        raise ImportError(f"[deepspeed] comet: got comet_ml {version}, expected 3.41.0 or newer")


def check_tb_availability() -> None:
    """[local] Nothing is needed: the library writes the event files."""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Monitor(ABC):
    """Takes events (tag, value, samples)."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Event]) -> None:
        """They are written when it returns."""


class _Files(Monitor):
    """The library's writer of one block, with the names of the block's keys."""

    block: str

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled = monitor_config.enabled
        self.output_path, self.job_name = monitor_config.output_path, monitor_config.job_name
        keys = {"enabled": self.enabled, "output_path": self.output_path or "", "job_name": self.job_name}
        self._writer = _native.Monitor(as_options({"train_batch_size": 1, self.block: keys}), _rank())

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        """IoError if a file cannot be written."""
        if self.enabled:
            write(self._writer, event_list)

    def flush(self) -> None:
        """Nothing is left to write."""


def write(writer: _native.Monitor, events: Iterable[Event]) -> None:
    """[local] Those of the same count of samples together."""
    by_samples: dict[int, list[tuple[str, float]]] = {}
    for tag, value, samples in events:
        by_samples.setdefault(samples, []).append((tag, float(value)))
    for samples, values in by_samples.items():
        writer.write(values, samples)


class TensorBoardMonitor(_Files):
    """Event files in output_path/job_name."""

    block = "tensorboard"


class csvMonitor(Monitor):  # noqa: N801
    """One file for each tag in output_path/job_name, with _ for "/" and a space of the tag."""

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.enabled = csv_config.enabled
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.log_dir = Path(self.output_path or "", self.job_name)
        if self.enabled and _rank() == 0:
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """OSError if a file cannot be written."""
        if not self.enabled or _rank() != 0:
            return
        for tag, value, samples in event_list:
            name = tag.replace("/", "_").replace(" ", "_")
            with open(self.log_dir / f"{name}.csv", "a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", tag.rpartition("/")[2]])
                rows.writerow([samples, value.item() if hasattr(value, "item") else value])


class WandbMonitor(Monitor):
    """A run of Weights & Biases. ImportError without the package wandb."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        check_wandb_availability()
        self._wandb = importlib.import_module("wandb")
        self.enabled = wandb_config.enabled
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        if self.enabled and _rank() == 0:
            self._wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
        """wandb.log() on rank 0."""
        return self._wandb.log(data, step=step, commit=commit) if self.enabled and _rank() == 0 else None

    def write_events(self, event_list: Iterable[Event]) -> None:
        """See Monitor."""
        for tag, value, samples in event_list:
            self.log({tag: value}, step=samples)


class EventsLogScheduler:
    """Lets an event of a name through once in so many samples, the first one always."""

    def __init__(self, samples_log_interval: int) -> None:
        self._interval = samples_log_interval
        self._last: dict[str, int] = {}

    def needs_logging(self, name: str, current_sample: int) -> bool:
        """[local] And counts from there."""
        due = name not in self._last or current_sample - self._last[name] >= self._interval
        if due:
            self._last[name] = current_sample
        return due


class CometMonitor(Monitor):
    """An experiment of Comet; a tag is sent once in samples_log_interval samples. ImportError without comet_ml."""

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        check_comet_availability()
        comet = importlib.import_module("comet_ml")
        self.enabled, self.samples_log_interval = comet_config.enabled, comet_config.samples_log_interval
        self.experiment: Any = None
        self._due = EventsLogScheduler(self.samples_log_interval)
        if self.enabled and _rank() == 0:
            names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
            self.experiment = comet.start(**{name: getattr(comet_config, name) for name in names})
            if comet_config.experiment_name is not None:
                self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """See Monitor."""
        for tag, value, samples in event_list if self.experiment is not None else ():
            if self._due.needs_logging(tag, samples):
                self.experiment.__internal_api__log_metric__(name=tag, value=value, step=samples)


class MonitorMaster(Monitor):
    """[local] All that are enabled; they write on rank 0 only.

    monitor_config: DeepSpeedMonitorConfig; or the engine's options, with the blocks of services.
    """

    def __init__(self, monitor_config: Any, rank: int | None = None, blocks: Mapping[str, Any] | None = None) -> None:
        super().__init__(monitor_config)
        self._rank = _rank() if rank is None else rank
        self.tb_monitor: Monitor | None = None
        self.csv_monitor: Monitor | None = None
        self.wandb_monitor: Monitor | None = None
        self.comet_monitor: Monitor | None = None
        self._writer: _native.Monitor | None = None
        config: Any = monitor_config
        names = tuple(_KINDS)
        if isinstance(monitor_config, Options):
            self._writer = _native.Monitor(monitor_config, self._rank)
            effective = monitor_config.effective()
            names = tuple(services(blocks or {}))
            self.enabled = any(effective[f"{block}.enabled"] == "true" for block in ("csv_monitor", "tensorboard"))
            self.enabled = self.enabled or bool(names)
            """The configuration's; the same on every rank. Rank 0 writes."""
            if names:
                models = importlib.import_module("libzero.deepspeed.runtime._models")
                config = models.get_monitor_config({name: (blocks or {})[name] for name in names})
        else:
            self.enabled = monitor_config.enabled
        if self._rank == 0:
            for name in names:
                if getattr(config, name).enabled:
                    short, kind = _KINDS[name]
                    setattr(self, short, kind(getattr(config, name)))

    def write_events(self, event_list: Iterable[Event]) -> None:
        """They are in the files when it returns."""
        events = list(event_list)
        if self._writer is not None:
            write(self._writer, events)
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if monitor is not None:
                monitor.write_events(events)


_KINDS: dict[str, tuple[str, Any]] = {
    "tensorboard": ("tb_monitor", TensorBoardMonitor),
    "csv_monitor": ("csv_monitor", csvMonitor),
    "wandb": ("wandb_monitor", WandbMonitor),
    "comet": ("comet_monitor", CometMonitor),
}

__getattr__ = module_getattr("deepspeed.monitor.monitor")
