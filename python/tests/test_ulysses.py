"""Sequence parallelism by DeepSpeed's names: models of transformers over two ranks against one process; tiles."""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import nightly, under_the_runner

import libzero
from libzero.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    AutogradComputeMLP,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)

nn = torch.nn
HERE = Path(__file__).parent


def ran(folder: Path, program: str, *words: str, ranks: int = 2) -> dict[str, Any]:
    """What a program of this folder writes."""
    pytest.importorskip("transformers")
    out = folder / "seen.json"
    under_the_runner(folder, str(HERE / program), "--out", str(out), *words, ranks=ranks)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def assert_as_one_process(seen: dict[str, Any]) -> None:
    for name, (plain, losses, difference) in seen.items():
        assert losses == pytest.approx(plain, abs=1e-5), name
        assert difference <= 1e-5, name
        assert abs(plain[0] - plain[-1]) > 1e-3, name  # it trains


# ---- over two ranks ----
def test_models_whose_tokens_two_ranks_share_train_as_in_one_process(tmp_path: Path) -> None:
    """Losses and parameters of three steps: grouped and uneven heads, windows, padding, packed documents, tiles."""
    seen = ran(tmp_path, "ulysses_program.py")
    assert_as_one_process(seen)
    assert {f"llama, stage {stage}" for stage in range(4)} < set(seen) and len(seen) == 16


@pytest.mark.parametrize("case", [nightly(case) for case in ("llama", "lengths", "padding", "packed documents")])
def test_data_and_sequence_parallel_ranks_together_train_as_in_one_process(tmp_path: Path, case: str) -> None:
    seen = ran(tmp_path, "ulysses_program.py", "--every-stage", "--only", case, ranks=4)
    assert_as_one_process(seen)
    assert len(seen) == 4


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ran(tmp_path_factory.mktemp("rules"), "ulysses_rules_program.py")


def test_a_model_of_its_own_attention_over_a_group_of_the_mesh(rules: dict[str, Any]) -> None:
    assert max(rules[f"a model of its own, stage {stage}"] for stage in (1, 3)) < 1e-5
    assert rules["mesh_param"] == {
        "engine": [2, 1, 2],
        "batch": 2,
        "group": [[0, 1], True],
        "groups": [2, [0, 1]],
        "data": [1, [0]],
        "all": [2, [0, 1]],
    }
    assert rules["there and back"] == [[6, 1, 2, 2], True]


def test_sizes_and_ranks_of_the_parallel_state(rules: dict[str, Any]) -> None:
    assert rules["sizes"] == [2, 2, 2] and rules["ranks"] == [0, 0, 0] and rules["one rank registers"] is None
    assert rules["a later engine"] == [2, True, False]


def test_no_thread_of_a_group_is_left_at_the_interpreters_end(rules: dict[str, Any]) -> None:
    assert rules["threads at the end"] == []


def test_batches_of_a_loader_are_cut_over_the_ranks(rules: dict[str, Any]) -> None:
    """Of each rank's batch in turn; lengths differ. shift_labels are those of the next token in the whole sample."""
    assert rules["batches"] == [4, ["00", "10", "01", "11"]]
    assert rules["parts"] == {
        "input_ids": [[[0, 1]], [[100, 101, 102, 103]], [[50, 51, 52, 53]], [[150, 151, 152, 153, 154, 155]]],
        "position_ids": [[[0, 1]], [[0, 1, 2, 3]], [[0, 1, 2, 3]], [[0, 1, 2, 3, 4, 5]]],
        "shift_labels": [
            [[1001, 1002]],
            [[1101, 1102, 1103, 1104]],
            [[1051, 1052, 1053, 1054]],
            [[1151, 1152, 1153, 1154, 1155, 1156]],
        ],
    }
    assert rules["dtypes"] == ["torch.bool", ["input_ids", "mask", "name", "position_ids", "shift_labels"]]


def test_evaluation_of_whole_and_of_divided_samples(rules: dict[str, Any]) -> None:
    assert rules["whole in evaluation"] < 1e-6 and rules["divided in evaluation"] < 1e-6


def test_dropout_of_attention_draws_on_each_rank_and_leaves_the_generators_equal(rules: dict[str, Any]) -> None:
    assert rules["dropout"] == [True, True, True]


