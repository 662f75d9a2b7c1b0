"""Optimizers that a program brings train as in a plain torch loop, at every stage, tier and number of ranks, or are
refused in words."""

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch, config, network, nightly, without

import libzero
from libzero.optimizers import probe

O = torch.optim
Make = Callable[[list[Any]], O.Optimizer]


def clean(stage: int, **more: Any) -> dict[str, Any]:
    """A configuration without an optimizer."""
    return without("optimizer", config(stage, **more))


class SignMomentum(O.Adam):
    """A subclass whose step() is another rule; its state has another name, and is bf16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sign"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["sign"].mul_(0.5).add_(p.grad.to(torch.bfloat16))
                p.add_(state["sign"].float().sign(), alpha=-group["lr"])


class Written(O.Optimizer):
    """Base of the classes below."""

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, self.state[p])

    def before(self) -> None:
        pass

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class GroupCounter(Written):
    """Counts in its groups, as schedule-free ones do, and looks ahead: a state that is replaced each fifth step."""

    def before(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] * group["k"]

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        slow = state.setdefault("slow", p.clone())
        p.add_(p.grad, alpha=-group["lr"] / math.sqrt(group["k"]))
        if group["k"] % 5 == 0:
            state["slow"] = slow + 0.5 * (p - slow)
            p.copy_(state["slow"])
        state["mean"] = None if group["k"] < 3 else state["slow"] / group["weight_sum"]


class OwnCounter(Written):
    """Counts in itself."""

    count = 0

    def before(self) -> None:
        self.count += 1

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] / self.count)


class HiddenCounter(OwnCounter):
    """Counts where nobody can look."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.hidden = {"calls": [0]}

    def before(self) -> None:
        self.hidden["calls"][0] += 1
        self.count = self.hidden["calls"][0]


class Lamb(Written):
    """A trust ratio of each parameter."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / (p.grad.norm() + 1e-6)))


class GlobalNorm(Written):
    """Divides by the norm of all gradients."""

    def before(self) -> None:
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        self.norm = float(torch.stack(grads).norm()) if grads else 1.0

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] / self.norm)


class Drawn(Written):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class DrawnByPython(Written):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * random.random())


class Wide(Written):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        sums = state.setdefault("sums", torch.zeros_like(p, dtype=torch.float64))
        sums.add_(p.grad)
        p.sub_(sums.float(), alpha=group["lr"])


class BySize(Written):
    """Large parameters have 8-bit states."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        coarse = p.numel() >= 4096
        seen = state.setdefault("seen", torch.zeros_like(p))
        seen.add_(p.grad)
        p.sub_(seen.round() if coarse else seen, alpha=group["lr"])


