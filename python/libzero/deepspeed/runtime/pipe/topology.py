"""Ranks as a grid with named axes: the last axis has the ranks that follow each other."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from libzero.deepspeed._refuse import module_getattr

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


class ProcessTopology:
    """The rank of each coordinate, in row-major order: ProcessTopology(["x", "y"], [2, 3]).get_rank(x=1, y=0) is 3."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # noqa: PYI024
        self.ProcessCoord = coordinate
        places = product(*(range(dim) for dim in dims))
        self.mapping = {coordinate(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a coordinate, with a number for each axis. ValueError for other axes, AssertionError outside."""
        if sorted(coord_kwargs) != sorted(self.axes):
            raise ValueError(f"get_rank: got {sorted(coord_kwargs)}, expected {self.axes}. Hint: filter_match().")
        coordinate = self.ProcessCoord(**coord_kwargs)
        if coordinate not in self.mapping:
            lengths = dict(zip(self.axes, self.dims, strict=True))
            raise AssertionError(f"get_rank: got {coord_kwargs}, expected a place in {lengths}")
        return self.mapping[coordinate]

    def get_axis_names(self) -> list[str]:
        """The axes in their order."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's coordinate as text for names of files: `model_00`."""
        place = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{place[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def get_dim(self, axis: str) -> int:
        """The length of an axis; 0 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank, as a namedtuple. ValueError outside."""
        for coordinate, at in self.mapping.items():
            if at == rank:
                return coordinate
        raise ValueError(f"get_coord: got rank {rank}, expected 0 to {self.world_size() - 1}")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks that differ only along an axis, one list for each place on the others."""
        if axis not in self.axes:
            return []
        others = [each for each in self.axes if each != axis]
        places = product(*(range(self.get_dim(each)) for each in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks whose coordinates have these numbers."""
        return [
            rank
            for coordinate, rank in self.mapping.items()
            if all(getattr(coordinate, axis) == at for axis, at in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one place of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each with neighbouring data-parallel ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same with tensor-parallel ranks next to each other."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


__getattr__ = module_getattr("deepspeed.runtime.pipe.topology")
