"""What programs and frameworks written for DeepSpeed do around the engine: schedules of their own, saves,
configurations as they write them."""

import argparse
import base64
import copy
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Programs, batch, config, network, nightly, under_the_runner

import libzero
import libzero.deepspeed as deepspeed
from libzero.deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from libzero.deepspeed.runtime.torch_autocast import get_comm_dtype
from libzero.errors import ConfigError

nn = torch.nn


def one_step(engine: deepspeed.DeepSpeedEngine, step: int = 0) -> float:
    loss = engine(batch(0, step)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def masters(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return engine._engine.full_state_dict()


def assert_same(engine: deepspeed.DeepSpeedEngine, plain: nn.Module, tolerance: float = 2e-6) -> None:
    state = plain.state_dict()
    for name, value in masters(engine).items():
        torch.testing.assert_close(value, state[name], atol=tolerance, rtol=tolerance, msg=name)


# ---- schedules over an optimizer that no engine owns ----
def rates_of(make: Any, kind: type[torch.optim.Optimizer] = torch.optim.SGD, count: int = 8) -> list[float]:
    """The rate of each update of a plain loop."""
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = make(optimizer)
    seen = []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]] == schedule.get_lr()
    return seen


LOG = [math.log(s + 1) / math.log(4) for s in range(4)]
"""A warm-up of four steps."""
SCHEDULES: dict[str, tuple[Any, list[float]]] = {
    "WarmupLR": (lambda o: WarmupLR(o, 0.0, 0.2, 4), [0, *(0.2 * x for x in LOG), 0.2, 0.2, 0.2]),
    "WarmupLR, the optimizer's rate": (
        lambda o: WarmupLR(o, warmup_num_steps=4, warmup_type="linear"),
        [0, 0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1],
    ),
    "WarmupDecayLR": (
        lambda o: WarmupDecayLR(o, 6, 0.0, 0.2, 2, "linear"),
        [0, 0, 0.1, 0.2, 0.15, 0.1, 0.05, 0],
    ),
    "WarmupCosineLR": (
        lambda o: WarmupCosineLR(o, 6, warmup_num_steps=2, warmup_type="linear", cos_min_ratio=0.5),
        [0, 0, 0.05, *(0.05 + 0.025 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3, 4)), 0.05],
    ),
    "LRRangeTest": (lambda o: LRRangeTest(o, 0.01, 2, 3.0), [0.01 * (1 + 1.5 * k) for k in range(8)]),
    "LRRangeTest, stairs": (
        lambda o: LRRangeTest(o, 0.01, 3, 2.0, True),
        [0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0.05, 0.05],
    ),
    "OneCycle": (
        lambda o: OneCycle(o, 0.1, 0.3, cycle_first_step_size=4, cycle_second_step_size=2, decay_step_size=1,
                           decay_lr_rate=1.0),
        [0.1, 0.15, 0.2, 0.25, 0.3, 0.2, 0.1, 0.05],
    ),
    "OneCycle, no way down": (
        lambda o: OneCycle(o, 0.1, 0.3, cycle_first_step_size=4, cycle_second_step_size=0),
        [0.1, 0.15, 0.2, 0.25, 0.1, 0.1, 0.1, 0.1],
    ),
    "OneCycle, half an update": (
        lambda o: OneCycle(o, 0.1, 0.2, cycle_first_step_size=2.5),
        [0.1, 0.14, 0.18, 0.18, 0.14, 0.1, 0.1, 0.1],
    ),
    "WarmupDecayLR, half an update": (
        lambda o: WarmupDecayLR(o, 4.5, 0.0, 0.2, 2, "linear"),
        [0, 0, 0.1, 0.2, 0.12, 0.04, 0, 0],
    ),
    "OneCycle, stairs": (
        lambda o: OneCycle(o, 0.1, 0.3, cycle_first_step_size=4, cycle_first_stair_count=2),
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.2, 0.2, 0.1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_moves_the_rate_of_an_optimizer_of_torch(name: str) -> None:
    make, expected = SCHEDULES[name]
    assert rates_of(make) == pytest.approx(expected, abs=1e-12)


def test_a_schedule_over_groups_keeps_tensors_and_jumps() -> None:
    rate = torch.tensor(0.1)
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate}, {"params": [nn.Parameter(torch.ones(1))]}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.4))
    schedule = WarmupCosineLR(optimizer, 10, warmup_min_ratio=0.5, warmup_num_steps=4, warmup_type="linear")
    assert optimizer.param_groups[0]["lr"] is rate and schedule.get_lr_ratio() == rate == 0
    schedule.step(2)
    assert schedule.get_lr_ratio() == 0.75 and schedule.org_lrs == pytest.approx([0.1, 0.4])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.075, 0.3])
    assert optimizer.param_groups[0]["lr"] is rate
    again = WarmupCosineLR(optimizer, 10, warmup_num_steps=4)
    again.load_state_dict(schedule.state_dict())
    assert again.last_batch_iteration == 2

    cycle = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=2)
    assert cycle.get_mom() == [(0.9, 0.99)] * 2 and optimizer.param_groups[1]["betas"] == (0.8, 0.99)
    cycle.step()
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.85, 0.99))
    cycle.step(batch_iteration=3)
    assert cycle.last_batch_iteration == 3
    lists = WarmupLR(optimizer, [0.0, 0.1], [1.0, 2.0], 2)
    lists.step(5)
    assert [float(rate) for rate in lists.get_last_lr()] == [1.0, 2.0] and lists.min_lrs == [0.0, 0.1]


def test_a_warm_up_without_a_rate_ends_at_each_groups_own() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.4)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    assert schedule.max_lrs == [0.1, 0.4]
    schedule.step(2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.2])


