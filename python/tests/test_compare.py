"""lab/peers/peer.py with libzero: the programs that script/compare --python measures have equal losses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Programs, find_zero

pytestmark = pytest.mark.nightly
# 1.6 M parameters: what a rank keeps of them is far above the pages that come and go with the interpreter.
SIZE = "--layers 2 --hidden 256 --heads 2 --vocabulary 64 --sequence 16 --batch 2 --steps 4 --warmup 1".split()
BYTES_OF_STATES = 16  # per element: fp32 parameter, gradient, two moments


def measure(programs: Programs, launcher: list[str], peer: str, recipe: str) -> Any:
    out = programs.folder / f"{peer}.json"
    words = [*launcher, str(REPOSITORY / "lab" / "peers" / "peer.py"), peer, recipe, "--out", str(out), *SIZE]
    ended = subprocess.run(words, env=programs.environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(out.read_text())


def losses(document: Any) -> list[float]:
    return [document["first_loss"], document["last_loss"]]


def check_times(document: Any) -> None:
    samples = document["samples"]
    parts = zip(samples["forward_s"], samples["backward_s"], samples["optimizer_s"], strict=True)
    assert samples["step_s"] == pytest.approx([sum(one) for one in parts])
    assert len(samples["step_s"]) == 4


def test_two_ranks_train_as_ddp(programs: Programs) -> None:
    zero = find_zero()
    if zero is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    reference = measure(programs, torchrun, "ddp", "fp32")
    runs = {
        name: measure(programs, [zero, "run", "-n", "2", sys.executable], name, "fp32")
        for name in ("libzero0", "libzero3", "twin0", "twin3")
    }
    assert losses(runs["libzero0"]) == losses(runs["libzero3"]) == pytest.approx(losses(reference), rel=1e-5)
    assert losses(runs["twin0"]) == losses(runs["twin3"]) == pytest.approx(losses(reference), rel=1e-5)
    for one in runs.values():
        check_times(one)
        assert (one["world"], one["transport"]) == (2, "shm")
        assert one["bytes_sent_per_step"] > 0
        assert one["torch_commit"] == reference["torch_commit"]
        share = BYTES_OF_STATES * one["parameters_elements"] / (1 if one["peer"].endswith("0") else 2)
        assert one["peak_pss_bytes"]["highest"] > share


@pytest.mark.parametrize(("recipe", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-3)])
def test_one_rank_trains_as_a_plain_loop(programs: Programs, recipe: str, tolerance: float) -> None:
    document = measure(programs, [sys.executable], "alone", recipe)
    plain, *stages = document["runs"]
    assert [one["peer"] for one in document["runs"]] == ["plain", "libzero0", "libzero3"]
    assert losses(stages[0]) == losses(stages[1]) == pytest.approx(losses(plain), rel=tolerance)
    for one in document["runs"]:
        check_times(one)
    assert list(Path(programs.folder).iterdir()) == [programs.folder / "alone.json"]
