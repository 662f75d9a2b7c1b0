"""deepspeed.runtime: the modules that programs import names from."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime import (
    base_optimizer,
    config,
    dataloader,
    engine,
    lr_schedules,
    pipe,
    torch_autocast,
    utils,
    zero,
)

__all__ = [
    "base_optimizer",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "pipe",
    "torch_autocast",
    "utils",
    "zero",
]

__getattr__ = module_getattr("deepspeed.runtime")