class InPlace(Written):
    """Changes gradients, and puts new memory in the place of a parameter."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.grad.mul_(0.5).sub_(p, alpha=1e-3)
        p.data = p.data - group["lr"] * p.grad


class Many(Written):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        for i in range(9):
            state.setdefault(f"state{i}", torch.zeros_like(p)).add_(p.grad)


class Nested(Written):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = O.SGD([{**group} for group in self.param_groups], lr=0.1)


class NeedsClosure(Written):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


NATIVE: dict[str, Make] = {
    "SGD": lambda ps: O.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda ps: O.Adam(ps),
    "AdamW": lambda ps: O.AdamW(ps),
    "Adagrad": lambda ps: O.Adagrad(ps),
}
CLIENTS: dict[str, Make] = {
    "RMSprop": lambda ps: O.RMSprop(ps, lr=1e-3, eps=1e-3, centered=True, momentum=0.9),
    "amsgrad": lambda ps: O.AdamW(ps, amsgrad=True),
    "maximize": lambda ps: O.Adagrad(ps, maximize=True, initial_accumulator_value=0.1),
    "foreach": lambda ps: O.Adam(ps, amsgrad=True, foreach=True),
    "NAdam": lambda ps: O.NAdam(ps),
    "RAdam": lambda ps: O.RAdam(ps),
    "Adamax": lambda ps: O.Adamax(ps),
    "Adadelta": lambda ps: O.Adadelta(ps),
    "ASGD": lambda ps: O.ASGD(ps),
    "Rprop": lambda ps: O.Rprop(ps),
    "SignMomentum": lambda ps: SignMomentum(ps, lr=1e-3),
    "GroupCounter": lambda ps: GroupCounter(ps),
    "OwnCounter": lambda ps: OwnCounter(ps),
    "WarnsOnce": lambda ps: WarnsOnce(ps),
    "InPlace": lambda ps: InPlace(ps),
    "two groups": lambda ps: O.Adam([{"params": ps[1:], "betas": (0.5, 0.9)}, {"params": ps[:1], "weight_decay": 0.1}]),
}
class MuonLike(O.Optimizer):
    """Matrices by an orthogonal update, the other groups by AdamW, as programs write it."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2, "orthogonal": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    if not group["orthogonal"]:
                        state["square"] = torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                if group["orthogonal"]:
                    x = state["mean"] / state["mean"].norm()
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * (x @ x.T) @ x
                    p.sub_(x, alpha=group["lr"])
                else:
                    state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    p.addcdiv_(state["mean"], state["square"].sqrt() + 1e-3, value=-group["lr"])


class DecaysMatrices(Written):
    """The number of dimensions decides."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.mul_(0.99 if p.dim() > 1 else 1.0).sub_(p.grad, alpha=group["lr"])


def matrices(ps: list[Any]) -> list[Any]:
    return [p for p in ps if p.dim() == 2]


WHOLE: dict[str, Make] = {
    "MuonLike": lambda ps: MuonLike(
        [{"params": matrices(ps), "orthogonal": True}, {"params": [p for p in ps if p.dim() != 2]}]
    ),
    "Lamb": lambda ps: Lamb(ps),
    "Adafactor": lambda ps: O.Adafactor(ps, lr=1e-2),
    "Muon": lambda ps: O.Muon(matrices(ps), lr=1e-2),
    "BySize": lambda ps: BySize(ps),
    "DecaysMatrices": lambda ps: DecaysMatrices(ps),
}
class WarnsOnce(Written):
    """A mark in the object of what its first state has found, as paged optimizers of bitsandbytes have."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            self.mark()
            state["mean"] = torch.zeros_like(p)
        state["mean"].lerp_(p.grad, 0.1)
        p.add_(state["mean"], alpha=-group["lr"])

    def mark(self) -> None:
        self.warned = True


