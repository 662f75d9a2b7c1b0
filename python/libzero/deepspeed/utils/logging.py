"""The logger "DeepSpeed", and messages of some ranks only."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

from libzero.deepspeed._refuse import module_getattr

logger = logging.getLogger("DeepSpeed")
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """[local] Logs `message` on `ranks` ([-1] or None: on all), with the rank in front."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks or rank == -1:
        logger.log(level, "[Rank %s] %s", rank, message)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """[local] As log_dist; each message once in a process."""
    _once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(level: str) -> None:
    """[local] "debug", "info", "warning", "error" or "critical". ValueError for another."""
    if level not in log_levels:
        raise ValueError(f"log level: got {level!r}, expected one of {', '.join(log_levels)}")
    logger.setLevel(log_levels[level])


__getattr__ = module_getattr("deepspeed.utils.logging")
