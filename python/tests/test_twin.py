"""The GPT of models/, trained by `zero train`, and the same network in Python have the same bits after 20 steps."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, find_zero

import libzero

sys.path.insert(0, str(REPOSITORY / "lab" / "peers"))
twins: Any = importlib.import_module("twin")

STEPS, RANKS, SEED = 20, 2, 7
LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 2, 32, 2, 16, 256
HOLDOUT = 0.05
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 16}},  # overflows at first: steps are skipped
}


def twin() -> torch.nn.Module:
    """lab/peers/twin.py, which script/compare --python compares with the C++ program."""
    torch.manual_seed(1)
    module: torch.nn.Module = twins.Twin(LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE)
    return module


def mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def permuted(index: int, size: int, key: int) -> int:
    """Permutation of data/corpus.cpp."""
    half = next(bits for bits in range(1, 32) if 2 ** (2 * bits) >= size)
    while True:
        left, right = divmod(index, 2**half)
        for turn in range(4):
            left, right = right, left ^ (mix(right ^ mix((mix(key) + turn) % 2**64)) % 2**half)
        index = left * 2**half + right
        if index < size:
            return index


class Text:
    """The samples of `zero train`, by number."""

    def __init__(self, file: Path) -> None:
        self.data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        self.count = (len(self.data) - int(len(self.data) * HOLDOUT) - 1) // SEQUENCE

    def sample(self, number: int) -> torch.Tensor:
        epoch, index = divmod(number, self.count)
        begin = permuted(index, self.count, (mix(SEED) + epoch) % 2**64) * SEQUENCE
        return self.data[begin : begin + SEQUENCE + 1]

    def batch(self, step: int, rank: int, size: int) -> torch.Tensor:
        first = (step * RANKS + rank) * size
        return torch.stack([self.sample(first + i) for i in range(size)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_bytes((REPOSITORY / "LICENSE").read_bytes()[:1000])  # two epochs
    return file


def settings(stage: int, recipe: str, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload and stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "seq_length": SEQUENCE, "vocabulary": VOCABULARY}
    return {
        "seed": SEED,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "libzero": {"model": sizes, "data": {"holdout": HOLDOUT}},
        **RECIPES[recipe],
    }


GATE = ((0, "bf16", False), (3, "bf16", False), (3, "fp32", True))
"""What script/test runs of the cases."""


def cases() -> Iterator[Any]:
    for recipe in RECIPES:
        for stage in range(4):
            for offload in (False, True):
                if stage > 0 or not offload:
                    gate = (stage, recipe, offload) in GATE
                    marks, name = [] if gate else pytest.mark.nightly, f"{recipe}-{stage}{'-offload' * offload}"
                    yield pytest.param(stage, recipe, offload, marks=marks, id=name)


@pytest.mark.parametrize(("stage", "recipe", "offload"), list(cases()))
def test_python_and_cpp_have_the_same_bits(
    stage: int, recipe: str, offload: bool, tmp_path: Path, text: Path
) -> None:
    """C++ starts from a checkpoint that Python wrote before its first step; Python loads the one C++ ends with."""
    if (zero := find_zero()) is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    config, data = settings(stage, recipe, offload), Text(text)
    start = {"position": 0, "samples": data.count, "seed": SEED, "sequence": SEQUENCE}

    def python(comm: libzero.Communicator) -> tuple[str, list[float], int]:
        engine = libzero.Engine(models[comm.rank], config)
        engine.save_checkpoint(tmp_path / "python", "start", user_state={"reader": start})
        losses = []
        for step in range(STEPS):
            batch = data.batch(step, comm.rank, engine.micro_batch_size)
            loss = engine(batch[:, :-1], batch[:, 1:])
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return engine.state_hash(), losses, engine.skipped_steps

    models = [twin() for _ in range(RANKS)]
    ours = libzero.run_ranks(RANKS, python)

    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [zero, "run", "-n", str(RANKS), zero, "train", str(tmp_path / "config.json"), "-q", "--text", str(text),
             "--steps", str(STEPS), "--sample", "0", "--out", str(tmp_path / "out"),
             "--checkpoint-dir", str(tmp_path / "python"), "--resume", "start"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    curve = json.loads((tmp_path / "out" / "result.json").read_text())["curve"]
    losses = zip(*(losses for _, losses, _ in ours), strict=True)
    assert [loss for _, loss in curve] == [sum(pair) / RANKS for pair in losses]

    def cpp(comm: libzero.Communicator) -> tuple[str, int]:
        engine = libzero.Engine(models[comm.rank], config)
        engine.load_checkpoint(tmp_path / "python", f"global_step{STEPS}")
        return engine.state_hash(), engine.skipped_steps

    models = [twin() for _ in range(RANKS)]
    assert libzero.run_ranks(RANKS, cpp) == [(digest, skipped) for digest, _, skipped in ours]
