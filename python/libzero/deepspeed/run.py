"""python -m libzero.deepspeed.run [options] script.py [args]: a program written for DeepSpeed, without an edit.

Under a launcher (`zero run`, torchrun, ...), or without an option of DeepSpeed's launcher, it runs the script in this
process, where `import deepspeed` is libzero.deepspeed. With one (--num_gpus, --hostfile, ...) it becomes
`zero run --deepspeed` (docs/cli.md), which reads these options and starts ranks that each run the script so.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from libzero import _program
from libzero.communicator import Communicator
from libzero.deepspeed._under_its_name import install


def launch(words: Sequence[str]) -> NoReturn:
    """Becomes `zero run --deepspeed`, whose ranks have this interpreter."""
    program = os.environ.get("ZERO_PROGRAM") or _program.program()
    os.execve(program, [program, "run", "--deepspeed", *words], {**os.environ, "ZERO_PYTHON": sys.executable})


def _refuse(got: str, expected: str) -> NoReturn:
    print(f"libzero.deepspeed.run: error: got {got}, expected {expected}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads sys.argv. Does not return where it starts ranks. Exit code 2 for words that cannot be meant."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags = set()
    count = 0
    while count < len(words) and words[count].replace("-", "_") in ("__module", "__no_local_rank"):
        flags.add(words[count].replace("-", "_"))
        count += 1
    script, rest = words[count : count + 1], words[count + 1 :]
    if not script:
        _refuse("no script", "one. Hint: zero run --help lists the options of `zero run --deepspeed`.")
    if script[0].startswith("-"):
        if Communicator.launched():
            _refuse(script[0], "a script: a launcher has started the ranks. Hint: give the option to the launcher.")
        launch(words)
    install()
    local_rank = [] if "__no_local_rank" in flags else [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"]
    sys.argv = [script[0], *local_rank, *rest]
    if "__module" in flags:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script[0])))
        runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
