"""Schedule-free optimizers, whose train() and eval() move the weights, train and evaluate as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch, config, network, nightly, without

import libzero
from libzero import deepspeed
from libzero.optimizers import probe

STEPS = 5


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al., The Road Less Scheduled (arXiv:2405.15682): gradients at y, evaluation at the mean x."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        beta = group["beta"]
                        p.lerp_(self.state[p]["z"], 1 - beta if train else 1 - 1 / beta)
                group["train_mode"] = train

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() in evaluation")
            group["k"] += 1
            c, beta, lr = 1 / group["k"], group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(p.grad, alpha=lr)


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step)
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def plain(base: torch.nn.Module, world: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of rank 0, an evaluation after each second step, and the weights of the last one."""
    model = copy.deepcopy(base)
    optimizer, seen = ScheduleFree(model.parameters()), []
    for step in range(STEPS):
        optimizer.train()
        losses = [loss_of(model, rank, step) for rank in range(world)]
        torch.autograd.backward(torch.stack(losses).mean())
        seen.append(losses[0].item())
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            optimizer.eval()
            seen.append(loss_of(model, 0, 99).item())
    optimizer.eval()
    return seen, [p.detach() for p in model.parameters()]


def trained(
    engine: Any, optimizer: Any, rank: int, steps: range, save: Callable[[int, str], None] = lambda step, tag: None
) -> list[float]:
    """As plain(). save: called in both modes."""
    seen = []
    for step in steps:
        optimizer.train()
        loss = loss_of(engine, rank, step)
        engine.backward(loss)
        seen.append(loss.item())
        engine.step()
        save(step, "training")
        if step % 2:
            optimizer.eval()
            with torch.no_grad():
                seen.append(loss_of(engine, 0, 99).item())
        save(step, "evaluating")
    optimizer.eval()
    return seen


@pytest.mark.parametrize(("stage", "world"), [(0, 2), nightly(1, 3), nightly(2, 2), (3, 2), nightly(3, 1)])
@pytest.mark.parametrize("tier", ["device", nightly("cpu"), "nvme"])
def test_evaluations_see_the_mean_of_the_weights(stage: int, world: int, tier: str, tmp_path: Path) -> None:
    if tier != "device" and stage == 0:
        pytest.skip("offload needs sharded states")
    base = network()
    wanted, weights = plain(base, world)
    more: dict[str, Any] = {}
    if tier != "device":
        place = {"device": tier, **({"nvme_path": str(tmp_path)} if tier == "nvme" else {})}
        more["zero_optimization"] = {"stage": stage, "offload_optimizer": place}
    settings = without("optimizer", config(stage, **more))

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        with libzero.Engine(model, settings, comm=comm, optimizer=ScheduleFree) as engine:

            def save(step: int, tag: str) -> None:
                if step == 1:
                    engine.save_checkpoint(tmp_path / "run", tag)

            seen = trained(engine, engine.optimizer, comm.rank, range(STEPS), save)
            return seen, [engine.parameter_state(name) for name, _ in model.named_parameters()], engine.state_hash()

    results = libzero.run_ranks(world, rank)
    assert results[0][0] == pytest.approx(wanted, rel=1e-5)
    for found, weight in zip(results[0][1], weights, strict=True):
        torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-6)

    def resumed(comm: libzero.Communicator, tag: str) -> Any:
        model = copy.deepcopy(base)
        with libzero.Engine(model, settings, comm=comm, optimizer=ScheduleFree) as engine:
            engine.load_checkpoint(tmp_path / "run", tag)
            optimizer: Any = engine.optimizer
            assert optimizer.param_groups[0]["train_mode"] is (tag == "training")
            trained(engine, optimizer, comm.rank, range(2, STEPS))
            return engine.state_hash(), [engine.parameter_state(name) for name, _ in model.named_parameters()]

    assert libzero.run_ranks(world, lambda comm: resumed(comm, "evaluating"))[0][0] == results[0][2]
    # This one has no change to evaluation and back at step 1, which rounds, in a plain loop too.
    again = libzero.run_ranks(world, lambda comm: resumed(comm, "training"))[0][1]
    for found, weight in zip(again, weights, strict=True):
        torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-6)


def test_bf16_parameters_follow() -> None:
    base = network()

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        settings = without("optimizer", config(3, bf16={"enabled": True}))
        with libzero.Engine(model, settings, comm=comm, optimizer=ScheduleFree) as engine:
            optimizer: Any = engine.optimizer
            optimizer.train()
            for step in range(3):
                engine.backward(engine(batch(comm.rank, step).bfloat16()).float().square().mean())
                engine.step()
            before = engine.parameter_state("0.weight")
            optimizer.eval()
            masters = {name: engine.parameter_state(name) for name, _ in model.named_parameters()}
            with engine.gathered_parameters():
                assert all(torch.equal(p, masters[name].bfloat16()) for name, p in model.named_parameters())
            assert not torch.equal(before, masters["0.weight"])

    libzero.run_ranks(2, rank)


def test_deepspeeds_names_reach_it() -> None:
    base = network()
    wanted = plain(base, 2)[0]

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        settings = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}
        engine, optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=ScheduleFree(model.parameters()), config=settings
        )
        return trained(engine, optimizer, comm.rank, range(STEPS))

    assert libzero.run_ranks(2, rank)[0] == pytest.approx(wanted, rel=1e-5)


def test_what_it_cannot_do_is_said() -> None:
    base = network()
    assert probe(ScheduleFree(base.parameters())).policy == "elements"
    with libzero.Engine(base, without("optimizer", config(0)), optimizer=ScheduleFree) as engine:
        engine.backward(loss_of(engine, 0, 0))
        with pytest.raises(RuntimeError, match="step\\(\\) in evaluation"):
            engine.step()
    with libzero.Engine(network(), config(0)) as engine:
        assert not hasattr(engine.optimizer, "train")