VALUE, UNSUITED, LATER = ["ValueError"], ["ValueError", "AssertionError"], ["NotImplementedError", "RuntimeError"]
REFUSALS: dict[str, tuple[list[str], str]] = {
    "mesh of other ranks": (VALUE, r"data_parallel_size .*: got 2, expected 1 \(2 ranks"),
    "mesh of one number": (VALUE, r"mesh_param: got \(2,\), expected two numbers"),
    "mesh and configuration": (VALUE, "sequence_parallel_size: got 1 in the configuration, and 2 of mesh_param"),
    "uneven heads": (LATER, "got 3 heads for 2 ranks, expected a multiple. Hint: DistributedAttention"),
    "no group yet": (["AssertionError"], "no sequence-parallel ranks yet. Hint: initialize_sequence_parallel"),
    "one rank": (VALUE, "got 1, expected more than 1"),
    "three ranks": (["RuntimeError"], "got 3, expected a divisor of 2 ranks"),
    "again": (["AssertionError"], "got a second call, expected one in a run"),
    "eager": (VALUE, "got eager, which needs a mask of all pairs of tokens, expected sdpa"),
    "another implementation": (VALUE, "got sdpa, expected eager, which the model has"),
    "unknown": (VALUE, "got none, expected one of .*sdpa"),
    "flex": (LATER, "flex_attention is not built"),
    "an encoder": (LATER, "a model with an encoder"),
    "no length": (VALUE, "seq_length: got None, expected a number of tokens"),
    "an odd length": (VALUE, "got 5, expected a multiple of 2 ranks"),
    "one head": (VALUE, "got 1 heads for 2 sequence-parallel ranks, expected at least 2"),
    "positions that depend on the length": (LATER, "rotary positions of dynamic: they depend on the longest"),
    "a layer with a state": (LATER, "layers of linear_attention: they carry a state"),
    "a layer with neighbours": (LATER, r"model\.layers\.0\.mlp\.near, a Conv1d"),
    "no positions": (UNSUITED, "position_ids are 0 to 5 on every rank, expected places in the whole sequence"),
    "labels": (UNSUITED, "got labels and no shift_labels of a part of a sequence"),
    "lengths": (UNSUITED, r"got position_ids of \[1, 4\], \[1, 5\] on the sequence-parallel ranks"),
    "a mask of pairs": (UNSUITED, r"got a mask of \[1, 1, 6, 6\] of the program"),
    "a cache": (UNSUITED, "got 6 queries and 12 keys on a rank"),
    "documents and a cache": (UNSUITED, "got a mask that is not causal, or use_cache with packed documents"),
    "not taken over": (UNSUITED, "got 0 calls of the attention sdpa in a forward, expected those of 2 layers"),
    "another length": (UNSUITED, "got 6 tokens on a rank, expected 10 over 2 ranks"),
    "loaders of two lengths": (VALUE, r"the loaders of sequence-parallel ranks \[0\] ended"),
    "an odd number of tokens": (VALUE, "got 9 tokens, expected a multiple of 2 sequence-parallel ranks"),
    "a batch without position_ids": (VALUE, "got a batch without position_ids"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_be_wrong_is_refused_in_words(rules: dict[str, Any], name: str) -> None:
    kinds, text = REFUSALS[name]
    found = rules[name]
    assert found[0] == kinds and re.search(text, found[1]), found


@pytest.mark.parametrize("stage", [3, nightly(1), nightly(2)])
def test_the_trainer_of_transformers_with_sequence_parallel_ranks(tmp_path: Path, stage: int) -> None:
    """Accelerate's parallelism_config: losses, norms and evaluations of one process, which has no DeepSpeed."""
    pytest.importorskip("accelerate")
    seen = ran(tmp_path, "ulysses_trainer_program.py", "--stage", str(stage))
    plain = ran(tmp_path, "ulysses_trainer_program.py", ranks=1)
    assert len(seen["log"]) == 7
    for found, expected in zip(seen["log"], plain["log"], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert seen["sum"] == pytest.approx(plain["sum"], abs=1e-3)


# ---- tiles ----
def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 10, bias=bias), nn.GELU(), nn.Linear(10, 6))


def gradients_of(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, tensors))


