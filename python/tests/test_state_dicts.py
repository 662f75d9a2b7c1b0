"""torch.distributed.checkpoint.state_dict over an engine's model and optimizer, compared with plain torch."""

import copy
import sys
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
                                       *(nightly(*each.values, flat) for each in EACH[5:]
                                         for flat in (False, True))])  # fmt: skip
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


def adamw(lr: float = 1e-3, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"lr": lr, **params}}}


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BARE = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (3, BF16),
    "bf16, 16-bit states": (2, {**BF16, **adamw(state_bits=16)}),
    "bf16, 8-bit states": (3, {**BF16, **adamw(state_bits=8)}),
    "no masters": (3, BARE),
    "fp16 with overflow": (1, {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}),
    "states in host memory": (3, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    "states in files": (3, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}),
    "its own schedule": (1, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 60}}}),
}


@pytest.mark.parametrize("own", [False, nightly(True)])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_precision_and_tier_continues(name: str, own: bool, tmp_path: Any) -> None:
    """The bits of an engine that was not interrupted, in a new engine that begins with other values."""
    stage, more = SETTINGS[name]
    if own and (name == "no masters" or "optimizer" in more):
        return  # an optimizer of the program needs fp32 states
    settings = copy.deepcopy(config(stage, **more))
    if "files" in name:
        settings["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path)
    if own:
        settings = without("gradient_clipping", without("optimizer", settings))
    dtype = torch.bfloat16 if "bf16" in settings else torch.float16 if "fp16" in settings else torch.float32
    base = network(width=40)

    def run(engine: Any, steps: range) -> None:
        for step in steps:
            engine.backward(engine(batch(engine.comm.rank, step).to(dtype)).float().square().mean())
            engine.step()

    def engine_of(model: Any, comm: libzero.Communicator) -> libzero.Engine:
        return libzero.Engine(model, settings, comm=comm, optimizer=O.RMSprop(model.parameters()) if own else None)

    def rank(comm: libzero.Communicator) -> Any:
        with engine_of(copy.deepcopy(base), comm) as engine:
            run(engine, range(4))
            saved = get_state_dict(engine.module, engine.optimizer, options=HOST)
            assert all(value.dtype == torch.float32 for value in saved[0].values())
            steps = {float(state["step"]) for state in saved[1]["state"].values()}
            assert steps == {float(engine.global_step - engine.skipped_steps)}
            if "overflow" in name:
                assert 0 < engine.skipped_steps < 4
            scale = engine.loss_scale
            run(engine, range(4, 7))
            expected = engine.state_hash(), engine.optimizer.param_groups[0]["lr"]
        model = network(seed=5, width=40)
        if dtype == torch.float16:
            settings["fp16"]["initial_scale_power"] = int(torch.tensor(scale).log2())
        with engine_of(model, comm) as engine:
            set_state_dict(model, engine.optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
            run(engine, range(4, 7))
            return (engine.state_hash(), engine.optimizer.param_groups[0]["lr"]), expected

    for found, expected in libzero.run_ranks(1 if "overflow" in name else 2, rank):
        assert found == expected


def test_frozen_parameters() -> None:
    """They have no states. Of parameters that were unfrozen torch's step is known of a program's optimizer."""
    base = network()
    base[0].requires_grad_(False)

    def rank(comm: libzero.Communicator) -> None:
        for kind in (O.AdamW, O.RMSprop):
            model = copy.deepcopy(base)
            optimizer = kind(model.parameters(), lr=1e-3)
            with libzero.Engine(model, clean(3), comm=comm, optimizer=optimizer) as engine:
                train(engine, range(2))
                model_state, state = get_state_dict(model, optimizer, options=FULL)
                torch.testing.assert_close(model_state["0.weight"], base[0].weight, rtol=0, atol=0)
                assert list(state["state"]) == ["2.weight", "2.bias", "4.weight", "4.bias"]
                assert state["param_groups"][0]["params"][0] == "0.weight"
                model_state["0.weight"] = torch.ones(32, 8)
                set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state, options=FULL)
                assert torch.equal(engine.parameter_state("0.weight"), torch.ones(32, 8))
                state["state"]["0.bias"] = state["state"]["2.bias"]
                with pytest.raises(libzero.ConfigError, match=r"states of 0\.bias, which the engine does not train"):
                    engine.set_full_optimizer_state_dict(state)
                model[0].requires_grad_(True)
                train(engine, range(2, 4))
                if kind is O.RMSprop:
                    found = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
                    assert [float(found[name]["step"]) for name in ("0.weight", "2.weight")] == [2, 4]
                    assert engine.full_optimizer_state_dict() == {} or comm.rank == 0
                    continue
                for call in (engine.full_optimizer_state_dict, lambda: get_optimizer_state_dict(model, optimizer)):
                    with pytest.raises(libzero.ConfigError, match=r"frozen or unfrozen.*save_checkpoint"):
                        call()

    libzero.run_ranks(2, rank)


def test_counts_of_a_loaded_checkpoint(tmp_path: Any) -> None:
    def one(folder: Any, unfrozen: bool) -> None:
        model = network()
        with libzero.Engine(model, config(1)) as engine:
            train(engine, range(2))
            if unfrozen:
                model[0].requires_grad_(False)
                train(engine, range(1))
                model[0].requires_grad_(True)
            engine.save_checkpoint(folder, "one")

    for unfrozen in (False, True):
        folder = tmp_path / str(unfrozen)
        one(folder, unfrozen)
        with libzero.Engine(network(), config(3)) as engine:
            engine.load_checkpoint(folder)
            if unfrozen:
                with pytest.raises(libzero.ConfigError, match="frozen or unfrozen"):
                    engine.full_optimizer_state_dict()
                engine.load_checkpoint(folder, weights_only=True)
                assert engine.full_optimizer_state_dict()["state"]["0.weight"]["step"] == 0
            else:
                assert engine.full_optimizer_state_dict()["state"]["0.weight"]["step"] == 2


def test_what_does_not_fit_is_told_on_all_ranks() -> None:
    base = network()

    def rank(comm: libzero.Communicator) -> None:
        model = copy.deepcopy(base)
        optimizer = O.AdamW(model.parameters(), lr=1e-3)
        with libzero.Engine(model, clean(2), comm=comm, optimizer=optimizer) as engine:
            train(engine, range(2))
            before, good = engine.state_hash(), get_optimizer_state_dict(model, optimizer)

            def refused(change: Callable[[Any], Any], why: str) -> None:
                bad = copy.deepcopy(good)
                change(bad)
                with pytest.raises(libzero.ConfigError, match=why):
                    engine.set_full_optimizer_state_dict(bad if comm.rank == 0 else {})

            state = "2.weight"
            refused(lambda d: d["state"].pop(state), r"got no states of 2\.weight")
            refused(lambda d: d["state"][state].pop("exp_avg"), r"got no exp_avg of 2\.weight, expected exp_avg, exp")
            refused(lambda d: d["state"][state].update(exp_avg=torch.ones(3)), r"got \(3,\), expected .*\(32, 32\)")
            refused(lambda d: d["state"][state].update(sum=torch.ones(3)), "a state sum of 2.weight, expected step, ex")
            refused(lambda d: d["state"][state].update(step=torch.tensor(7.0)), r"2 updates of 0\.weight and 7 of 2\.w")
            refused(lambda d: d["param_groups"][0].update(amsgrad=True), r"\['amsgrad'\] got True, expected False")
            refused(lambda d: d["param_groups"][0]["params"].pop(), r"groups of \[5\] parameters, expected \[6\]")
            refused(lambda d: d.pop("param_groups"), "got no 'param_groups'")
            assert engine.state_hash() == before and optimizer.param_groups[0]["lr"] == 1e-3
            wrong = get_model_state_dict(model)
            wrong["2.weight"] = torch.ones(3)
            with pytest.raises(RuntimeError, match=r"size mismatch for 2\.weight: got \(3,\), expected \(32, 32\)"):
                set_model_state_dict(model, wrong)
            with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "2.weight"'):
                set_model_state_dict(model, {key: v for key, v in base.state_dict().items() if key != "2.weight"})
            assert set_model_state_dict(model, {"0.bias": torch.ones(32)}, options=StateDictOptions(strict=False))[0]
            assert torch.equal(engine.parameter_state("0.bias"), torch.ones(32))
            with pytest.raises(RuntimeError, match="writes parameter"):  # without torch.distributed.checkpoint
                model.load_state_dict(base.state_dict())

    libzero.run_ranks(2, rank)


def test_other_callers_get_no_values() -> None:
    """Frameworks may ask on one rank alone."""
    base = network()

    def rank(comm: libzero.Communicator) -> None:
        for kind in (O.AdamW, O.RMSprop):
            model = copy.deepcopy(base)
            optimizer = kind(model.parameters(), lr=1e-3)
            with libzero.Engine(model, clean(3), comm=comm, optimizer=optimizer) as engine:
                train(engine, range(1))
                if comm.rank == 0:
                    state = optimizer.state_dict()
                    assert state["state"] == {} and "engine.save_checkpoint" in state["libzero"]
                    optimizer.load_state_dict(state)
                    held = optimizer.state[model[0].weight]
                    assert set(held) == set(optimizer.state[model[2].bias]) and "step" in held
                    with pytest.raises(libzero.ConfigError, match="full_optimizer_state_dict"):
                        held["step"]
                    assert "nothing" not in held
                state = get_optimizer_state_dict(model, optimizer)
                assert state["state"]["0.weight"]["step"] == 1
                numbered = {"state": {i: each for i, each in enumerate(state["state"].values())},
                            "param_groups": [{**state["param_groups"][0], "params": list(range(6)),
                                              "lr": 0.25}]}  # fmt: skip
                before = engine.state_hash()
                optimizer.load_state_dict(numbered)  # as a plain program has saved it
                assert engine.state_hash() == before and optimizer.param_groups[0]["lr"] == 0.25

    libzero.run_ranks(2, rank)


def test_an_average_of_whole_values_and_a_compiled_model() -> None:
    """As averaging code over FSDP is written. Buffers and tied parameters come along."""
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = torch.nn.Embedding(8, 4), torch.nn.BatchNorm1d(4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.norm(self.table(x)))

    torch.manual_seed(3)
    base = Tied()
    plain = copy.deepcopy(base)
    reference, words = O.AdamW(plain.parameters(), lr=1e-2), torch.arange(8)
    average: dict[str, Any] = copy.deepcopy(plain.state_dict())
    for _ in range(3):
        plain(words).square().mean().backward()
        reference.step()
        reference.zero_grad()
        for key, value in plain.state_dict().items():
            average[key] = average[key] + (value - average[key]) * 0.5

    def rank(comm: libzero.Communicator) -> None:
        for compiled in (False, True):
            model: Any = copy.deepcopy(base)
            optimizer = O.AdamW(model.parameters(), lr=1e-2)
            run = torch.compile(model, backend="eager") if compiled and comm.rank == 0 else model
            with libzero.Engine(run, clean(3, bf16={"enabled": False}), comm=comm, optimizer=optimizer) as engine:
                found = copy.deepcopy(get_model_state_dict(run, options=FULL))
                for _ in range(3):
                    engine.backward(model(words).square().mean())
                    engine.step()
                    for key, value in get_model_state_dict(run, options=FULL).items():
                        found[key] = found[key] + (value - found[key]) * 0.5
                assert_same(found, average)
                copied = engine.unsharded_copy()
                copy.deepcopy(copied)  # without what belongs to the engine
                assert_same(get_model_state_dict(copied), get_model_state_dict(run))
                set_model_state_dict(run, {key: value.clone() for key, value in found.items()}, options=FULL)
                tracked = {"norm.num_batches_tracked": torch.tensor(2)}  # an integer
                assert_same(get_model_state_dict(run), average | tracked)
                assert torch.equal(engine.parameter_state("table.weight"), found["head.weight"])
            assert not model._state_dict_hooks and not model._load_state_dict_pre_hooks

    libzero.run_ranks(2, rank)


def test_each_element_is_sent_once() -> None:
    """Also those of parameters that lie in shards of several ranks, and next to others in a unit."""
    base = network(width=40)
    elements = sum(p.numel() for p in base.parameters())

    def rank(comm: libzero.Communicator) -> int:
        with libzero.Engine(copy.deepcopy(base), config(stage), comm=comm) as engine:
            train(engine, range(2))
            comm.reset_stats()
            found = engine.full_optimizer_state_dict()
            sent: int = comm.stats()["bytes_sent"]
            for name, state in found.get("state", {}).items():
                assert all(value.device.type == "cpu" for value in state.values()), name
            for name, _ in base.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    whole = engine.parameter_state(name, key)
                    assert comm.rank > 0 or torch.equal(found["state"][name][key], whole)
            return sent

    for stage in (0, 3):
        assert sum(libzero.run_ranks(3, rank)) <= 2 * 2 * 4 * elements  # two receive each element of two states


def test_divided_experts_are_refused() -> None:
    def rank(comm: libzero.Communicator) -> None:
        moe = libzero.MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), moe)
        with libzero.Engine(model, config(1), comm=comm) as engine:
            for call in (lambda: get_model_state_dict(model), engine.full_optimizer_state_dict):
                with pytest.raises(libzero.ConfigError, match=r"experts are divided.*save_checkpoint"):
                    call()

    libzero.run_ranks(2, rank)


