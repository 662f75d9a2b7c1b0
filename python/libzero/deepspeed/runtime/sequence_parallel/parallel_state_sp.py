"""Sequence-parallel ranks as process groups of torch. The module is the mpu that deepspeed.initialize(mpu=) takes.

Groups are of ranks that follow one another, as the engine's mesh has them. RuntimeErrors and ValueErrors of the number
of ranks, and AssertionErrors of a call out of order, are DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from libzero.deepspeed import comm
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.groups import HeldGroup

__all__ = [
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]


class _Groups:
    """This rank's groups, as long as torch.distributed runs."""

    def __init__(self, sequence: ProcessGroup, every: ProcessGroup) -> None:
        world = comm.get_world_group()
        assert world is not None
        self.sequence, self.every, self.world = HeldGroup(sequence), HeldGroup(every), HeldGroup(world)


_groups: _Groups | None = None


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """[collective] Makes the groups of the run, once.

    ValueError for a size below 2, RuntimeError for one that does not divide the ranks, AssertionError for a second call
    and before deepspeed.init_distributed().
    """
    global _groups
    if not comm.is_initialized():
        raise AssertionError("no ranks yet. Hint: deepspeed.init_distributed().")
    ranks = comm.get_world_size()
    if sequence_parallel_size <= 1:
        raise ValueError(f"sequence_parallel_size: got {sequence_parallel_size}, expected more than 1")
    if ranks % sequence_parallel_size != 0:
        raise RuntimeError(f"sequence_parallel_size: got {sequence_parallel_size}, expected a divisor of {ranks} ranks")
    if _initialized():
        raise AssertionError("sequence-parallel ranks: got a second call, expected one in a run")
    own: ProcessGroup | None = None
    for begin in range(0, ranks, sequence_parallel_size):
        members = list(range(begin, begin + sequence_parallel_size))
        group: Any = comm.new_group(members)  # no common type in the versions of torch
        if comm.get_rank() in members:
            own = group
    assert own is not None
    world: Any = comm.new_group(list(range(ranks)))
    _groups = _Groups(own, world)


def _initialized() -> bool:
    return _groups is not None and _groups.world.is_world()


def _made() -> _Groups:
    if _groups is None or not _groups.world.is_world():
        raise AssertionError("no sequence-parallel ranks yet. Hint: initialize_sequence_parallel().")
    return _groups


def get_sequence_parallel_group() -> ProcessGroup:
    """[local] The ranks that share the tokens of this rank's samples."""
    return _made().sequence()


def get_sequence_data_parallel_group() -> ProcessGroup:
    """[local] The ranks over which ZeRO shards: all."""
    return _made().every()


def get_sequence_parallel_world_size() -> int:
    """[local] Their number."""
    return comm.get_world_size(get_sequence_parallel_group())


def get_sequence_data_parallel_world_size() -> int:
    """[local] Their number."""
    return comm.get_world_size(get_sequence_data_parallel_group())


def get_sequence_parallel_rank() -> int:
    """[local] This rank's place among them."""
    return comm.get_rank(get_sequence_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """[local] This rank's place among them."""
    return comm.get_rank(get_sequence_data_parallel_group())


get_model_parallel_rank = get_sequence_parallel_rank
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_group = get_sequence_parallel_group

__getattr__ = module_getattr("deepspeed.runtime.sequence_parallel.parallel_state_sp")
