"""What DeepSpeed's tools ask of a checkpoint's folder, of one of libzero or of a universal one that it has exported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import torch

from libzero._carried import decoded_file
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor, model_3d_desc
from libzero.deepspeed.utils.zero_to_fp32 import (
    client_state_of,
    get_fp32_state_dict_from_zero_checkpoint,
    read_manifest,
)
from libzero.errors import ConfigError, IoError

__all__ = ["DeepSpeedCheckpoint"]

_MODEL = "mp_rank_00_model_states.pt"


class DeepSpeedCheckpoint:
    """A folder's grid of ranks, and what the program saved with it. It has no pipeline and no files of layers.

    dir: DIR/TAG of libzero, or of `zero checkpoint export --to universal`. The degrees are those of another grid; None:
    the folder's. ConfigError for other folders, and for a grid that the folder's ranks do not divide into.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = -1,
    ) -> None:
        self.dir, self.final_layer_norm_idx = dir, final_layer_norm_idx
        folder = Path(dir)
        self._whole: dict[str, Any] | None = None
        if (folder / "manifest.json").is_file():
            _, manifest = read_manifest(folder.parent, folder.name)
            self.file_list = [str(folder / file["name"]) for file in manifest["files"]]
            self.global_state = client_state_of(manifest)
        elif (folder / "zero").is_dir() and (folder / _MODEL).is_file():
            self.file_list = [str(file) for file in sorted(folder.rglob("*.pt"))]
            self._whole = self.global_state = decoded_file(folder / _MODEL)
        else:
            raise ConfigError(
                f"[DeepSpeedCheckpoint] dir: got {folder}, expected a checkpoint of libzero, or a universal one. Hint: "
                "`zero checkpoint import` reads DeepSpeed's other checkpoints."
            )
        self._source = get_model_3d_descriptor(dir)
        self.tp_degree = self._source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = self._source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = self._source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size = self._source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.layer_files: list[str] = []
        self.layer_keys: list[str] = []
        self.layer_count = 0
        possible, faults = self._source.can_reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        if not possible:
            raise ConfigError(f"[DeepSpeedCheckpoint] cannot divide {self._source.get_desc()}: {', '.join(faults)}")

    def is_change_tp_degree(self) -> bool:
        """[local] Whether the grid that was given has another number of tensor-parallel ranks."""
        return self.tp_degree != self._source.tp_degree

    def is_change_pp_degree(self) -> bool:
        """[local] The same, of stages of a pipeline."""
        return self.pp_degree != self._source.pp_degree

    def is_change_dp_degree(self) -> bool:
        """[local] The same, of data-parallel ranks."""
        return self.dp_degree != self._source.dp_degree

    def get_iteration(self) -> Any:
        """[local] "iteration" of the client_state; 0 without one."""
        return self.global_state.get("iteration", 0)

    def get_args(self) -> Any:
        """[local] "args" of the client_state; None without one."""
        return self.global_state.get("args")

    def get_checkpoint_info(self, info_key: str = "checkpoint_info") -> Any:
        """[local] The same of another key."""
        return self.global_state.get(info_key)

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """[local] The client_state, and "module": the weights in fp32, whole, whatever the place in the grid."""
        if not 0 <= tp_index < self.tp_degree or not 0 <= pp_index < self.pp_degree:
            raise AssertionError(f"got {pp_index}, {tp_index}, expected a place in {self.pp_degree} x {self.tp_degree}")
        if self._whole is not None:
            return {**self._whole, "module": self._universal()}
        folder = Path(self.dir)
        return {**self.global_state, "module": get_fp32_state_dict_from_zero_checkpoint(folder.parent, folder.name)}

    def _universal(self) -> dict[str, torch.Tensor]:
        zero = Path(self.dir) / "zero"
        files = {file.parent.relative_to(zero).as_posix(): file for file in sorted(zero.rglob("fp32.pt"))}
        found = {name: decoded_file(file) for name, file in files.items()}
        return {name: value["param"] if isinstance(value, dict) else value for name, value in found.items()}

    def validate_files(self) -> None:
        """[local] IoError for a file that is not there."""
        missing = [file for file in self.file_list if not os.path.isfile(file)]
        if missing:
            raise IoError(f"[DeepSpeedCheckpoint] {self.dir}: {', '.join(missing)} is not there")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"DeepSpeedCheckpoint.{name} is not built: the folder has no files of layers or ranks that it could name. "
            "Hint: get_2d_parallel_state(), deepspeed.utils.zero_to_fp32."
        )


__getattr__ = module_getattr("deepspeed.checkpoint.deepspeed_checkpoint")