PROGRAM = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_optimizer_state_dict,
        set_state_dict)

    torch.distributed.init_process_group("gloo")
    first, folder = torch.distributed.get_rank() == 0, os.path.dirname(os.path.abspath(__file__))

    def engine_of(seed, stage):
        model = network(seed)
        optimizer = torch.optim.{kind}(model.parameters(), lr=1e-3)
        left_out = ("optimizer", "gradient_clipping")
        settings = {{key: value for key, value in config(stage).items() if key not in left_out}}
        return libzero.Engine(model, settings, optimizer=optimizer), model, optimizer

    def train(engine, steps):
        for step in steps:
            engine.backward(engine(batch(engine.comm.rank, step)).square().mean())
            engine.step()

    engine, model, optimizer = engine_of(1, {stage})
    train(engine, range(3))
    host = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_state_dict(model, optimizer, options=host)
    assert first or saved == ({{}}, {{}})
    assert get_model_state_dict(model, options=host).keys() == saved[0].keys()
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=folder + "/sharded")
    if first:
        torch.save(saved, folder + "/whole.pt")
    train(engine, range(3, 6))
    hashes = [engine.state_hash()]
    engine.close()

    # The usual loads: whole values of rank 0, and what torch.distributed.checkpoint reads into a new program's states.
    engine, model, optimizer = engine_of(2, 3 - {stage})
    all_of_it = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    given = torch.load(folder + "/whole.pt", weights_only=True) if first else ({{}}, {{}})
    set_model_state_dict(model, given[0], options=all_of_it)  # torch's set_state_dict() hangs with an empty one
    set_optimizer_state_dict(model, optimizer, given[1], options=all_of_it)
    train(engine, range(3, 6))
    hashes.append(engine.state_hash())
    engine.close()

    engine, model, optimizer = engine_of(3, {stage})
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder + "/sharded")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    train(engine, range(3, 6))
    hashes.append(engine.state_hash())
    assert len(set(hashes)) == 1, hashes
    print("same", flush=True)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "kind, stage", [("AdamW", 3), nightly("RMSprop", 3), nightly("AdamW", 1), nightly("RMSprop", 0)]
)
def test_programs_over_a_process_group(kind: str, stage: int, programs: Any) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--standalone"]
    assert programs.run(PROGRAM.format(kind=kind, stage=stage), *torchrun, timeout=120).count("same") == 2


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_under_deepspeeds_names(name: str) -> None:
    """The optimizer that initialize() returns, and that of the configuration."""
    from libzero import deepspeed

    base = network()
    plain = copy.deepcopy(base)
    reference = getattr(O, name)(plain.parameters(), lr=1e-3)
    for step in range(4):
        if step == 2:
            middle = copy.deepcopy(get_state_dict(plain, reference))
        plain(batch(0, step)).square().mean().backward()
        reference.step()
        reference.zero_grad()
    model = copy.deepcopy(base)
    own = getattr(O, name)(model.parameters(), lr=1e-3)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=own, config=clean(3))
    assert optimizer is not None
    for again in range(2):
        for step in range(2 if again else 0, 4):
            engine.backward(engine(batch(0, step)).square().mean())
            engine.step()
        assert_same(list(get_state_dict(model, optimizer, options=FULL)), list(get_state_dict(plain, reference)))
        assert optimizer.state_dict()["state"] == {}
        set_state_dict(model, optimizer, model_state_dict=middle[0], optim_state_dict=middle[1])


def test_a_schedule_of_the_configuration_without_a_count(caplog: pytest.LogCaptureFixture) -> None:
    """torch's SGD counts no updates."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    model = network()
    optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with libzero.Engine(model, clean(1, scheduler=schedule), optimizer=optimizer) as engine:
        train(engine, range(2))
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, state)
        assert engine.global_step == 2 and "say no number of updates" in caplog.text
