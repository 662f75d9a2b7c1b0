"""deepspeed.zero.Init: a model that the ranks hold in parts while it is built. Several ranks: deepspeed_unit.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import libzero
from libzero import deepspeed
from conftest import Programs
from libzero._divided import is_divided
from libzero.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

Gathered = deepspeed.zero.GatheredParameters


def config(stage: int = 3) -> dict[str, Any]:
    adam = {"type": "Adam", "params": {"lr": 1e-2}}
    return {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "optimizer": adam}


class Own(nn.Module):
    """Its constructors read and write parameters of their children, as programs do that know nothing of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3, 7))
        self.first, self.second = nn.Linear(7, 16), nn.Linear(16, 7)
        nn.init.xavier_normal_(self.first.weight)
        self.second.weight.data.uniform_(-1, 1)
        with torch.no_grad():
            self.second.weight[0] = self.first.weight.T[1]
            self.first.bias += self.second.weight.sum()
            self.position.copy_(torch.cat([self.first.weight[:1]] * 3))
        self.third = nn.Linear(self.second.weight.shape[0], len(self.position))
        self.tied = nn.Linear(7, 3)
        self.tied.weight = self.third.weight
        self.replaced = nn.Linear(3, 2)
        self.replaced.weight = nn.Parameter(torch.full((5, 3), 0.25))
        self.replaced.bias.data = torch.ones(5)
        self.apply(self._begin)

    @staticmethod
    def _begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.add_(torch.rand(len(module.bias)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return self.replaced(self.third(x) + self.tied(x)) + self.position.sum()


def made() -> Own:
    torch.manual_seed(5)
    return Own()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_constructors_see_whole_values(stage: int) -> None:
    expected = made()
    with deepspeed.zero.Init(config_dict_or_path=config(stage)):
        model = made()
    assert torch.equal(torch.rand(3), (made(), torch.rand(3))[1])  # nothing else was drawn
    for name, p in model.named_parameters():
        mine = dict(expected.named_parameters())[name]
        assert p.numel() == 0 and p.ndim == mine.ndim, name
        assert p.ds_shape == mine.shape and p.ds_numel == mine.numel(), name
        assert torch.equal(p.ds_tensor.view(mine.shape), mine) and p.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert model.tied.weight is model.third.weight
    with Gathered([*model.parameters()]):
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    engine, *_ = deepspeed.initialize(model=model, config=config(stage))
    x = torch.randn(4, 7)
    assert torch.equal(engine(x), expected(x))
    assert all(hasattr(p, "ds_tensor") == (stage == 3) and not is_divided(p) for p in model.parameters())


def test_operations_on_whole_and_divided_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            nn.init.ones_(self.a.weight)  # whole from now on, the others are divided
            with torch.no_grad():
                self.b.weight.copy_(torch.cat([self.a.weight, self.b.weight])[1:4] + self.a.weight @ self.b.weight)
                self.a.weight.data = self.c.weight.clone()
                self.a.weight.add_(self.b.weight)
                self.a.bias.copy_(torch.func.functional_call(self.b, dict(self.c.named_parameters()), torch.ones(3)))
                self.c.bias.fill_(self.b.weight.contiguous().sum().item())
            self.table = nn.Parameter(torch.from_numpy(array := numpy.zeros(4, numpy.float32)))
            array[:] = 3  # the parameter's memory
            self.expanded = nn.Parameter(torch.ones(1, 3).expand(2, 3))

    def build() -> Mixed:
        torch.manual_seed(2)
        return Mixed()

    expected = build()
    with deepspeed.zero.Init():
        model = build()
    assert not is_divided(model.table) and not is_divided(model.expanded) and is_divided(model.c.bias)
    with Gathered([*model.parameters()]):
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(p, q), name


def test_a_parameter_of_parts_is_refused_and_others_are_left() -> None:
    class Parted(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.other = nn.Linear(2, 2)
            with Gathered(self.inner.weight, modifier_rank=0):
                self.same = nn.Sequential(self.inner)
                assert not is_divided(self.inner.weight) and is_divided(self.inner.bias)
                self.inner = nn.utils.parametrizations.weight_norm(self.inner)
            if wrong:
                self.again = nn.Parameter(self.other.weight)

    with deepspeed.zero.Init():
        Parted(False)
        lazy = nn.Sequential(nn.LazyLinear(3))
        with pytest.raises(RuntimeError, match=r"Parted.again was made of a parameter that the ranks hold in parts"):
            Parted(True)
    assert torch.nn.parameter.is_lazy(lazy[0].weight)


def test_one_module_is_whole_at_a_time() -> None:
    seen = []

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            parameters.extend(self.parameters())
            nn.init.normal_(self.up.weight)
            seen.append(sum(p.ds_numel for p in parameters if not is_divided(p)))

    parameters: list[nn.Parameter] = []
    with deepspeed.zero.Init():
        layers = [Layer(16) for _ in range(6)]
        nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)), *layers)
    largest = 16 * 64 + 64
    assert len(seen) == 6 and max(seen) <= largest