def test_what_programs_import_to_write_a_schedule() -> None:
    names = vars(deepspeed.lr_schedules)
    assert names["WARMUP_MAX_LR"] == "warmup_max_lr" and names["LR_RANGE_TEST_STEP_SIZE"] == "lr_range_test_step_size"
    assert names["CYCLE_FIRST_STAIR_COUNT"] == "cycle_first_stair_count" and names["WARMUP_LINEAR_RATE"] == "linear"
    for kind, key in (("WarmupDecayLR", "warmup_max_lr"), ("OneCycle", "cycle_max_lr")):
        assert deepspeed.lr_schedules.get_lr_from_config({"type": kind, "params": {key: 0.5}}) == (0.5, "")
    for block in ({"params": {}}, {"type": "OneCycle"}, {"type": "None", "params": {}},
                  {"type": "WarmupCosineLR", "params": {}}):  # fmt: skip
        rate, why = deepspeed.lr_schedules.get_lr_from_config(block)
        assert rate is None and why
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))
    held = optimizer.param_groups[0]["lr"]
    assert deepspeed.lr_schedules.update_lr(optimizer.param_groups, [0.5])[0] is held and held == 0.5
    assert deepspeed.lr_schedules.get_torch_optimizer(optimizer) is optimizer


def test_numbers_that_no_schedule_has_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for bad in (-5, 0, 2.5, "four"):
        for make in (
            lambda n: WarmupLR(optimizer, warmup_num_steps=n),
            lambda n: WarmupCosineLR(optimizer, 10, warmup_num_steps=n),
            lambda n: WarmupDecayLR(optimizer, 10, warmup_num_steps=n),
        ):
            with pytest.raises(ValueError, match=f"warmup_num_steps: got {bad!r}, expected a positive integer"):
                make(bad)
    with pytest.raises(ValueError, match="warmup_max_lr: got 2 values, expected 1, one for each parameter group"):
        WarmupLR(optimizer, 0.0, [0.1, 0.2])
    with pytest.raises(ValueError, match="lr_range_test_min_lr: got 3 values"):
        LRRangeTest(optimizer, [0.1, 0.2, 0.3])
    for bad in (-1.5, 0, "four", math.nan):
        for total in (WarmupDecayLR, WarmupCosineLR):
            with pytest.raises(ValueError, match=f"total_num_steps: got {bad!r}, expected a number that is positive"):
                total(optimizer, bad)
        with pytest.raises(ValueError, match=f"cycle_first_step_size: got {bad!r}, expected a number that is positive"):
            OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=bad)
    with pytest.raises(ValueError, match="cycle_second_step_size: got -1, expected a number that is not negative"):
        OneCycle(optimizer, 0.1, 0.2, cycle_second_step_size=-1)
    with pytest.raises(TypeError, match="got object, expected a torch.optim.Optimizer"):
        WarmupLR(object())
    assert optimizer.param_groups[0]["lr"] == 0.1


# ---- schedules of the engine ----
@pytest.mark.parametrize("given", ["object", "callable", "program", "block"])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupCosineLR", "OneCycle"])
def test_an_engine_updates_with_the_rates_of_the_schedule(name: str, given: str) -> None:
    """Two groups with rates of their own, as a plain loop with the same schedule. program: it steps the schedule."""
    numbers: dict[str, Any] = {
        "WarmupLR": {"warmup_num_steps": 3, "warmup_type": "linear"},
        "WarmupCosineLR": {"total_num_steps": 5, "warmup_num_steps": 2},
        "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3, "cycle_momentum": False},
    }[name]
    made = getattr(deepspeed.runtime.lr_schedules, name)

    def optimizer_of(model: nn.Sequential) -> torch.optim.Optimizer:
        rest = [*model[0].parameters(), *model[2].parameters()]
        return torch.optim.AdamW([{"params": rest}, {"params": model[4].parameters(), "lr": 5e-3}], lr=2e-3)

    plain = network()
    reference = optimizer_of(plain)
    schedule = made(reference, **numbers)
    model = network()
    optimizer = optimizer_of(model)
    words: dict[str, Any] = {"config": config(2)}
    own = None
    if given == "object":
        words["lr_scheduler"] = made(optimizer, **numbers)
    elif given == "callable":
        words["lr_scheduler"] = lambda groups: made(groups, **numbers)
    elif given == "program":
        own = made(optimizer, **numbers)
    else:
        words["config"] = config(2, scheduler={"type": name, "params": numbers})
    engine, _, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, **words)
    for step in range(6):
        reference.zero_grad()
        torch.autograd.backward(plain(batch(0, step)).square().mean())
        reference.step()
        schedule.step()
        one_step(engine, step)
        if own is not None:
            own.step()
        assert engine.get_lr() == pytest.approx([group["lr"] for group in reference.param_groups], rel=1e-6)
        assert (own or scheduler).last_batch_iteration == step
    assert_same(engine, plain)


def test_a_schedule_of_the_configuration_with_one_number_per_group() -> None:
    model, plain = network(), network()
    groups = [{"params": list(model[0].parameters())}, {"params": [*model[2].parameters(), *model[4].parameters()]}]
    twins = [{"params": list(plain[0].parameters())}, {"params": [*plain[2].parameters(), *plain[4].parameters()]}]
    reference = torch.optim.AdamW(twins, lr=1e-3, weight_decay=0.01)
    schedule = WarmupLR(reference, 0.0, [0.01, 0.002], 2)
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.01, 0.002], "warmup_num_steps": 2}}
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config(2, scheduler=block))
    for step in range(4):
        reference.zero_grad()
        torch.autograd.backward(plain(batch(0, step)).square().mean())
        reference.step()
        schedule.step()
        one_step(engine, step)
    assert engine.get_lr() == [0.01, 0.002]
    assert_same(engine, plain)


def test_the_numbers_of_the_largest_group_count_too() -> None:
    """As frameworks make them: one group without decay, which has more parameters than the other."""
    model, plain = network(), network()

    def groups_of(of: nn.Module) -> list[dict[str, Any]]:
        small = [p for p in of.parameters() if p.ndim < 2]
        return [
            {"params": [next(of.parameters())], "weight_decay": 0.3, "lr": 1e-2},
            {"params": [*small, *list(of.parameters())[2::2]], "weight_decay": 0.0, "lr": 3e-3},
        ]

    reference = torch.optim.AdamW(groups_of(plain), lr=1e-3, weight_decay=0.01)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config(2))
    for step in range(4):
        reference.zero_grad()
        torch.autograd.backward(plain(batch(0, step)).square().mean())
        reference.step()
        one_step(engine, step)
    assert_same(engine, plain)


