"""deepspeed.utils.nvtx"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator

__all__ = ["enable_nvtx", "instrument_w_nvtx"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

enable_nvtx = True


def instrument_w_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """[local] The function within a range of its name, for profilers of GPUs; not where torch.compile traces it."""

    @functools.wraps(func)
    def ranged(*arguments: _P.args, **named: _P.kwargs) -> _R:
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*arguments, **named)
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*arguments, **named)
        finally:
            get_accelerator().range_pop()

    return ranged


__getattr__ = module_getattr("deepspeed.utils.nvtx")