def test_what_something_else_refers_to_stays_whole() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(4, 4)
            self.flat = self.plain.weight.detach().view(-1)
            self.own = nn.Linear(4, 4)

    with deepspeed.zero.Init():
        model = Viewed()
    assert not is_divided(model.plain.weight) and is_divided(model.plain.bias) and is_divided(model.own.weight)
    model.flat.fill_(2.0)
    assert model.plain.weight.detach().eq(2.0).all()


def test_what_reads_or_writes_outside_of_gathered_parameters_is_an_error() -> None:
    def model() -> nn.Linear:
        with deepspeed.zero.Init():
            return nn.Linear(4, 2)

    outside = model()
    for use in (
        lambda: nn.init.zeros_(outside.weight),
        lambda: outside.weight.data.normal_(),
        lambda: outside(torch.ones(3, 4)),
        lambda: outside.weight.sum(),
        lambda: nn.functional.pad(outside.bias, (0, 2)),
        lambda: outside.weight.detach().clone(),
        lambda: torch.cat([outside.weight, torch.ones(2, 4)]),
        lambda: outside.bias.tolist() or outside.bias.add(1),
    ):
        with pytest.raises(RuntimeError, match=r"aten::\w+ needs a parameter that the ranks hold.*Hint"):
            use()
    assert outside.weight.ndim == 2 and outside.bias.ndim == 1 and outside.weight.requires_grad
    outside.to("cpu").float().train()
    outside.bias.data = nn.functional.pad(outside.bias.data, (0, len(outside.weight) - len(outside.bias)))
    assert is_divided(outside.bias)
    assert "weight" in outside.state_dict() and is_divided(outside.weight)
    reader = model()
    before = reader.weight.ds_tensor.clone()
    with pytest.raises(RuntimeError, match=r"modifier_rank=None and parameters that were written \(shapes: \[2, 4\]\)"):
        with Gathered([*reader.parameters()]):
            nn.init.zeros_(reader.weight)
    assert is_divided(reader.weight) and torch.equal(reader.weight.ds_tensor, before)
    with pytest.raises(ZeroDivisionError), Gathered(reader.weight, modifier_rank=0):
        nn.init.zeros_(reader.weight)
        raise ZeroDivisionError
    assert is_divided(reader.weight) and torch.equal(reader.weight.ds_tensor, before)
    with Gathered(reader.weight, modifier_rank=0):
        assert reader.weight.ds_status == ZeroParamStatus.AVAILABLE and reader.weight.numel() == 8
        nn.init.zeros_(reader.weight)
    assert reader.weight.numel() == 0 and reader.weight.ds_tensor.eq(0).all()
    with Gathered(reader.weight, modifier_rank=0):
        held = reader.weight.data  # refers to the memory at the end
        held.fill_(3)
    assert is_divided(reader.weight) and reader.weight.ds_tensor.eq(3).all() and held.eq(3).all()
    with pytest.raises(RuntimeError, match="parameters that were written"), Gathered(reader.weight):
        reader.weight.data[0] = 5
    assert reader.weight.ds_tensor.eq(3).all()
    reader.bfloat16()
    with pytest.raises(RuntimeError, match="needs a parameter that the ranks hold in parts"):
        nn.init.ones_(reader.weight)
    with Gathered(reader.weight):
        assert reader.weight.dtype == torch.bfloat16 and reader.weight.eq(3).all()
    with Gathered(reader.weight, modifier_rank=0):
        nn.init.constant_(reader.weight, 1 / 3)
    reader.float().half()
    with Gathered(reader.weight):  # rounds, which is no write
        assert reader.weight.dtype == torch.float16