def test_the_keys_that_a_scheduler_leaves_in_a_group_are_its_own() -> None:
    model, plain = network(), network()
    optimizer, reference = (torch.optim.AdamW(of.parameters(), lr=1e-3) for of in (model, plain))
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.01, total_steps=6, cycle_momentum=False)
        for each in (optimizer, reference)
    ]
    assert "max_lr" in optimizer.param_groups[0]
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedulers[0], config=config(2)
    )
    for step in range(5):
        reference.zero_grad()
        torch.autograd.backward(plain(batch(0, step)).square().mean())
        reference.step()
        schedulers[1].step()
        one_step(engine, step)
    assert_same(engine, plain)
    optimizer.param_groups[0]["max_lr"] = 1.0  # a scheduler's, who may change it
    one_step(engine, 5)


def test_a_rate_that_a_schedule_would_overwrite_is_refused() -> None:
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    engine, _, _, scheduler = deepspeed.initialize(model=network(), config=config(2, scheduler=block))
    one_step(engine)
    scheduler.load_state_dict(scheduler.state_dict())
    with pytest.raises(NotImplementedError, match="cannot jump to update 7"):
        scheduler.load_state_dict({"last_batch_iteration": 7})
    engine.set_lr(0.5)
    with pytest.raises(libzero.ConfigError, match=r"lr got 0\.5, expected .*the engine's schedule moves the rates"):
        one_step(engine, 1)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_schedule_goes_where_it_was(stage: int, tmp_path: Path) -> None:
    block = {"type": "WarmupCosineLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}}
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(stage, scheduler=block))
    for step in range(3):
        one_step(engine, step)
    engine.save_checkpoint(tmp_path)
    again, _, _, scheduler = deepspeed.initialize(model=network(2), config=config(stage, scheduler=block))
    again.load_checkpoint(tmp_path)
    assert scheduler.last_batch_iteration == 2 and again.get_lr() == engine.get_lr() == scheduler.get_last_lr()
    assert one_step(again, 3) == one_step(engine, 3) and again.get_lr() == engine.get_lr()


# ---- the tutorial for pictures ----
def run_pictures(folder: Path, *words: str) -> dict[str, Any]:
    program = Path(__file__).parent / "pictures_program.py"
    under_the_runner(folder, str(program), "--out", str(folder / "seen.json"), *words)
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


@pytest.mark.nightly
def test_every_combination_of_the_tutorials_options_trains(tmp_path: Path) -> None:
    pictures = run_pictures(tmp_path)
    assert len(pictures) == 3 * 4 * 3 + 7 * 2 + 2
    check_groups_of_the_blocks_numbers(pictures, 12 + 7)
    for words, seen in pictures.items():
        assert len(seen["losses"]) == 6 and all(math.isfinite(x) for x in [*seen["losses"], seen["sum"]]), words
        if "WarmupLR" not in words and "Cosine" not in words:
            log = [0.0, *(0.01 * math.log(s + 1) / math.log(4) for s in range(4)), 0.01]
            assert [rates[-1] for rates in seen["rates"]] == pytest.approx(log), words


def check_groups_of_the_blocks_numbers(pictures: dict[str, Any], count: int) -> None:
    """Groups for experts with the numbers of the optimizer's block change nothing."""
    pairs = [words for words in pictures if "--moe-param-group" in words and "--rate" not in words]
    assert len(pairs) == count
    for words in pairs:
        without = pictures[words.replace(" --moe-param-group", "")]
        assert pictures[words]["losses"] == without["losses"] and pictures[words]["sum"] == without["sum"], words
        assert [len(rates) for rates in pictures[words]["rates"]] == [2 if "2 4" not in words else 2] * 6


def test_groups_for_experts_begin_from_their_own_rate(tmp_path: Path) -> None:
    pictures = run_pictures(tmp_path, "--few")
    check_groups_of_the_blocks_numbers(pictures, 1)
    lower, equal = (seen for words, seen in pictures.items() if "--rate" in words)
    assert all(mine[0] == mine[1] for mine in equal["rates"])
    assert [mine[1] for mine in lower["rates"]] == pytest.approx([0.2 * mine[0] for mine in lower["rates"]])
    assert [mine[0] for mine in lower["rates"]] == [mine[0] for mine in equal["rates"]]
    assert lower["sum"] != equal["sum"] and lower["rates"][-1][1] > 0


# ---- zero.Init and buffers ----
class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, dtype=torch.float32) / 8), persistent=False)
        self.register_buffer("positions", torch.linspace(0, 1, 300))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.scale * self.inv_freq.to(x.dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["init", "module", "build", "engine"])
