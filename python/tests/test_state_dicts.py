"""torch.distributed.checkpoint.state_dict over an engine's model and optimizer, compared with plain torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import batch, config, network, nightly, without
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import libzero
from libzero.muon import Muon, muon_groups

O = torch.optim
FULL = StateDictOptions(full_state_dict=True)
HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)

Make = Callable[[torch.nn.Module], O.Optimizer]


class OwnAdam(O.Adam):
    """Run by the program's own step()."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def two_groups(kind: Any, **words: Any) -> Make:
    def make(model: torch.nn.Module) -> O.Optimizer:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": biases, "weight_decay": 0.0, "lr": 3e-3}, {"params": weights, "name": "weights"}]
        return kind(groups, lr=1e-3, **words)  # type: ignore[no-any-return]

    return make


MAKE: dict[str, Make] = {
    "AdamW": two_groups(O.AdamW),
    "Adam, own step": two_groups(OwnAdam),
    "SGD": lambda m: O.SGD(m.parameters(), lr=1e-2),
    "SGD, momentum": two_groups(O.SGD, momentum=0.9, dampening=0.5),
    "Adagrad": two_groups(O.Adagrad, initial_accumulator_value=0.1),
    "RMSprop": two_groups(O.RMSprop, momentum=0.9, centered=True),
    "NAdam": two_groups(O.NAdam),
    "Adafactor": lambda m: O.Adafactor(m.parameters(), lr=1e-2),
    "Muon": lambda m: Muon(muon_groups(m)),
}
EACH = ["AdamW", "Adam, own step", "SGD, momentum", "RMSprop", "Adafactor", nightly("SGD"), nightly("Adagrad"),
        nightly("NAdam"), nightly("Muon")]  # fmt: skip
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (O.AdamW, {"weight_decay": 0.01}),
    "Adam": (O.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "SGD": (O.SGD, {"momentum": 0.9}),
    "Adagrad": (O.Adagrad, {}),
    "RMSprop": (O.RMSprop, {"centered": True, "momentum": 0.5}),
    "NAdam": (O.NAdam, {"momentum_decay": 0.01}),
    "RAdam": (O.RAdam, {}),
    "Adamax": (O.Adamax, {}),
    "Adadelta": (O.Adadelta, {}),
}


def clean(stage: int, **more: Any) -> dict[str, Any]:
    return without("gradient_clipping", without("optimizer", config(stage, **more)))