class FirstIsFaster(WarnsOnce):
    """Its mark changes updates."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        faster = not getattr(self, "warned", False)
        super().update({"lr": group["lr"] * (2 if faster else 1)}, p, state)


REFUSED: dict[str, tuple[Make, str]] = {
    "FirstIsFaster": (lambda ps: FirstIsFaster(ps), "couples parameters"),
    "GlobalNorm": (lambda ps: GlobalNorm(ps), "couples parameters"),
    "HiddenCounter": (lambda ps: HiddenCounter(ps), "couples parameters"),
    "Drawn": (lambda ps: Drawn(ps), "drawn at random"),
    "DrawnByPython": (lambda ps: DrawnByPython(ps), "drawn at random"),
    "Wide": (lambda ps: Wide(ps), "its state sums is torch.float64"),
    "Many": (lambda ps: Many(ps), "9 states per element, expected up to 8"),
    "Nested": (lambda ps: Nested(ps), "it keeps parameters or another optimizer in base"),
    "LBFGS": (lambda ps: O.LBFGS(ps), "needs a closure"),
    "NeedsClosure": (lambda ps: NeedsClosure(ps), "needs a closure"),
    "SparseAdam": (lambda ps: O.SparseAdam(ps), "does not support dense gradients"),
}


def loss_of(model: Any, step: int, rank: int = 0) -> torch.Tensor:
    x = batch(rank, step)
    dtype = next(p for p in model.parameters()).dtype
    return model(x.to(dtype)).float().square().mean()  # type: ignore[no-any-return]


def plain(model: torch.nn.Module, optimizer: O.Optimizer, steps: int, world: int = 1, skipped: Any = ()) -> list[float]:
    """A torch loop on the mean over ranks, without the updates of the `skipped` steps."""
    losses = []
    for step in range(steps):
        each = [loss_of(model, step, rank) for rank in range(world)]
        torch.autograd.backward(torch.stack(each).mean())
        losses.append(each[0].item())
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(
    world: int, settings: dict[str, Any], make: Make, steps: int, base: torch.nn.Module, micro: int = 1
) -> tuple[list[float], str, dict[str, torch.Tensor], set[int]]:
    """Losses of rank 0, the hash of states, the masters, and the skipped steps."""

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        with libzero.Engine(model, settings, comm=comm, optimizer=make) as engine:
            losses, skipped = [], set()
            for step in range(steps):
                for _ in range(micro):
                    loss = loss_of(_Called(engine, model), step, comm.rank)
                    losses.append(loss.item())
                    engine.backward(loss)
                    if engine.step().overflow:
                        skipped.add(step)
            return losses[::micro], engine.state_hash(), engine.full_state_dict(), skipped

    return libzero.run_ranks(world, rank)[0]  # type: ignore[no-any-return]


class _Called:
    """The engine's forward with the model's parameters."""

    def __init__(self, engine: libzero.Engine, model: torch.nn.Module) -> None:
        self.engine, self.parameters = engine, model.parameters

    def __call__(self, x: torch.Tensor) -> Any:
        return self.engine(x)


ODD = ("two groups", "GroupCounter", "OwnCounter", "WarnsOnce", "InPlace", "SignMomentum", "maximize", "NAdam")


@pytest.mark.parametrize("name", [*ODD, *map(nightly, sorted({*NATIVE, *CLIENTS} - {*ODD}))])
def test_the_probe_accepts_rules_for_each_element(name: str) -> None:
    optimizer = {**NATIVE, **CLIENTS}[name](list(network().parameters()))
    before = torch.random.get_rng_state(), random.getstate(), [dict(group) for group in optimizer.param_groups]
    found = probe(optimizer)
    assert (found.policy, found.exact, found.reason) == ("elements", True, "")
    assert torch.equal(torch.random.get_rng_state(), before[0]) and random.getstate() == before[1]
    for now, then in zip(optimizer.param_groups, before[2], strict=True):
        assert now.keys() == then.keys() and all(now[key] is then[key] or now[key] == then[key] for key in now)


@pytest.mark.parametrize("name", WHOLE)
def test_the_probe_finds_rules_of_whole_parameters(name: str) -> None:
    found = probe(WHOLE[name](list(network().parameters())))
    assert (found.policy, found.exact) == ("whole", True) and "parts" in found.reason
    assert found.groups == (("whole", "elements") if name == "MuonLike" else ("whole",))


@pytest.mark.parametrize("name", REFUSED)
def test_other_rules_are_refused_in_words(name: str) -> None:
    make, why = REFUSED[name]
    model = network()
    with pytest.raises(libzero.ConfigError, match=f"(?s)cannot take over an optimizer of class .*{why}.* Hint: "):
        libzero.Engine(model, clean(1), optimizer=make)


@pytest.mark.parametrize("name", ["two groups", "GroupCounter", "SignMomentum", *map(nightly, (
    sorted(set(CLIENTS) - {"two groups", "GroupCounter", "SignMomentum"})))])  # fmt: skip
def test_stages_train_as_a_plain_loop(name: str, tmp_path: Path) -> None:
    make, base, steps = CLIENTS[name], network(), 7
    model = copy.deepcopy(base)
    expected = plain(model, make(list(model.parameters())), steps)
    for world in (1, 3):
        reference = copy.deepcopy(base)
        losses = plain(reference, make(list(reference.parameters())), steps, world)
        assert world > 1 or losses == expected
        hashes = set()
        tiers: list[dict[str, Any]] = [
            {"stage": 0},
            {"stage": 1},
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            {"stage": 3},
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "sub_group_size": 100},
        ]
        for zero in tiers:
            got, digest, masters, _ = trained(world, clean(0, zero_optimization=zero), make, steps, base)
            hashes.add(digest)
            assert got == losses if world == 1 else got == pytest.approx(losses, rel=1e-6, abs=1e-7), zero
            for key, value in reference.named_parameters():
                torch.testing.assert_close(masters[key], value.detach(), rtol=2e-6, atol=2e-7)
        assert len(hashes) == 1


def frozen_vectors(model: torch.nn.Module) -> torch.nn.Module:
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return model


@pytest.mark.parametrize("name", ["MuonLike", *map(nightly, ("Adafactor", "Lamb", "Muon", "BySize", "DecaysMatrices"))])
def test_whole_parameters_train_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    """Their owners get all of them, at every stage, and give back what each rank stores."""
    make, steps = WHOLE[name], 6
    base = frozen_vectors(network()) if name == "Muon" else network()
    for world in (1, 3):
        reference = copy.deepcopy(base)
        losses = plain(reference, make(list(reference.parameters())), steps, world)
        hashes = set()
        for zero in ({"stage": 0}, {"stage": 1}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"stage": 3}):
            got, digest, masters, _ = trained(world, clean(0, zero_optimization=zero), make, steps, base)
            hashes.add(digest)
            assert got == losses if world == 1 else got == pytest.approx(losses, rel=2e-6, abs=1e-7), (world, zero)
            for key, value in reference.named_parameters():
                torch.testing.assert_close(masters[key], value.detach(), rtol=1e-5, atol=2e-6)
        assert len(hashes) == 1, world
    files = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(libzero.ConfigError, match="which needs whole parameters: its states are offloaded in parts"):
        libzero.Engine(copy.deepcopy(base), clean(0, zero_optimization=files), optimizer=make)


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_recipes_and_accumulation(recipe: str) -> None:
    """In bf16, and in fp16 whose first steps overflow, stages have the same bits where those of AdamW have."""
    base, steps = network(), 30 if recipe == "fp16" else 6
    settings = {"enabled": True, **({"initial_scale_power": 40, "hysteresis": 1} if recipe == "fp16" else {})}
    more: dict[str, Any] = {recipe: settings, "gradient_accumulation_steps": 3}

    def run(make: Make) -> list[Any]:
        return [trained(2, clean(stage, **more), make, steps, base, micro=3) for stage in (0, 1, 2, 3)]

    client, native = run(CLIENTS["NAdam"]), run(NATIVE["AdamW"])
    for i in range(4):
        assert [client[i][1] == other[1] for other in client] == [native[i][1] == other[1] for other in native]
    for found, _, _, skipped in client:
        assert (len(skipped) > 3) == (recipe == "fp16")
        reference = copy.deepcopy(base)
        losses = plain(reference, O.NAdam(reference.parameters()), steps, 2, skipped)
        assert found == pytest.approx(losses, rel=2e-2)


@pytest.mark.parametrize("names", [("GroupCounter", "OwnCounter", "Adafactor"),
                                   nightly(("RMSprop", "SignMomentum", "two groups", "MuonLike"))])  # fmt: skip
def test_a_resumed_run_continues(names: tuple[str, ...], tmp_path: Path) -> None:
    """Also at another stage and number of ranks: states, counts of parameters and counters of groups."""
    base = network()
    for name in names:
        make = {**CLIENTS, **WHOLE}[name]
        whole = trained(2, clean(3), make, 8, base)
        folder = tmp_path / name

        def first(comm: libzero.Communicator) -> None:
            with libzero.Engine(copy.deepcopy(base), clean(2), comm=comm, optimizer=make) as engine:
                for step in range(4):
                    engine.backward(engine(batch(comm.rank, step)).square().mean())
                    engine.step()
                engine.save_checkpoint(folder, "at4", user_state={"x": 1})

        libzero.run_ranks(2, first)

        def second(comm: libzero.Communicator) -> Any:
            model = copy.deepcopy(base)
            with libzero.Engine(model, clean(3), comm=comm, optimizer=make) as engine:
                engine.load_checkpoint(folder)
                assert engine.user_state == {"x": 1}
                for step in range(4, 8):
                    engine.backward(engine(batch(comm.rank, step)).square().mean())
                    engine.step()
                return engine.state_hash()

        assert libzero.run_ranks(2, second)[0] == whole[1], name

        def other_world(comm: libzero.Communicator) -> Any:
            with libzero.Engine(copy.deepcopy(base), clean(1), comm=comm, optimizer=make) as engine:
                engine.load_checkpoint(folder)
                saved = engine.logical_hash()
                engine.backward(engine(batch(0, 9)).square().mean())
                engine.step()
                engine.load_checkpoint(folder, weights_only=True)
                engine.backward(engine(batch(0, 9)).square().mean())
                engine.step()
                return saved

        assert len({libzero.run_ranks(world, other_world)[0] for world in (1, 3)}) == 1


def test_another_optimizers_checkpoint_is_refused(tmp_path: Path) -> None:
    with libzero.Engine(network(), config(0)) as engine:
        engine.backward(engine(batch()).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path, "adamw")
    with libzero.Engine(network(), clean(0), optimizer=CLIENTS["RMSprop"]) as engine:
        with pytest.raises(libzero.ConfigError, match="has the states of the optimizer AdamW .exp_avg, exp_avg_sq"):
            engine.load_checkpoint(tmp_path)
    own = lambda ps: SameStates(ps)  # noqa: E731
    with libzero.Engine(network(), clean(0), optimizer=own) as engine:
        with pytest.raises(libzero.ConfigError, match="numbers of a SameStates of the program, got none.*is closed"):
            engine.load_checkpoint(tmp_path)
        with pytest.raises(libzero.ConfigError, match="was closed"):  # with weights of one run and numbers of another
            engine.step()
    with libzero.Engine(network(), clean(0), optimizer=own) as engine:
        engine.load_checkpoint(tmp_path, weights_only=True)
        with pytest.raises(libzero.ConfigError, match="got states of AdamW in .*adamw, expected those of SameStates"):
            engine.import_weights(tmp_path / "adamw", optimizer=True)


class SameStates(O.AdamW):
    """A subclass with the states of AdamW."""


@pytest.mark.parametrize(
    "scheduler", ["OneCycleLR", "ReduceLROnPlateau", nightly("CosineAnnealingLR"), nightly("LambdaLR")]
)
def test_schedulers_move_every_number(scheduler: str) -> None:
    """OneCycleLR moves the momentum, too."""
    makers: dict[str, Callable[[O.Optimizer], Any]] = {
        "OneCycleLR": lambda o: O.lr_scheduler.OneCycleLR(o, 0.05, total_steps=8),
        "CosineAnnealingLR": lambda o: O.lr_scheduler.CosineAnnealingLR(o, 8),
        "ReduceLROnPlateau": lambda o: O.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        "LambdaLR": lambda o: O.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    }

    def run(model: Any, optimizer: O.Optimizer, engine: libzero.Engine | None) -> list[float]:
        schedule, losses = makers[scheduler](optimizer), []
        for step in range(8):
            loss = loss_of(model, step)
            losses.append(loss.item())
            if engine is None:
                torch.autograd.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
            schedule.step(*[1.0] * (scheduler == "ReduceLROnPlateau"))
        return losses

    base = network()
    model = copy.deepcopy(base)
    expected = run(model, O.RMSprop(model.parameters(), momentum=0.9), None)
    model = copy.deepcopy(base)
    optimizer = O.RMSprop(model.parameters(), momentum=0.9)
    with libzero.Engine(model, clean(3), optimizer=optimizer) as engine:
        assert run(model, optimizer, engine) == expected


def test_what_would_be_lost_is_refused() -> None:
    model = network()
    used = O.RMSprop(model.parameters())
    torch.autograd.backward(model(batch()).square().mean())
    used.step()
    hooked = O.RMSprop(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    replaced = O.RMSprop(model.parameters())
    replaced.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    partial = O.RMSprop(list(model.parameters())[1:])
    foreign = O.RMSprop([*model.parameters(), torch.nn.Parameter(torch.zeros(3))])
    for optimizer, why in (
        (used, "it has states of 6 parameters, which would be lost"),
        (hooked, "it has hooks of step()"),
        (replaced, "its step() was replaced"),
        (partial, "the optimizer has not 0.weight, which the model trains"),
        (foreign, "a parameter of shape (3,) that the model has not"),
    ):
        with pytest.raises(libzero.ConfigError) as fault:
            libzero.Engine(network() if optimizer is None else model, clean(0), optimizer=optimizer)
        assert why in str(fault.value)
    with pytest.raises(libzero.ConfigError, match="RMSprop, and optimizer.type in the configuration"):
        libzero.Engine(model, config(0), optimizer=O.RMSprop(model.parameters()))
    with libzero.Engine(model, clean(0), optimizer=O.RMSprop(model.parameters())) as engine:
        with pytest.raises(ValueError, match=r"some parameters appear in more than one|parameter group"):
            engine.optimizer.add_param_group({"params": list(model.parameters())[:1]})
        with pytest.raises(libzero.ConfigError, match="got a closure"):
            engine.optimizer.step(lambda: 0.0)
        state = engine.optimizer.state_dict()
        assert state["state"] == {} and len(state["param_groups"][0]["params"]) == 6
        engine.optimizer.load_state_dict(state)


def test_a_rank_without_elements_counts_its_steps() -> None:
    base = torch.nn.Linear(2, 1, bias=False)

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        optimizer = GroupCounter(model.parameters())
        with libzero.Engine(model, clean(1), comm=comm, optimizer=optimizer) as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(4, 2)).sum())
                engine.step()
            return optimizer.param_groups[0]["k"]

    assert libzero.run_ranks(3, rank) == [3, 3, 3]


def test_ranks_with_other_numbers_are_told() -> None:
    def rank(comm: libzero.Communicator) -> str:
        model = copy.deepcopy(base)
        optimizer = O.RMSprop(model.parameters())
        with libzero.Engine(model, clean(1), comm=comm, optimizer=optimizer) as engine:
            optimizer.param_groups[0]["alpha"] = 0.9 + comm.rank / 100
            engine.backward(engine(batch(comm.rank)).square().mean())
            with pytest.raises(libzero.ConfigError) as fault:
                engine.step()
            return str(fault.value)

    base = network()
    assert all("other numbers of the program's optimizer" in text for text in libzero.run_ranks(2, rank))


def test_a_step_that_fails_on_one_rank_fails_on_all() -> None:
    class Fails(Written):
        def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
            if group.get("fails") and p.grad is not None and bool((p.grad != 0).any()):
                raise ValueError("no more")
            p.sub_(p.grad, alpha=group["lr"])

    def rank(comm: libzero.Communicator) -> str:
        model = copy.deepcopy(base)
        optimizer = Fails(model.parameters())
        engine = libzero.Engine(model, clean(1), comm=comm, optimizer=optimizer)
        engine.backward(engine(batch(comm.rank)).square().mean())
        engine.step()
        engine.backward(engine(batch(comm.rank)).square().mean())
        if comm.rank == 1:
            Fails.update = broken  # type: ignore[method-assign]
        with pytest.raises((libzero.CommError, ValueError)) as fault:
            engine.step()
        return str(fault.value)

    def broken(self: Any, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        raise ValueError("no more")

    base = network()
    assert all("no more" in text for text in libzero.run_ranks(2, rank))


def test_a_second_resume_has_the_newest_numbers_of_each_parameter(tmp_path: Path) -> None:
    """A rank keeps old numbers of parameters that it does not update."""
    base = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)) for _ in range(3)))

    def part(comm: libzero.Communicator) -> Any:
        with libzero.Engine(copy.deepcopy(base), clean(stage), comm=comm, optimizer=make) as engine:
            if first > 0:
                engine.load_checkpoint(tmp_path / name)
            for step in range(first, last):
                engine.backward(engine(batch(comm.rank, step)).square().mean())
                engine.step()
            engine.save_checkpoint(tmp_path / name, f"at{last}")
            return engine.logical_hash()

    for name, make in {"NAdam": CLIENTS["NAdam"], "Adafactor": WHOLE["Adafactor"]}.items():
        for stage in (1, 3):
            for first, last in ((0, 2), (2, 4), (4, 6)):
                found = libzero.run_ranks(2, part)[0]
            first, last = 0, 6
            assert libzero.run_ranks(2, part)[0] == found, (name, stage)


class Exchanges(Written):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        state.setdefault("a", torch.zeros_like(p)).add_(p.grad)
        state.setdefault("b", torch.ones_like(p))
        state["a"], state["b"] = state["b"], state["a"]
        p.sub_(state["a"], alpha=group["lr"])


class Late(Written):
    """A state that comes after everybody has looked."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        if state["count"] > 15:
            state.setdefault("late", torch.zeros_like(p)).add_(p.grad)
        p.sub_(p.grad, alpha=group["lr"])


