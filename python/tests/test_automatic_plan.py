"""tensor_parallel.autotp_size without a plan: what is cut of a model, compared with the same model on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import nightly
from torch import nn

import libzero
from libzero import deepspeed
from libzero.deepspeed.runtime.tensor_parallel import automatic_plan

TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config(stage: int, degree: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-3}},
        "tensor_parallel": {"autotp_size": degree},
        **more,
    }


def hugging_face(kind: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    )
    return made


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(64, 10)
        self.layers = nn.Sequential(nn.Linear(10, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 10, bias=False))
        self.out = nn.Linear(10, 64)
        self.tied = nn.Linear(10, 64, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        x = self.table(input_ids)
        x = x + self.layers(x)
        return (nn.functional.cross_entropy((self.out(x) + self.tied(x)).flatten(0, 1), labels.flatten()),)


def compare(make: Callable[[], nn.Module], stage: int, degree: int = 2) -> set[str]:
    """Returns the names of the cut parameters."""

    def loss_of(model: Any, step: int) -> torch.Tensor:
        ids = TOKENS.roll(step, 1)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False)[0]
        return loss

    models = [make() for _ in range(degree)]
    settings = config(stage, degree)
    cut: list[set[str]] = []

    def body(comm: libzero.Communicator) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine, *_ = deepspeed.initialize(model=models[comm.rank], config=settings)
        losses = []
        for step in range(3):
            loss = loss_of(engine, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        cut.append(set(engine._engine._cut_parameters()))
        return losses, {name: engine._engine.parameter_state(name) for name, _ in engine.module.named_parameters()}

    results = libzero.run_ranks(degree, body)
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, eps=1e-3)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(plain, step)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, states in results:
        assert losses == pytest.approx(expected, abs=1e-5)
        for name, p in plain.named_parameters():
            assert (states[name] - p.detach()).abs().max() < 1e-5, name
    return cut[0]


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("kind", "more", "cut"),
    [
        ("Llama", {}, LINEAR | {"embed_tokens", "lm_head"}),
        ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}, LINEAR | {"embed_tokens"}),
        nightly("Gemma2", {"head_dim": 8}, LINEAR | {"embed_tokens"}),
        nightly("GPTNeoX", {}, {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "lm_head"}),
        nightly("Phi3", {}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"}),
        nightly("Mixtral", {"num_local_experts": 2}, {f"{x}_proj" for x in "qkvo"} | {"embed_tokens", "lm_head"}),
        ("Llama", {"num_key_value_heads": 1}, {"gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"}),
    ],
)
def test_a_model_of_transformers_is_cut_by_its_plan(kind: str, more: dict[str, Any], cut: set[str]) -> None:
    names = compare(lambda: hugging_face(kind, **more), 3)
    assert {name.split(".")[-2] for name in names if name.endswith("weight")} == cut


@pytest.mark.parametrize(("stage", "degree"), [(0, 2), nightly(1, 3), nightly(2, 2), (3, 3)])
def test_another_model_is_cut_at_its_linear_layers(stage: int, degree: int) -> None:
    assert compare(Plain, stage, degree) == {"layers.0.weight", "layers.3.weight", "out.weight"}


def test_heads_that_share_keys_stay_together() -> None:
    specs = automatic_plan(hugging_face("Llama"), 2)["layer_specs"]
    multiples = {spec["patterns"][0].split(r"\.")[-2].removeprefix(")?"): spec["multiple"] for spec in specs}
    assert multiples["q_proj"] == multiples["o_proj"] == 2 * multiples["k_proj"] == 2 * multiples["v_proj"] == 16
    assert multiples["up_proj"] == multiples["down_proj"] == multiples["lm_head"] == 1


def test_layers_stay_whole_beside_one_that_cannot_be_cut() -> None:
    model = hugging_face("Llama")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj)  # type: ignore[union-attr, operator]
    patterns = " ".join(spec["patterns"][0] for spec in automatic_plan(model, 2)["layer_specs"])
    assert "q_proj" in patterns and "gate_proj" not in patterns and "down_proj" not in patterns


def test_what_cannot_be_cut_is_refused_in_words() -> None:
    def body(comm: libzero.Communicator) -> None:
        with pytest.raises(libzero.ConfigError, match="autotp_size: got 2 with"):
            deepspeed.initialize(model=nn.Conv1d(2, 2, 1), config=config(0))

    libzero.run_ranks(2, body)


def test_what_tp_model_init_was_given_is_in_the_next_initialize() -> None:
    def settings(**more: Any) -> dict[str, Any]:
        made = config(1, **more)
        if "tensor_parallel" not in more:
            del made["tensor_parallel"]
        return made

    models = [Plain(), Plain()]
    for model in models:
        assert deepspeed.tp_model_init(model, tp_size=2, dtype=torch.bfloat16) is model
    with pytest.raises(libzero.ConfigError, match="which was given before"):
        deepspeed.tp_model_init(models[0], tp_size=4, dtype=torch.bfloat16)
    deepspeed.set_autotp_mode(training=True)
    first = deepspeed.runtime.tensor_parallel.init_utils.merge_tp_model_init_into_config(settings())
    assert first["tensor_parallel"] == {"autotp_size": 2} and first["bf16"] == {"enabled": True}
    assert deepspeed.runtime.tensor_parallel.init_utils.merge_tp_model_init_into_config(settings()) == settings()
    for other, found in (
        ({"tensor_parallel": {"autotp_size": 4}}, "tp_size: got 2, expected 4"),
        ({"fp16": {"enabled": True}}, "dtype: got torch.bfloat16, expected torch.float16"),
    ):
        deepspeed.tp_model_init(models[0], tp_size=2, dtype=torch.bfloat16)
        with pytest.raises(libzero.ConfigError, match=found):
            deepspeed.initialize(model=models[0], config=settings(**other))
    deepspeed.tp_model_init(models[0], tp_size=1, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=models[0], config=settings())
    assert engine.autotp_size() == 1
