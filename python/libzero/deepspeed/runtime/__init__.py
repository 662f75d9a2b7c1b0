"""deepspeed.runtime: the modules that programs import names from."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime import (
    base_optimizer,
    bf16_optimizer,
    config,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    pipe,
    sequence_parallel,
    tensor_parallel,
    torch_autocast,
    utils,
    zero,
)

__all__ = [
    "base_optimizer",
    "bf16_optimizer",
    "config",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "pipe",
    "sequence_parallel",
    "tensor_parallel",
    "torch_autocast",
    "utils",
    "zero",
]

__getattr__ = module_getattr("deepspeed.runtime")