class First(Written):
    """Keeps the values that parameters began with."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(step=0, p0=p.detach().clone())

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.add_(state["p0"] - p, alpha=group["lr"])


class BySizeOfMany(Written):
    """Only matrices larger than any that is made up are updated as a whole."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        large = p.dim() == 2 and min(p.shape) >= 100
        p.sub_(p.grad / p.grad.norm() if large else p.grad, alpha=group["lr"])


def test_states_that_are_exchanged_or_come_late() -> None:
    base = network()
    model = copy.deepcopy(base)
    losses = plain(model, Exchanges(model.parameters()), 6, 2)
    assert trained(2, clean(1), lambda ps: Exchanges(ps), 6, base)[0] == pytest.approx(losses, rel=1e-6)
    with pytest.raises(libzero.ConfigError, match="begun a state late that it had not when it was tried"):
        trained(1, clean(1), lambda ps: Late(ps), 20, base)
    with pytest.raises(libzero.ConfigError, match="first state p0"):
        libzero.Engine(network(), clean(1), optimizer=lambda ps: First(ps))


def test_the_probe_tries_the_sizes_of_the_program() -> None:
    assert probe(BySizeOfMany(network(width=32).parameters())).policy == "elements"
    assert probe(BySizeOfMany(network(width=128).parameters())).policy == "whole"


