"""deepspeed.git_version_info: what was built. The engine has no operators that are compiled when they are used."""

from __future__ import annotations

import torch

from libzero.deepspeed import _names
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.ops.op_builder import compatible

__all__ = ["accelerator_name", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

version = _names.VERSION
git_hash = git_branch = "unknown"
installed_ops = compatible()
accelerator_name = get_accelerator()._name
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": str(torch.version.cuda or "0.0"),
    "nccl_version": "0.0",
    "hip_version": str(torch.version.hip or "0.0"),
}

__getattr__ = module_getattr("deepspeed.git_version_info")
