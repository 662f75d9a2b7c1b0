"""Muon by name: compared with torch.optim.Muon and AdamW in a plain loop, sharded, and by DeepSpeed's configuration."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch, config, losses_of, network

import libzero
from libzero.muon import Muon, muon_groups

STEPS = 8


def clean(stage: int) -> dict[str, Any]:
    return {key: value for key, value in config(stage).items() if key != "optimizer"}


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def plain(optimizers: list[torch.optim.Optimizer], model: torch.nn.Module, world: int = 1) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = sum(loss_of(model, rank, step) for rank in range(world)) / world
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("numbers", [{}, {"nesterov": False, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}])
def test_the_rule_is_torchs(numbers: dict[str, Any]) -> None:
    ours, theirs = network(), network()
    decay = numbers.get("weight_decay", 0.0)
    first = plain([Muon(muon_groups(ours), lr=0.02, adam_lr=1e-3, **numbers)], ours)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    others = [p for p in theirs.parameters() if p.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.02, **{"weight_decay": 0.0, **numbers})
    second = plain([muon, torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=decay)], theirs)
    assert all(abs(a - b) <= 1e-3 * b for a, b in zip(first, second, strict=True))


def test_the_direction_is_nearly_orthogonal() -> None:
    for shape in ((32, 8), (8, 32), (4, 3, 2, 2)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        optimizer = Muon([{"params": [weight]}], lr=1.0, ns_method="gram")
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        rows = weight.detach().reshape(shape[0], -1)
        values = torch.linalg.svdvals(rows / max(1.0, rows.size(0) / rows.size(1)) ** 0.5)
        assert values.min() > 0.6 and values.max() < 1.3, shape


def test_which_parameters_are_matrices() -> None:
    model = torch.nn.ModuleDict(
        {"table": torch.nn.Embedding(5, 4), "hidden": torch.nn.Linear(4, 4), "lm_head": torch.nn.Linear(4, 5)}
    )
    model["marked"] = torch.nn.Linear(4, 4)
    model["marked"].weight.use_muon = False
    first, second = muon_groups(model, muon={"momentum": 0.9})
    assert first["use_muon"] and [tuple(p.shape) for p in first["params"]] == [(4, 4)] and first["momentum"] == 0.9
    assert len(second["params"]) == 6 and not second["use_muon"]
    with pytest.raises(libzero.ConfigError, match="two dimensions or more"):
        flat = torch.nn.Parameter(torch.ones(3))
        flat.grad = torch.ones(3)
        Muon([flat]).step()
    with pytest.raises(libzero.ConfigError, match="expected one of standard, gram"):
        Muon([{"params": [torch.nn.Parameter(torch.ones(2, 2))], "ns_method": "exact"}])


def test_stages_train_as_a_plain_loop(tmp_path: Path) -> None:
    model = network()
    losses = plain([Muon(muon_groups(model), ns_method="gram", weight_decay=0.1)], model, 2)
    hashes = set()
    for stage in range(4):
        models = [network(), network()]

        def rank(comm: libzero.Communicator) -> tuple[str, list[float]]:
            optimizer = Muon(muon_groups(models[comm.rank]), ns_method="gram", weight_decay=0.1)
            engine = libzero.Engine(models[comm.rank], clean(stage), optimizer=optimizer)
            found = losses_of(engine, loss_of, STEPS)
            return engine.state_hash(), found

        (hash_, a), (_, b) = libzero.run_ranks(2, rank)
        hashes.add(hash_)
        assert all(abs((x + y) / 2 - z) <= 1e-5 for x, y, z in zip(a, b, losses, strict=True)), stage
    assert len(hashes) == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeeds_configuration(stage: int) -> None:
    import libzero.deepspeed as deepspeed
    from libzero.deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    params = {"lr": 0.01, "momentum": 0.9, "adam_lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-8, "ns_method": "gram"}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=network(), config=settings)
    own = optimizer if stage == 0 else optimizer.optimizer
    assert str(engine.optimizer_name()).lower() == "muon" and isinstance(own, MuonWithAuxAdam)
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [(True, 0.01), (False, 2e-3)]
    model = network()
    same = Muon(muon_groups(model), lr=0.01, momentum=0.9, adam_lr=2e-3, betas=(0.8, 0.9), eps=1e-8, ns_method="gram")
    losses = plain([same], model)
    for step in range(STEPS):
        loss = loss_of(engine, 0, step)
        engine.backward(loss)
        engine.step()
        assert abs(loss.item() - losses[step]) <= 1e-5


def test_deepspeeds_groups_and_keys() -> None:
    import libzero.deepspeed as deepspeed

    def made(params: dict[str, Any], groups: Any = None) -> Any:
        settings = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Muon", "params": params}}
        model = network()
        return deepspeed.initialize(model=model, model_parameters=groups and groups(model), config=settings)[1]

    marked = network()
    written = deepspeed.DeepSpeedConfig({"optimizer": {"type": "Muon"}, "train_batch_size": 1})
    deepspeed.set_optimizer_flags(written, marked)
    assert all(p.use_muon is (p.dim() == 2) for p in marked.parameters())
    optimizer = made({"lr": 0.01, "muon_lr": 0.03}, lambda model: [
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.2},
    ])
    found = [(group["use_muon"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(False, 0.01, 0.0), (True, 0.03, 0.2)]
    with pytest.raises(libzero.ConfigError, match="optimizer.params.momentun"):
        made({"momentun": 0.9})


class Words(torch.nn.Module):
    """Its table's name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = torch.nn.Embedding(9, 8)
        self.up, self.down = torch.nn.Linear(8, 20), torch.nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.words((x[:, 0] * 4).long() % 9))))


