"""deepspeed.checkpoint.utils"""

from __future__ import annotations

from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """[local] `item` with the tensors in its lists, tuples and dicts replaced by copies on `device`.

    A tensor that is a view of a larger one would be saved with all of it.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(each, device) for key, each in item.items()})
    return item


__getattr__ = module_getattr("deepspeed.checkpoint.utils")
