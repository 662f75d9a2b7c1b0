"""Every optimizer of packages from outside trains as in a plain loop, or is refused in words: at night, where
script/setup --frameworks has installed them."""

import copy
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, batch, network

import libzero
from libzero.optimizers import Properties, probe

pytestmark = pytest.mark.nightly
INSTALLED = REPOSITORY / ".deps" / "frameworks" / "site-packages"
PACKAGES = ("pytorch_optimizer", "prodigyopt", "lion_pytorch", "optimi", "bitsandbytes.optim")
STEPS = 6


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(INSTALLED))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(kind: Any, parameters: list[Any]) -> torch.optim.Optimizer:
    lr = inspect.signature(kind).parameters.get("lr")
    words = {"lr": 1e-3} if lr is not None and lr.default is inspect.Parameter.empty else {}
    return kind(parameters, **words)  # type: ignore[no-any-return]


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()  # type: ignore[no-any-return]


def plain(kind: Any, base: torch.nn.Module) -> list[float]:
    model = copy.deepcopy(base)
    optimizer, losses = made(kind, list(model.parameters())), []
    for step in range(STEPS):
        both = [loss_of(model, rank, step) for rank in (0, 1)]
        losses.append(both[0].item())
        torch.autograd.backward(torch.stack(both).mean())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharded(kind: Any, base: torch.nn.Module, stage: int) -> tuple[list[float], str]:
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}

    def rank(comm: libzero.Communicator) -> Any:
        model, losses = copy.deepcopy(base), []
        with libzero.Engine(model, settings, comm=comm, optimizer=lambda ps: made(kind, ps)) as engine:
            for step in range(STEPS):
                loss = loss_of(model, comm.rank, step)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            return losses, engine.state_hash()

    return libzero.run_ranks(2, rank)[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_trains_as_in_a_plain_loop_or_is_refused(package: str) -> None:
    if not (INSTALLED / package.split(".")[0]).is_dir():
        pytest.skip(f"{package} is not installed: script/setup --frameworks")
    module = importlib.import_module(package)
    classes = {name: kind for name, kind in vars(module).items()
               if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}  # fmt: skip
    base, counts, wrong = network(), {"elements": 0, "whole": 0, "refused": 0}, {}
    for name, kind in classes.items():
        try:
            expected = plain(kind, base)
            properties = probe(made(kind, list(copy.deepcopy(base).parameters())))
        except Exception:  # it needs other arguments, a closure, or a GPU
            continue
        if not properties.groups:
            assert properties.reason and properties.hint
            counts["refused"] += 1
            continue
        if (fault := differs(kind, base, expected, properties)) is not None:
            wrong[name] = fault
        counts[properties.policy] += 1
    print(f"{package}: {counts}", file=sys.stderr)
    assert not wrong
    assert sum(counts.values()) > 0


def differs(kind: Any, base: torch.nn.Module, expected: list[float], properties: Properties) -> str | None:
    """What is not as in the plain loop."""
    hashes = set()
    for stage in (0, 3):
        try:
            losses, digest = sharded(kind, base, stage)
        except libzero.ConfigError as fault:
            return None if "which would be lost" in str(fault) else str(fault)
        if losses != pytest.approx(expected, rel=1e-5, abs=1e-6):
            return f"stage {stage}: {losses} for {expected}"
        hashes.add(digest)
    return None if len(hashes) == 1 or not properties.exact else "stages have different bits"
