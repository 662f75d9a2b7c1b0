"""The default communicator of an Engine, and ranks as threads."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

import torch.distributed as dist

from libzero import _native
from libzero._native import Communicator
from libzero.errors import ConfigError

T = TypeVar("T")

__all__ = ["Communicator", "default_communicator", "run_ranks"]

_of_thread = threading.local()  # ranks as threads
_of_process: weakref.ref[Communicator] | None = None
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_lock = threading.Lock()


def default_communicator() -> Communicator:
    """[collective] The ranks of this run. Created once and shared while an Engine uses it.

    Inside `run_ranks`: the communicator of the thread. With a launcher: the ranks in its environment. Without one: the
    ranks of torch.distributed if it is initialised (over a new gloo group), else a world of one. ConfigError if the
    environment and torch.distributed disagree.
    """
    own: Communicator | None = getattr(_of_thread, "comm", None)
    if own is not None:
        return own
    global _of_process
    with _lock:
        comm = _of_process() if _of_process is not None else None
        if comm is None or comm.closed:
            comm = close_at_exit(_make())
            _of_process = weakref.ref(comm)
        return comm


def _make() -> Communicator:
    initialised = dist.is_available() and dist.is_initialized()
    if initialised and not Communicator.launched():
        return Communicator.from_process_group(dist.new_group(backend="gloo"))
    comm = Communicator.from_env()
    if initialised and (comm.rank, comm.size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"[Engine] got rank {comm.rank}/{comm.size} from the environment, expected rank "
            f"{dist.get_rank()}/{dist.get_world_size()} of torch.distributed. "
            "Hint: comm=Communicator.from_process_group(group)."
        )
    return comm


def run_ranks(size: int, body: Callable[[Communicator], T], *, timeout_s: float = 60.0) -> list[T]:
    """Runs body(comm) in `size` threads, each with its own Communicator; returns the results by rank.

    For tests, notebooks and simulation. An Engine created in such a thread uses the thread's communicator. Raises the
    first failure; waits of the other ranks then raise CommError. Ctrl-C ends all threads. torch's default random
    generator is shared by all threads: use a torch.Generator per rank.
    """
    results: dict[int, T] = {}

    def rank(comm: Communicator) -> None:
        _of_thread.comm = comm
        try:
            results[comm.rank] = body(comm)
        finally:
            del _of_thread.comm

    _native.run_ranks(size, rank, timeout_s)
    return [results[i] for i in range(size)]


def close_at_exit(comm: Communicator) -> Communicator:
    """[local] comm, which the end of the interpreter closes if nothing else has."""
    _open.add(comm)
    return comm


@atexit.register
def _close_all() -> None:
    for comm in list(_open):
        comm.close()
    _end_process_group()


def _end_process_group() -> None:
    # Also of a group that the program started: a thread of gloo that still holds a tensor while the interpreter ends
    # needs the GIL, and aborts the process (https://github.com/pytorch/pytorch/issues/190489).
    if not (dist.is_available() and dist.is_initialized()):
        return
    # Imported after the group was made, it holds the group in default arguments: its threads would not end.
    functional = sys.modules.get("torch.distributed.nn.functional")
    for value in vars(functional).values() if functional else ():
        if isinstance(value, FunctionType) and any(
            isinstance(one, dist.ProcessGroup) for one in value.__defaults__ or ()
        ):
            value.__defaults__ = None
    dist.destroy_process_group()
