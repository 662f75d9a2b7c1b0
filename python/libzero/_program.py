"""The program `zero` of this package, as a console script."""

import os
import sys
from pathlib import Path


def program() -> str:
    """Returns its path. Raises FileNotFoundError if only the extension was built."""
    path = Path(__file__).parent / "bin" / "zero"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Hint: pip install . builds it; or use build/bin/zero.")
    return str(path)


def main() -> None:
    """Replaces this process by the program. Its `run --deepspeed` starts ranks with this interpreter."""
    path = program()
    os.environ.setdefault("ZERO_PYTHON", sys.executable)
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