def test_buffers_keep_the_dtype_of_their_class_with_bf16(how: str) -> None:
    settings = config(3, bf16={"enabled": True})
    torch.manual_seed(1)
    expected = nn.Sequential(Rotary(), nn.Linear(8, 2))
    torch.manual_seed(1)
    make = lambda: nn.Sequential(Rotary(), nn.Linear(8, 2))  # noqa: E731
    if how == "init":
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = make()
            assert torch.get_default_dtype() == torch.float32
        assert all(p.dtype == torch.bfloat16 and hasattr(p, "ds_id") for p in model.parameters())
    elif how == "module":
        model = make()
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    else:
        model = libzero.build(make, settings) if how == "build" else make()
    if how == "build":
        engine: Any = libzero.Engine(model, settings)
        forward = model
    else:
        engine, _, _, _ = deepspeed.initialize(model=model, config=settings)
        forward = engine
    for name, buffer in expected.named_buffers():
        found = dict(model.named_buffers())[name]
        assert found.dtype == buffer.dtype and torch.equal(found, buffer), name
    assert forward(torch.ones(4, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_parameters_that_init_made_are_those_of_a_model_that_was_rounded() -> None:
    settings = config(3, bf16={"enabled": True})
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        alone = nn.Parameter(torch.full((3,), 1 / 3))
        model = Rotary()
        model.extra = alone
    assert model.scale.dtype == model.extra.dtype == model.proj.weight.dtype == torch.bfloat16
    with deepspeed.zero.Init():  # no recipe
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    kept = nn.Linear(2, 2)
    with deepspeed.zero.Init(enabled=False, dtype=torch.bfloat16):
        assert nn.Sequential(nn.Linear(2, 2))[0].weight.dtype == kept.weight.dtype


def test_init_leaves_what_may_stay_fp32() -> None:
    settings = config(3, bf16={"enabled": True}, libzero={"keep_fp32": ["0.norm.*", "1.bias"]})
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = nn.Sequential(Rotary(), nn.Linear(8, 2))
    single = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert single == {"0.norm.weight", "0.norm.bias", "1.bias"}
    deepspeed.initialize(model=model, config=settings)
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == single


class Tied(nn.Module):
    """A head with the embedding's parameter, which is made first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_parameter_that_init_has_rounded_is_refused() -> None:
    wide = Tied().embed.weight.detach().clone()
    assert not torch.equal(wide.bfloat16().float(), wide)
    for pattern, refused in (("head.weight", True), ("embed.weight", False), ("*.weight", False), ("embed*", False)):
        settings = config(3, bf16={"enabled": True}, libzero={"keep_fp32": [pattern]})
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Tied()
        if refused:
            with pytest.raises(ConfigError, match=r"cannot keep embed.weight in fp32: .*zero.Init has rounded it"):
                deepspeed.initialize(model=model, config=settings)
            continue
        engine, _, _, _ = deepspeed.initialize(model=model, config=settings)
        assert torch.equal(engine._engine.full_state_dict()["embed.weight"], wide)
    with deepspeed.zero.Init(dtype=torch.bfloat16):  # knows no keep_fp32
        model = Tied()
    with pytest.raises(ConfigError, match=r"give zero.Init the same configuration"):
        deepspeed.initialize(model=model, config=config(3, bf16={"enabled": True}, libzero={"keep_fp32": "head.*"}))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_what_stays_fp32_begins_with_its_values(compiled: bool) -> None:
    settings = config(3, bf16={"enabled": True}, libzero={"keep_fp32": ["0.*"]})
    torch.manual_seed(5)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))
    nn.init.normal_(model[0].weight)
    wide = {name: p.detach().clone() for name, p in model.named_parameters()}
    given: Any = torch.compile(model, backend="eager") if compiled else model
    engine, _, _, _ = deepspeed.initialize(model=given, config=settings)
    for name, master in engine._engine.full_state_dict().items():
        expected = wide[name] if name.startswith("0.") else wide[name].bfloat16().float()
        assert torch.equal(master, expected), name
    assert not torch.equal(wide["0.weight"].bfloat16().float(), wide["0.weight"])


def test_what_stays_fp32_is_cast_to_fp32() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
        settings = config(2, bf16={"enabled": True}, libzero={"keep_fp32": ["0.*"]})
        deepspeed.initialize(model=model, config=settings)
        assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2


# ---- configurations as frameworks write them ----
def test_a_dotted_key_at_the_top_has_no_effect_as_in_deepspeed() -> None:
    wild = {"zero_optimization.stage3_prefetch_bucket_size": 921.6, "zero_optimization.reduce_bucket_size": 1024}
    engine, _, _, _ = deepspeed.initialize(model=network(), config={**config(3), **wild})
    with pytest.raises(libzero.ConfigError, match="got 921.6, expected a whole number"):
        libzero.Options({**config(3), **wild})  # reads it as a key of the block
    plain, _, _, _ = deepspeed.initialize(model=network(), config=config(3))
    effective = engine._engine.options.effective()
    assert effective == plain._engine.options.effective()
    assert one_step(engine) == one_step(plain)


def test_a_dotted_key_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.logger, "propagate", True)
    more = {"zero_optimization.reduce_bucket_size": 1024}
    deepspeed.initialize(model=network(), config={**config(3), **more})
    assert "zero_optimization.reduce_bucket_size: a dotted key at the top of the configuration" in caplog.text


def test_an_auto_that_was_left_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.logger, "propagate", True)
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.0}}
    left = config(2, optimizer=optimizer, bf16={"enabled": "auto"})
    engine, _, _, _ = deepspeed.initialize(model=network(), config=left)
    assert re.search(r'optimizer\.params\.lr: "auto" was left in the configuration, 0\.001 is taken', caplog.text)
    assert engine.get_lr() == [0.001]
    left["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    with pytest.raises(libzero.ConfigError, match='<dict>: error: .*total_num_steps: got "auto" without its flag'):
        deepspeed.initialize(model=network(), config=left)


def test_faults_of_a_file_name_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    text = json.dumps({**config(2), "zero_optimization": {"stage": 2, "stge": 2}, "bf16": {"enabled": "yes"}}, indent=2)
    file.write_text(text)
    lines = text.splitlines()
    stge = next(i for i, line in enumerate(lines, 1) if "stge" in line)
    enabled = next(i for i, line in enumerate(lines, 1) if "enabled" in line)
    with pytest.raises(libzero.ConfigError) as seen:
        deepspeed.initialize(model=network(), config=str(file))
    message = str(seen.value)
    assert f"{file}:{stge}:5: error: /zero_optimization/stge: unknown key" in message
    assert f"{file}:{enabled}:5: error: /bf16/enabled: got " in message
    assert f"{stge:6} | {lines[stge - 1]}\n       |     ^~~~~~\n" in message
    assert "<dict>" not in message and f"2 errors, 0 notices in {file}" in message
    with pytest.raises(libzero.ConfigError) as seen:
        deepspeed.initialize(model=network(), config=json.loads(text))
    assert "<dict>: error: /zero_optimization/stge: unknown key" in str(seen.value) and ":1:" not in str(seen.value)
    file.write_text('{\n "bf16": {"enabled": [true}\n}')
    with pytest.raises(libzero.ConfigError, match=rf"{re.escape(str(file))}:2:\d+: "):
        deepspeed.initialize(model=network(), config=file)
    file.write_text('{"bf16": {"enabled": true},\n "bf16": {"enabled": false}}')
    with pytest.raises(libzero.ConfigError, match='ds.json: got the key "bf16" twice in one block'):
        deepspeed.initialize(model=network(), config=file)


HJSON = """# as programs comment it
{
  train_micro_batch_size_per_gpu: 4  // samples
  /* no
     clipping */
  gradient_clipping: 0
  "optimizer": {"type": "AdamW", "params": {lr: 1e-3, weight_decay: 0.01,},},
  zero_optimization: {
    stage: 2
    overlap_comm: 1
  }
}
"""


def test_hjson_is_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text(HJSON)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hjson", None)  # not installed
        with pytest.raises(ConfigError, match=r"ds.hjson:1:1: Expecting value. Hint: .* needs `pip install hjson`"):
            deepspeed.initialize(model=network(), config=file)
    pytest.importorskip("hjson")
    text = base64.urlsafe_b64encode(HJSON.encode()).decode()
    reference, _, _, _ = deepspeed.initialize(model=network(), config=config(2))
    one_step(reference)
    for given in (file, text):
        engine, _, _, _ = deepspeed.initialize(model=network(), config=given)
        assert engine.zero_overlap_comm() is True
        one_step(engine)
        assert_same(engine, reference.module, 0)
    file.write_text("{\n  bf16: {enabled: [true}\n}")
    with pytest.raises(ConfigError, match=r"ds.hjson:2:\d+: .*; as Hjson 2:\d+: "):
        deepspeed.initialize(model=network(), config=file)
    file.write_text("{\n  steps_per_print: 1\n  steps_per_print: 2\n}")
    with pytest.raises(ConfigError, match='got the key "steps_per_print" twice'):
        deepspeed.initialize(model=network(), config=file)
    file.write_text("{\n  zero_optimization: {stge: 2}\n}")
    with pytest.raises(ConfigError, match="ds.hjson: error: /zero_optimization/stge: unknown key"):
        deepspeed.initialize(model=network(), config=file)


def test_numbers_stand_for_booleans_where_deepspeed_reads_them() -> None:
    written = config(
        0,
        bf16={"enabled": 1},
        steps_per_print=math.inf,
        wall_clock_breakdown=0,
        zero_allow_untested_optimizer=1,
        managed_gradient_accumulation=0,
        scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 1, "cycle_momentum": 0}},
    )
    given = copy.deepcopy(written)
    engine, _, _, _ = deepspeed.initialize(model=network(), config=given)
    assert given == written and type(given["bf16"]["enabled"]) is int
    assert engine.bfloat16_enabled() is True and next(engine.parameters()).dtype is torch.bfloat16
    assert engine.wall_clock_breakdown() is False and engine.managed_gradient_accumulation() is False
    assert engine.train_micro_batch_size_per_gpu() == 4 and engine.get_lr() == [1.0]
    for value in (2, -1, "yes"):
        with pytest.raises(ConfigError, match="/wall_clock_breakdown: got .*, expected true or false"):
            deepspeed.initialize(model=network(), config=config(0, wall_clock_breakdown=value))
    with pytest.raises(ConfigError, match="/wall_clock_breakdown: got a number"):
        libzero.Options({"wall_clock_breakdown": 1})


def test_an_optimizer_block_as_programs_write_it() -> None:
    """adam_w_mode does not change AdamW; torch_adam does not change a number, wherever it is."""
    decayed = {"lr": 1e-3, "weight_decay": 0.01}
    plain = network()
    reference = torch.optim.AdamW(plain.parameters(), **decayed)
    torch.autograd.backward(plain(batch()).square().mean())
    reference.step()
    for block in (
        {"type": "AdamW", "params": {**decayed, "adam_w_mode": False}},
        {"type": "adamw", "params": {**decayed, "adam_w_mode": 0, "torch_adam": 1}},
        {"type": "Adam", "torch_adam": True, "params": decayed},
    ):
        engine, _, _, _ = deepspeed.initialize(model=network(), config=config(1, optimizer=block))
        one_step(engine)
        assert_same(engine, plain)
        assert engine.optimizer_params() == block["params"]
    with pytest.raises(ConfigError, match="got false, expected true for AdamW"):
        libzero.Options({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}})


def test_the_command_line_names_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(1)))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    for name in ("deepspeed_config", "deepscale_config"):
        words = parser.parse_args([f"--{name}", str(file)])
        engine, _, _, _ = deepspeed.initialize(words, model=network())
        assert engine.zero_optimization_stage() == 1
        with pytest.raises(ConfigError, match=f"got config= and --{name}, expected one configuration"):
            deepspeed.initialize(words, model=network(), config=config(2))
    words = argparse.Namespace(deepspeed_config=file, deepscale_config=file)
    with pytest.raises(ConfigError, match="got --deepspeed_config and --deepscale_config, expected one"):
        deepspeed.initialize(words, model=network())


def test_a_loader_reads_with_the_attributes_that_it_has_then() -> None:
    class Pids(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> int:
            return os.getpid()

    engine, _, loader, _ = deepspeed.initialize(model=network(), config=config(1), training_data=Pids())
    assert loader is not None and loader.num_local_io_workers == 2 and len(loader) == 2
    assert os.getpid() not in torch.cat(list(loader)).tolist()
    loader.num_local_io_workers = 0
    assert set(torch.cat(list(loader)).tolist()) == {os.getpid()}
    assert loader.dataloader is loader.dataloader and loader.dataloader.num_workers == 0
    loader.batch_size, loader.dataloader_drop_last = 3, True
    assert [len(each) for each in loader] == [3, 3] and len(loader) == 2


# ---- torch_autocast ----
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("normed", [True, False])
def test_forward_runs_under_autocast(normed: bool, stage: int) -> None:
    """As torch.autocast around a plain loop; gradients of linear layers alone are reduced in bf16."""

    def made() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(8), network()) if normed else network()

    plain = made()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    engine, _, _, _ = deepspeed.initialize(model=made(), config=config(stage, **AUTOCAST))
    seen: list[torch.dtype] = []
    engine.module[-1 if not normed else 1].register_forward_hook(lambda *about: seen.append(about[2].dtype))
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(batch(0, step))
        loss = output.float().square().mean()
        reference.zero_grad()
        torch.autograd.backward(loss)
        if not normed and stage > 0:
            for p in plain.parameters():
                p.grad = None if p.grad is None else p.grad.bfloat16().float()
        reference.step()
        ours = engine(batch(0, step)).float().square().mean()
        torch.testing.assert_close(ours, loss, atol=1e-6, rtol=1e-6)
        engine.backward(ours)
        engine.step()
    assert_same(engine, plain)
    assert seen == [torch.bfloat16] * 3 and not torch.is_autocast_enabled("cpu")
    assert engine.communication_data_type() == (None if normed or stage == 0 else "bf16")
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.bfloat16
    dtypes = {name: get_comm_dtype(p) for name, p in engine.module.named_parameters()}
    assert dtypes.pop("0.weight") is (torch.float32 if normed else torch.bfloat16)
    assert dtypes["1.0.weight" if normed else "2.bias"] is torch.bfloat16


@pytest.mark.parametrize("stage", range(4))
def test_autocast_to_fp16_scales_the_loss(stage: int, tmp_path: Path) -> None:
    """As torch.autocast and GradScaler in a plain loop, where no gradient of a loss this small is above 0 unscaled."""
    small = 2.0**-14

    def loss_of(output: torch.Tensor, step: int) -> torch.Tensor:
        return output.float().square().mean() * (2.0**40 if step == 2 else small)  # step 2 overflows

    plain = network()
    reference = torch.optim.SGD(plain.parameters(), lr=100.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    training = config(stage, torch_autocast={"enabled": True, "dtype": "float16"}, fp16={"loss_scale": 2})
    training["optimizer"] = {"type": "SGD", "params": {"lr": 100.0, "momentum": 0.9}}
    engine, _, _, _ = deepspeed.initialize(model=network(), config=training)
    assert engine.optimizer.needs_scaler() and engine.optimizer.cur_scale == 65536 and not engine.fp16_enabled()
    for step in range(5):
        with torch.autocast("cpu", torch.float16):
            output = plain(batch(0, step))
        reference.zero_grad()
        torch.autograd.backward(scaler.scale(loss_of(output, step)))
        if stage > 0:
            for p in plain.parameters():
                p.grad = None if p.grad is None else p.grad.half().float()
        scaler.step(reference)
        scaler.update()
        ours = engine(batch(0, step))
        assert ours.dtype is torch.float16
        engine.backward(loss_of(ours, step))
        engine.step()
        assert engine.optimizer.cur_scale == scaler.get_scale() and engine.optimizer.overflow == (step == 2)
        if step == 3:
            engine.save_checkpoint(str(tmp_path), "half")
    assert engine.skipped_steps == 1 and engine.communication_data_type() == ("fp16" if stage > 0 else None)
    assert_same(engine, plain)
    moved = max(float((p - q).detach().abs().max()) for p, q in zip(plain.parameters(), network().parameters()))
    assert moved > 1e-3, "the steps without an overflow train"
    again, _, _, _ = deepspeed.initialize(model=network(), config=training)
    assert again.load_checkpoint(str(tmp_path), "half")[0] is not None
    assert again.optimizer.cur_scale == 32768
    again.backward(loss_of(again(batch(0, 4)), 4))
    again.step()
    assert_same(again, plain)
    with pytest.raises(RuntimeError, match="of a loss that is not scaled"):
        torch.autograd.backward(again(batch(0, 5)).float().mean())
    wide, _, _, _ = deepspeed.initialize(model=network(), config={**training, "torch_autocast": {"enabled": False}})
    wide.save_checkpoint(str(tmp_path), "wide")
    again, _, _, _ = deepspeed.initialize(model=network(), config=training)
    assert again.load_checkpoint(str(tmp_path), "wide")[0] is not None and again.optimizer.cur_scale == 65536


def test_the_key_of_the_loss_scale_changes_nothing_in_fp16(tmp_path: Path) -> None:
    def made(power: int, **more: Any) -> deepspeed.DeepSpeedEngine:
        fp16 = {"enabled": True, "initial_scale_power": power}
        return deepspeed.initialize(model=network(), config=config(1, fp16=fp16, **more))[0]

    made(4).save_checkpoint(str(tmp_path), "fp16")
    resumed = made(8, libzero={"loss_scaling": True})
    assert resumed.load_checkpoint(str(tmp_path), "fp16")[0] is not None and resumed.optimizer.cur_scale == 16


def test_the_block_torch_autocast_is_checked() -> None:
    def made(**block: Any) -> deepspeed.DeepSpeedEngine:
        return deepspeed.initialize(model=network(), config=config(1, torch_autocast=block))[0]

    off = made(enabled=0, dtype="fp16")
    assert off.torch_autocast_enabled() is False and off(batch()).dtype is torch.float32
    assert off.torch_autocast_lower_precision_safe_modules()[0] == "torch.nn.modules.linear.Linear"
    own = made(enabled=1, lower_precision_safe_modules=["torch.nn.LayerNorm"])
    assert own(batch()).dtype is torch.bfloat16 and own.torch_autocast_dtype() is None
    assert own.communication_data_type() is None and get_comm_dtype(own.module[0].weight) is torch.float32
    wide = deepspeed.initialize(model=network(), config=config(1, communication_data_type="fp32", **AUTOCAST))[0]
    assert wide.communication_data_type() == "fp32"
    for wrong, expected in (
        ({"enable": True}, "torch_autocast: got 'enable', expected an object with keys of enabled, dtype"),
        ({"enabled": "yes"}, "torch_autocast.enabled: got 'yes', expected true or false"),
        ({"enabled": True, "dtype": "fp32"}, "torch_autocast.dtype: got 'fp32', expected bfloat16 or float16"),
        ({"lower_precision_safe_modules": "torch.nn.Linear"}, "got 'torch.nn.Linear', expected a list of names"),
        ({"enabled": True, "lower_precision_safe_modules": ["torch.nn.Liner"]}, "cannot import torch.nn.Liner"),
        ({"enabled": True, "lower_precision_safe_modules": ["Linear"]}, "cannot import Linear"),
    ):
        with pytest.raises(ConfigError, match=expected):
            made(**wrong)


# ---- what frameworks save ----
@pytest.mark.parametrize("stage", range(4))
def test_a_checkpoint_of_an_adapter_is_saved_and_loaded(stage: int, tmp_path: Path) -> None:
    """As Trainer saves every model of PEFT, and loads it into the base model with another adapter."""

    def model_of(seed: int) -> nn.Sequential:
        model = network(1)
        torch.manual_seed(seed)
        model[2].requires_grad_(False)
        with torch.no_grad():
            model[0].weight.normal_()
        return model

    engine, _, _, _ = deepspeed.initialize(model=model_of(5), config=config(stage))
    one_step(engine)
    assert engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True) is True
    assert not list(tmp_path.glob("*/frozen-*"))
    again, _, _, _ = deepspeed.initialize(model=model_of(6), config=config(stage))
    path, _ = again.load_checkpoint(tmp_path, load_module_strict=False)
    assert path is not None and again.global_steps == 1
    assert one_step(engine, 1) == one_step(again, 1)
    before, after = (each._engine.state_dict() for each in (engine, again))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_zero_to_fp32_lies_in_the_folder_and_runs(tmp_path: Path, programs: Programs) -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(3))
    one_step(engine)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "zero_to_fp32.py").symlink_to(elsewhere)
    engine.save_checkpoint(tmp_path / "saved")
    assert elsewhere.read_text() == "untouched"
    done = subprocess.run(
        [sys.executable, "zero_to_fp32.py", ".", str(tmp_path / "out")],
        cwd=tmp_path / "saved",
        env=programs.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in masters(engine).items())
    assert sorted(p.name for p in (tmp_path / "saved").iterdir() if "zero_to_fp32" in p.name) == ["zero_to_fp32.py"]


def test_the_optimizers_state_dict_is_a_marker_that_loads_back(tmp_path: Path) -> None:
    """As Lightning puts it into its own file at each save, and gives it back at a resume."""
    engine, optimizer, _, _ = deepspeed.initialize(model=network(), config=config(3))
    assert optimizer is not None
    one_step(engine)
    optimizer.param_groups[0]["lr"] = 0.25
    torch.save({"optimizer_states": [optimizer.state_dict()]}, tmp_path / "own.ckpt")
    optimizer.param_groups[0]["lr"] = 0.5
    state = torch.load(tmp_path / "own.ckpt", weights_only=True)["optimizer_states"][0]
    assert state["state"] == {} and len(state["param_groups"][0]["params"]) == 6
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25 and not hasattr(optimizer, "consolidate_state_dict")
    plain = torch.optim.AdamW(network().parameters())
    with pytest.raises(NotImplementedError, match="states of an optimizer of torch"):
        optimizer.load_state_dict(plain.state_dict())
    state["param_groups"][0]["params"].pop()
    with pytest.raises(libzero.ConfigError, match=r"got groups of \[5\] parameters, expected \[6\]"):
        optimizer.load_state_dict(state)


def test_hooks_are_removed_and_put_back_around_a_generation() -> None:
    """The calls that TRL makes at stage 3."""
    engine, optimizer, _, _ = deepspeed.initialize(model=network(), config=config(3))
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        offload = engine.optimizer.parameter_offload
        module = offload.module
        every = [*module.named_parameters(recurse=True), *module.ds_external_parameters()]
        assert len(every) == 6
        for _, p in every:
            p.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        assert engine.module(batch()).shape == (4, 4)
        offload._register_deepspeed_module(offload.module)
    one_step(engine)
    below, _, _, _ = deepspeed.initialize(model=network(), config=config(2))
    assert not hasattr(below.optimizer, "parameter_offload")


# ---- loops ----
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("boundary", [False, True])
def test_two_backwards_make_one_update(stage: int, boundary: bool) -> None:
    """A discriminator's two losses, each whole: python/README.md names both forms."""
    plain = network()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(stage, gradient_accumulation_steps=2))
    for step in range(3):
        reference.zero_grad()
        for part in (0, 1):
            torch.autograd.backward((plain(batch(part, step)) - part).square().mean())
        reference.step()
        for part in (0, 1):
            if boundary:
                engine.set_gradient_accumulation_boundary(part == 1)
            engine.backward((engine(batch(part, step)) - part).square().mean(), scale_wrt_gas=False)
            engine.step()
        assert engine.global_steps == step + 1
    assert_same(engine, plain)


def test_a_second_backward_without_a_step_is_told_the_form() -> None:
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(2))
    loss = engine(batch()).square().mean()
    engine.backward(loss, retain_graph=True)
    engine.backward(2 * loss)  # of the same micro-batch
    with pytest.raises(libzero.ConfigError, match="of several losses call set_gradient_accumulation_boundary"):
        engine.backward(engine(batch(1)).square().mean())
    engine.step()
    one_step(engine, 1)


