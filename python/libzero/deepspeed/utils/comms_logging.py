"""deepspeed.utils.comms_logging: what a program's own collectives of deepspeed.comm took.

The engine's traffic is not in it: engine.start_trace() of libzero records that.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.utils.logging import log_dist
from libzero.deepspeed.utils.timer import trim_mean

__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "timed_op"]


def get_caller_func(frame: int = 3) -> str:
    """[local] The name of the function that called, so many calls above."""
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: int) -> str:
    """[local] As text: "1.5 KB"."""
    if size_bytes == 0:
        return "0B"
    power = int(math.log(size_bytes, 1024))
    return f"{round(size_bytes / 1024**power, 2)} {('B', 'KB', 'MB', 'GB', 'TB', 'PB', 'EB', 'ZB', 'YB')[power]}"


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """[local] Gbit/s of a rank's `size` bytes in `duration` milliseconds, and those that pass each rank's link."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    share = (ranks - 1) / ranks
    whole, link = 1.0, 1.0
    if comm_op.startswith("all_to_all"):
        link = share
    elif comm_op.startswith(("all_gather", "reduce_scatter")):
        whole, link = ranks, ranks * share
    elif "all_reduce" in comm_op:
        whole, link = 2.0, 2 * share
    scale = size / duration * 8 / 1e6
    return whole * scale, link * scale


class CommsLogger:
    """The counts and times by operation and bytes: comms_dict[name][bytes] is [count, milliseconds, Gbit/s, of links].

    prof_all, or prof_ops with names: which are recorded while it is enabled.
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled, self.verbose, self.debug, self.prof_all = False, False, False, True
        self.prof_ops: list[str] = []

    def configure(self, comms_config: Any) -> None:
        """As the block comms_logger says."""
        self.enabled = comms_config.comms_logger_enabled
        if self.enabled:
            for name in ("verbose", "debug", "prof_ops", "prof_all"):
                setattr(self, name, getattr(comms_config.comms_logger, name))

    def start_profiling_comms(self) -> None:
        """Records all operations."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Only those of prof_ops."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Adds names to prof_ops."""
        self.prof_ops = list({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Removes them."""
        gone = set(op_name_list)
        self.prof_ops = [name for name in self.prof_ops if name not in gone]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """One call of the operation `raw_name`, recorded as `record_name`: milliseconds and bytes."""
        numbers = (latency, *calc_bw_log(raw_name, msg_size, latency))
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for column, number in zip(record[1:], numbers, strict=True):
            column.append(number)
        if self.verbose:
            log_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {numbers[1]:.2f} | busbw (Gbps): {numbers[2]:.2f}",
                [0],
            )

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """comms_dict"""
        return dict(self.comms_dict)

    def has_data(self) -> bool:
        """Whether one is recorded."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forgets all."""
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        """Those that are recorded."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """How many calls."""
        return sum(record[0] for records in self.comms_dict.values() for record in records.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """By bytes; None for an operation that is not recorded."""
        if operation_name not in self.comms_dict:
            return None
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, 0.1),
                "tput_avg_gbps": trim_mean(whole, 0.1),
                "busbw_avg_gbps": trim_mean(links, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, latencies, whole, links) in sorted(self.comms_dict[operation_name].items())
        }

    def _waits(self, name: str) -> dict[int, dict[str, Any]]:
        """[collective] By bytes, the least time of all ranks, and what this rank took above it."""
        found = {}
        for size, (count, latencies, _, _) in sorted(self.comms_dict[name].items()):
            mine = torch.tensor(latencies)
            least = mine.clone()
            if dist.is_initialized():
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
            found[size] = {
                "count": count,
                "total_comm_lat_ms": least.sum().item(),
                "total_straggler_ms": (mine - least).sum().item(),
                "avg_comm_lat_ms": trim_mean(least.tolist(), 0.1),
                "avg_straggler_ms": trim_mean((mine - least).tolist(), 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
        return found

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """[collective with show_straggler] Prints the records, and returns them as a dict if asked to."""
        names = self.get_operation_names()
        parts: dict[str, Any] = {"summary": {name: self.get_operation_summary(name) for name in names}}
        parts["straggler_analysis"] = {name: self._waits(name) for name in names} if show_straggler else None
        if print_log:
            for part in filter(None, parts.values()):
                for name, records in part.items():
                    print(name)
                    for record in records.values():
                        values = {key: value for key, value in record.items() if key != "msg_size_bytes"}
                        shown = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
                                 for key, value in values.items())  # fmt: skip
                        print("   ", ", ".join(shown))
        ranks = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        now = datetime.now().isoformat()
        parts["metadata"] = {"world_size": ranks[0], "rank": ranks[1], "timestamp": now}
        return parts if return_dict else None


_SENT = ("tensor", "input", "input_tensor", "input_list", "input_tensor_list", "scatter_list")


def timed_op(func: Callable[..., Any], log: CommsLogger) -> Callable[..., Any]:
    """[local] The same function of torch.distributed, recorded while `log` is enabled.

    prof, log_name and debug are DeepSpeed's arguments: whether this call is recorded, under which name.
    """
    signature = inspect.signature(func)

    @functools.wraps(func)
    def timed(*arguments: Any, prof: bool = False, log_name: str = "", debug: str = "", **named: Any) -> Any:
        name = log_name or func.__name__
        if not log.enabled or not (prof or log.prof_all or name in log.prof_ops):
            return func(*arguments, **named)
        bound = signature.bind(*arguments, **named).arguments
        sent: Any = next((bound[key] for key in _SENT if bound.get(key) is not None), [])
        tensors = sent if isinstance(sent, list | tuple) else [sent]
        size = sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))
        began = time.perf_counter()
        result = func(*arguments, **named)
        get_accelerator().synchronize()
        milliseconds = (time.perf_counter() - began) * 1000
        log.append(func.__name__, f"{name} | [Caller Func: {debug or get_caller_func(2)}]" if log.debug else name,
                   milliseconds, size)  # fmt: skip
        return result

    return timed


__getattr__ = module_getattr("deepspeed.utils.comms_logging")
