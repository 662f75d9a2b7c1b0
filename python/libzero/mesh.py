"""The ranks of a run as a grid of data, sequence and tensor parallelism."""

from __future__ import annotations

import atexit
import weakref
from typing import NamedTuple

from libzero import _native
from libzero.communicator import Communicator, close_at_exit, default_communicator
from libzero.config import Config, as_options

__all__ = ["ExpertGroups", "Mesh"]

_open: weakref.WeakSet[Mesh] = weakref.WeakSet()


class ExpertGroups(NamedTuple):
    """Ranks along "dp_sp", for one ep_size."""

    expert: Communicator
    """Those that share the experts of a layer, by place."""
    data: Communicator
    """Those that have the same experts as this rank."""


class Mesh:
    """`engine.mesh`, or Mesh.of(config) before there is an Engine; torch's DeviceMesh has the same words.

    Rank (d * u + i) * t + j has the coordinates d of "dp", i of "sp" and j of "tp", with u = sequence_parallel_size and
    t = tensor_parallel.autotp_size; "dp_sp" is the flattened dimension over which ZeRO shards. Training data are
    divided by (mesh.rank("dp"), mesh.size("dp")). docs/parallelism.md describes it.

    dim is "dp", "sp", "tp" or "dp_sp"; ConfigError for another name.
    """

    def __init__(self, native: _native.Mesh) -> None:
        self._native = native
        _open.add(self)

    @staticmethod
    def of(config: Config, comm: Communicator | None = None) -> Mesh:
        """[collective] The mesh of a configuration, for Engine(model, config, mesh=mesh).

        comm: the ranks; default_communicator() if not given. ConfigError if the configuration's degrees do not divide
        the number of ranks, and for process groups that cannot be split (gloo can).
        """
        return Mesh(_native.Mesh.of(as_options(config), default_communicator() if comm is None else comm))

    def size(self, dim: str) -> int:
        """[local] Number of ranks along a dimension."""
        return self._native.size(dim)

    def rank(self, dim: str) -> int:
        """[local] This rank's coordinate in a dimension."""
        return self._native.rank(dim)

    def group(self, dim: str) -> Communicator:
        """[local] The ranks that differ from this one along a dimension only, in order of their coordinate in it.

        A Communicator of one rank if the dimension's size is 1.
        """
        return close_at_exit(self._native.group(dim))

    def experts(self, ep_size: int) -> ExpertGroups:
        """[collective] at the first call for a size, else [local]. The groups for experts that ep_size ranks share.

        ep_size consecutive ranks share the experts of a layer; with use_data_before_expert_parallelism, consecutive
        ranks have the same ones. ConfigError if ep_size does not divide size("dp_sp").
        """
        expert, data = self._native.experts(ep_size)
        return ExpertGroups(close_at_exit(expert), close_at_exit(data))

    @property
    def world(self) -> Communicator:
        """[local] All ranks."""
        return close_at_exit(self._native.world())

    def tokens(self, tokens: int) -> tuple[int, int]:
        """[local] Begin and end of this sequence-parallel rank's stretch of `tokens` tokens."""
        return self._native.tokens(tokens)

    def __repr__(self) -> str:
        return f"<libzero.Mesh: {self._native.text()}>"


@atexit.register
def _close_all() -> None:
    for mesh in list(_open):
        mesh._native.close()
