"""Programs around layers that are cut: checkpointed segments, autocast, evaluation, models of Hugging Face."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Programs
from test_mesh import SPECS, Block, settings
from torch.utils.checkpoint import checkpoint

import libzero

PLAN = {"partition_config": {"use_default_specs": False, "layer_specs": SPECS}}
Model = torch.nn.Module
LossOf = Callable[[Model, int], torch.Tensor]


def blocks(dropout: float = 0.0) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(Block(15, 21, dropout) for _ in range(3)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, 5, 15, generator=torch.Generator().manual_seed(step))


def checkpointed(model: Model, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    assert isinstance(model, torch.nn.Sequential)
    x.requires_grad_()  # a reentrant segment needs an input with a gradient
    for block in model:
        x = checkpoint(block, x, use_reentrant=use_reentrant)  # type: ignore[no-untyped-call]
    return x


def one_rank(model: Model, loss_of: LossOf, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A plain torch loop: losses by step, and the gradients of the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def on_engine(engine: libzero.Engine, loss_of: LossOf, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same on an engine. loss_of is given the engine, which calls the model."""
    losses, gradients = [], {}
    for step in range(steps):
        loss = loss_of(engine, step)  # type: ignore[arg-type]
        engine.backward(loss)
        gradients = {name: engine.gradient(name) for name, _ in engine.module.named_parameters()}
        engine.step()
        losses.append(loss.item())
    return losses, gradients


def compare(make: Callable[[], Model], config: dict[str, Any], loss_of: LossOf, tolerance: float = 1e-5) -> None:
    """Two tensor-parallel ranks against one: losses of 3 steps and the last gradients."""
    models = [make(), make()]

    def body(comm: libzero.Communicator) -> Any:
        engine = libzero.Engine(models[comm.rank], config)

        def through(of: Any, step: int) -> torch.Tensor:
            with of._native.forward_scope():
                return loss_of(of.module, step)

        return on_engine(engine, through, 3)

    results = libzero.run_ranks(2, body)
    losses, gradients = one_rank(make(), loss_of, 3)
    for found_losses, found in results:
        assert found_losses == pytest.approx(losses, abs=tolerance)
        assert found.keys() >= gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_segments(stage: int, use_reentrant: bool) -> None:
    def loss_of(model: Model, step: int) -> torch.Tensor:
        return checkpointed(model, batch(step), use_reentrant).square().mean()

    compare(blocks, settings(stage, **PLAN), loss_of)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpointed_segments_draw_again_what_they_drew(stage: int, programs: Programs) -> None:
    """Processes: threads share the generator. Dropout lies between a column and a row layer, and outside."""
    out = programs.ranks(
        f"""
        from test_mesh import settings
        from test_mesh_autograd import PLAN, batch, blocks, checkpointed, on_engine

        found = []
        for form in (None, False, True):
            model = blocks(dropout=0.3)
            engine = libzero.Engine(model, settings({stage}, **PLAN))
            torch.manual_seed(17)

            def loss_of(engine, step):
                x = torch.nn.functional.dropout(batch(step), 0.2)
                y = engine(x) if form is None else checkpointed(model, x, form)
                return torch.nn.functional.dropout(y, 0.2).square().mean()

            losses, gradients = on_engine(engine, loss_of, 3)
            found.append((losses, gradients, torch.get_rng_state()))
            engine.close()
        losses, gradients, state = found[0]
        for other_losses, other_gradients, other_state in found[1:]:
            assert other_losses == losses, (other_losses, losses)
            assert torch.equal(state, other_state)
            for name in gradients:
                assert torch.equal(gradients[name], other_gradients[name]), name
        print("equal", losses[0] != losses[1], flush=True)
        """,
        ranks=2,
    )
    assert out.count("equal True") == 2, out


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast(stage: int) -> None:
    """Products in bf16, of parameters in fp32; each rank rounds its share of a row product."""

    def loss_of(model: Model, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model[0].up(batch(step))  # type: ignore[index]
            y = model(batch(step))
        assert (hidden.dtype, y.dtype) == (torch.bfloat16, torch.float32)  # y is x in fp32 + a product
        return y.square().mean()

    compare(blocks, settings(stage, **PLAN), loss_of, tolerance=5e-3)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(stage: int, mode: Any) -> None:
    """Between training steps, of inputs and labels made inside and outside of the mode."""
    models = [blocks(), blocks()]

    def body(comm: libzero.Communicator) -> Any:
        engine = libzero.Engine(models[comm.rank], settings(stage, **PLAN))
        outside = batch(50)
        found = []
        for step in range(2):
            engine.eval()
            with mode():
                found += [engine(outside).clone(), engine(batch(51)).clone()]
            engine.train()
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
        return found

    expected = []
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(2):
        with torch.no_grad():
            expected += [model(batch(50)), model(batch(51))]
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    for found in libzero.run_ranks(2, body):
        for mine, wanted in zip(found, expected, strict=True):
            assert torch.allclose(mine, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_llama_of_hugging_face(stage: int, checkpointing: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))

    def made() -> Model:
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64,
                hidden_size=48,
                intermediate_size=50,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=2,
            )
        )
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        return model  # type: ignore[no-any-return]

    def loss_of(model: Model, step: int) -> torch.Tensor:
        ids = tokens.roll(step, 1)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    compare(made, settings(stage, preset_model="llama"), loss_of)


