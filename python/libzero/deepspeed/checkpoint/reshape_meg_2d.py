"""Which files of a grid of ranks a smaller grid reads: arithmetic of DeepSpeed's checkpoints.

libzero's checkpoints need none of it: they load on any number of ranks.
"""

from __future__ import annotations

from typing import Any

from libzero.deepspeed._refuse import module_getattr

__all__ = ["meg_2d_parallel_map", "reshape_meg_2d_parallel"]


def split(items: list[Any], parts: int) -> list[list[Any]]:
    """[local] Equal parts. AssertionError where they cannot be equal."""
    if len(items) % parts != 0:
        raise AssertionError(f"got {len(items)} ranks for {parts} new ones, expected a multiple")
    each = len(items) // parts
    return [items[part * each : (part + 1) * each] for part in range(parts)]


class meg_2d_parallel_map:  # noqa: N801
    """A list of old ranks for each place of a grid of stages (pp) and tensor-parallel ranks (tp)."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree, self.tp_degree = pp_degree, tp_degree
        self.map: dict[str, list[int]] = {}

    def simple_init(self) -> None:
        """Each place has its own rank, in row-major order."""
        self.map = {
            self._make_key(rank // self.tp_degree, rank % self.tp_degree): [rank]
            for rank in range(self.pp_degree * self.tp_degree)
        }

    def add_data(self, pp_index: int, tp_index: int, data: list[int]) -> None:
        """More ranks at a place."""
        self._validate_indices(pp_index, tp_index)
        self.map.setdefault(self._make_key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """Those of a place, of a row, of a column, or all."""
        self._validate_indices(pp_index, tp_index)
        rows = range(self.pp_degree) if pp_index is None else [pp_index]
        columns = range(self.tp_degree) if tp_index is None else [tp_index]
        return [rank for row in rows for column in columns for rank in self.map[self._make_key(row, column)]]

    def print_data(self, tag: str) -> None:
        """Prints all."""
        print(tag)
        for key, ranks in self.map.items():
            print(f"{key} = {ranks}")

    def _validate_indices(self, pp_index: int | None, tp_index: int | None) -> None:
        for index, degree in ((pp_index, self.pp_degree), (tp_index, self.tp_degree)):
            if index is not None and index >= degree:
                raise AssertionError(f"got place {index}, expected 0 to {degree - 1}")

    def _make_key(self, i: int, j: int) -> str:
        return f"{i},{j}"


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """[local] The old ranks of each place of a grid that is not larger, in the order of their parts."""
    if new_pp_degree > old_pp_degree or new_tp_degree > old_tp_degree:
        expected = f"{old_pp_degree} x {old_tp_degree} or less"
        raise AssertionError(f"reshape_meg_2d_parallel: got {new_pp_degree} x {new_tp_degree}, expected {expected}")
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    narrow = meg_2d_parallel_map(old_pp_degree, new_tp_degree)
    for row in range(old_pp_degree):
        for column, ranks in enumerate(split(old.get_data(pp_index=row), new_tp_degree)):
            narrow.add_data(row, column, ranks)
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for column in range(new_tp_degree):
        for row, ranks in enumerate(split(narrow.get_data(tp_index=column), new_pp_degree)):
            new.add_data(row, column, ranks)
    if verbose:
        new.print_data("final_2d_map:")
    return new


__getattr__ = module_getattr("deepspeed.checkpoint.reshape_meg_2d")
