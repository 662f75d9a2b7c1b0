"""python -m libzero.deepspeed.shim DIR: writes the command `deepspeed` into a folder of PATH, where one asks for it.

The command is `zero run --deepspeed` with this interpreter. With --package DIR it writes a package `deepspeed` into a
folder of PYTHONPATH instead, for programs that another launcher starts (`accelerate launch`). Nothing else writes them:
another package has that name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from libzero.deepspeed import _names
from libzero.deepspeed._under_its_name import Distribution

_MARK = "# written by libzero.deepspeed.shim"

_PACKAGE = f'''{_MARK}
"""libzero.deepspeed under the name deepspeed, in each process that imports it."""

import sys

import libzero.deepspeed
from libzero.deepspeed._under_its_name import install

sys.modules[__name__] = libzero.deepspeed  # instead of this module
install()
'''


def _command() -> str:
    return f"#!{sys.executable}\n{_MARK}\nfrom libzero.deepspeed.launcher.runner import main\n\nmain()\n"


def _refuse(text: str) -> NoReturn:
    print(f"libzero.deepspeed.shim: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def _require_own(path: Path, file: Path) -> None:
    """Exit code 2 where `path` is there, and `file` is not one of ours."""
    if os.path.lexists(path) and not (file.is_file() and _MARK in file.read_text(errors="replace")):
        _refuse(f"{path} is there, and is not of libzero. Hint: remove it, or name another folder.")


def _note_outside(variable: str, folder: str, paths: Sequence[str]) -> None:
    if os.path.abspath(folder) not in map(os.path.abspath, paths):
        print(f"libzero.deepspeed.shim: note: {folder} is not in {variable}", file=sys.stderr)


def _write_command(folder: str) -> Path:
    file = Path(folder) / "deepspeed"
    _require_own(file, file)
    file.write_text(_command())
    file.chmod(0o755)
    _note_outside("PATH", folder, os.environ.get("PATH", "").split(os.pathsep))
    return file


def _write_package(folder: str) -> Path:
    """And its metadata, by which frameworks find that it is installed. `pip uninstall deepspeed` removes both."""
    package = Path(folder) / "deepspeed"
    _require_own(package, package / "__init__.py")
    about = Path(folder) / f"deepspeed-{_names.VERSION}.dist-info"
    files = {
        package / "__init__.py": _PACKAGE,
        about / "METADATA": Distribution().read_text("METADATA") or "",
        about / "INSTALLER": "libzero.deepspeed.shim\n",
        about / "RECORD": "",
    }
    files[about / "RECORD"] = "".join(f"{file.relative_to(folder).as_posix()},,\n" for file in files)
    for file, text in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    _note_outside("PYTHONPATH", folder, [path for path in sys.path if path])
    return package


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads sys.argv. Exit code 2 for other words than one folder, and where another `deepspeed` is in it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    package = words[:1] == ["--package"]
    folders = words[1:] if package else words
    if len(folders) != 1 or not os.path.isdir(folders[0]):
        _refuse(f"got {words}, expected one folder: python -m libzero.deepspeed.shim [--package] DIR")
    print(_write_package(folders[0]) if package else _write_command(folders[0]))


if __name__ == "__main__":
    main()