def test_an_error_that_nobody_catches_is_shown_and_ends_with_its_code(programs: Programs) -> None:
    """Also where torch.distributed has a hook of its own around libzero's, as deepspeed.initialize() leaves it."""
    text = """
    import atexit
    atexit.register(print, "in the end")
    from libzero import deepspeed
    deepspeed.initialize(model=network(), config={"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4})
    """
    out = programs.run(text, rc=2)
    assert "Traceback" in out and "error: /train_batch_size: 2 is not 4" in out and "in the end" in out, out


@pytest.mark.nightly
def test_an_error_that_nobody_catches_ends_with_its_code(programs: Programs) -> None:
    for text, code in (
        ("try:\n    raise libzero.IoError\nexcept OSError:\n    sys.excepthook(*sys.exc_info())", 0),
        ("libzero.Options({'stage': 2})", 2),
        ("raise libzero.IoError('a disk')", 5),
        ("raise libzero.InternalError('a bug')", 1),
        ("class Own(libzero.CommError): pass\nraise Own('lost')", 6),
        ("raise ValueError('not ours')", 1),
        ("try:\n    libzero.Options({'stage': 2})\nexcept libzero.ConfigError:\n    pass", 0),
    ):
        out = programs.run(text, rc=code)
        assert ("Traceback" in out) == (code != 0 or "excepthook" in text), out
    error = "engine = libzero.Engine(network(), config(2)); engine.backward(torch.ones(2))"
    assert "Traceback" in programs.ranks(error, rc=2)


