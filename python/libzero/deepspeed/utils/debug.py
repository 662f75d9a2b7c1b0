"""Memory of this process, in the log."""

from __future__ import annotations

import torch.distributed as dist

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.utils.logging import logger

__all__ = ["see_memory_usage"]


def see_memory_usage(message: str, force: bool = False) -> None:
    """[local] Logs `message` with this process's memory on rank 0, if `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith(("VmRSS", "VmHWM")))
    resident, highest = (int(lines[key].split()[0]) / 2**20 for key in ("VmRSS", "VmHWM"))
    accelerator = get_accelerator()
    logger.info(
        "%s | process %.2f GB, highest %.2f GB | GPU %.2f GB, highest %.2f GB",
        message,
        resident,
        highest,
        accelerator.memory_allocated() / 2**30,
        accelerator.max_memory_allocated() / 2**30,
    )


__getattr__ = module_getattr("deepspeed.utils.debug")
