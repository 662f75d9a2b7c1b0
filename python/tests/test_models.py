"""Models of Hugging Face's libraries are used unchanged: the losses of plain torch, the same bits at every stage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from conftest import config, nightly, plain

import libzero

Make: TypeAlias = Callable[[], torch.nn.Module]
LossOf: TypeAlias = Callable[[Any, int], torch.Tensor]

VOCABULARY = 100
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
NAMES = ["gpt2", "bert", "t5", "llama", "vit", "whisper", "unet"]


def numbers(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def ids(step: int, length: int = 16, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, below, (2, length), generator=torch.Generator().manual_seed(step))


def make_unet() -> torch.nn.Module:
    diffusers = pytest.importorskip("diffusers")
    model: torch.nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=2, out_channels=2, block_out_channels=(8, 16), layers_per_block=1, dropout=0.1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4, cross_attention_dim=8, attention_head_dim=4,
    )  # fmt: skip
    return model


def make_transformer(name: str) -> torch.nn.Module:
    t = pytest.importorskip("transformers")
    text = {"vocab_size": VOCABULARY, **TOKENS}
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if name == "gpt2":
        model = t.GPT2LMHeadModel(t.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=32, **text))
    elif name == "bert":
        model = t.BertForMaskedLM(t.BertConfig(**text, **layers))
    elif name == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        model = t.T5ForConditionalGeneration(t.T5Config(decoder_start_token_id=0, **text, **sizes))
    elif name == "llama":
        grouped = {"num_key_value_heads": 2, "max_position_embeddings": 32}
        model = t.LlamaForCausalLM(t.LlamaConfig(attention_dropout=0.1, **text, **layers, **grouped))
    elif name == "vit":
        sizes = {"image_size": 16, "patch_size": 8, "num_labels": 5}
        model = t.ViTForImageClassification(t.ViTConfig(hidden_dropout_prob=0.1, **layers, **sizes))
    else:
        part = {f"{half}_{key}": value for half in ("encoder", "decoder")
                for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
        sizes = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
        words = {"decoder_start_token_id": 0, **text, **part, **sizes}
        model = t.WhisperForConditionalGeneration(t.WhisperConfig(dropout=0.1, **words))
    return model  # type: ignore[no-any-return]


def example(name: str) -> tuple[Make, LossOf]:
    """How to make the small model with random weights, in train mode, and its loss at a step."""

    def make() -> torch.nn.Module:
        torch.manual_seed(1)
        return (make_unet() if name == "unet" else make_transformer(name)).train()

    def loss_of(model: Any, step: int) -> torch.Tensor:
        if name == "unet":
            out = model(numbers(step, 2, 2, 8, 8), torch.tensor([3, 500]), numbers(step, 2, 4, 8)).sample
            return torch.nn.functional.mse_loss(out, numbers(step + 1, 2, 2, 8, 8))
        if name == "vit":
            images, labels = numbers(step, 2, 3, 16, 16), ids(step, 1, 5)[:, 0]
            return model(pixel_values=images, labels=labels).loss  # type: ignore[no-any-return]
        if name == "whisper":
            return model(input_features=numbers(step, 2, 8, 32), labels=ids(step)).loss  # type: ignore[no-any-return]
        return model(input_ids=ids(step), labels=ids(step)).loss  # type: ignore[no-any-return]

    return make, loss_of


def trained(engine: libzero.Engine, loss_of: LossOf, steps: int = 5, first: int = 0, every: int = 1) -> list[float]:
    losses = []
    for step in range(first, first + every * steps, every):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def seeded(loss_of: LossOf) -> LossOf:
    """Dropout draws the same numbers at the same step."""

    def of(model: Any, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        return loss_of(model, step)

    return of


@pytest.mark.parametrize("name", [name if name in ("gpt2", "unet") else nightly(name) for name in NAMES])
def test_a_model_with_dropout_agrees_with_plain_torch_at_every_stage(name: str) -> None:
    make, loss_of = example(name)
    without = loss_of(make().eval(), 0).item()
    expected = plain(make(), 5, seeded(loss_of))
    assert abs(expected[0] - without) > 1e-4  # dropout acts
    hashes = set()
    for stage in range(4):
        with libzero.Engine(make(), config(stage)) as engine:
            assert trained(engine, seeded(loss_of)) == pytest.approx(expected, abs=1e-5)
            hashes.add(engine.state_hash())
    assert len(hashes) == 1


@pytest.mark.parametrize("name", [name if name in ("gpt2", "unet") else nightly(name) for name in NAMES])
def test_a_model_on_two_ranks_agrees_with_plain_torch(name: str) -> None:
    """Ranks are threads and share torch's generator, so dropout is off."""
    make, loss_of = example(name)
    expected = plain(make().eval(), 3, lambda m, step: (loss_of(m, 2 * step) + loss_of(m, 2 * step + 1)) / 2)
    hashes = set()
    for stage in (0, 3):
        models = [make().eval() for _ in range(2)]

        def body(comm: libzero.Communicator) -> tuple[str, list[float]]:
            with libzero.Engine(models[comm.rank], config(stage)) as engine:
                losses = trained(engine, loss_of, 3, comm.rank, 2)
                return engine.state_hash(), losses

        results = libzero.run_ranks(2, body)
        both = [sum(pair) / 2 for pair in zip(*(losses for _, losses in results), strict=True)]
        assert both == pytest.approx(expected, abs=1e-5)
        hashes |= {digest for digest, _ in results}
    assert len(hashes) == 1


