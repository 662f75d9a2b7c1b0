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


_places: dict[str, tuple[int, int]] = {}


def use_mesh(mesh: Mesh) -> None:
    """[local] The mesh of the engine that was made last, which the functions below describe."""
    # Not the mesh itself, which would keep the communicator of an engine that has ended.
    _places.update({dim: (mesh.rank(dim), mesh.size(dim)) for dim in ("dp", "sp", "tp")})


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
    return _places["dp"][0] if _places else comm.get_rank()


def get_data_parallel_world_size() -> int:
    """[local] The number of data-parallel ranks."""
    return _places["dp"][1] if _places else comm.get_world_size()


def get_model_parallel_rank() -> int:
    """[local] This rank's coordinate among the tensor-parallel ranks."""
    return _places["tp"][0] if _places else 0


def get_model_parallel_world_size() -> int:
    """[local] The number of tensor-parallel ranks."""
    return _places["tp"][1] if _places else 1


def _get_sequence_parallel_rank() -> int:
    return _places["sp"][0] if _places else 0


def _get_sequence_parallel_world_size() -> int:
    return _places["sp"][1] if _places else 1


get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size

__getattr__ = module_getattr("deepspeed.utils.groups")
