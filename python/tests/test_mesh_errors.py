"""Mistakes with tensor and sequence parallelism are named on every rank, and nothing hangs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_mesh import settings

import libzero

PLAN = {
    "use_default_specs": False,
    "layer_specs": [{"patterns": ["up"]}, {"patterns": ["down"], "partition_type": "row"}],
}


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(4, 8)
        self.down = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def error_of(call: Callable[[], Any]) -> str:
    """The text of the error; torch raises an error of its operators as a RuntimeError."""
    with pytest.raises((libzero.ConfigError, RuntimeError)) as info:
        call()
    assert "mat1 and mat2" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("name", ["up.weight", "down.weight", "up.bias"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_weight_whose_data_become_whole(name: str, evaluated: bool) -> None:
    models = [Pair(), Pair()]

    def body(comm: libzero.Communicator) -> str:
        model = models[comm.rank]
        engine = libzero.Engine(model, settings(0, partition_config=PLAN))
        if evaluated:
            for _ in range(2):
                with torch.no_grad():
                    model(torch.ones(3, 4))
        whole = engine.parameter_state(name)
        model.get_parameter(name).data = whole
        text = error_of(lambda: model(torch.ones(3, 4)))
        assert f"{name} was replaced behind the Engine by a tensor of shape {list(whole.shape)}" in text, text
        assert f"(rank {comm.rank}/2" in text and f"this rank, tp {comm.rank}, has a part of shape [4" in text or (
            name == "down.weight" and "has a part of shape [4, 4] of [4, 8]" in text
        )
        assert "give set_parameter_state() the whole values" in text
        return text

    libzero.run_ranks(2, body)


def test_another_parameter_in_the_place_of_a_part() -> None:
    models = [Pair(), Pair()]

    def body(comm: libzero.Communicator) -> None:
        model = models[comm.rank]
        engine = libzero.Engine(model, settings(0, partition_config=PLAN))
        model.up.weight = torch.nn.Parameter(torch.zeros(8, 4))
        text = error_of(lambda: engine(torch.ones(3, 4)))
        assert "aten::linear got 8 features with up.bias, of which this rank holds rows" in text, text

    libzero.run_ranks(2, body)


def test_ranks_with_different_degrees() -> None:
    """Also of a rank that has no mesh at all, which would take part in no group."""
    models = [Pair() for _ in range(4)]
    plain = {key: value for key, value in settings(0).items() if key != "tensor_parallel"}

    def body(comm: libzero.Communicator) -> list[str]:
        config = plain if comm.rank == 3 else settings(0, partition_config=PLAN)
        texts = []
        for call in (lambda: libzero.Mesh.of(config), lambda: libzero.Engine(models[comm.rank], config)):
            with pytest.raises(libzero.ConfigError) as info:
                call()
            texts.append(str(info.value))
        engine = libzero.Engine(models[comm.rank], settings(0, partition_config=PLAN))
        assert engine.mesh.size("dp") == 2
        return texts

    results = libzero.run_ranks(4, body)
    assert all(texts == results[0] for texts in results)
    for text in results[0]:
        assert (
            "the ranks have different degrees of parallelism: tensor_parallel.autotp_size 2 x sequence_parallel_size 1 "
            "on ranks 0-2; tensor_parallel.autotp_size 1 x sequence_parallel_size 1 on rank 3. Hint: "
        ) in text, text


def test_an_engine_without_degrees_sends_nothing_more() -> None:
    """As in C++: the degrees of all ranks are compared in a message that is sent anyway."""
    models = [Pair(), Pair()]

    def body(comm: libzero.Communicator) -> None:
        comm.reset_stats()
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        engine = libzero.Engine(models[comm.rank], config)
        assert comm.stats()["control"] == (5, 2 + 16 + 16 + 2), comm.stats()
        mesh = engine.mesh
        engine.close()
        assert mesh.size("dp") == 2  # outlives the Engine

    libzero.run_ranks(2, body)


def test_heads_and_tokens_that_do_not_divide() -> None:
    def body(comm: libzero.Communicator) -> list[str]:
        mesh = libzero.Mesh.of({"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 3})
        q, k = torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 4, 4)
        calls: list[Callable[[], Any]] = [
            lambda: libzero.attention_over_heads(q, q, q, lambda a, b, c: a, mesh=mesh),
            lambda: libzero.sequence_to_heads(q, mesh=mesh),
            lambda: libzero.sequence_to_heads(torch.zeros(1, 2, 6, 4), k, k, mesh=mesh),
            lambda: mesh.tokens(-1),
            lambda: libzero.sequence_to_heads(torch.zeros(1, 2, 3, 4), mesh=mesh, tokens=-6),
        ]
        return [error_of(call) for call in calls]

    results = libzero.run_ranks(3, body)
    assert all(texts == results[0] for texts in results)
    for text, part in zip(
        results[0],
        [
            "got 2 heads for 3 sequence-parallel ranks, expected at least 3. Hint: 3 heads or more, or",
            "sequence_parallel_size 2 or less",
            "got 4 heads of keys and values for 6 query heads, expected a divisor. Hint: 3 or 6",
            "got -1 tokens, expected 0 or more",
            "got -6 tokens, expected 0 or more",
        ],
        strict=True,
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        ({"layer_specs": [{"patterns": ["nothing"]}]}, "(nothing) matches no parameter"),
        ({"strict_mod": True}, "did you mean strict_mode?"),
        ({"tp_size": 4}, "got 4, expected 2, as tensor_parallel.autotp_size"),
        ({"layer_specs": [{"patterns": ["up.weight"], "shape": [3, -1]}]}, "8 rows are not 3 equal pieces"),
        ({"layer_specs": [{"patterns": ["up.weight"], "multiple": 8}]}, "Hint: tensor_parallel.autotp_size 1"),
    ],
)
def test_faults_of_a_plan(plan: dict[str, Any], part: str) -> None:
    models = [Pair(), Pair()]

    def body(comm: libzero.Communicator) -> str:
        with pytest.raises(libzero.ConfigError) as info:
            libzero.Engine(models[comm.rank], settings(3, partition_config=plan))
        return str(info.value)

    texts = libzero.run_ranks(2, body)
    assert texts[0] == texts[1] and part in texts[0], texts
