"""A resumed run has everything that torch's state dicts of module, optimizer and scheduler would have given it."""

import copy
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Programs, batch, config, find_zero, network, nightly, without

import libzero
from libzero import deepspeed

Scheduler = Any
schedulers = torch.optim.lr_scheduler
RECURSIVE: dict[str, Callable[[torch.optim.Optimizer], Scheduler]] = {
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.5),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, half),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.25, total_iters=6),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 10),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5, 3), schedulers.ExponentialLR(o, 0.5)], [3]
    ),
    # These compute each rate from the number of steps.
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.4, total_steps=12, cycle_momentum=False),
}


def half(_: int) -> float:
    return 0.5


def sgd(stage: int, lr: float = 0.1, **more: Any) -> dict[str, Any]:
    return config(stage, optimizer={"type": "SGD", "params": {"lr": lr}}, **more)


def moved(scheduler: Scheduler) -> None:
    scheduler.step(*[1.0] * isinstance(scheduler, schedulers.ReduceLROnPlateau))


def plain_rates(make: Callable[[torch.optim.Optimizer], Scheduler], steps: int) -> tuple[list[float], dict[str, Any]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, rates = make(optimizer), []
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(model(batch(0, step)).square().mean())
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        moved(scheduler)
    return rates, model.state_dict()


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
@pytest.mark.parametrize("layer", ["libzero", "deepspeed"])
@pytest.mark.parametrize("name", RECURSIVE)
def test_rates_of_a_scheduler_of_torch_continue_after_a_resume(
    name: str, layer: str, stage: int, tmp_path: Path
) -> None:
    """Saved after scheduler.step(), as torch's own loops are."""
    make = RECURSIVE[name]
    expected, weights = plain_rates(make, 8)
    rates: list[float] = []
    native = layer == "libzero"

    def start() -> tuple[Any, Any, Scheduler]:
        if native:
            engine = libzero.Engine(network(), sgd(stage))
            return engine, engine.optimizer, make(engine.optimizer)
        wrapped, optimizer, _, _ = deepspeed.initialize(model=network(), config=sgd(stage))
        return wrapped, optimizer, make(optimizer)

    def train(engine: Any, optimizer: Any, scheduler: Scheduler, steps: range) -> None:
        for step in steps:
            engine.backward(engine(batch(0, step)).square().mean())
            rates.append(float(optimizer.param_groups[0]["lr"]))
            engine.step()
            moved(scheduler)

    engine, optimizer, scheduler = start()
    train(engine, optimizer, scheduler, range(4))
    engine.save_checkpoint(tmp_path, "four")
    state = copy.deepcopy(scheduler.state_dict())
    raw = engine if native else engine._engine
    saved_rate = optimizer.param_groups[0]["lr"]
    raw.close()
    again, optimizer, scheduler = start()
    again.load_checkpoint(tmp_path)
    if native:
        assert optimizer.param_groups[0]["lr"] == saved_rate
    else:
        assert again._engine.optimizer.param_groups[0]["lr"] == saved_rate  # a program without this layer has it too
    scheduler.load_state_dict(state)
    train(again, optimizer, scheduler, range(4, 8))
    assert rates == pytest.approx(expected, rel=1e-12)
    raw = again if native else again._engine
    found = raw.state_dict()
    raw.close()
    for key, value in found.items():
        torch.testing.assert_close(value, weights[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", ["configuration", "program", "deepspeed"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_scheduler_moves_momentum(kind: str, layer: str, tmp_path: Path) -> None:
    """Of the rules that the engine has, and also in a run that is resumed before the scheduler moves again."""
    words: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, **({"momentum": 0.9} if kind == "SGD" else {})}
    base = network()

    def cycle(optimizer: torch.optim.Optimizer) -> Scheduler:
        return schedulers.OneCycleLR(optimizer, 0.1, total_steps=9, base_momentum=0.6, max_momentum=0.95)

    plain = copy.deepcopy(base)
    reference = getattr(torch.optim, kind)(plain.parameters(), **words)
    scheduler, expected, numbers = cycle(reference), [], []
    for step in range(8):
        loss = plain(batch(0, step)).square().mean()
        torch.autograd.backward(loss)
        expected.append(loss.item())
        numbers.append(reference.param_groups[0]["momentum" if kind == "SGD" else "betas"])
        reference.step()
        reference.zero_grad()
        scheduler.step()

    def begin() -> tuple[Any, Any]:
        model = copy.deepcopy(base)
        if layer == "configuration":
            engine = libzero.Engine(model, config(2, optimizer={"type": kind, "params": words}))
            return engine, engine.optimizer
        mine = getattr(torch.optim, kind)(model.parameters(), **words)
        if layer == "program":
            return libzero.Engine(model, without("optimizer", config(2)), optimizer=mine), mine
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=mine, config=without("optimizer", config(2))
        )
        return engine, optimizer

    engine, optimizer = begin()
    scheduler = cycle(optimizer)
    losses, seen = [], []
    for step in range(8):
        if step == 4:
            engine.save_checkpoint(tmp_path, "t")
            state = scheduler.state_dict()
            (engine if layer != "deepspeed" else engine._engine).close()
            engine, optimizer = begin()
            scheduler = cycle(optimizer)
            engine.load_checkpoint(tmp_path, "t")
            scheduler.load_state_dict(state)
        loss = engine(batch(0, step)).square().mean()
        losses.append(loss.item())
        seen.append(optimizer.param_groups[0]["momentum" if kind == "SGD" else "betas"])
        engine.backward(loss)
        engine.step()
        scheduler.step()
    (engine if layer != "deepspeed" else engine._engine).close()
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(numbers))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layer", ["libzero", "deepspeed"])
@pytest.mark.parametrize("name", ["ExponentialLR", "CosineAnnealingLR", "LambdaLR"])
def test_a_scheduler_may_be_made_after_the_load(name: str, layer: str, tmp_path: Path) -> None:
    """torch's other way: optimizer.load_state_dict(), then a scheduler with last_epoch=."""
    make: dict[str, Callable[..., Scheduler]] = {
        "ExponentialLR": lambda o, **k: schedulers.ExponentialLR(o, 0.5, **k),
        "CosineAnnealingLR": lambda o, **k: schedulers.CosineAnnealingLR(o, 10, **k),
        "LambdaLR": lambda o, **k: schedulers.LambdaLR(o, lambda step: 1 / (1 + step), **k),
    }

    def three(update: Callable[[], object], optimizer: torch.optim.Optimizer, scheduler: Scheduler) -> list[float]:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # no warning of updates by the engine
        rates = []
        for _ in range(3):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            update()
            scheduler.step()
        return rates

    first, second = (torch.optim.SGD(network().parameters(), lr=0.1) for _ in range(2))
    scheduler = make[name](first)
    three(first.step, first, scheduler)
    second.load_state_dict(first.state_dict())
    expected = three(second.step, second, make[name](second, last_epoch=scheduler.last_epoch))

    def start() -> Any:
        if layer == "libzero":
            return libzero.Engine(network(), sgd(1))
        return deepspeed.initialize(model=network(), config=sgd(1))[0]

    def updated(engine: Any) -> Callable[[], None]:
        def update() -> None:
            engine.backward(engine(batch()).square().mean())
            engine.step()

        return update

    engine, again = start(), start()
    scheduler = make[name](engine.optimizer)
    three(updated(engine), engine.optimizer, scheduler)
    engine.save_checkpoint(tmp_path, "t")
    again.load_checkpoint(tmp_path)
    scheduler = make[name](again.optimizer, last_epoch=scheduler.last_epoch)
    assert three(updated(again), again.optimizer, scheduler) == pytest.approx(expected, rel=1e-12)


