"""Groups of ranks: the dimensions of the engine's mesh."""

from __future__ import annotations

from collections.abc import Iterable

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
_expert_places: dict[str, dict[str, tuple[int, int]]] = {"expert": {}, "data": {}}
"""By the name of a group, "ep_size_N"."""


def use_mesh(mesh: Mesh, expert_degrees: Iterable[int]) -> None:
    """[local] The mesh of the engine that was made last, which the functions below describe.

    expert_degrees: each ep_size of its model's layers of experts.
    """
    # Not the mesh itself, which would keep the communicator of an engine that has ended.
    _places.update({dim: (mesh.rank(dim), mesh.size(dim)) for dim in ("dp", "sp", "tp")})
    for places in _expert_places.values():
        places.clear()
    for ep_size in sorted(expert_degrees):
        for kind, group in mesh.experts(ep_size)._asdict().items():
            _expert_places[kind][f"ep_size_{ep_size}"] = (group.rank, group.size)


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


def _expert_place(kind: str, group_name: str) -> tuple[int, int]:
    places = _expert_places[kind]
    if group_name not in places:
        raise ConfigError(
            f"[deepspeed.utils.groups] got the group {group_name}, expected one of {sorted(places)}. "
            "Hint: deepspeed.initialize() makes the group ep_size_N of a model with layers of that ep_size."
        )
    return places[group_name]


def _get_expert_parallel_rank(group_name: str) -> int:
    return _expert_place("expert", group_name)[0]


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _expert_place("expert", group_name)[1]


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _expert_place("data", group_name)[0]


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _expert_place("data", group_name)[1]


def _get_expert_model_parallel_world_size() -> int:
    return 1  # experts are not cut over tensor-parallel ranks


def _get_max_expert_size() -> int:
    """[local] The largest ep_size of the model's layers. ConfigError without layers of experts."""
    sizes = [size for _, size in _expert_places["expert"].values()]
    if not sizes:
        raise ConfigError(
            "[deepspeed.utils.groups] got no layers of experts, expected some. Hint: deepspeed.initialize() with them."
        )
    return max(sizes)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size

__getattr__ = module_getattr("deepspeed.utils.groups")
