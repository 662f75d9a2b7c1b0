"""Shared by the tests: small models, a configuration, programs that run in other processes."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]

torch.set_num_threads(1)
# A shell's background jobs ignore it, and so do the programs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def nightly(*values: Any) -> Any:
    """Values of `parametrize` that script/test leaves to script/nightly."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    """AdamW without clipping, so that plain torch is comparable."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def without(key: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings but this one."""
    return {name: value for name, value in settings.items() if name != key}


def network(seed: int = 1, width: int = 32) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    nn = torch.nn
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))


def batch(rank: int = 0, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 + 10 * step + rank))


def plain(model: torch.nn.Module, steps: int, loss_of: Callable[[torch.nn.Module, int], torch.Tensor]) -> list[float]:
    """The losses of a plain torch loop with the optimizer of config()."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(engine: Any, loss_of: Callable[[Any, int, int], torch.Tensor], steps: int) -> list[float]:
    """The losses of an engine's rank. loss_of: of a model, a rank and a step."""
    losses = []
    for step in range(steps):
        loss = loss_of(engine, engine.comm.rank, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def no_large_files() -> Iterator[None]:
    """Writes past the first 4 KiB of a file fail, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def find_zero() -> str | None:
    """The program: ZERO_PROGRAM, the package's own, or a build of this repository."""
    import libzero

    for path in (
        os.environ.get("ZERO_PROGRAM", ""),
        str(Path(libzero.__file__).parent / "bin" / "zero"),
        str(REPOSITORY / "build" / "bin" / "zero"),
    ):
        if path and os.access(path, os.X_OK):
            return path
    return None


class Programs:
    """Runs a Python program in separate processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str) -> str:
        head = "import os, sys, time\nimport torch\nimport libzero\nfrom conftest import batch, config, network\n"
        path = self.folder / "program.py"
        path.write_text(head + textwrap.dedent(text))
        return str(path)

    def environment(self) -> dict[str, str]:
        import libzero

        package = str(Path(libzero.__file__).parents[1])
        return {**os.environ, "PYTHONPATH": f"{package}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}

    def start(self, text: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words, sys.executable, self.write(text)],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, text: str, *words: str, rc: int | None = 0, timeout: float = 300) -> str:
        process = self.start(text, *words)
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            raise AssertionError(f"not ended after {timeout} s:\n{out}") from None
        assert rc is None or process.returncode == rc, f"exit {process.returncode}:\n{out}"
        return out

    def ranks(self, text: str, ranks: int = 2, **more: Any) -> str:
        """Under `zero run`."""
        program = find_zero()
        if program is None:
            pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
        return self.run(text, program, "run", "-n", str(ranks), **more)


def under_the_runner(folder: Path, *words: str, ranks: int = 2) -> str:
    """The ranks of a program written for DeepSpeed; returns what it prints."""
    program = find_zero()
    if program is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    done = subprocess.run(
        [sys.executable, "-m", "libzero.deepspeed.run", "--num_gpus", str(ranks), *words],
        env={**Programs(folder).environment(), "ZERO_PROGRAM": program},
        cwd=folder,  # -m looks there first: not in the sources
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


@pytest.fixture
def train() -> Callable[..., list[float]]:
    def steps(engine: Any, count: int = 4) -> list[float]:
        losses = []
        for step in range(count):
            loss = engine(batch(engine.comm.rank, step)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    return steps