def called(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = self(x)
    return output


@pytest.mark.parametrize("shape", [(2, 7, 6), (1, 8, 6), (5, 6)])
@pytest.mark.parametrize("shards", [1, 3, 20])
def test_a_tiled_mlp_has_the_values_and_gradients_of_the_whole(shape: tuple[int, ...], shards: int) -> None:
    model = mlp()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = torch.randn(*shape)
    for parameters in (list(model.parameters()), None):
        tiled = TiledMLP.apply(called, model, x, shards, parameters)
        whole = model(x)
        torch.testing.assert_close(tiled, whole)
        for found, expected in zip(
            gradients_of((tiled * weights).sum(), x, *model.parameters()),
            gradients_of((whole * weights).sum(), x, *model.parameters()),
            strict=True,
        ):
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(AutogradComputeMLP.apply(called, model, x), whole)
    with torch.no_grad():
        torch.testing.assert_close(TiledMLP.apply(called, model, x, shards, None), whole)


def test_dropout_in_a_tile_has_the_gradient_of_what_it_dropped() -> None:
    for tiled in (
        lambda x: TiledMLP.apply(lambda _, tile: nn.functional.dropout(tile, 0.5), None, x, 4, None),
        lambda x: sequence_tiled_compute(
            lambda x: nn.functional.dropout(x, 0.5), 32, 4, {"x": x}, {}, "x", output_reduction=None
        ),
    ):
        x = torch.ones(1, 32, 8, requires_grad=True)
        y = tiled(x)
        after = torch.get_rng_state()
        y.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, y.detach())
        assert 0 < y.count_nonzero() < y.numel()
        assert torch.equal(torch.get_rng_state(), after)


def test_a_tiled_mlp_of_an_input_without_gradient_and_of_frozen_parameters() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    x = torch.randn(2, 5, 6)
    tiled = TiledMLP.apply(called, model, x, 2, None)
    for found, expected in zip(
        gradients_of(tiled.square().sum(), *model[2].parameters()),
        gradients_of(model(x).square().sum(), *model[2].parameters()),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def loss_of(self: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    losses = nn.functional.cross_entropy(self(x), y, reduction="none")
    return losses.sum() if mask is None else (losses * mask).sum()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_tiled_loss_has_the_value_and_gradients_of_the_whole(masked: bool, reduction: str) -> None:
    """Its own gradient multiplies those of parameters, too."""
    head = mlp()
    x = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(3), requires_grad=True)
    y = torch.arange(18).view(2, 9) % 6
    mask = torch.arange(18).view(2, 9) % 4 > 0 if masked else None
    tiled = TiledFusedLogitsLoss.apply(loss_of, head, x, y, mask, 4, list(head.parameters()), reduction)
    whole = loss_of(head, x.flatten(0, 1), y.flatten(), None if mask is None else mask.flatten())
    whole = whole if reduction == "sum" else whole / 4
    torch.testing.assert_close(tiled, whole)
    for found, expected in zip(
        gradients_of(tiled * 3, x, *head.parameters()), gradients_of(whole * 3, x, *head.parameters()), strict=True
    ):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(TiledFusedLogitsLoss.apply(loss_of, head, x, y, mask, 4, None, reduction), whole)


def test_any_computation_by_tiles_of_the_tokens() -> None:
    """Two tensors that are cut and one that is not, all with gradients."""
    head, scale = mlp(), torch.rand(6, requires_grad=True)
    x, z = (torch.randn(2, 7, 6, requires_grad=True) for _ in range(2))
    given = {"cut": {"x": x, "z": z}, "passed": {"scale": scale, "power": 2}}

    def mixed(x: torch.Tensor, z: torch.Tensor, scale: torch.Tensor, power: int) -> torch.Tensor:
        output: torch.Tensor = head(x * scale) * z**power
        return output

    def total(**words: Any) -> torch.Tensor:
        return mixed(**words).sum()

    leaves = [x, z, scale, *head.parameters()]
    whole = mixed(x, z, scale, 2)
    for fn, dim, reduction, expected in (
        (mixed, 1, None, whole),
        (mixed, 1, "mean", whole.mean()),
        (total, 0, "sum", whole.sum()),
    ):
        found = sequence_tiled_compute(
            fn, 7, 3, given["cut"], given["passed"], "x", None, dim, reduction
        )
        torch.testing.assert_close(found, expected)
        pairs = zip(
            gradients_of(found.square().sum(), *leaves),
            torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True),
            strict=True,
        )
        for one, other in pairs:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_tiles_within_a_checkpointed_segment() -> None:
    model = mlp()
    x = torch.randn(2, 7, 6, requires_grad=True)
    tiled = torch.utils.checkpoint.checkpoint(
        lambda x: TiledMLP.apply(called, model, x, 3, None).tanh(), x, use_reentrant=False
    )
    for found, expected in zip(
        gradients_of(tiled.sum(), x, *model.parameters()),
        gradients_of(model(x).tanh().sum(), x, *model.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("stage", range(4))
def test_an_engine_reduces_gradients_of_tiles_once(stage: int) -> None:
    class Model(nn.Module):
        def __init__(self, tiled: bool) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.up, self.inner, self.head = nn.Linear(3, 6), mlp(), nn.Linear(6, 6)
            self.tiled = tiled

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            if not self.tiled:
                return loss_of(self.head, self.inner(x).flatten(0, 1), y.flatten()) / y.numel()
            x = TiledMLP.apply(called, self.inner, x, 3, None)
            total = TiledFusedLogitsLoss.apply(loss_of, self.head, x, y, None, 3, list(self.head.parameters()), "sum")
            return total / y.numel()

    models = [[Model(tiled) for tiled in (False, True)] for _ in range(2)]

    def body(comm: libzero.Communicator) -> list[dict[str, torch.Tensor]]:
        states = []
        for model in models[comm.rank]:
            settings = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                "zero_optimization": {"stage": stage},
            }
            engine = libzero.Engine(model, settings)
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + comm.rank)
                engine.backward(engine(torch.randn(2, 7, 3, generator=generator), torch.arange(14).view(2, 7) % 6))
                engine.step()
            states.append(copy.deepcopy(engine.full_state_dict()))
            engine.close()
        return states

    whole, tiled = libzero.run_ranks(2, body)[0]
    assert whole
    for name, value in whole.items():
        torch.testing.assert_close(tiled[name], value, msg=name)


