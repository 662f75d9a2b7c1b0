"""The same with data-parallel ranks. See reshape_meg_2d."""

from __future__ import annotations

import json
import os
from pathlib import Path

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel, split

__all__ = ["flatten_dp_dimension", "get_model_3d_descriptor", "model_3d_desc", "unflatten_dp_dimension"]


class model_3d_desc:  # noqa: N801
    """A grid of stages, tensor-parallel and data-parallel ranks."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def _degrees(self) -> dict[str, int]:
        return {"PP": self.pp_degree, "TP": self.tp_degree, "DP": self.dp_degree}

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """For each data-parallel rank of the target, the old ranks of each of its places. AssertionError if larger."""
        possible, faults = self.can_reshape(target_3d_desc)
        if not possible:
            raise AssertionError(", ".join(faults))
        grid = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree, verbose
        )
        flat = flatten_dp_dimension(grid, self.pp_degree * self.tp_degree, self.dp_degree)
        return unflatten_dp_dimension(flat, target_3d_desc.dp_degree)

    def get_desc(self) -> str:
        """As text."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """All ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Whether there is this place, and the faults."""
        places = zip(self._degrees().items(), (pp_index, tp_index, dp_index), strict=True)
        faults = [f"{name}: got {at}, expected 0 to {degree - 1}" for (name, degree), at in places if at >= degree]
        return not faults, faults

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Whether the target is not larger, and the faults."""
        new = target_3d_desc._degrees()
        faults = [
            f"{name}: got {new[name]}, expected {degree} or less"
            for name, degree in self._degrees().items()
            if new[name] > degree
        ]
        return not faults, faults


def get_model_3d_descriptor(dir: str | os.PathLike[str]) -> model_3d_desc:  # noqa: A002
    """[local] The grid of the ranks that wrote a folder: DIR/TAG of libzero, or of DeepSpeed, by its files' names.

    Ranks that share tokens (sequence_parallel_size) count as data-parallel. FileNotFoundError where neither is there.
    """
    folder = Path(dir)
    if (folder / "manifest.json").is_file():
        mesh = json.loads((folder / "manifest.json").read_text())["mesh"]
        return model_3d_desc(1, mesh["tp"], mesh["dp"] * mesh["sp"])
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    models = sum(name.startswith("mp_rank_") for name in names)
    first_layers = sum(name.startswith("layer_01") for name in names)
    states = sum("zero_pp_rank_" in name and name.endswith("_optim_states.pt") for name in names)
    if models == 0:
        raise FileNotFoundError(f"{folder}: got no manifest.json and no mp_rank_* files, expected a checkpoint")
    tensor = first_layers or models
    stages = models // tensor
    return model_3d_desc(stages, tensor, max(1, states // (stages * tensor)))


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """[local] Each rank with those of the other data-parallel ranks after it."""
    flat = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for row in range(flat.pp_degree):
        for column in range(flat.tp_degree):
            ranks = meg_2d_map.get_data(row, column)
            flat.add_data(row, column, [rank + dp * src_2d_size for rank in ranks for dp in range(dp_degree)])
    return flat


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """[local] Equal parts of each place for so many data-parallel ranks."""
    maps = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for row in range(meg_2d_map.pp_degree):
        for column in range(meg_2d_map.tp_degree):
            parts = split(meg_2d_map.get_data(row, column), dp_degree)
            for grid, ranks in zip(maps, parts, strict=True):
                grid.add_data(row, column, ranks)
    return maps


__getattr__ = module_getattr("deepspeed.checkpoint.reshape_3d_utils")