def test_ranks_that_differ_are_told_the_calls_of_the_program(programs: Programs) -> None:
    out = programs.ranks(
        """
        engine = libzero.Engine(network(), config(2))
        engine.backward(engine(batch()).square().mean())
        engine.step()
        if engine.comm.rank == 0:
            engine.save_checkpoint(os.path.dirname(__file__), "one")
        else:
            engine.backward(engine(batch()).square().mean())
            engine.step()
        """,
        rc=6,
    )
    assert "got different calls" in out and "[Engine::save_checkpoint] " in out, out


@pytest.mark.parametrize("stage", [nightly(0), 3])
def test_the_error_of_endless_overflow_names_the_rank_whose_loss_it_was(programs: Programs, stage: int) -> None:
    out = programs.ranks(
        f"""
        settings = config({stage}, libzero={{"max_skipped_steps": 2}}, gradient_accumulation_steps=2)
        engine = libzero.Engine(network(), settings)
        for step in range(9):
            x = batch(engine.comm.rank, step)
            if engine.comm.rank == 1 and step % 2 == 0:
                x[2, 3] = float("nan")
            engine.backward(engine(x).square().mean())
            engine.step()
        """,
        rc=7,
    )
    assert "2 steps in a row had non-finite gradients" in out
    assert "the loss of the last step was not finite on rank 1. Hint" in out, out