def test_a_choice_that_changes_is_refused_and_counters_begin_again(tmp_path: Path) -> None:
    model = network()
    optimizer = O.RMSprop(model.parameters())
    with libzero.Engine(model, clean(1), optimizer=optimizer) as engine:
        optimizer.param_groups[0]["maximize"] = True
        engine.backward(engine(batch()).square().mean())
        with pytest.raises(libzero.ConfigError, match="a choice in its groups was changed"):
            engine.step()
    counts = GroupCounter(model.parameters())
    with libzero.Engine(model, clean(1), optimizer=counts) as engine:
        engine.save_checkpoint(tmp_path, "first")
        engine.backward(engine(batch()).square().mean())
        engine.step()
        assert counts.param_groups[0]["k"] == 1
        engine.load_checkpoint(tmp_path, weights_only=True)
        assert "k" not in counts.param_groups[0]
    delayed = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": True}}
    with pytest.raises(libzero.ConfigError, match="cannot run in the background"):
        libzero.Engine(network(), clean(1, zero_optimization=delayed), optimizer=CLIENTS["RMSprop"])


def test_hooks_of_the_engines_optimizer_are_called_once_a_step() -> None:
    model = network()
    optimizer = O.RMSprop(model.parameters())
    with libzero.Engine(model, clean(3), optimizer=optimizer) as engine:
        seen: list[int] = []
        optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.param_groups[0]["params"])))
        for step in range(3):
            engine.backward(engine(batch(0, step)).square().mean())
            engine.step()
        assert seen == [6, 6, 6]