def test_a_copy_is_divided_too() -> None:
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(4, 2))
    other = copy.deepcopy(model)
    assert other[0].weight.ds_id != model[0].weight.ds_id
    with Gathered([*other.parameters()], modifier_rank=0):
        nn.init.zeros_(other[0].weight)
    with Gathered([*model.parameters()]):
        assert model[0].weight.ne(0).any()
        whole = copy.deepcopy(model)
    assert not is_divided(whole[0].weight) and whole[0].weight.shape == (2, 4)


def test_an_engine_that_is_refused_leaves_the_parts() -> None:
    with deepspeed.zero.Init():
        model = nn.Linear(4, 2)
    kept = model.weight.ds_tensor.clone()
    for _ in range(2):
        with pytest.raises(libzero.ConfigError, match="no_such_key"):
            deepspeed.initialize(model=model, config={**config(), "no_such_key": 1})
        with pytest.raises(libzero.ConfigError, match="held|duplicate|elsewhere|unit|names"):
            libzero.Engine(model, config(), units=["no.such.module"])
    with Gathered(model.weight):
        assert torch.equal(model.weight.detach().view(-1), kept)
    engine = libzero.Engine(model, config())  # libzero's own engine takes such a model too
    assert torch.equal(engine.full_state_dict()["weight"].view(-1), kept)


def test_added_parameters_are_divided_by_a_call() -> None:
    with deepspeed.zero.Init():
        model = nn.Linear(4, 2)
    model.extra = nn.Parameter(torch.arange(6.0))
    model.weight.convert_to_zero_parameters([model.extra])
    assert model.extra.numel() == 0 and model.extra.ds_numel == 6 and not model.extra.ds_persist
    engine, *_ = deepspeed.initialize(model=model, config=config())
    held = engine._engine.full_state_dict()["extra"]
    assert torch.equal(held, torch.arange(6.0))
    model.extra.convert_to_zero_parameters([*model.parameters()])  # an engine has them
    assert not any(is_divided(p) for p in model.parameters())
    assert torch.equal(engine._engine.full_state_dict()["extra"], held)


