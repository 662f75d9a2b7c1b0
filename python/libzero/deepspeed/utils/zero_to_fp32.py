"""The weights of a checkpoint without an engine: one process, no GPU. All calls are local and change no checkpoint."""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from libzero._carried import Carried, decoded
from libzero.deepspeed import _names
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.logging import logger
from libzero.errors import IoError

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "read_manifest",
    "read_tensors",
]

_READER = 5
"""The newest min_reader of a manifest whose tensors read_tensors() can assemble."""

_FORMATS = ("zero.checkpoint/1", "zero.checkpoint/2")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def latest_tag(folder: str | os.PathLike[str], name: str = "latest") -> str | None:
    """The tag in the file `latest`, or of another name; None without the file."""
    file = Path(folder) / name
    return file.read_text().split("\n", 1)[0].strip() if file.is_file() else None


def read_manifest(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint (None: the latest) and its manifest. FileNotFoundError where there is none."""
    taken = tag if tag is not None else latest_tag(folder)
    if taken is None:
        raise FileNotFoundError(f"cannot find the latest checkpoint: {Path(folder) / 'latest'} is not there")
    path = Path(folder) / taken
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    if manifest.get("format") not in _FORMATS:
        raise IoError(f"{path}: got format {manifest.get('format')!r}, expected one of {', '.join(_FORMATS)}")
    needed = manifest.get("min_reader")
    if not isinstance(needed, int) or needed > _READER:
        raise IoError(
            f"{path}: min_reader: got {needed!r}, expected {_READER} or less, which this libzero reads. "
            "Hint: read it with the libzero that wrote it, or a newer one."
        )
    return path, manifest


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """The files DIR/TAG has of a pattern, numbers in their order. FileNotFoundError for none."""
    found = [str(path) for path in Path(checkpoint_dir).glob(glob_pattern)]
    if not found:
        raise FileNotFoundError(f"cannot find {Path(checkpoint_dir) / glob_pattern}")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


_made: list[tempfile.TemporaryDirectory[str]] = []
"""The folder of the files that torch.load() reads; removed when the process ends."""


def _written(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Files with these names, for torch.load(), in a folder of this process."""
    if not _made:
        _made.append(tempfile.TemporaryDirectory(prefix="libzero-"))
        atexit.register(_made[0].cleanup)
    folder = Path(tempfile.mkdtemp(dir=_made[0].name))
    for name, value in values.items():
        torch.save(dict(value), folder / name)
    return [str(folder / name) for name in values]


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """A file for each rank that wrote DIR/TAG, for torch.load(): the stage and the number of ranks, no states.

    They are made when one asks, in a folder that is removed when the process ends: DIR/TAG has no pickled files.
    FileNotFoundError where it is not there.
    """
    _, manifest = read_manifest(Path(checkpoint_dir).parent, Path(checkpoint_dir).name)
    ranks, stage = manifest["world"]["size"], manifest["world"]["stage"]
    about = {"zero_stage": stage, "partition_count": ranks, "ds_version": _names.VERSION}
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    return _written({name: {"optimizer_state_dict": about, "ds_version": _names.VERSION} for name in names})


def client_state_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """[local] That of the save; empty for a checkpoint of another program."""
    carried = Carried.read(manifest["user_state"]).user_state
    if not isinstance(carried, dict) or "deepspeed" not in carried:
        return {}
    return dict(decoded(carried["deepspeed"])["client_state"])


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """[get_model_state_file()]"""
    _, manifest = read_manifest(Path(checkpoint_dir).parent, Path(checkpoint_dir).name)
    state = client_state_of(manifest)
    step, mesh = manifest["step"], manifest["mesh"]
    counters = {name: step[name] for name in ("global_steps", "global_samples", "skipped_steps")}
    sizes = {"dp_world_size": mesh["dp"] * mesh["sp"], "mp_world_size": mesh["tp"], "ds_version": _names.VERSION}
    return _written({"mp_rank_00_model_states.pt": {**state, **counters, **sizes}})


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """A file for torch.load(), made as those of get_optim_files(): the client_state of the save, counters, no weights.

    Objects of the client_state are those that torch.load(weights_only=True) reads.
    """
    return get_model_state_files(checkpoint_dir)[0]


class _Files:
    """The rank files of a checkpoint, mapped into memory."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._names = [file["name"] for file in manifest["files"]]
        self._open: dict[str, tuple[torch.Tensor, int, dict[str, Any]]] = {}

    def read(self, tensor: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensor's parts in order. Format 1 names the key of a part in its file, format 2 its place."""
        dtype = _DTYPES[tensor["dtype"]]
        found: list[tuple[int, torch.Tensor]] = []
        for part in tensor["parts"]:
            if isinstance(part, dict):
                values, data, index = self._file(part["file"])
                begin, end = (data + offset for offset in index[part["key"]]["data_offsets"])
                found.append((int(part["start"]), values[begin:end].clone().view(dtype)))
            else:
                file, offset, start, numel = part
                values, _, _ = self._file(self._names[file])
                found.append((start, values[offset : offset + numel * dtype.itemsize].clone().view(dtype)))
        return [values for _, values in sorted(found, key=lambda each: each[0])] or [torch.empty(0, dtype=dtype)]

    def _file(self, name: str) -> tuple[torch.Tensor, int, dict[str, Any]]:
        """Its bytes, the place of its data and its header."""
        if name not in self._open:
            path = self._folder / name
            whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
            head = int.from_bytes(whole[:8].numpy().tobytes(), "little")
            self._open[name] = whole, 8 + head, json.loads(whole[8 : 8 + head].numpy().tobytes())
        return self._open[name]


def _assembled(flat: torch.Tensor, tensor: Mapping[str, Any]) -> torch.Tensor:
    """A whole tensor from its elements as they are stored: in row-major order, or box by box of its slices."""
    if "slices" not in tensor:
        return flat.view(tensor["shape"])
    boxes = [box for slice_ in tensor["slices"] for box in slice_]
    values = torch.split(flat, [math.prod(box["size"]) for box in boxes])
    whole = flat.new_empty(tensor["shape"])
    for box, value in zip(boxes, values, strict=True):
        place = tuple(slice(start, start + size) for start, size in zip(box["start"], box["size"], strict=True))
        whole[place] = value.view(box["size"])
    return whole


def read_tensors(path: Path, manifest: Mapping[str, Any], kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Whole tensors of these kinds by name, tied names included, in host memory."""
    files = _Files(path, manifest)
    found: dict[str, torch.Tensor] = {}
    for tensor in manifest["tensors"]:
        if tensor["kind"] not in kinds:
            continue
        found[tensor["name"]] = _assembled(torch.cat(files.read(tensor)), tensor)
    for alias, name in manifest["aliases"].items():
        if name in found:
            found[alias] = found[name]
    return found


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """fp32 parameters, the buffers and rank 0's extra states of modules by name, for model.load_state_dict().

    tag: the latest if not given. Hashes are not compared: `zero checkpoint verify` does that. NotImplementedError for
    lazy_mode.
    """
    if lazy_mode:
        raise NotImplementedError("cannot read a checkpoint lazily: lazy_mode is not built. Hint: lazy_mode=False.")
    path, manifest = read_manifest(checkpoint_dir, tag)
    kinds = ("master", "buffer") if exclude_frozen_parameters else ("master", "param", "buffer")
    found = read_tensors(path, manifest, kinds)
    buffers = read_tensors(path, manifest, ("buffer",))
    state = {name: value if name in buffers else value.float() for name, value in found.items()}
    return {**state, **Carried.read(manifest["user_state"]).extra_of(0)}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the same to output_dir as pytorch_model.bin, or model.safetensors with safe_serialization.

    One file, whatever max_shard_size says. ImportError where safetensors is wanted and not installed.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        from safetensors.torch import save_file

        # It takes tensors only, and refuses tied ones.
        state = {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
        save_file(state, Path(output_dir) / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, Path(output_dir) / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Loads the same into a model on the CPU that no engine holds, and returns it."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


_SCRIPT = '''#!/usr/bin/env python
"""Writes the fp32 weights of a checkpoint in this folder: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR"""

try:
    from libzero.deepspeed.utils.zero_to_fp32 import main
except ImportError as missing:
    raise SystemExit(f"zero_to_fp32.py: error: {missing}. Hint: pip install libzero.") from None

if __name__ == "__main__":
    main()
'''


def write_script(folder: str | os.PathLike[str]) -> None:
    """Puts zero_to_fp32.py into a folder of checkpoints, where programs look for it."""
    path = Path(folder) / "zero_to_fp32.py"
    if path.is_file() and not path.is_symlink() and path.read_text(errors="replace") == _SCRIPT:
        return
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".zero_to_fp32.", delete=False) as file:
            file.write(_SCRIPT)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)  # never through a link
    except OSError as fault:  # the checkpoint is complete without it
        logger.warning("cannot write %s: %s", path, fault)


def main() -> None:
    """python -m libzero.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR"""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Writes a checkpoint's weights in fp32.")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch's format")
    parser.add_argument("-t", "--tag", help="the latest if not given")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    words = parser.parse_args()
    convert_zero_checkpoint_to_fp32_state_dict(
        words.checkpoint_dir,
        words.output_dir,
        safe_serialization=words.safe_serialization,
        tag=words.tag,
        exclude_frozen_parameters=words.exclude_frozen_parameters,
    )


__getattr__ = module_getattr("deepspeed.utils.zero_to_fp32")

if __name__ == "__main__":
    main()
