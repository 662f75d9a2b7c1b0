"""python -m libzero.deepspeed.shim DIR: writes the command `deepspeed` into a folder of PATH, where one asks for it.

The command is `zero run --deepspeed` with this interpreter. Nothing else writes it: another package has that name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_MARK = "# written by libzero.deepspeed.shim"


def _text() -> str:
    return f"#!{sys.executable}\n{_MARK}\nfrom libzero.deepspeed.launcher.runner import main\n\nmain()\n"


def _refuse(text: str) -> NoReturn:
    print(f"libzero.deepspeed.shim: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads sys.argv. Exit code 2 for other words than one folder, and where another `deepspeed` is in it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 1 or not os.path.isdir(words[0]):
        _refuse(f"got {words}, expected one folder: python -m libzero.deepspeed.shim DIR")
    file = Path(words[0]) / "deepspeed"
    if file.exists() and _MARK not in file.read_text(errors="replace"):
        _refuse(f"{file} is there, and is not of libzero. Hint: remove it.")
    file.write_text(_text())
    file.chmod(0o755)
    if os.path.abspath(words[0]) not in map(os.path.abspath, os.environ.get("PATH", "").split(os.pathsep)):
        print(f"libzero.deepspeed.shim: note: {words[0]} is not in PATH", file=sys.stderr)
    print(file)


if __name__ == "__main__":
    main()
