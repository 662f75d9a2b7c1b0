"""deepspeed.checkpoint.ds_to_universal: every checkpoint of libzero loads on any number of ranks, so this copies one.

    python -m libzero.deepspeed.checkpoint.ds_to_universal --input_folder DIR/TAG --output_folder DIR/TAG_universal
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.zero_to_fp32 import read_manifest
from libzero.errors import ConfigError

__all__ = ["main", "parse_arguments"]

LATEST = "latest_universal"


def parse_arguments() -> argparse.Namespace:
    """[local] Of sys.argv. All but the folders have no effect."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="Copies a checkpoint of libzero.")
    parser.add_argument("--input_folder", required=True, help="DIR/TAG")
    parser.add_argument("--output_folder", required=True, help="DIR/ANOTHER_TAG")
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, default=1, help="without effect")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="without effect")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """[local] Copies args.input_folder to args.output_folder, which the file latest_universal next to it then names.

    ConfigError for a checkpoint that libzero has not written.
    """
    given, copied = Path(args.input_folder), Path(args.output_folder)
    if not (given / "manifest.json").is_file():
        raise ConfigError(
            f"[ds_to_universal] input_folder: got {given}, expected a checkpoint of libzero. "
            "Hint: `zero checkpoint import` reads DeepSpeed's universal checkpoints."
        )
    read_manifest(given.parent, given.name)
    shutil.copytree(given, copied, dirs_exist_ok=True)
    (copied.parent / LATEST).write_text(copied.name)


__getattr__ = module_getattr("deepspeed.checkpoint.ds_to_universal")

if __name__ == "__main__":
    main(parse_arguments())
