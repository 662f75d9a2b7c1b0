"""deepspeed.checkpoint.utils"""

from __future__ import annotations

import os
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """[local] DeepSpeed's name of a file; libzero's are in the checkpoint's manifest."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """[local] The same, of optimizer states."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """[local] The same, of a layer of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


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