# ---- what Megatron's programs call ----
class OneOf:
    """An mpu whose ranks are all data-parallel, but for one kind."""

    def __init__(self, **degrees: int) -> None:
        for name, degree in {"model": 1, **degrees}.items():
            setattr(self, f"get_{name}_parallel_world_size", lambda degree=degree: degree)


def test_named_states_of_the_generator_are_forked() -> None:
    checkpointing = deepspeed.checkpointing
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()
    own, named = (torch.Generator().manual_seed(seed) for seed in (5, 5 + 2718))
    for _ in range(2):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=own))
        with tracker.fork():
            assert torch.equal(torch.rand(3), torch.rand(3, generator=named))
    states = tracker.get_states()
    with tracker.fork():
        first = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork(), pytest.raises(RuntimeError):  # an error leaves the generator's own state, too
        assert torch.equal(torch.rand(3), first)
        raise RuntimeError
    assert torch.equal(torch.rand(3), torch.rand(3, generator=own))
    tracker.add("more", 7)
    for wrong in (("more", 8), ("other", 7)):
        with pytest.raises(ValueError, match="expected new ones"):
            tracker.add(*wrong)
    with pytest.raises(ValueError, match="got 'none', expected one of model-parallel-rng, more"), tracker.fork("none"):
        pass
    checkpointing.model_parallel_reconfigure_tp_seed(9)
    with tracker.fork():
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(9 + 2718)))
    tracker.reset()
    assert not tracker.get_states()