def gpt2() -> Model:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    shape = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=12, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(shape)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "pattern"), [("column", r".*mlp\.c_fc\.weight"), ("row", r".*mlp\.c_proj\.weight")]
)
def test_a_weight_whose_outputs_are_its_columns_is_refused(kind: str, pattern: str) -> None:
    """GPT-2 of Hugging Face has Conv1D, which is addmm with a weight [in, out]."""
    models = [gpt2(), gpt2()]
    ids = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(1))

    def body(comm: libzero.Communicator) -> str:
        specs = [{"patterns": [pattern], "partition_type": kind}]
        engine = libzero.Engine(models[comm.rank], settings(0, partition_config={"layer_specs": specs}))
        with pytest.raises(RuntimeError, match="aten::addmm reads ") as refused:
            engine(input_ids=ids, labels=ids)
        return str(refused.value)

    for text in libzero.run_ranks(2, body):
        assert "weight, of which this rank holds" in text


def text_model(**options: Any) -> Model:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Embedding(11, 12, **options), Block())


VOCABULARY_PLAN = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [*SPECS, {"patterns": [r"0\.weight"], "partition_type": "column", "gather_output": True}],
    }
}


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("padding", [None, 0, 4])
def test_a_vocabulary_is_cut(padding: int | None) -> None:
    """The row of the padding gets no gradient, on the rank that has it."""

    def loss_of(model: Model, step: int) -> torch.Tensor:
        return model(ids_of(step)).pow(2).mean()  # type: ignore[no-any-return]

    compare(lambda: text_model(padding_idx=padding), settings(2, **VOCABULARY_PLAN), loss_of)


def test_ids_outside_of_a_cut_vocabulary() -> None:
    """torch's error on every rank, after which the engine trains on."""
    models = [text_model(), text_model()]

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(models[comm.rank], settings(2, **VOCABULARY_PLAN))
        for wrong in (11, -1):
            ids = ids_of(0)
            ids[1, 3] = wrong
            with pytest.raises(IndexError, match="index out of range in self"):
                engine(ids)
            engine.discard_micro_batch()
        engine.backward(engine(ids_of(1)).pow(2).mean())
        assert engine.step().updated

    libzero.run_ranks(2, body)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": 1.0}, "leave out max_norm of the embedding"),
        ({"sparse": True}, "has sparse gradients or scale_grad_by_freq"),
        ({"scale_grad_by_freq": True}, "has sparse gradients or scale_grad_by_freq"),
    ],
)
def test_options_of_an_embedding_that_parts_do_not_support(options: dict[str, Any], text: str) -> None:
    models = [text_model(**options), text_model(**options)]

    def body(comm: libzero.Communicator) -> None:
        engine = libzero.Engine(models[comm.rank], settings(0, **VOCABULARY_PLAN))
        with pytest.raises(RuntimeError, match=text):
            engine(ids_of(0))

    libzero.run_ranks(2, body)
