"""LAMB, and other optimizers that a configuration names and the engine has no rule of."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from conftest import batch, config, network, nightly

import libzero
from libzero import deepspeed
from libzero.deepspeed.ops.lamb import FusedLamb

STEPS = 4


def by_formula(
    p: torch.Tensor, gradients: list[torch.Tensor], coefficient: Any, *, lr: float, decay: float, inside: bool
) -> torch.Tensor:
    """arXiv:1904.00962, algorithm 2, in double precision; bias correction in the rate."""
    w, m, v = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for t, g in enumerate((g.double() for g in gradients), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / ((v + 1e-6).sqrt() if inside else v.sqrt() + 1e-6) + decay * w
        rate = lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        w = w - rate * coefficient(w.norm() / u.norm() if w.norm() * u.norm() else torch.ones(())) * u
    return w


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.1, 0.2), (30.0, 50.0)])
def test_the_formula(low: float, high: float, inside: bool) -> None:
    torch.manual_seed(3)
    start, gradients = torch.randn(5, 7), [torch.randn(5, 7) for _ in range(STEPS)]
    words: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6, "eps_inside_sqrt": inside}
    p, zero = torch.nn.Parameter(start.clone()), torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedLamb([p, zero], max_coeff=high, min_coeff=low, **words)
    for g in gradients:
        p.grad, zero.grad = g.clone(), torch.zeros(3)
        optimizer.step()
    wanted = by_formula(start, gradients, lambda r: r.clamp(low, high), lr=0.01, decay=0.1, inside=inside)
    torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-5, atol=1e-6)
    first, second = optimizer.get_lamb_coeffs()
    assert low <= first <= high and second == 1.0 and zero.eq(0).all()


def losses_of(model: Any, step: Any, rank: int, world: int) -> list[float]:
    losses = []
    for k in range(STEPS):
        each = [model(batch(r, k)).float().square().mean() for r in ([rank] if world == 1 else range(world))]
        losses.append(each[0].item())
        step(torch.stack(each).mean())
    return losses


TYPES: dict[str, tuple[dict[str, Any], Any]] = {
    "Lamb": ({"lr": 0.02, "weight_decay": 0.01, "max_coeff": 0.3}, FusedLamb),
    "Rprop": ({"lr": 1e-3, "etas": [0.4, 1.3]}, torch.optim.Rprop),
    "ASGD": ({"lr": 0.01}, torch.optim.ASGD),
    "Adafactor": ({"lr": 0.01}, torch.optim.Adafactor),
}


@pytest.mark.parametrize("name", ["Lamb", "Rprop", nightly("ASGD"), nightly("Adafactor")])
@pytest.mark.parametrize("how", ["type", "object"])
def test_stages_train_as_a_plain_loop(name: str, how: str) -> None:
    params, kind = TYPES[name]
    base = network()
    plain = copy.deepcopy(base)
    optimizer = kind(plain.parameters(), **params)

    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    wanted = losses_of(plain, update, 0, 2)

    def rank(comm: libzero.Communicator, stage: int) -> tuple[list[float], str]:
        model, settings = copy.deepcopy(base), {**config(stage), "gradient_clipping": 0.0}
        settings["optimizer"] = {"type": name.lower() if name == "Lamb" else name, "params": params}
        made = None
        if how == "object":
            del settings["optimizer"]
            made = kind(model.parameters(), **params)
        engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=settings)

        def step(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        assert type(engine.optimizer.optimizer).__name__ == kind.__name__
        return losses_of(engine, step, comm.rank, 1), engine._engine.state_hash()

    hashes = set()
    for stage in (0, 1, 2, 3):
        losses, digest = libzero.run_ranks(2, lambda comm, stage=stage: rank(comm, stage))[0]  # type: ignore[misc]
        assert losses == pytest.approx(wanted, rel=1e-5)
        hashes.add(digest)
    assert len(hashes) == 1


def test_what_it_does_not_take_is_said() -> None:
    with pytest.raises(RuntimeError, match="no amsgrad"):
        FusedLamb([torch.nn.Parameter(torch.ones(2))], amsgrad=True)
    with pytest.raises(NotImplementedError, match="max_grad_norm is not built: gradient_clipping"):
        FusedLamb([torch.nn.Parameter(torch.ones(2))], max_grad_norm=1.0)

    def refused(block: dict[str, Any], match: str) -> None:
        with pytest.raises((libzero.ConfigError, NotImplementedError), match=match):
            deepspeed.initialize(model=network(), config={**config(0), "optimizer": block})

    refused({"type": "Lamb", "params": {"lr": 1.0, "max_coef": 1}}, r"params.max_coef: unknown key for type Lamb\.")
    refused({"type": "Rprop", "params": {"etas": [2.0, 1.0]}}, "optimizer.params: Rprop refused them: .*eta")
    refused({"type": "Lamb", "parms": {}}, "optimizer.parms: unknown key")
    refused({"type": "Muon", "parms": {}}, "optimizer.parms: unknown key")
    refused({"type": "LBFGS", "params": {"lr": 1.0}}, "closure")
    refused({"type": "OneBitAdam", "params": {"lr": 1.0}}, "OneBitAdam")
    refused({"type": "Optimist", "params": {"lr": 1.0}}, "Optimist")
