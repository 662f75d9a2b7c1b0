"""Groups of ranks. Every rank is data-parallel; there is one rank in any other direction."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from libzero.deepspeed import comm
from libzero.deepspeed._refuse import module_getattr

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
]


def get_data_parallel_group() -> ProcessGroup | None:
    """[local] All ranks."""
    return comm.get_world_group()


def get_data_parallel_rank() -> int:
    """[local] This rank."""
    return comm.get_rank()


def get_data_parallel_world_size() -> int:
    """[local] The number of ranks."""
    return comm.get_world_size()


def get_model_parallel_rank() -> int:
    """[local] 0."""
    return 0


def get_model_parallel_world_size() -> int:
    """[local] 1."""
    return 1


get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank

__getattr__ = module_getattr("deepspeed.utils.groups")