def test_rates_stay_where_a_load_leaves_them(tmp_path: Path) -> None:
    """Also those that a scheduler has set and no step() has seen."""
    engine = libzero.Engine(network(), sgd(1))
    engine.save_checkpoint(tmp_path, "t")
    engine.optimizer.param_groups[0]["lr"] = 0.7
    engine.load_checkpoint(tmp_path, "t", weights_only=True)
    assert engine.optimizer.param_groups[0]["lr"] == 0.7
    engine.backward(engine(batch()).square().mean())
    assert engine.step().lr == 0.7
    engine.load_checkpoint(tmp_path, "t")
    assert engine.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("kept", [False, True])
def test_restarts_have_the_rates_of_a_run_that_never_failed(kept: bool, programs: Programs, tmp_path: Path) -> None:
    """From checkpoints, and from kept snapshots."""
    text = f"""
        kept, folder = {kept}, {str(tmp_path)!r} + os.environ.get("TEST_FOLDER", "")
        again = int(os.environ["ZERO_RESTART_COUNT"])
        settings = config(2, optimizer={{"type": "SGD", "params": {{"lr": 0.1}}}})
        settings["libzero"] = {{"keep_snapshot_every": 1 if kept else 0}}
        engine = libzero.Engine(network(), settings)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        if again:
            engine.load_checkpoint(folder)
            scheduler.load_state_dict(engine.user_state)
            print("from step", engine.global_step, flush=True)
        while engine.global_step < 6:
            engine.backward(engine(batch(engine.comm.rank, engine.global_step)).square().mean())
            engine.step()
            scheduler.step()
            if engine.global_step == 4 and "DIES" in os.environ and not again:
                engine.comm.barrier()
                os._exit(1)
            if kept:
                engine.keep_snapshot(folder, user_state=scheduler.state_dict())
            else:
                engine.save_checkpoint(folder, "t", user_state=scheduler.state_dict())
        print("rate", engine.optimizer.param_groups[0]["lr"], engine.logical_hash(), flush=True)
        """
    program = find_zero()
    if program is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    ends = []
    for dies in (False, True):
        words = ["env", f"TEST_FOLDER=/{dies}", *(["DIES=1"] if dies else []), program, "run", "-n", "2"]
        out = programs.run(text, *words, "--restarts", "1", timeout=120)
        assert ("from step 3" in out) == dies, out
        ends.append({line.partition("rate ")[2] for line in out.splitlines() if "rate " in line})
    assert len(ends[0]) == 1 and ends[0] == ends[1], ends
    assert str(0.1 * 0.5**6) in ends[0].pop()


