"""A loop of torch as it stands: loss.backward(), a norm, optimizer.step(), optimizer.zero_grad()."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch, config, network, nightly, without

import libzero
from libzero.muon import Muon, muon_groups

O = torch.optim
MAKE: dict[str, Callable[[Any], O.Optimizer]] = {
    "AdamW": lambda ps: O.AdamW(ps, lr=1e-3),
    "RMSprop": lambda ps: O.RMSprop(ps, lr=1e-3, eps=1e-3),
}


def clean(stage: int, **more: Any) -> dict[str, Any]:
    return without("gradient_clipping", without("optimizer", config(stage, **more)))


def loop(
    model: Any, optimizer: O.Optimizer, clip: Callable[[], Any], ranks: list[int], steps: int, micro: int
) -> tuple[list[float], list[float]]:
    """Losses of the first of the ranks whose samples it has, and norms."""
    losses, norms = [], []
    for step in range(steps):
        for part in range(micro):
            each = [model(batch(rank, step * micro + part)).square().mean() for rank in ranks]
            losses.append(each[0].item())
            loss = torch.stack(each).mean() / micro
            loss.backward()
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("name, micro, clip", [
    ("AdamW", 1, None), ("AdamW", 3, 0.02), ("RMSprop", 1, 0.02), nightly("AdamW", 1, 0.02), nightly("AdamW", 3, None),
    nightly("RMSprop", 1, None), nightly("RMSprop", 3, None), nightly("RMSprop", 3, 0.02),
])  # fmt: skip
def test_it_trains_as_in_one_process(name: str, micro: int, clip: float | None) -> None:
    """Losses to 1e-5 over 50 steps, norms to 1e-5, at every stage, for a built-in rule and another one."""
    make, base, steps = MAKE[name], network(), 50

    def none() -> float:
        return 0.0

    plain = copy.deepcopy(base)
    reference = make(plain.parameters())
    norm = none if clip is None else lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
    losses, norms = loop(plain, reference, norm, [0, 1], steps, micro)
    if clip is not None:
        assert max(norms) > clip

    def rank(comm: libzero.Communicator) -> Any:
        model = copy.deepcopy(base)
        optimizer = make(model.parameters())
        own = type(optimizer)
        with libzero.Engine(model, clean(stage), comm=comm, optimizer=optimizer) as engine:
            assert isinstance(optimizer, own) and engine.optimizer is optimizer
            own_norm = none if clip is None else lambda: engine.clip_grad_norm_(clip)
            found = loop(model, optimizer, own_norm, [comm.rank], steps, micro)
            return *found, engine.state_hash()

    hashes = set()
    for stage in range(4):
        got, got_norms, digest = libzero.run_ranks(2, rank)[0]
        assert got == pytest.approx(losses, rel=1e-5, abs=1e-7), stage
        assert got_norms == pytest.approx(norms, rel=1e-5), stage
        hashes.add(digest)
    assert len(hashes) <= (1 if micro == 1 else 2)  # the two families of accumulation


@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
def test_calls_between_backward_and_step(stage: int) -> None:
    base = network()
    plain, model = copy.deepcopy(base), copy.deepcopy(base)
    reference, optimizer = O.SGD(plain.parameters(), lr=0.1), O.SGD(model.parameters(), lr=0.1)
    with libzero.Engine(model, clean(stage), optimizer=optimizer) as engine:

        def same(limit: Callable[[Any], Any] | None = None) -> None:
            for each, by in ((plain, reference), (model, optimizer)):
                each(batch(0, 1)).square().mean().backward()
                if limit is not None:
                    limit(each)
                by.step()
                by.zero_grad()
            copied = engine.unsharded_copy()
            for ours, theirs in zip(copied.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

        same()
        # Gradients that were dropped change nothing, also after their reduction.
        model(batch(0, 5)).square().mean().backward()
        optimizer.zero_grad()
        optimizer.zero_grad()
        same()
        model(batch(0, 5)).square().mean().backward()
        assert engine.clip_grad_norm_(math.inf) > 0
        optimizer.zero_grad()
        same()

        def by_value(each: Any) -> None:
            if each is plain:
                torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
            else:
                engine.clip_grad_value_(1e-3)

        same(by_value)

        def nothing(each: Any) -> None:
            if each is plain:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.0)
            else:
                assert engine.clip_grad_norm_(0.0) > 0

        same(nothing)
        def by_both(first: float, second: float, value: float) -> Callable[[Any], Any]:
            def limit(each: Any) -> None:
                if each is plain:
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), first)
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), second)
                    torch.nn.utils.clip_grad_value_(plain.parameters(), value)
                else:
                    engine.clip_grad_norm_(first)
                    assert float(engine.clip_grad_norm_(second)) <= first * 1.001
                    engine.clip_grad_value_(value)

            return limit

        for limits in ((0.01, 0.05, 1.0), (0.05, 0.01, 1e9), (0.02, 0.02, 1e-3)):
            same(by_both(*limits))
        # A limit of gradients that were dropped is not one of the next.
        model(batch(0, 5)).square().mean().backward()
        engine.clip_grad_norm_(1e-4)
        optimizer.zero_grad()
        same(by_value)
        # A gradient that is set after the norm was asked for counts.
        model(batch(0, 1)).square().mean().backward()
        engine.clip_grad_norm_(1e9)
        engine.set_gradient("0.weight", torch.full((32, 8), 3.0))
        assert float(engine.clip_grad_norm_(1e9)) == pytest.approx(
            math.sqrt(9 * 32 * 8 + sum(float(engine.gradient(name).square().sum()) for name, _ in
                                       plain.named_parameters() if name != "0.weight")), rel=1e-5)  # fmt: skip
        optimizer.zero_grad()
        # The engine's words in the same loop.
        engine.backward(model(batch(0, 2)).square().mean())
        with pytest.raises(libzero.ConfigError, match="called 2 times without step"):
            engine.backward(model(batch(0, 2)).square().mean())
        engine.discard_micro_batch()


def test_what_cannot_be_meant_is_an_error_in_words() -> None:
    model = network()
    optimizer = O.AdamW(model.parameters())
    engine = libzero.Engine(model, clean(2), optimizer=optimizer)
    with pytest.raises(libzero.ConfigError, match="expected between the last backward.. and step"):
        engine.clip_grad_norm_(1.0)
    model(batch()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"got the gradient of parameter .* engine.clip_grad_norm_\(\)"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(libzero.ConfigError, match="got -1, expected 0 or more"):
        engine.clip_grad_norm_(-1.0)
    with pytest.raises(libzero.ConfigError, match=r"engine.unsharded_copy\(\)"):
        copy.deepcopy(model)
    with pytest.raises(AttributeError, match="AdamW has no eval"):
        optimizer.eval()  # type: ignore[attr-defined]
    assert not hasattr(optimizer, "train")
    engine.close()

    half = network()
    scaled = O.AdamW(half.parameters())
    with libzero.Engine(half, clean(1, fp16={"enabled": True, "initial_scale_power": 4}), optimizer=scaled) as engine:
        loss = half(batch().half()).float().square().mean()
        with pytest.raises(RuntimeError, match="of a loss that is not scaled, in a run that scales it"):
            loss.backward()
        engine.discard_micro_batch()
        engine.scale(half(batch().half()).float().square().mean()).backward()
        scaled.step()
        assert engine.global_step == 1 and engine.skipped_steps == 0


def test_a_parameter_in_no_group_stays_as_it_is() -> None:
    for make in MAKE.values():
        model = network()
        model[0].requires_grad_(False)
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        with libzero.Engine(model, clean(1), optimizer=optimizer) as engine:
            before = model[0].weight.detach().clone()
            for step in range(3):
                model[0].requires_grad_(step > 0)
                model(batch(0, step)).square().mean().backward()
                optimizer.step()
            assert torch.equal(engine.unsharded_copy()[0].weight, before)


def test_an_optimizer_of_whole_parameters_with_two_modes_is_refused() -> None:
    class Free(Muon):
        def train(self) -> None:
            pass

        eval = train

    model = network()
    with libzero.Engine(model, clean(1), optimizer=Free(muon_groups(model))) as engine:
        optimizer: Any = engine.optimizer
        with pytest.raises(libzero.ConfigError, match=r"its eval\(\) moves whole parameters"):
            optimizer.eval()


def test_a_parameter_that_changes_its_group_is_an_error() -> None:
    for make in MAKE.values():
        model = network()
        first, *others = model.parameters()
        optimizer = make([{"params": [first]}, {"params": others}])
        with libzero.Engine(model, clean(1), optimizer=optimizer) as engine:
            model(batch(0, 0)).square().mean().backward()
            optimizer.step()
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
            model(batch(0, 1)).square().mean().backward()
            with pytest.raises(libzero.ConfigError, match=r"param_groups\[0, 1\]: got other parameters than"):
                optimizer.step()
            assert engine.global_step == 1


def test_a_rate_that_is_a_tensor_stays_the_programs(tmp_path: Path) -> None:
    rate = torch.tensor(1e-3)
    for kind in (O.AdamW, O.RMSprop):
        model = network()
        optimizer = kind(model.parameters(), lr=rate.clone(), foreach=False)
        with libzero.Engine(model, clean(1), optimizer=optimizer) as engine:
            held = optimizer.param_groups[0]["lr"]
            model(batch(0, 0)).square().mean().backward()
            optimizer.step()
            engine.save_checkpoint(tmp_path / kind.__name__, "one")
            held.fill_(5e-4)
            model(batch(0, 1)).square().mean().backward()
            result: Any = optimizer.step()
            assert result.lr == pytest.approx(5e-4)
            engine.load_checkpoint(tmp_path / kind.__name__)
            assert optimizer.param_groups[0]["lr"] is held and float(held) == pytest.approx(1e-3)
            state = optimizer.state_dict()
            held.fill_(7e-4)
            optimizer.load_state_dict(state)
            assert optimizer.param_groups[0]["lr"] is held


def test_clipping_is_the_configurations_if_it_says_so() -> None:
    base = network()
    plain, model = copy.deepcopy(base), copy.deepcopy(base)
    plain(batch()).square().mean().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    reference = O.SGD(plain.parameters(), lr=0.1)
    reference.step()
    optimizer = O.SGD(model.parameters(), lr=0.1)
    with libzero.Engine(model, {**clean(1), "gradient_clipping": 0.01}, optimizer=optimizer) as engine:
        model(batch()).square().mean().backward()
        result = engine.step()
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        for ours, theirs in zip(engine.unsharded_copy().parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, nightly(2), 3])
def test_zero_grad_of_a_class_and_of_the_model(stage: int) -> None:
    """A program's own zero_grad() is called, and that of the model drops gradients, as in a plain loop."""

    class Counts(O.RMSprop):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)
            assert all(p.grad is None for group in self.param_groups for p in group["params"])

    class Plain(O.SGD):
        calls = 0

        def zero_grad(self) -> None:  # type: ignore[override]
            self.calls += 1
            super().zero_grad()

    for kind in (Counts, Plain):
        base = network()
        plain, model = copy.deepcopy(base), copy.deepcopy(base)
        reference, optimizer = kind(plain.parameters(), lr=0.01), kind(model.parameters(), lr=0.01)
        with libzero.Engine(model, clean(stage), optimizer=optimizer) as engine:
            for each, by in ((plain, reference), (model, optimizer)):
                for step in range(4):
                    each(batch(0, step + 10)).square().mean().backward()
                    if step % 2:
                        each.zero_grad()
                    else:
                        by.zero_grad()
                    each.zero_grad(set_to_none=True)
                    each(batch(0, step)).square().mean().backward()
                    by.step()
                    by.zero_grad()
            assert optimizer.calls == reference.calls == 6
            copied = engine.unsharded_copy()
            assert "zero_grad" not in vars(copied)
            for ours, theirs in zip(copied.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert "zero_grad" not in vars(model)