class LateNorm(Written):
    """From its 15th update on it divides by the norm of the parameter's gradient: a trial of 13 does not show it."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        state["updates"] = state.get("updates", 0) + 1
        scale = float(p.grad.norm()) if state["updates"] >= 15 else 1.0
        p.sub_(p.grad, alpha=group["lr"] / scale)


class NormOfAll(Written):
    """The same of all gradients, and no attribute has it."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        norms = [each.grad.norm() for group in self.param_groups for each in group["params"]]
        p.sub_(p.grad, alpha=group["lr"] / float(torch.stack(norms).norm()))


@pytest.mark.parametrize("stage", [0, nightly(1), 3])
def test_the_programs_word_for_how_it_is_sharded(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    base = network()

    def run(make: Make, policy: str) -> Any:
        def rank(comm: libzero.Communicator) -> Any:
            model = copy.deepcopy(base)
            with libzero.Engine(model, clean(stage), comm=comm, optimizer=make, optimizer_policy=policy) as engine:
                for step in range(18):
                    engine.backward(loss_of(_Called(engine, model), step, comm.rank))
                    engine.step()
                return engine.full_state_dict()

        return libzero.run_ranks(2, rank)[0]

    assert probe(LateNorm(network().parameters())).policy == "elements"
    model = copy.deepcopy(base)
    plain(model, LateNorm(model.parameters()), 18, 2)
    found = run(lambda ps: LateNorm(ps), "whole")
    assert "LateNorm: optimizer_policy is whole" in caplog.text and "in a trial" not in caplog.text
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    for policy in ("whole", "elements"):
        values = run(lambda ps: NormOfAll(ps), policy)
        assert all(bool(value.isfinite().all()) for value in values.values())
        assert f"NormOfAll: optimizer_policy is {policy}; in a trial updates differ by" in caplog.text


def test_a_word_that_cannot_be_followed() -> None:
    for make, policy, why in (
        (lambda ps: O.AdamW(ps), "whole", "optimizer_policy is whole, but the engine's own rule updates it"),
        (lambda ps: Drawn(ps), "elements", "drawn at random"),
        (lambda ps: GlobalNorm([*ps, torch.nn.Parameter(torch.ones(2))]), "whole", "parameter of shape .2,. that the"),
        (lambda ps: O.Muon(matrices(ps)), "elements", "updates of elements are not possible: step.. of parts"),
        (lambda ps: O.RMSprop(ps), "other", "got 'other', expected auto, elements or whole"),
        (None, "whole", "got 'whole' without an optimizer of the program"),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))
        settings = config(1) if make is None else clean(1)
        with pytest.raises(libzero.ConfigError, match=why):
            libzero.Engine(model, settings, optimizer=make, optimizer_policy=policy)
    with pytest.raises(libzero.ConfigError, match="couples parameters.*optimizer_policy of the Engine"):
        libzero.Engine(network(), clean(1), optimizer=lambda ps: GlobalNorm(ps))
