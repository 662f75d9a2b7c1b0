"""Version and requirements of the package, which depend on its build's torch: a dynamic-metadata provider.

A build takes the torch that is installed, also in an environment of its own (build isolation), which hides it: a
package that was built with another one could not be imported. Where none is installed, it asks for a tested one.

    python libzero_metadata.py      prints the folder of that torch, for CMake
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIND = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"


def tested_minors() -> list[str]:
    """ "2.11" .. "2.15", the oldest first."""
    versions = re.search(r"ZERO_TESTED_TORCH (.*)\)", (ROOT / "cmake/TorchVersions.cmake").read_text())
    assert versions
    return [version.rpartition(".")[0] for version in versions[1].split()]


def installed_torch() -> Path | None:
    """The folder of the torch to build with: ZERO_TORCH_DIR, the environment's, or the one that isolation hides."""
    if given := os.environ.get("ZERO_TORCH_DIR"):
        return Path(given)
    spec = importlib.util.find_spec("torch")
    if spec and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    # pip isolates a build through PYTHONPATH and leaves the interpreter, hence its folders, as they are.
    said = subprocess.run([sys.executable, "-E", "-c", FIND], stdout=subprocess.PIPE, text=True, cwd="/").stdout.strip()
    return Path(said) if said else None


def minor_of(torch: Path) -> str:
    file = torch / "version.py"
    version = re.search(r"__version__ = '(\d+\.\d+)", file.read_text()) if file.exists() else None
    if not version:
        raise SystemExit(f"[libzero] {file} has no version. Hint: ZERO_TORCH_DIR=<site-packages>/torch of a wheel")
    minors = tested_minors()
    if version[1] not in minors:
        raise SystemExit(
            f"[libzero] got torch {version[1]} in {torch}, expected {minors[0]} to {minors[-1]}. "
            f"Hint: pip install 'torch=={minors[-1]}.*', or ZERO_TORCH_DIR=<site-packages>/torch of another one."
        )
    return version[1]


class Provider:
    def __init__(self) -> None:
        self.state = ""

    def build_state(self, state: str) -> None:
        self.state = state

    def get_requires_for_dynamic_metadata(self, settings: Mapping[str, object]) -> list[str]:
        if torch := installed_torch():
            minor_of(torch)
            return []
        return [window()]

    def dynamic_wheel(self, settings: Mapping[str, object]) -> dict[str, bool]:
        return {"dependencies": True}

    def dynamic_metadata(self, settings: Mapping[str, object], project: Mapping[str, object]) -> dict[str, object]:
        match = re.search(r'#define ZERO_VERSION "([0-9.]+)"', (ROOT / "include/zero/version.h").read_text())
        assert match
        version = match[1]
        if self.state == "sdist":
            return {"version": version, "dependencies": [window()]}
        torch = installed_torch()
        if torch is None:
            raise SystemExit(f"[libzero] the interpreter {sys.executable} has no torch. Hint: pip install '{window()}'")
        minor = minor_of(torch)
        # A source distribution has its version in its name, and what is built from it has the same.
        label = "" if (ROOT / "PKG-INFO").exists() else f"+torch{minor}"
        return {"version": version + label, "dependencies": [f"torch=={minor}.*"]}


def window() -> str:
    minors = tested_minors()
    major, _, newest = minors[-1].partition(".")
    return f"torch>={minors[0]},<{major}.{int(newest) + 1}"


if __name__ == "__main__":
    found = installed_torch()
    sys.exit("no torch") if found is None else print(found)
