"""python -m libzero.deepspeed.run [options] script.py [args]: a program written for DeepSpeed, without an edit.

Under a launcher (`zero run`, torchrun, ...), or without an option that asks for ranks, it runs the script in this
process, where `import deepspeed` is libzero.deepspeed. With --num_gpus, --num_nodes, --hostfile, --include or --exclude
it starts the ranks with `zero run` (docs/cli.md), each of which runs the script so.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from libzero import _program
from libzero.communicator import Communicator
from libzero.deepspeed._under_its_name import install

_TO_ZERO_RUN = ("num_gpus", "num_nodes", "hostfile", "include", "exclude", "master_addr", "master_port")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m libzero.deepspeed.run",
        description="Runs a program written for DeepSpeed over libzero.",
        allow_abbrev=False,
    )
    parser.add_argument("--num_gpus", "--num-gpus", "-n", metavar="N", help="ranks on each host")
    parser.add_argument("--num_nodes", "--num-nodes", metavar="N", help="the first N hosts of the hostfile")
    parser.add_argument("-H", "--hostfile", metavar="FILE", help='lines of "HOST slots=N"')
    parser.add_argument("-i", "--include", metavar="FILTER", help="only HOST[:SLOT,...][@HOST...]")
    parser.add_argument("-e", "--exclude", metavar="FILTER", help="all except these, in the same form")
    parser.add_argument("--master_addr", "--master-addr", metavar="ADDRESS", help="MASTER_ADDR of the ranks")
    parser.add_argument("--master_port", "--master-port", metavar="PORT", help="MASTER_PORT of the ranks")
    parser.add_argument("--no_local_rank", "--no-local-rank", action="store_true", help="do not pass --local_rank=N")
    parser.add_argument("--module", action="store_true", help="script is the name of a module, as in python -m")
    parser.add_argument("script", help="the program, or a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _launch(words: argparse.Namespace) -> None:
    """Becomes `zero run`."""
    program = os.environ.get("ZERO_PROGRAM") or _program.program()
    command = [program, "run"]
    for name in _TO_ZERO_RUN:
        value = getattr(words, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", value]
    if words.num_gpus is None and words.hostfile is None and words.include is None and words.exclude is None:
        command += ["--num-gpus", "auto"]
    command += ["--", sys.executable, "-m", "libzero.deepspeed.run"]
    command += ["--no_local_rank"] * words.no_local_rank + ["--module"] * words.module
    os.execv(program, [*command, words.script, *words.args])


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads sys.argv. Does not return where it starts ranks."""
    words = _parser().parse_args(arguments)
    launched = Communicator.launched()
    if not launched and any(getattr(words, name) is not None for name in _TO_ZERO_RUN):
        _launch(words)
    install()
    local_rank = [] if words.no_local_rank else [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"]
    sys.argv = [words.script, *local_rank, *words.args]
    if words.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words.script)))
        runpy.run_path(words.script, run_name="__main__")


if __name__ == "__main__":
    main()
