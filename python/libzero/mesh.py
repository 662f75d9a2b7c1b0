"""The ranks of a run as a grid of data, sequence and tensor parallelism."""

from __future__ import annotations

from libzero import _native
from libzero.errors import ConfigError

__all__ = ["Mesh"]


class Mesh:
    """The mesh of an Engine, as `engine.mesh`; torch's DeviceMesh has the same words. All calls are [local].

    Rank (d * u + i) * t + j has the coordinates d of "dp", i of "sp" and j of "tp", with u = sequence_parallel_size and
    t = tensor_parallel.autotp_size; "dp_sp" is the flattened dimension over which ZeRO shards. Training data are
    divided by (mesh.rank("dp"), mesh.size("dp")). docs/parallelism.md describes it.
    """

    def __init__(self, native: _native.Engine) -> None:
        self._dims = {dim: (native.mesh_size(dim), native.mesh_rank(dim)) for dim in ("dp", "sp", "tp", "dp_sp")}
        self._text = native.mesh_text()

    def _dim(self, dim: str) -> tuple[int, int]:
        if dim not in self._dims:
            raise ConfigError(f'[Mesh] got the dimension "{dim}", expected dp, sp, tp or dp_sp')
        return self._dims[dim]

    def size(self, dim: str) -> int:
        """Number of ranks along a dimension: "dp", "sp", "tp" or "dp_sp". ConfigError for another name."""
        return self._dim(dim)[0]

    def rank(self, dim: str) -> int:
        """This rank's coordinate in a dimension."""
        return self._dim(dim)[1]

    def tokens(self, tokens: int) -> tuple[int, int]:
        """Begin and end of this sequence-parallel rank's stretch of `tokens` tokens."""
        size, rank = self._dims["sp"]
        return rank * tokens // size, (rank + 1) * tokens // size

    def __repr__(self) -> str:
        return f"<libzero.Mesh: {self._text}>"
