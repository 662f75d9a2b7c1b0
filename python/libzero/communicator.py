"""Which ranks an Engine belongs to when the program does not say, and ranks as threads."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
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
    """[collective] The ranks of this run, made once and shared while an Engine uses them.

    In `run_ranks` the rank's own. Else what the launcher's environment says; without a launcher the ranks of
    torch.distributed where it is initialised (over a gloo group of its own), else a world of one. ConfigError where the
    environment and torch.distributed disagree.
    """
    own: Communicator | None = getattr(_of_thread, "comm", None)
    if own is not None:
        return own
    global _of_process
    with _lock:
        comm = _of_process() if _of_process is not None else None
        if comm is None or comm.closed:
            comm = _make()
            _of_process = weakref.ref(comm)
            _open.add(comm)
        return comm


def _make() -> Communicator:
    initialised = dist.is_available() and dist.is_initialized()
    if initialised and not Communicator.launched():
        return Communicator.from_process_group(dist.new_group(backend="gloo"))
    comm = Communicator.from_env()
    if initialised and (comm.rank, comm.size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"[Engine] got rank {comm.rank}/{comm.size} from the environment, expected rank "
            f"{dist.get_rank()}/{dist.get_world_size()} as torch.distributed says. "
            "Hint: comm=Communicator.from_process_group(group)."
        )
    return comm


def run_ranks(size: int, body: Callable[[Communicator], T], *, timeout_s: float = 60.0) -> list[T]:
    """Runs body(comm) in `size` threads, each with a Communicator of its own; returns what they return, by rank.

    For tests, notebooks and simulation. An Engine made in one of them belongs to its ranks. Raises the first failure;
    the others' waits then raise CommError. Ctrl-C ends all of them. torch's default random generator is one for all
    threads: draw from a torch.Generator of the rank.
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


def _close_all() -> None:
    for comm in list(_open):
        comm.close()


atexit.register(_close_all)