# ---- the program's own state ----
def test_a_save_has_the_user_state_of_its_own_call(tmp_path: Path) -> None:
    engine = libzero.Engine(network(), config(1))
    engine.save_checkpoint(tmp_path, "a", user_state={"step": 10})
    assert engine.user_state == {"step": 10}
    engine.save_checkpoint(tmp_path, "b")
    for tag, state in (("a", {"step": 10}), ("b", None), ("a", {"step": 10})):
        engine.load_checkpoint(tmp_path, tag)
        assert engine.user_state == state
    schedulers.StepLR(engine.optimizer, 2)  # its initial_lr is stored with the state
    for state in (3, None, {"libzero.carried": {"a": 1}}, [1, {"x": None}]):
        engine.save_checkpoint(tmp_path, "c", user_state=state)
        assert engine.user_state == state
        engine.load_checkpoint(tmp_path, "c")
        assert engine.user_state == state
    with libzero.Engine(network(), config(1)) as other:
        for state in ({"libzero.carried": {"a": 1}}, {"libzero.carried": 1, "user_state": 2}):
            other.save_checkpoint(tmp_path, "d", user_state=state)
            assert other.user_state == state
        other.save_checkpoint(tmp_path, "e", user_state={"mine": 1})
    manifest = json.loads((tmp_path / "e" / "manifest.json").read_text())
    assert json.loads(manifest["user_state"]) == {"mine": 1}  # as a program in C++ reads it