def test_ranks_hold_parts_of_rank_0s_values(programs: Programs) -> None:
    """Three ranks that draw different values; the last part of 21 elements is not full."""
    out = programs.ranks(
        """
        import sys
        sys.path.insert(0, HERE)
        from test_zero_init import Gathered, config, deepspeed, made
        import torch.distributed as dist

        expected = made()
        deepspeed.init_distributed()
        rank = dist.get_rank()
        draw = torch.manual_seed
        torch.manual_seed = lambda seed: draw(seed + rank)  # made() seeds
        with deepspeed.zero.Init(config_dict_or_path={**config(), "train_batch_size": 3}):
            model = made()
        for p in model.parameters():
            assert len(p.ds_tensor) == -(-p.ds_numel // 3) and p.numel() == 0
        with Gathered([*model.parameters()]):
            for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(p, q), name
        position = model.position
        try:
            with Gathered(position):
                if rank == 1:
                    position.data.zero_()  # not seen: torch does not count it
                    torch.nn.init.ones_(position)
        except RuntimeError as error:
            print("refused", "none on this rank" not in str(error))
        with Gathered(position, modifier_rank=2):
            if rank == 2:
                torch.nn.init.constant_(position, 2.0)
        model.late = torch.nn.Parameter(torch.full((999,), 1.0 + rank))  # whole, next to divided ones
        engine, *_ = deepspeed.initialize(model=model, config={**config(), "train_batch_size": 3})
        assert engine._engine.parameter_state("position").eq(2.0).all()
        assert engine._engine.parameter_state("late").eq(1.0).all()
        torch.nn.init.constant_(expected.position, 2.0)
        x = torch.ones(2, 7)
        print("equal", torch.equal(engine(x), expected(x)), flush=True)
        model.late.requires_grad_(False)
        for name, p in model.named_parameters():
            part = p.ds_tensor
            parts = [None] * 3
            dist.all_gather_object(parts, part.clone())
            with Gathered(p):
                assert torch.equal(torch.cat(parts), p.detach().flatten()) and part.ds_numel == len(part), name
            try:
                part.zero_()
            except RuntimeError as error:
                assert "inference tensor" in str(error).lower(), error
            else:
                raise AssertionError("a write to a copy would be lost")
        engine.destroy()
        print("parts", not hasattr(p, "ds_tensor"), flush=True)
        """.replace("HERE", repr(str(Path(__file__).parent))),
        ranks=3,
    )
    assert out.count("refused False") == 2 and out.count("refused True") == 1 and out.count("equal True") == 3, out
    assert out.count("parts True") == 3, out


def test_ranks_agree_on_what_is_divided(programs: Programs) -> None:
    out = programs.ranks(
        """
        from libzero import deepspeed
        from libzero._divided import is_divided
        import torch.distributed as dist

        deepspeed.init_distributed()
        views = []
        with deepspeed.zero.Init():
            model = torch.nn.Linear(2, 2)
        other = torch.nn.Linear(4, 2)
        if dist.get_rank() == 1:
            views.append(other.weight.detach())
        model.weight.convert_to_zero_parameters([other.weight, other.bias])
        print([is_divided(p) for p in (other.weight, other.bias)], flush=True)
        """
    )
    assert out.count("[False, True]") == 2, out


def test_experts_and_cut_layers_begin_with_rank_0s_values(programs: Programs) -> None:
    out = programs.ranks(
        """
        import sys
        sys.path.insert(0, HERE)
        from test_zero_init import config, deepspeed, is_divided
        import torch.distributed as dist

        class Net(torch.nn.Module):
            def __init__(self, ep_size):
                super().__init__()
                self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
                expert = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 8))
                self.moe = libzero.MoE(8, expert, 4, ep_size)

        def made(seed, ep_size):
            torch.manual_seed(seed)
            return Net(ep_size)

        deepspeed.init_distributed()
        rank = dist.get_rank()
        for what in ("ep", "tp"):
            expected = made(3, 1)
            settings = {**config(), "train_batch_size": 2}
            if what == "tp":
                cuts = [{"patterns": [f"{name}.weight"], "partition_type": kind}
                        for name, kind in (("up", "column"), ("down", "row"))]
                settings["tensor_parallel"] = {"autotp_size": 2, "partition_config": {"layer_specs": cuts}}
            with deepspeed.zero.Init(config_dict_or_path=settings):
                model = made(3 + rank, 2 if what == "ep" else 1)
            assert all(is_divided(p) for p in model.parameters())
            engine, *_ = deepspeed.initialize(model=model, config=settings)
            for name, value in expected.named_parameters():
                assert torch.equal(engine._engine.parameter_state(name), value), name
            print(what, "equal", flush=True)
            engine.destroy()
        """.replace("HERE", repr(str(Path(__file__).parent)))
    )
    assert out.count("ep equal") == 2 and out.count("tp equal") == 2, out