def step_plain(model: Any, optimizer: O.Optimizer, step: int) -> None:
    torch.stack([model(batch(rank, step)).square().mean() for rank in (0, 1)]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(engine.comm.rank, step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Of nested dictionaries: keys, types of leaves, values; what only says how a rule is computed may lack."""
    if isinstance(theirs, dict):
        keys = {key for key in theirs if key not in ("foreach", "fused", "capturable", "differentiable")}
        assert keys <= set(ours), where
        if where.startswith("/state"):
            assert set(ours) == set(theirs), where
        for key in keys:
            assert_same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}/{i}")
    elif isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, where
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")
    else:
        assert ours == (pytest.approx(theirs) if isinstance(theirs, float) else theirs), where


@pytest.mark.parametrize("name", EACH)
def test_whole_states_are_those_of_plain_torch(name: str) -> None:
    """At every stage, on all ranks, before the first step too."""
    make, base = MAKE[name], network()
    plain = copy.deepcopy(base)
    reference = make(plain)
    expected = []
    for step in range(4):
        if step in (0, 3):
            expected.append(copy.deepcopy(get_state_dict(plain, make(plain) if step == 0 else reference, options=FULL)))
        if step < 3:
            step_plain(plain, reference, step)

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        optimizer = make(model)
        with libzero.Engine(model, clean(stage), comm=comm, optimizer=optimizer) as engine:
            first = get_state_dict(model, optimizer, options=FULL)
            train(engine, range(3))
            found = get_state_dict(model, optimizer)
            assert engine.global_step == 3
            return first, found, get_optimizer_state_dict(model, optimizer, options=HOST), (
                engine.full_optimizer_state_dict(), get_model_state_dict(model, options=FULL))  # fmt: skip

    for stage in range(4):
        for i, (first, found, host, (full, model)) in enumerate(libzero.run_ranks(2, rank)):
            assert_same(found[0], expected[1][0])
            assert_same(found[1], expected[1][1])
            assert_same(host, expected[1][1])
            assert_same(full, expected[1][1] if i == 0 else {})
            assert i == 0 or full == {}
            assert_same(model, expected[1][0])
            assert_same(first[0], expected[0][0])
            for states in (*first[1]["state"].values(), *expected[0][1]["state"].values()):
                states.pop("step", None)  # torch has made one step by then
                states.pop("mu_product", None)
            assert_same(first[1], expected[0][1])


@pytest.mark.parametrize("name", [*list(RULES)[:3], *map(nightly, list(RULES)[3:])])
def test_built_in_rules_have_torchs_names(name: str) -> None:
    kind, params = RULES[name]
    base = network()
    plain = copy.deepcopy(base)
    reference = kind(plain.parameters(), lr=3e-3, **params)
    for step in range(3):
        step_plain(plain, reference, step)
    theirs = get_optimizer_state_dict(plain, reference)
    more = {"adam_w_mode": False} if name == "Adam" else {}

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        settings = config(3, optimizer={"type": name, "params": {"lr": 3e-3, **params, **more}})
        with libzero.Engine(model, settings, comm=comm) as engine:
            train(engine, range(3))
            with pytest.raises(libzero.ConfigError, match="full_optimizer_state_dict"):
                engine.optimizer.state_dict()
            return get_optimizer_state_dict(model, engine.optimizer, options=FULL)

    for found in libzero.run_ranks(2, rank):
        assert_same(found["state"], theirs["state"], "/state")
        assert found["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]


@pytest.mark.parametrize("name, flat", [*((name, False) for name in EACH[:5]), ("AdamW", True), ("Adafactor", True),
                                       *(nightly(*each.values, flat) for each in EACH[5:] for flat in (False, True))])  # fmt: skip
def test_training_continues_from_whole_states(name: str, flat: bool) -> None:
    """In a new engine of another stage and number of ranks: as one that was not interrupted, and as plain torch."""
    make, base = MAKE[name], network()
    # Torch itself loads no flat whole dictionaries, and no whole one without states.
    options = StateDictOptions(full_state_dict=not flat and name != "SGD", flatten_optimizer_state_dict=flat)
    plain = copy.deepcopy(base)
    reference = make(plain)
    for step in range(3):
        step_plain(plain, reference, step)
    theirs = copy.deepcopy(get_state_dict(plain, reference))
    for step in range(3, 6):
        step_plain(plain, reference, step)

    def whole(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        optimizer = make(model)
        with libzero.Engine(model, clean(stage), comm=comm, optimizer=optimizer) as engine:
            train(engine, range(3))
            saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
            train(engine, range(3, 6))
            end = engine.state_hash()
            set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
            assert engine.global_step in (3, 6)  # of rules that count, 3
            losses = train(engine, range(3, 6))
            return saved, end, engine.state_hash(), losses

    def continued(comm: libzero.Communicator) -> Any:
        model = network(seed=7)
        optimizer = make(model)
        optimizer.param_groups[0]["lr"] = 0.5  # the dictionary's is taken
        with libzero.Engine(model, clean(3 - stage), comm=comm, optimizer=optimizer) as engine:
            given = copy.deepcopy(saved)
            set_model_state_dict(model, given[0], options=FULL)
            set_optimizer_state_dict(model, optimizer, given[1], options=options)
            train(engine, range(3, 6))
            return engine.state_hash(), get_model_state_dict(model)

    for stage in (0, 1, 2, 3):
        (saved, end, again, _), _ = libzero.run_ranks(2, whole)
        assert end == again
        (other, found), _ = libzero.run_ranks(2, continued)
        assert other == end
        assert_same(found, plain.state_dict())
        if not flat:
            saved = theirs
            (_, found), _ = libzero.run_ranks(2, continued)
            assert_same(found, plain.state_dict())