def test_a_segment_that_is_computed_again_forks_the_same_state() -> None:
    checkpointing = deepspeed.checkpointing
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()

    def segment(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return torch.nn.functional.dropout(x.sin(), 0.5)

    x = torch.linspace(0.1, 1, 64, requires_grad=True)
    outputs = [checkpointing.checkpoint(segment, x) for _ in range(3)]
    after = tracker.get_states()
    torch.autograd.backward(sum(output.sum() for output in outputs))
    assert x.grad is not None
    expected = sum((output.detach() != 0) * 2 * x.detach().cos() for output in outputs)
    torch.testing.assert_close(x.grad, expected)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], after["model-parallel-rng"])
    tracker.reset()


def test_a_client_state_has_the_programs_arguments_and_arrays(tmp_path: Path) -> None:
    """As Megatron saves them: argparse's, and the states of numpy's and Python's generators."""
    numpy = pytest.importorskip("numpy")
    engine, _, _, _ = deepspeed.initialize(model=network(), config=config(1))
    state = {
        "args": argparse.Namespace(lr=0.5, layers=[1, 2]),
        "numpy": numpy.random.get_state(),
        "python": random.getstate(),
        "steps": numpy.int64(3),
        "half": numpy.ones(2, numpy.float16),
    }
    engine.save_checkpoint(tmp_path, client_state=state)
    _, found = engine.load_checkpoint(tmp_path)
    assert found is not None
    assert found["args"] == state["args"] and found["python"] == state["python"] and found["steps"] == 3
    assert found["numpy"][0] == "MT19937" and (found["numpy"][1] == state["numpy"][1]).all()
    assert found["half"].dtype == numpy.float16 and found["half"].tolist() == [1, 1]
    for wrong in (network(), argparse.ArgumentParser(), numpy.array([argparse.ArgumentParser()])):
        with pytest.raises(TypeError, match="client_state: got an object that cannot be loaded safely"):
            engine.save_checkpoint(tmp_path, client_state={"args": argparse.Namespace(model=wrong)})


def test_ranks_that_a_program_cuts_the_model_over_are_refused() -> None:
    deepspeed.init_distributed()
    world = deepspeed.comm.new_group([0])
    with deepspeed.zero.Init(data_parallel_group=world, sequence_data_parallel_group=world, mpu=OneOf(sequence=1)):
        model = network()
    engine, _, _, _ = deepspeed.initialize(model=model, config=config(3), mpu=OneOf())
    for kind in ("model", "tensor_model", "pipeline_model", "pipe"):
        degree = f"mpu.get_{kind}_parallel_world_size\\(\\) is 2, expected 1"
        for made in (
            lambda mpu: deepspeed.zero.Init(mpu=mpu),
            lambda mpu: deepspeed.checkpointing.configure(mpu),
            lambda mpu: deepspeed.initialize(model=network(), config=config(3), mpu=mpu),
        ):
            with pytest.raises(NotImplementedError, match=degree):
                made(OneOf(**{kind: 2}))
        deepspeed.zero.Init(mpu=OneOf(**{kind: 2}), enabled=False)
    with pytest.raises(NotImplementedError, match="param_swapper"):
        deepspeed.zero.Init(param_swapper=object())