# ---- weights that other libraries read ----
def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def lora() -> Any:
    """GPT-2 whose parameters are frozen, with trainable adapters."""
    peft = pytest.importorskip("peft")
    base = example("gpt2")[0]()
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def test_adapters_of_peft_agree_with_plain_torch_at_every_stage(tmp_path: Path) -> None:
    loss_of = seeded(example("gpt2")[1])
    expected = plain(lora(), 5, loss_of)
    assert expected[0] != expected[-1]
    frozen = {name: p.detach().clone() for name, p in lora().named_parameters() if not p.requires_grad}
    hashes = set()
    for stage in range(4):
        model = lora()
        with libzero.Engine(model, config(stage)) as engine:
            assert trained(engine, loss_of) == pytest.approx(expected, abs=1e-5)
            hashes.add(engine.state_hash())
            state = engine.state_dict()
            assert all(same(state[name], value) for name, value in frozen.items())
            with torch.no_grad():
                logits = model.eval()(input_ids=ids(9)).logits
            folder = tmp_path / str(stage)
            if stage % 2:  # either way writes the same
                model.save_pretrained(folder, state_dict=state)
            else:
                with engine.gathered_parameters():
                    model.save_pretrained(folder)
        again = pytest.importorskip("peft").PeftModel.from_pretrained(example("gpt2")[0](), folder).eval()
        assert same(again(input_ids=ids(9)).logits, logits)
    assert len(hashes) == 1


def test_frozen_parameters_are_sharded_and_have_no_states() -> None:
    models = [lora().eval() for _ in range(2)]
    sizes = [p.numel() for p in models[0].parameters()]
    trainable = sum(p.numel() for p in models[0].parameters() if p.requires_grad)
    assert all(size % 32 == 0 for size in sizes)  # no padding: docs/memory.md

    def body(comm: libzero.Communicator) -> None:
        with libzero.Engine(models[comm.rank], config(3)) as engine:
            trained(engine, example("gpt2")[1], 2)
            memory = engine.memory()
            assert memory.current(purpose="parameters") == 4 * sum(sizes) // 2
            assert memory.current(purpose="gradients") == 4 * trainable // 2
            assert memory.current(purpose="optimizer states") == 8 * trainable // 2

    libzero.run_ranks(2, body)


def test_weights_of_tied_models_are_saved_and_read_by_hugging_face(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    make, loss_of = example("gpt2")
    models = [make().eval() for _ in range(2)]

    def body(comm: libzero.Communicator) -> None:
        model: Any = models[comm.rank]
        with libzero.Engine(model, config(3)) as engine:
            trained(engine, loss_of, 2)
            with torch.no_grad():
                logits = engine(input_ids=ids(9)).logits
            state = engine.state_dict()
            with engine.gathered_parameters():
                if comm.rank == 0:
                    safetensors.save_model(model, str(tmp_path / "gathered.safetensors"))
            if comm.rank > 0:
                return
            assert state["lm_head.weight"] is state["transformer.wte.weight"]
            once = {name: value for name, value in state.items() if name != "lm_head.weight"}
            safetensors.save_file(once, str(tmp_path / "file.safetensors"))
            model.save_pretrained(tmp_path / "pretrained", state_dict=state)  # empties the dict
        for file in ("gathered", "file"):
            fresh = make().eval()
            missing, unexpected = safetensors.load_model(fresh, tmp_path / f"{file}.safetensors")
            assert not missing and not unexpected
            assert same(fresh(input_ids=ids(9)).logits, logits)
        fresh = type(model).from_pretrained(tmp_path / "pretrained").eval()
        assert fresh.lm_head.weight is fresh.transformer.wte.weight
        assert same(fresh(input_ids=ids(9)).logits, logits)

    libzero.run_ranks(2, body)
