"""Groups of ranks: the dimensions of the engine's mesh.

With sequence-parallel ranks there are process groups of torch as well, for what a program itself exchanges: those of
its mpu, or of `mesh_device`. mesh_of() has the mesh of such a group, over which libzero exchanges. torch holds the
groups, and here they are held weakly: threads of one that is still held when the interpreter ends may abort it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from libzero.communicator import Communicator, close_at_exit
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
mpu: Any = None
"""What the program gave to the engine that was made last."""
mesh_device: DeviceMesh | None = None
"""The ranks of that engine as torch's mesh, where some of them are sequence-parallel."""
_meshes: weakref.WeakKeyDictionary[ProcessGroup, Mesh] = weakref.WeakKeyDictionary()
"""By a group of sequence-parallel ranks."""


class HeldGroup:
    """A process group of torch, until torch ends it."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def __call__(self) -> ProcessGroup:
        """[local] RuntimeError where torch has ended it."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed. Hint: make it again, and what was made of it.")
        return group

    def is_world(self) -> bool:
        """[local] Whether it is the group of all ranks of torch.distributed as it runs now."""
        return comm.is_initialized() and self._group() is comm.get_world_group()


_world_of_mesh: HeldGroup | None = None
"""torch's group of all ranks when mesh_device was made. A program may end torch.distributed, and start it again."""


def use_mesh(mesh: Mesh, expert_degrees: Iterable[int], program_mpu: Any = None) -> None:
    """[collective] with sequence-parallel ranks. The mesh of the last engine, which the functions below describe.

    An mpu with sequence-parallel ranks stays for later engines without one, as a reference model's. expert_degrees:
    each ep_size of the model's layers of experts.
    """
    global mpu, mesh_device
    _use_experts(mesh, expert_degrees)
    stays = hasattr(mpu, "get_sequence_parallel_group") and mesh_device is not None
    if stays and program_mpu is None and mesh.size("sp") == 1:
        return
    # Not the mesh itself, which would keep the communicator of an engine that has ended.
    _places.update({dim: (mesh.rank(dim), mesh.size(dim)) for dim in ("dp", "sp", "tp")})
    mpu, before, mesh_device = program_mpu, mesh_device, None
    if mesh.size("sp") > 1 and comm.is_initialized() and comm.get_world_size() == mesh.world.size:
        mesh_device = _device_mesh(mesh, before)
        _meshes[mesh_device.get_group("sequence_parallel")] = mesh
        _meshes[_get_sequence_parallel_group()] = mesh


def _use_experts(mesh: Mesh, expert_degrees: Iterable[int]) -> None:
    for places in _expert_places.values():
        places.clear()
    for ep_size in sorted(expert_degrees):
        for kind, group in mesh.experts(ep_size)._asdict().items():
            _expert_places[kind][f"ep_size_{ep_size}"] = (group.rank, group.size)


def _device_mesh(mesh: Mesh, before: DeviceMesh | None) -> DeviceMesh:
    """[collective] The same ranks and order as torch's mesh; `before` if it is one."""
    global _world_of_mesh
    sizes = {"data_parallel": mesh.size("dp"), "sequence_parallel": mesh.size("sp")}
    if mesh.size("tp") > 1:
        sizes["tensor_parallel"] = mesh.size("tp")
    shape, names = tuple(sizes.values()), tuple(sizes)
    same = before is not None and (before.shape, before.mesh_dim_names) == (shape, names)
    if before is not None and same and _world_of_mesh is not None and _world_of_mesh.is_world():
        return before
    world = comm.get_world_group()
    _world_of_mesh = None if world is None else HeldGroup(world)
    return comm.initialize_mesh_device(shape, names)


def mesh_of(group: ProcessGroup) -> Mesh:
    """[collective] at the first call for a group, else [local]. A mesh whose "sp" ranks are those of a torch group.

    ConfigError for a group that is not of gloo and is no group of an engine.
    """
    if group not in _meshes:
        ranks = comm.get_world_size(group)
        degrees = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": ranks}
        _meshes[group] = Mesh.of(degrees, close_at_exit(Communicator.from_process_group(group)))
    return _meshes[group]


def get_data_parallel_group() -> ProcessGroup | None:
    """[local] The data-parallel ranks. ConfigError with tensor parallelism alone, whose groups are not torch's."""
    if mesh_device is not None:
        return mesh_device.get_group("data_parallel")
    return _all_ranks(get_data_parallel_world_size())


def _all_ranks(count: int) -> ProcessGroup | None:
    if count != comm.get_world_size():
        raise ConfigError(
            "[deepspeed.utils.groups] got a mesh with tensor parallelism, whose groups are not torch process groups. "
            "Hint: get_data_parallel_rank() and get_data_parallel_world_size() divide the data."
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


def _get_sequence_parallel_group() -> ProcessGroup:
    """[local] The sequence-parallel ranks: the mpu's group, or mesh_device's. KeyError without such ranks."""
    if hasattr(mpu, "get_sequence_parallel_group"):
        group: ProcessGroup = mpu.get_sequence_parallel_group()
        return group
    if mesh_device is None:
        raise KeyError("no sequence-parallel ranks. Hint: sequence_parallel_size, mesh_param or an mpu with them.")
    return mesh_device.get_group("sequence_parallel")


def _get_sequence_data_parallel_group() -> ProcessGroup | None:
    """[local] The ranks over which ZeRO shards. ConfigError with tensor parallelism, whose groups are not torch's."""
    if hasattr(mpu, "get_sequence_data_parallel_group"):
        group: ProcessGroup = mpu.get_sequence_data_parallel_group()
        return group
    return _all_ranks(_get_sequence_data_parallel_world_size())


def _get_sequence_data_parallel_rank() -> int:
    return get_data_parallel_rank() * _get_sequence_parallel_world_size() + _get_sequence_parallel_rank()


def _get_sequence_data_parallel_world_size() -> int:
    return get_data_parallel_world_size() * _get_sequence_parallel_world_size()


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
