"""What a module may hold besides ordinary parameters: buffers of all kinds, parts of one tensor, target networks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import config
from torch import nn

import libzero
from libzero import deepspeed
from libzero.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}


def inputs(step: int, rank: int, ranks: int = 2) -> torch.Tensor:
    """A rank's part of a batch."""
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def by_loop(model: nn.Module, steps: int = 3) -> dict[str, torch.Tensor]:
    """A plain torch loop over the whole batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(step, 0, 1)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def by_engine(make: Callable[[], nn.Module], stage: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """Two ranks; rank 0's state dict."""
    models = [make(), make()]

    def body(comm: libzero.Communicator) -> dict[str, torch.Tensor]:
        with libzero.Engine(models[comm.rank], config(stage, **SGD)) as engine:
            for step in range(steps):
                engine.backward(engine(inputs(step, comm.rank)).square().mean())
                engine.step()
            return engine.state_dict()

    return libzero.run_ranks(2, body)[0]


def require_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


# ---- buffers that are not persistent --------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), float(seed)), persistent=False)
        self.register_buffer("mean", torch.zeros(4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.blocks.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.layer(x) + self.table + self.mean)


@pytest.mark.parametrize("stage", range(4))
def test_files_leave_out_buffers_that_are_not_persistent(stage: int, tmp_path: Path) -> None:
    models = [Rotary(seed) for seed in range(2)]

    def body(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(stage)) as engine:
            assert models[comm.rank].table.tolist() == [0.0] * 4  # rank 0's, as every buffer's
            engine.backward(engine(inputs(0, comm.rank)).square().mean())
            engine.step()
            engine.save_checkpoint(tmp_path / "saved", "t")
            engine.save_checkpoint(tmp_path / "saved", "w", weights_only=True)
            engine.export_weights(tmp_path / "out")
            engine.import_weights(tmp_path / "out")

    libzero.run_ranks(2, body)
    from safetensors.torch import load_file, save_file

    names = models[0].state_dict().keys()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names
    for tag in "tw":
        state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"), tag)
        Rotary().load_state_dict(state, strict=True)
    for words in ({"load_module_only": True}, {"load_optimizer_states": False}):
        layer, *_ = deepspeed.initialize(model=Rotary(7), config=config(stage))
        layer.load_checkpoint(tmp_path / "saved", "t", **words)
        found = layer._engine.state_dict()
        require_close(found, get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"), "t"))
        layer.destroy()
    # Files of a program in which one of them was persistent.
    older = {**load_file(tmp_path / "out" / "model.safetensors"), "table": torch.ones(4)}
    save_file(older, tmp_path / "older.safetensors")
    with libzero.Engine(Rotary(7), config(0)) as engine:
        assert engine.import_weights(tmp_path / "older.safetensors").unexpected == ["table"]
        assert engine.module.table.tolist() == [7.0] * 4


def test_a_resume_has_the_buffers_that_are_not_persistent(tmp_path: Path) -> None:
    """Each rank its own, though no state dict has them."""
    models = [Rotary(seed) for seed in range(2)]

    def save(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(3)) as engine:
            models[comm.rank].table.fill_(3.0 + comm.rank)
            models[comm.rank].blocks.mask = torch.full((2,), 5.0)
            engine.save_checkpoint(tmp_path, "t")

    def load(comm: libzero.Communicator) -> tuple[list[float], list[float]]:
        model = Rotary(9)
        with libzero.Engine(model, config(3)) as engine:
            engine.load_checkpoint(tmp_path)
            return model.table.tolist(), model.blocks.mask.tolist()

    libzero.run_ranks(2, save)
    # One that has another shape now stays as the program made it.
    assert libzero.run_ranks(2, load) == [([3.0] * 4, [1.0] * 4), ([4.0] * 4, [1.0] * 4)]
    assert libzero.run_ranks(1, load) == [([3.0] * 4, [1.0] * 4)]


# ---- buffers that come and go ---------------------------------------------------------------------


class Calibrated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", None)
        self.register_buffer("gone", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().abs().max().reshape(1)
            self.gone = None
            self.layer.register_buffer("count", torch.tensor([2]))
        return self.layer(x / self.scale)


def test_a_checkpoint_has_the_buffers_of_the_moment(tmp_path: Path) -> None:
    model = Calibrated()
    with libzero.Engine(model, config(1)) as engine:
        engine(inputs(0, 0))
        engine.save_checkpoint(tmp_path, "t")
        assert get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "t").keys() == model.state_dict().keys()
        scale = model.scale
        model.scale = torch.full((1,), 9.0)
        engine.save_checkpoint(tmp_path, "u")
        assert scale.item() != 9.0  # a tensor that the program has put aside stays as it is
        engine.load_checkpoint(tmp_path, "t")
        torch.testing.assert_close(model.scale, scale)
    with libzero.Engine(Calibrated(), config(1)) as engine:
        with pytest.raises(libzero.ConfigError, match="scale: in the checkpoint, not in the model"):
            engine.load_checkpoint(tmp_path, "t")
        engine(inputs(1, 0))  # calibrates on another batch
        engine.load_checkpoint(tmp_path, "t")
        torch.testing.assert_close(engine.module.scale, scale)


# ---- sparse buffers -------------------------------------------------------------------------------


class Graph(nn.Module):
    """Layers over a sparse adjacency; ranks build graphs with different numbers of edges."""

    def __init__(self, rank: int, layout: torch.layout, persistent: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        edges = torch.eye(4)
        edges[0, 1 + rank] = 2.0 + rank
        edges[3, 0] = float(rank)
        made = edges.to_sparse() if layout == torch.sparse_coo else edges.to_sparse(layout=layout)
        self.register_buffer("adjacency", made, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.adjacency.to_dense()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("stage", [0, 3])
def test_sparse_buffers_are_rank_0s(layout: torch.layout, stage: int, tmp_path: Path) -> None:
    models = [Graph(rank, layout, False) for rank in range(2)]
    wanted = by_loop(Graph(0, layout, False))
    adjacency = models[0].adjacency.to_dense()

    def body(comm: libzero.Communicator) -> dict[str, torch.Tensor]:
        with libzero.Engine(models[comm.rank], config(stage, **SGD)) as engine:
            assert models[comm.rank].adjacency.layout == layout
            assert torch.equal(models[comm.rank].adjacency.to_dense(), adjacency)
            for step in range(3):
                engine.backward(engine(inputs(step, comm.rank)).square().mean())
                engine.step()
            engine.save_checkpoint(tmp_path, "t")
            engine.load_checkpoint(tmp_path, "t")
            return engine.state_dict()

    require_close(libzero.run_ranks(2, body)[0], wanted)


def test_what_cannot_be_saved_or_sent_is_named_and_the_ranks_stay_usable(tmp_path: Path) -> None:
    models = [Graph(rank, torch.sparse_coo, True) for rank in range(2)]

    def body(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(2)) as engine:
            with pytest.raises(libzero.ConfigError, match="buffer adjacency .* cannot hold"):
                engine.save_checkpoint(tmp_path, "t")
        for fault in (torch.empty(3, device="meta"), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)):
            model = nn.Sequential(nn.Linear(2, 2))
            model[0].register_buffer("odd", fault)
            with pytest.raises(libzero.ConfigError, match=r"buffer 0\.odd"):
                libzero.Engine(model, config(2))
        libzero.Engine(nn.Linear(2, 2), config(2)).close()

    libzero.run_ranks(2, body)


# ---- parameters -----------------------------------------------------------------------------------


class Parts(nn.Module):
    """Parameters that are parts of one tensor: rows, and columns, which lie between one another."""

    def __init__(self, deferred: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        left, right = torch.randn(4, 4).chunk(2, dim=1)
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)
        whole = torch.empty(3, 4, 4).normal_() if deferred else torch.randn(3, 4, 4)
        self.rows = nn.ParameterList([nn.Parameter(part) for part in whole.unbind(0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = torch.tanh(x @ row)
        return (x @ self.left) * (x @ self.right)


@pytest.mark.parametrize("stage", range(4))
def test_parameters_that_are_parts_of_one_tensor(stage: int) -> None:
    require_close(by_engine(Parts, stage), by_loop(Parts()))
    require_close(by_engine(lambda: libzero.build(lambda: Parts(True)), stage), by_loop(Parts(True)))


def test_parameters_with_common_elements_are_refused() -> None:
    whole = torch.randn(6)
    model = nn.ParameterList([nn.Parameter(whole[:4]), nn.Parameter(whole[3:])])
    with pytest.raises(libzero.ConfigError, match="parameter 1: shares its storage with 0, and elements"):
        libzero.Engine(model, config(0))


class Momentum(nn.Module):
    """A target network that follows the trained one within forward(), as in MoCo, BYOL and DINO."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.target = nn.Linear(4, 4), nn.Linear(4, 4)
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for target, student in zip(self.target.parameters(), self.student.parameters(), strict=True):
                target.mul_(0.9).add_(student, alpha=0.1)
        return self.student(x) - self.target(x)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_forward_may_write_frozen_parameters_below_stage_3(stage: int) -> None:
    require_close(by_engine(Momentum, stage), by_loop(Momentum()))


def test_forward_may_write_no_other_parameters(tmp_path: Path) -> None:
    with libzero.Engine(Momentum(), config(3)) as engine, pytest.raises(RuntimeError, match="target.weight"):
        engine(inputs(0, 0))
    model = Momentum()
    model.target.requires_grad_(True)  # frozen later, it has a master
    with libzero.Engine(model, config(1)) as engine:
        model.target.requires_grad_(False)
        with pytest.raises(RuntimeError, match="target.weight"):
            engine(inputs(0, 0))


def test_a_save_in_the_background_does_not_see_the_target_move(tmp_path: Path) -> None:
    model = Momentum()
    more = {"checkpoint": {"writer": {"decoupled": True}}}
    with libzero.Engine(model, config(1, **more)) as engine:
        before = model.target.weight.clone()
        engine.save_checkpoint(tmp_path, "t")
        engine(inputs(0, 0))
        engine.finish_checkpoint()
        assert not torch.equal(model.target.weight, before)
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "t")
    assert torch.equal(state["target.weight"], before)


# ---- files ----------------------------------------------------------------------------------------


def test_buffers_are_narrowed_as_parameters_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state: dict[str, Any] = {name: v.double() if v.is_floating_point() else v for name, v in model.state_dict().items()}
    state["1.running_mean"] = torch.full((4,), 0.1, dtype=torch.float64)
    torch.save(state, tmp_path / "wide.pt")
    with libzero.Engine(model, config(0)) as engine:
        report = engine.import_weights(tmp_path / "wide.pt")
        assert any(line.startswith("1.running_mean: F64, largest relative change") for line in report.converted)
        assert torch.equal(model[1].running_mean, torch.full((4,), 0.1))


@pytest.mark.parametrize("name", ["a\nb", "x" * 5000])
def test_names_that_no_checkpoint_can_hold_are_refused_at_once(name: str) -> None:
    model = nn.ModuleDict({name: nn.BatchNorm1d(2)})
    with pytest.raises(libzero.ConfigError, match="which checkpoints ca") as error:
        libzero.Engine(model, config(0))
    assert "parameter" in str(error.value)
    assert len(str(error.value)) < 1000
    model = nn.ModuleDict({"linear": nn.Linear(2, 2)})
    model["linear"].register_buffer(name, torch.ones(1))
    with pytest.raises(libzero.ConfigError, match="buffer linear"):
        libzero.Engine(model, config(0))