# ---- extra state of modules ----
class Counter(torch.nn.Module):
    """Counts its calls; what it has seen is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, torch.zeros(2)
        self.layer = torch.nn.Linear(8, 8)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": [self.seen, ("text", None)]}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.seen = state["calls"], state["seen"][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen + x.detach().sum()
        return self.layer(x)  # type: ignore[no-any-return]


def counters(seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    first = Counter()
    return torch.nn.Sequential(first, torch.nn.Tanh(), Counter(), first)


KEYS = ["0._extra_state", "2._extra_state", "3._extra_state"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize("stage", range(4))
def test_extra_state_is_in_state_dicts_and_checkpoints(stage: int, tmp_path: Path) -> None:
    """Each rank has its own."""

    def body(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        engine = libzero.Engine(model, config(stage))
        for step in range(2):
            engine.backward(engine(batch(comm.rank, step)).square().mean())
            engine.step()
        state = engine.state_dict()
        assert list(state) == list(counters().state_dict())
        assert same([state[key] for key in KEYS], [model[i].get_extra_state() for i in (0, 2, 3)])
        seen = state["0._extra_state"]["seen"][0]
        seen += 1  # a copy
        assert not torch.equal(seen, model[0].seen)
        engine.save_checkpoint(tmp_path / "all", "t", user_state={"mine": comm.rank})
        engine.save_checkpoint(tmp_path / "weights", "t", weights_only=True)
        report = engine.export_weights(tmp_path / "out")
        assert [line for line in report.remarks if "extra state" in line] == [
            f"{key}: the extra state of a module is left out" for key in KEYS
        ]
        engine.close()
        for folder, words in (("all", {}), ("all", {"weights_only": True}), ("weights", {"weights_only": True})):
            other = counters(2)
            again = libzero.Engine(other, config(stage))
            again.load_checkpoint(tmp_path / folder, **words)
            assert other[0].calls == 4 and torch.equal(other[0].seen, model[0].seen)
            assert other[2].calls == 2 and torch.equal(other[2].seen, model[2].seen)
            assert again.user_state == (None if words else {"mine": 0})
            again.close()

    models = [counters(), counters()]
    libzero.run_ranks(2, body)
    alone = counters(3)
    with libzero.Engine(alone, config(stage)) as engine:  # another number of ranks
        engine.load_checkpoint(tmp_path / "all")
    assert alone[0].calls == 4 and torch.equal(alone[0].seen, models[0][0].seen)


def test_extra_state_through_the_deepspeed_layer(tmp_path: Path) -> None:
    engine, _, _, _ = deepspeed.initialize(model=counters(), config=config(3))
    engine.backward(engine(batch()).square().mean())
    engine.step()
    seen = engine.module[0].seen
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert whole is not None and whole["0._extra_state"]["calls"] == 2
    engine.save_checkpoint(tmp_path, client_state={"mine": 1})
    torch.save(engine.module_state_dict(), io.BytesIO())
    for words in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        again, _, _, _ = deepspeed.initialize(model=counters(2), config=config(3))
        assert again.load_checkpoint(tmp_path, **words)[1] == {"mine": 1}
        assert again.module[0].calls == 2 and torch.equal(again.module[0].seen, seen), words
    state = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    fresh = counters(2)
    fresh.load_state_dict(state)
    assert fresh[0].calls == 2 and torch.equal(fresh[0].seen, seen)


class Odd(Counter):
    def get_extra_state(self) -> Any:
        return Path("x") if self.calls else None


def test_extra_state_that_cannot_be_stored_or_is_not_there_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(models[comm.rank], config(1))
        models[comm.rank].calls = comm.rank  # one rank's fault is the error of all
        with pytest.raises(TypeError, match="the extra state of '': got an object that cannot be loaded safely"):
            engine.save_checkpoint(tmp_path, "t")
        engine.close()

    models = [Odd(), Odd()]
    libzero.run_ranks(2, body)

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

    with libzero.Engine(Plain(), config(1)) as engine:
        engine.save_checkpoint(tmp_path, "plain")
    model = Counter()
    with libzero.Engine(model, config(1)) as engine:
        model.calls = 7
        engine.load_checkpoint(tmp_path, "plain")
    assert model.calls == 7 and "_extra_state was not restored: the checkpoint has none" in caplog.text


def test_experts_have_their_own_extra_state(tmp_path: Path) -> None:
    def layer(ep_size: int = 2) -> Any:
        torch.manual_seed(4)
        return torch.nn.Sequential(libzero.MoE(8, lambda c: Counter(), 4, ep_size=ep_size, k=2, drop_tokens=False))

    def body(comm: libzero.Communicator) -> dict[str, Any]:
        with libzero.Engine(models[comm.rank], config(1)) as engine:
            engine.backward(engine.module[0](batch(comm.rank))[0].square().mean())
            engine.step()
            engine.save_checkpoint(tmp_path, "t")
            seen = {name: expert.seen for name, expert in models[comm.rank][0].experts.items()}
            state = engine.state_dict()
        with libzero.Engine(others[comm.rank], config(1)) as engine:
            engine.load_checkpoint(tmp_path)
        for c in range(2 * comm.rank, 2 * comm.rank + 2):
            assert seen[str(c)].any() and torch.equal(others[comm.rank][0].experts[str(c)].seen, seen[str(c)])
        return state

    models, others, alone = [layer(), layer()], [layer(), layer()], layer(1)
    states = libzero.run_ranks(2, body)
    with libzero.Engine(alone, config(1)) as engine:
        engine.load_checkpoint(tmp_path)
    for c in range(4):  # of the rank that runs the expert
        expected = models[c // 2][0].experts[str(c)].seen
        assert torch.equal(alone[0].experts[str(c)].seen, expected)
        for state in states:
            assert torch.equal(state[f"0.experts.{c}._extra_state"]["seen"][0], expected)


# ---- everything at once ----
class Everything(torch.nn.Module):
    """What a module may hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = Counter()
        self.norm = torch.nn.BatchNorm1d(8)
        self.frozen = torch.nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.last = torch.nn.Linear(8, 8)
        self.last.weight = self.first.layer.weight
        self.scalar = torch.nn.Parameter(torch.randn(()))
        self.absent: torch.nn.Parameter | None
        self.register_parameter("absent", None)
        self.register_buffer("none", None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("doubles", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("turned", torch.randn(3, 2).t())
        self.register_buffer("derived", torch.arange(8.0), persistent=False)
        # The first batch makes it. A model that is to load it has it: torch's load_state_dict() asks for that.
        self.register_buffer("late", torch.zeros(8) if seed == 2 else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.late = x.detach().mean(0) if self.late is None else self.late * 0.9
            self.flags[int(self.steps) % 3] ^= True
            self.doubles = self.doubles + 1 / 3  # another tensor
            self.turned.mul_(0.5)
        x = self.norm(self.frozen(torch.tanh(self.first(x))) + self.derived)
        return self.last(x) * self.scalar


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_a_checkpoint_has_what_state_dicts_of_torch_have(kind: str, stage: int, tmp_path: Path) -> None:
    """Module, optimizer and scheduler: keys and values after a resume, and the steps that follow."""
    params: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, **({"momentum": 0.9} if kind == "SGD" else {})}

    def train(model: Any, step: Callable[[torch.Tensor], object], scheduler: Scheduler, steps: range) -> None:
        for number in steps:
            step(model(batch(0, number)).square().mean())
            scheduler.step()

    def plain(seed: int) -> tuple[Any, torch.optim.Optimizer, Scheduler, Callable[[torch.Tensor], object]]:
        model = Everything(seed)
        optimizer = getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], **params)

        def update(loss: torch.Tensor) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()

        return model, optimizer, schedulers.CosineAnnealingLR(optimizer, 10), update

    first, optimizer, scheduler, update = plain(1)
    train(first, update, scheduler, range(3))
    states = copy.deepcopy([each.state_dict() for each in (first, optimizer, scheduler)])
    reference, optimizer, scheduler, update = plain(2)
    for each, state in zip((reference, optimizer, scheduler), states, strict=True):
        each.load_state_dict(state)

    def start(seed: int) -> tuple[Any, libzero.Engine, Scheduler, Callable[[torch.Tensor], object]]:
        model = Everything(seed)
        engine = libzero.Engine(model, config(stage, optimizer={"type": kind, "params": params}))

        def update(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return model, engine, schedulers.CosineAnnealingLR(engine.optimizer, 10), update

    model, engine, ours, our_update = start(1)
    train(model, our_update, ours, range(3))
    engine.save_checkpoint(tmp_path, "t", user_state=ours.state_dict())
    engine.close()
    model, engine, ours, our_update = start(2)
    engine.load_checkpoint(tmp_path)
    ours.load_state_dict(engine.user_state)

    def compare() -> None:
        found, expected = engine.state_dict(), reference.state_dict()
        assert list(found) == list(expected)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
                torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)
            else:
                assert same(found[key]["calls"], value["calls"]), key
        assert "derived" not in found and torch.equal(model.derived, torch.arange(8.0))
        assert ours.state_dict() == scheduler.state_dict()
        mine, theirs = engine.optimizer.param_groups[0], optimizer.param_groups[0]
        for key in theirs.keys() & mine.keys() - {"params"}:
            assert mine[key] == theirs[key] or math.isclose(mine[key], theirs[key]), key
        assert {"lr", "initial_lr", "weight_decay"} <= theirs.keys() & mine.keys()
        names = [name for name, p in reference.named_parameters() if p.requires_grad]
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if key != "step":
                    own = engine.parameter_state(names[index], key)
                    torch.testing.assert_close(own, value, rtol=1e-4, atol=1e-7, msg=f"{names[index]} {key}")

    compare()
    train(reference, update, scheduler, range(3, 6))
    train(model, our_update, ours, range(3, 6))
    compare()
    engine.close()