@pytest.mark.parametrize("moves", [False, True])
def test_the_engines_own_rule_is_this_one(moves: bool) -> None:
    model = Words()
    same = Muon(muon_groups(model), lr=0.05, adam_lr=2e-3, weight_decay=0.1, ns_method="gram")
    losses = []
    for step in range(STEPS):
        for group in same.param_groups if moves else ():
            group["lr"] *= 0.9
            group["momentum" if group["use_muon"] else "betas"] = 0.9 if group["use_muon"] else (0.7, 0.95)
        loss = sum(loss_of(model, rank, step) for rank in range(2)) / 2
        torch.autograd.backward(loss)
        same.step()
        model.zero_grad()
        losses.append(loss.item())
    params = {"lr": 0.05, "adam_lr": 2e-3, "weight_decay": 0.1, "ns_method": "gram"}
    hashes = set()
    for stage in (0, 1, 2, 3):
        models = [Words(), Words()]

        def rank(comm: libzero.Communicator) -> tuple[str, list[float]]:
            settings = clean(stage) | {"optimizer": {"type": "Muon", "params": params}}
            engine = libzero.Engine(models[comm.rank], settings)
            found = []
            for step in range(STEPS):
                for group in engine.optimizer.param_groups if moves else ():
                    group["lr"] *= 0.9
                    group["momentum"], group["betas"] = 0.9, (0.7, 0.95)
                loss = loss_of(engine, comm.rank, step)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            assert engine.parameter_state("words.weight", "exp_avg_sq").shape == (9, 8)
            assert engine.parameter_state("up.weight", "momentum_buffer").shape == (20, 8)
            with pytest.raises(libzero.ConfigError, match="expected one of master, momentum_buffer"):
                engine.parameter_state("up.weight", "exp_avg")
            return engine.state_hash(), found

        (hash_, a), (_, b) = libzero.run_ranks(2, rank)
        hashes.add(hash_)
        assert all(abs((x + y) / 2 - z) <= 1e-5 for x, y, z in zip(a, b, losses, strict=True)), stage
    assert len(hashes) == 1


def test_states_are_those_of_each_kind() -> None:
    """Muon's matrices have one state, AdamW's parameters two, also in an optimizer of the program."""

    def bytes_of(make: Any, settings: dict[str, Any]) -> int:
        model = Words()
        engine = libzero.Engine(model, settings, optimizer=make and make(model))
        return int(engine.memory().current("device", "optimizer states"))

    matrices, others = 20 * 8 + 3 * 20, 9 * 8 + 20 + 3
    padding = 4 * 2 * 15 * 5  # each parameter begins at a multiple of 16 elements
    by_name = bytes_of(None, clean(1) | {"optimizer": {"type": "Muon", "params": {"lr": 0.05}}})
    of_program = bytes_of(lambda model: Muon(muon_groups(model)), clean(1))
    for found in (by_name, of_program):
        assert 4 * (matrices + 2 * others) <= found <= 4 * (matrices + 2 * others) + padding
