"""The program `zero` of this package, as a console script."""

import os
import sys
from pathlib import Path


def program() -> str:
    """Its path. FileNotFoundError where only the extension was built."""
    path = Path(__file__).parent / "bin" / "zero"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there. Hint: pip install . builds it; or use build/bin/zero.")
    return str(path)


def main() -> None:
    """Becomes the program."""
    path = program()
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
