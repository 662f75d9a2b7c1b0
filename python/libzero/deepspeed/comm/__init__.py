"""deepspeed.comm: torch.distributed's calls under DeepSpeed's names. The engine's own traffic does not go through here.

Every call is collective over the ranks of its group, as in torch.distributed, except the getters.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _dist
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_global_rank,
    get_process_group_ranks,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from libzero.communicator import Communicator
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.utils.comms_logging import CommsLogger, get_caller_func, timed_op as _timed_op
from libzero.errors import ConfigError

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=10)

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_caller_func",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "timed_op",
]

comms_logger = CommsLogger()

for _name in ("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
              "broadcast", "gather", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
              "send"):  # fmt: skip
    globals()[_name] = _timed_op(globals()[_name], comms_logger)

inference_all_reduce = all_reduce
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
get_all_ranks_from_group = get_process_group_ranks


def _expect_ready(call: str) -> None:
    if not is_initialized():
        raise RuntimeError(f"cannot call deepspeed.comm.{call}: no ranks yet. Hint: deepspeed.init_distributed().")


def get_rank(group: ProcessGroup | None = None) -> int:
    """[local] This process's number in `group` (None: in the run)."""
    _expect_ready("get_rank()")
    return _dist.get_rank(group)


def get_world_size(group: ProcessGroup | None = None) -> int:
    """[local] The ranks of `group` (None: of the run)."""
    _expect_ready("get_world_size()")
    return _dist.get_world_size(group)


def get_local_rank() -> int:
    """[local] This process's number on its host: the launcher's LOCAL_RANK."""
    _expect_ready("get_local_rank()")
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> ProcessGroup | None:
    """[local] The group of all ranks."""
    _expect_ready("get_world_group()")
    return _dist.group.WORLD


def has_all_gather_into_tensor() -> bool:
    """[local] True."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """[local] True."""
    return True


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """[collective] Starts torch.distributed over the launcher's ranks, or a world of one without a launcher.

    Nothing to do where it is started. dist_backend: "nccl" with GPUs, else "gloo" if not given. auto_mpi_discovery,
    verbose and config have no effect: docs/cli.md lists the launchers whose variables are read. If all ranks are on one
    host, its store and gloo listen on 127.0.0.1 (but for torchrun's store). RuntimeError where dist_init_required is
    False and torch.distributed is not started.
    """
    if is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError("cannot use torch.distributed: dist_init_required is False and nobody has started it")
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if init_method is None and rank < 0 and not Communicator.launched():
        store = _dist.HashStore()  # type: ignore[attr-defined]
        _dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if init_method in (None, "env://") and rank < 0 and world_size < 0 and _on_one_host():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # also of later groups
        store = _store_on_loopback(rank, world_size, timeout)
        _dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        return
    _dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)


def _on_one_host() -> bool:
    # torchrun's agent has a store of its own.
    environ = os.environ
    return (
        environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1")
        and environ.get("RANK", "").isdigit()
        and environ.get("WORLD_SIZE", "").isdigit()
        and environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )


def _store_on_loopback(rank: int, world_size: int, timeout: timedelta) -> Any:
    # c10d's own rendezvous listens on all interfaces, without a secret.
    port, fd = int(os.environ["MASTER_PORT"]), None
    if rank == 0:
        fd = socket.create_server(("127.0.0.1", port), backlog=world_size).detach()
    store = _dist.TCPStore  # type: ignore[attr-defined]
    return store("127.0.0.1", port, world_size, rank == 0, timeout, master_listen_fd=fd)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """[collective] torch's DeviceMesh of the ranks, in row-major order: get_group(name) is a process group of torch."""
    _expect_ready("initialize_mesh_device()")
    if math.prod(mesh_shape) != get_world_size():
        raise ConfigError(
            f"[deepspeed.comm] initialize_mesh_device: got the shape {tuple(mesh_shape)}, expected one of "
            f"{get_world_size()} ranks"
        )
    device = get_accelerator().device_name()
    mesh = init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))
    _device_meshes.add(mesh)
    return mesh


_device_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


@atexit.register
def _let_go_of_groups() -> None:
    # Before torch.distributed ends: a mesh that outlives it would keep the threads of its groups.
    for mesh in list(_device_meshes):
        getattr(mesh, "_pg_registry", {}).clear()


def timed_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """[local] A function of the program, recorded as these are."""
    return _timed_op(func, comms_logger)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """[local] Whether the calls of this module are recorded, and which: as a DeepSpeedConfig says, or these words."""
    if deepspeed_config is not None:
        comms_logger.configure(deepspeed_config.comms_config)
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    for name, value in given.items():
        if value is not None:
            setattr(comms_logger, name, value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """[collective] Rank 0 prints what was recorded; the engine's traffic is not in it."""
    _expect_ready("log_summary()")
    _dist.barrier()
    return comms_logger.log_all(get_rank() == 0, show_straggler, return_dict)


def has_comm_data() -> bool:
    """[local] Whether a call is recorded."""
    return comms_logger.has_data()


def reset_log() -> None:
    """[local] Forgets the records."""
    comms_logger.reset_data()


def get_comm_operation_count() -> int:
    """[local] How many calls are recorded."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """[local] Of which operations."""
    return comms_logger.get_operation_names()


from libzero.deepspeed.comm import comm  # noqa: E402  # its names are these

__getattr__ = module_getattr("deepspeed.comm")