def test_words_of_tiles_that_are_wrong() -> None:
    head, x, y = mlp(), torch.randn(2, 4, 6, requires_grad=True), torch.zeros(2, 4, dtype=torch.int64)
    loss = lambda *words: TiledFusedLogitsLoss.apply(loss_of, head, *words)
    some = [next(head.parameters())]
    wrong: dict[str, Callable[[], Any]] = {
        "shards: got 0, expected": lambda: TiledMLP.apply(called, head, x, 0, None),
        "compute_params: got 1 tensors, and fn also uses": lambda: TiledMLP.apply(called, head, x, 2, some),
        "output_reduction: got 'max'": lambda: loss(x, y, None, 2, None, "max"),
        r"y: got \[2, 3\], expected \[2, 4\] first": lambda: loss(x, y[:, :3], None, 2, None, "sum"),
        r"mask: got \[2, 4, 1\]": lambda: loss(x, y, torch.ones(2, 4, 1), 2, None, "sum"),
        "grad_requiring_tensor_key: got 'w'": lambda: sequence_tiled_compute(head, 4, 2, {"x": x}, {}, "w"),
        r"x: got \[2, 4, 6\], expected \[batch, 5": lambda: sequence_tiled_compute(head, 5, 2, {"x": x}, {}, "x"),
    }
    for text, call in wrong.items():
        with pytest.raises(ValueError, match=text):
            call()


# ---- the mesh of a program ----
@pytest.mark.skipif(sys.platform != "linux", reason="process groups of gloo")
def test_an_mpu_of_other_ranks_is_refused() -> None:
    import libzero.deepspeed as deepspeed

    class Two:
        get_sequence_parallel_world_size = staticmethod(lambda: 2)
        get_sequence_parallel_rank = staticmethod(lambda: 1)

    settings = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(libzero.ConfigError, match="got sequence-parallel rank 1 of 2 on rank 0, expected 0"):
        deepspeed.initialize(model=mlp(), config=settings, mpu=Two())
    with pytest.raises(libzero.ConfigError, match=r"initialize_mesh_device: got the shape \(1, 2\), expected one of 1"):
        deepspeed.comm.initialize_mesh_device((1, 2), ("data_parallel", "sequence_parallel"))
    mesh = deepspeed.comm.initialize_mesh_device((1, 1), ("data_parallel", "sequence_parallel"))
    assert torch.distributed.get_world_size(mesh.get_group("sequence_parallel")) == 1
    with pytest.raises(KeyError, match="no sequence-parallel ranks"):
        deepspeed.utils.groups._get_sequence_parallel_group()
