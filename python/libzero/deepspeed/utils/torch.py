"""deepspeed.utils.torch"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from libzero.deepspeed._refuse import module_getattr

__all__ = ["jit_script_compat", "register_grad_hook", "required_torch_version"]


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """[local] Whether torch's version is within these. AssertionError where both are left out."""
    if not min_version and not max_version:
        raise AssertionError("required_torch_version: got neither min_version nor max_version, expected one")
    mine = torch.torch_version.TorchVersion(torch.__version__)
    least, most = not min_version or mine >= str(min_version), not max_version or mine <= str(max_version)
    return bool(least and most)


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """[local] `hook(param)` follows each accumulation of its gradient."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """[local] torch.compile of it."""
    return torch.compile(fn)


__getattr__ = module_getattr("deepspeed.utils.torch")
