"""Update rules that a configuration names, compared with torch's classes in a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch, config, losses_of, network, nightly

import libzero

O = torch.optim

STEPS = 9

RULES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "amsgrad": (O.AdamW, "AdamW", {"amsgrad": True, "weight_decay": 0.1}),
    "amsgrad with L2": (O.Adam, "Adam", {"amsgrad": True, "weight_decay": 0.1}),
    "RMSprop": (O.RMSprop, "RMSprop", {"weight_decay": 0.1}),
    "RMSprop, momentum": (O.RMSprop, "RMSprop", {"momentum": 0.9, "alpha": 0.9}),
    "RMSprop, centered": (O.RMSprop, "RMSprop", {"centered": True, "eps": 1e-6}),
    "RMSprop, both": (O.RMSprop, "RMSprop", {"centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    "NAdam": (O.NAdam, "NAdam", {"weight_decay": 0.1, "momentum_decay": 0.01}),
    "NAdam, decoupled": (O.NAdam, "NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (O.RAdam, "RAdam", {"weight_decay": 0.1, "betas": [0.8, 0.9]}),
    "RAdam, decoupled": (O.RAdam, "RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adamax": (O.Adamax, "Adamax", {"weight_decay": 0.1}),
    "Adadelta": (O.Adadelta, "Adadelta", {"weight_decay": 0.1, "rho": 0.8}),
}
DEFAULTS = [O.RMSprop, O.NAdam, O.RAdam, O.Adamax, O.Adadelta]


def block(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    more = {"adam_w_mode": False} if kind == "Adam" else {}
    return {"optimizer": {"type": kind, "params": {"lr": 3e-3, **params, **more}}}


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean() * (20.0 if step % 3 == 0 else 1.0)


def plain(made: Any, world: int) -> tuple[torch.nn.Module, O.Optimizer, list[float]]:
    model, losses = network(), []
    optimizer = made(model.parameters())
    for step in range(STEPS):
        loss = sum(loss_of(model, rank, step) for rank in range(world)) / world
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


@pytest.mark.parametrize("name", RULES)
def test_rules_are_torchs_at_every_stage(name: str, tmp_path: Path) -> None:
    kind, spelled, params = RULES[name]
    model, optimizer, losses = plain(lambda p: kind(p, lr=3e-3, **params), 2)
    hashes = set()
    for stage, offload in [(0, None), (1, None), (2, "cpu"), (3, "nvme")]:
        zero: dict[str, Any] = {"stage": stage}
        if offload:
            zero["offload_optimizer"] = {"device": offload, "nvme_path": str(tmp_path)}
        settings = config(stage, **block(spelled, params)) | {"zero_optimization": zero}
        models = [network(), network()]

        def rank(comm: libzero.Communicator) -> tuple[str, list[float], dict[str, torch.Tensor]]:
            engine = libzero.Engine(models[comm.rank], settings)
            found = losses_of(engine, loss_of, STEPS)
            states = {key: engine.parameter_state("0.weight", key) for key in own}
            return engine.state_hash(), found, {**engine.state_dict(), **states}

        first = optimizer.state[model[0].weight]
        own = {key for key, value in first.items() if isinstance(value, torch.Tensor) and value.dim() == 2}
        (hash_, a, values), (_, b, _) = libzero.run_ranks(2, rank)
        hashes.add(hash_)
        assert all(abs((x + y) / 2 - z) <= 1e-6 * max(1, abs(z)) for x, y, z in zip(a, b, losses, strict=True))
        for key, value in [*model.state_dict().items(), *((key, first[key]) for key in own)]:
            torch.testing.assert_close(values[key], value, rtol=1e-5, atol=1e-6)
    assert len(hashes) == 1


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_torchs(kind: Any) -> None:
    engine = libzero.Engine(network(), config(2, optimizer={"type": kind.__name__}))
    defaults = kind(network().parameters()).defaults
    group = engine.optimizer.param_groups[0]
    shown = {key: value for key, value in defaults.items() if key in group}
    assert {"lr", "weight_decay", "eps"} <= set(shown) and shown == {key: group[key] for key in shown}


@pytest.mark.parametrize("recipe", ["bf16", nightly("fp16")])
def test_a_resumed_run_has_the_same_bits(recipe: str, tmp_path: Path) -> None:
    for name in ("amsgrad", "RMSprop, both", "NAdam", "RAdam"):
        _, spelled, params = RULES[name]
        settings = config(3, **block(spelled, params), **{recipe: {"enabled": True}})
        dtype = torch.bfloat16 if recipe == "bf16" else torch.float16

        def train(engine: libzero.Engine, begin: int, end: int) -> None:
            for step in range(begin, end):
                engine.backward(engine(batch(0, step).to(dtype)).float().square().mean())
                engine.step()

        whole = libzero.Engine(network(), settings)
        train(whole, 0, 8)
        first = libzero.Engine(network(), settings)
        train(first, 0, 5)
        folder = tmp_path / name.replace(" ", "-")
        first.save_checkpoint(folder, "t")
        second = libzero.Engine(network(2), settings)
        second.load_checkpoint(folder, "t")
        train(second, 5, 8)
        assert second.state_hash() == whole.state_hash(), name


def test_schedulers_move_the_numbers_of_the_rule() -> None:
    engine = libzero.Engine(network(), config(1, **block("RMSprop", {"momentum": 0.9})))
    engine.optimizer.param_groups[0]["alpha"] = 0.5
    engine.optimizer.param_groups[0]["momentum"] = 0.1
    other = libzero.Engine(network(), config(1, **block("RMSprop", {"momentum": 0.1, "alpha": 0.5})))
    for each in (engine, other):
        for step in range(3):
            each.backward(each(batch(0, step)).square().mean())
            each.step()
    assert engine.state_hash() == other.state_hash()
    nadam = libzero.Engine(network(), config(1, **block("NAdam", {})))
    nadam.optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    nadam.backward(nadam(batch(0, 0)).square().mean())
    with pytest.raises(libzero.ConfigError, match="first betas of all updates before"):
        nadam.step()
    centered = libzero.Engine(network(), config(1, **block("RMSprop", {})))
    centered.optimizer.param_groups[0]["centered"] = True
    centered.backward(centered(batch(0, 0)).square().mean())
    with pytest.raises(libzero.ConfigError, match="cannot change while training"):
        centered.step()


def test_deepspeed_takes_the_names(tmp_path: Path) -> None:
    import libzero.deepspeed as deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "RMSprop", "params": {"lr": 3e-3, "momentum": 0.9}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
    }
    model, _, losses = plain(lambda p: O.RMSprop(p, lr=3e-3, momentum=0.9), 1)
    engine, optimizer, _, _ = deepspeed.initialize(model=network(), config=settings)
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["alpha"] == 0.99
    for step in range(STEPS):
        loss = loss_of(engine, 0, step)
        engine.backward(loss)
        engine.step()
        assert abs(loss.item() - losses[step]) <= 1e-6 * max(1, losses[step])


def test_keys_of_other_rules_are_refused() -> None:
    with pytest.raises(libzero.ConfigError, match="alpha.*unknown key for type NAdam"):
        libzero.Engine(network(), config(1, **block("NAdam", {"alpha": 0.9})))
    schedule = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}}
    with pytest.raises(libzero.ConfigError, match="cycle_momentum false"):
        libzero.Engine(network(), config(1, **block("NAdam", {}), scheduler=schedule))
