"""Groups of ranks: the dimensions of the engine's mesh."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from libzero.deepspeed import comm
from libzero.deepspeed._refuse import module_getattr
from libzero.errors import ConfigError
from libzero.mesh import Mesh

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
]


_mesh: Mesh | None = None


def use_mesh(mesh: Mesh) -> None:
    """[local] The mesh of the engine that was made last, which the functions below describe."""
    global _mesh
    _mesh = mesh


def get_data_parallel_group() -> ProcessGroup | None:
    """[local] All ranks. ConfigError with tensor or sequence parallelism, whose groups are not torch's."""
    if get_data_parallel_world_size() != comm.get_world_size():
        raise ConfigError(
            "[deepspeed.utils.groups] got a mesh with tensor or sequence parallelism, whose groups are not torch "
            "process groups. Hint: get_data_parallel_rank() and get_data_parallel_world_size() divide the data."
        )
    return comm.get_world_group()


def get_data_parallel_rank() -> int:
    """[local] This rank's coordinate among the data-parallel ranks."""
    return comm.get_rank() if _mesh is None else _mesh.rank("dp")


def get_data_parallel_world_size() -> int:
    """[local] The number of data-parallel ranks."""
    return comm.get_world_size() if _mesh is None else _mesh.size("dp")


def get_model_parallel_rank() -> int:
    """[local] This rank's coordinate among the tensor-parallel ranks."""
    return 0 if _mesh is None else _mesh.rank("tp")


def get_model_parallel_world_size() -> int:
    """[local] The number of tensor-parallel ranks."""
    return 1 if _mesh is None else _mesh.size("tp")


def _get_sequence_parallel_rank() -> int:
    return 0 if _mesh is None else _mesh.rank("sp")


def _get_sequence_parallel_world_size() -> int:
    return 1 if _mesh is None else _mesh.size("sp")


get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size

__getattr__ = module_getattr("deepspeed.utils.groups")
