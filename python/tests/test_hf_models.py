"""The models of models/ compared with transformers: logits, losses, gradients, names, texts, and weights both ways.

Needs build/tests/hf_models_program, which loads the files of save_pretrained() through an Engine.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY

pytestmark = pytest.mark.nightly
transformers = pytest.importorskip("transformers")

LIMITS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3, "gradients": 1e-5}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TABLE = "| case | transformers' class | fp32 | bf16 | fp16 | gradients, fp32 |\n|---|---|---|---|---|---|\n"
# Of the largest gradient of a model; smaller ones are rounding. (The bias of keys adds the same to all scores of a
# softmax, and so do the bias of an answer's ends and that of the norm before them.)
ROUNDING = 1e-6
# Keys that say nothing of the model, or that transformers derives from others.
CONFIG_NOT_COMPARED = {"_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "n_inner"}

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 72}
LLAMA = {**SMALL, "vocab_size": 99, "max_position_embeddings": 64}
BERT = {**SMALL, "vocab_size": 99, "max_position_embeddings": 40}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
T5["decoder_start_token_id"] = 0

# A name, the class of transformers, and its configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 99}),
    "gpt2-untied": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 99, "tie_word_embeddings": False},
    ),
    "llama": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "llama-one-kv-head": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama-tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True, "pad_token_id": 3}),
    "llama-biases": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-3.1": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-linear": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "bert-mlm": ("BertForMaskedLM", BERT),
    "bert-mlm-untied": ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    "bert-classify": ("BertForSequenceClassification", {**BERT, "num_labels": 3, "type_vocab_size": 3}),
    "t5": ("T5ForConditionalGeneration", {**T5, "num_decoder_layers": 3}),
    "t5-v1.1": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5-untied": ("T5ForConditionalGeneration", {**T5, "relative_attention_max_distance": 20}),
    "vit": (
        "ViTForImageClassification",
        {**SMALL, "image_size": 24, "patch_size": 8, "num_labels": 5, "num_channels": 1, "hidden_act": "gelu_new"},
    ),
    "vit-no-bias": ("ViTForImageClassification", {**SMALL, "image_size": 16, "patch_size": 4, "qkv_bias": False}),
    "bert-qa": ("BertForQuestionAnswering", {**BERT, "hidden_act": "relu", "layer_norm_eps": 1e-6}),
}


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def their_model(name: str) -> Any:
    """Weights of a size at which every part of the model matters."""
    kind, fields = CASES[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**fields)
    model = model_class(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator(name + key)) * 0.12
            if name == "t5-untied" and key == "shared.weight":
                model.lm_head.weight = torch.nn.Parameter(-values.flip(0))
            parameter.copy_(1 + values if "norm" in key.lower() and key.endswith("weight") else values)
    return model


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    if model.config.model_type == "t5" and model.lm_head.weight is not model.shared.weight:
        # transformers 5.23 writes that they are tied, whatever they are.
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": False}))


def mask_of(batch: int, time: int, left: bool = False) -> torch.Tensor:
    """Samples that are padded by 0, 2, 4 ... tokens."""
    lengths = time - 2 * torch.arange(batch)
    places = torch.arange(time)
    return (places >= time - lengths[:, None] if left else places < lengths[:, None]).long()


def inputs_of(name: str) -> list[dict[str, torch.Tensor]]:
    """Inputs as transformers takes them; "labels" are its own."""
    kind, fields = CASES[name]
    g = generator(name + "inputs")
    tokens = torch.randint(4, 99, (3, 17), generator=g)
    tokens[:, 1] = fields.get("pad_token_id", 0)  # a token that is read, but in some models not learned
    mask = mask_of(3, 17)
    if "GPT2" in kind:
        return [{"input_ids": tokens}, {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100)}]
    if "Llama" in kind:
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:, :3] = -100  # a prompt
        left = mask_of(3, 17, left=True)
        return [
            {"input_ids": tokens},
            {"input_ids": tokens, "attention_mask": mask, "labels": labels},
            {"input_ids": tokens, "attention_mask": left},
        ]
    if "ViT" in kind:
        pixels = torch.randn(3, fields.get("num_channels", 3), fields["image_size"], fields["image_size"], generator=g)
        return [{"pixel_values": pixels, "labels": torch.tensor([1, 0, 1])}]
    if "T5" in kind:
        labels = torch.randint(4, 99, (3, 23), generator=g)
        read = mask_of(3, 23)
        return [
            {"input_ids": tokens, "decoder_input_ids": labels},
            {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(read == 0, -100)},
            {
                "input_ids": tokens,
                "attention_mask": mask,
                "decoder_input_ids": labels,
                "decoder_attention_mask": read,
            },
        ]
    types = torch.randint(fields.get("type_vocab_size", 2), (3, 17), generator=g)
    whole = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types}
    if kind == "BertForMaskedLM":
        chosen = torch.rand(3, 17, generator=g) < 0.3
        return [{"input_ids": tokens}, {**whole, "labels": tokens.masked_fill(~chosen, -100)}]
    if kind == "BertForSequenceClassification":
        return [{"input_ids": tokens}, {**whole, "labels": torch.tensor([2, 0, 1])}]
    first, last = torch.tensor([1, 5, 17]), torch.tensor([4, 5, 30])  # the last answer is cut off
    return [{"input_ids": tokens}, {**whole, "start_positions": first, "end_positions": last}]


def with_loss(name: str) -> int:
    """The number of the inputs that have labels."""
    return next(i for i, given in enumerate(inputs_of(name)) if {"labels", "start_positions"} & set(given))


def our_program() -> str:
    path = Path(os.environ.get("ZERO_BUILD", REPOSITORY / "build")) / "tests" / "hf_models_program"
    if not path.exists():
        pytest.skip(f"{path} is not built")
    return str(path)


def run_jobs(folder: Path, jobs: list[dict[str, Any]]) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    words = [our_program(), str(folder / "jobs.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def our_inputs(name: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The targets of a causal model belong to the token before them."""
    given = dict(given)
    if "labels" in given and CASES[name][0] in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        labels = given.pop("labels")
        given["targets"] = torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], 1)
    return given


def compare(name: str, theirs: Any, given: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    """The largest difference, at places that are no padding. Of logits above 1, relative to the largest."""
    with torch.no_grad():
        expected = theirs(**given)
    largest = 0.0
    assert "loss" in ours or not {"labels", "start_positions"} & set(given)
    for key, value in ours.items():
        wanted = expected[key].float()
        assert value.shape == wanted.shape, (name, key)
        difference = (value - wanted).abs() / max(1.0, wanted.abs().max().item())
        for mask in ("attention_mask", "decoder_attention_mask"):
            if mask in given and value.dim() >= 2 and value.shape[:2] == given[mask].shape:
                difference = difference[given[mask].bool()]
        assert torch.isfinite(value).all(), (name, key)
        largest = max(largest, difference.max().item())
    return largest


def difference_of_gradients(name: str, given: dict[str, torch.Tensor], folder: Path) -> float:
    """The largest difference from transformers' backward, of each tensor relative to its largest gradient. `folder`
    has ours in place of weights: from_pretrained() gives them the names, shapes and ties of the model's."""
    theirs = their_model(name)
    theirs(**given).loss.backward()
    ours = dict(type(theirs).from_pretrained(folder).named_parameters())
    wanted = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in theirs.named_parameters()}
    assert ours.keys() == wanted.keys(), name
    most = max(gradient.abs().max().item() for gradient in wanted.values())
    largest = 0.0
    for key, gradient in wanted.items():
        scale = gradient.abs().max().item()
        scale = scale if scale > ROUNDING * most else most
        largest = max(largest, ((ours[key].detach() - gradient).abs().max() / scale).item())
    return largest


def test_outputs_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []
    models = {}
    for name in CASES:
        models[name] = their_model(name)
        save(models[name], tmp_path / name)
        for i, given in enumerate(inputs_of(name)):
            torch.save(our_inputs(name, given), tmp_path / f"{name}-{i}.in")
            for kind in ("fp32", *DTYPES):
                job = {"folder": str(tmp_path / name), "inputs": str(tmp_path / f"{name}-{i}.in"), "dtype": kind}
                jobs.append({**job, "outputs": str(tmp_path / f"{name}-{i}.{kind}")})
                if kind == "fp32" and i == with_loss(name):
                    jobs[-1] |= {"gradients": True, "export": str(tmp_path / f"{name}.gradients")}
    run_jobs(tmp_path, jobs)
    rows = []
    for name, model in models.items():
        largest = dict.fromkeys(LIMITS, 0.0)
        for kind in ("fp32", *DTYPES):
            if kind in DTYPES:
                # Not model.bfloat16(), which would round the frequencies of rotary positions.
                model = type(model).from_pretrained(tmp_path / name, dtype=DTYPES[kind]).eval()
            for i, given in enumerate(inputs_of(name)):
                ours = torch.load(tmp_path / f"{name}-{i}.{kind}", weights_only=False)
                largest[kind] = max(largest[kind], compare(name, model, given, ours))
        given = inputs_of(name)[with_loss(name)]
        largest["gradients"] = difference_of_gradients(name, given, tmp_path / f"{name}.gradients")
        rows.append((name, largest))
        if not name.startswith("gpt2"):
            names = set((tmp_path / f"{name}-0.fp32.names").read_text().split())
            assert names == set(models[name].state_dict()), name
    table = "".join(
        f"| {name} | {CASES[name][0]} | " + " | ".join(f"{largest[kind]:.1e}" for kind in LIMITS) + " |\n"
        for name, largest in rows
    )
    print(table)
    assert not [row for row in rows if any(row[1][kind] > limit for kind, limit in LIMITS.items())], table
    page = REPOSITORY / "docs" / "models.md"
    before, after = page.read_text().split(TABLE)
    written, after = after.split("\n\n", 1)
    if os.environ.get("ZERO_WRITE_GOLDEN"):
        page.write_text(f"{before}{TABLE}{table}\n{after}")
        return
    # The page has a row for each case; its figures are those of one machine.
    listed = [line.split(" | ")[0] for line in written.splitlines()]
    assert listed == [f"| {name}" for name, _ in rows], "write docs/models.md again: ZERO_WRITE_GOLDEN=1"


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "llama", "llama-tied", "t5-untied", "t5-v1.1"])
def test_greedy_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = their_model(name)
    save(model, tmp_path / name)
    model.generation_config.eos_token_id = None
    eos, pad, count = 7, 5, 20
    tokens = torch.randint(8, 99, (4, 9), generator=generator(name + "prompt"))
    mask = mask_of(4, 9, left=True)
    jobs: list[dict[str, Any]] = []
    texts = {}
    for padded in (False, True):
        given = {"input_ids": tokens.masked_fill(mask == 0, pad) if padded else tokens}
        if padded:
            given["attention_mask"] = mask
        settings = {"max_new_tokens": count, "do_sample": False, "num_beams": 1, "pad_token_id": pad}
        with torch.no_grad():
            whole = model.generate(**given, **settings, eos_token_id=None)
            # A token that two rows reach at different steps ends them.
            eos = int(whole[0, -count + 4]) if not padded else eos
            short = model.generate(**given, **settings, eos_token_id=eos)
        inputs = dict(given)
        if "t5" in name:
            inputs["decoder_input_ids"] = torch.zeros(4, 1, dtype=torch.long)
        path = tmp_path / f"{padded}.in"
        torch.save(inputs, path)
        for ends, expected in (([], whole), ([eos], short)):
            for stage, ranks in ((0, 1), (3, 2)):
                out = str(tmp_path / f"{len(jobs)}.out")
                wanted = {"count": count, "eos": ends, "pad": pad}
                job = {"folder": str(tmp_path / name), "inputs": str(path), "outputs": out, "generate": wanted}
                jobs.append({**job, "stage": stage, "ranks": ranks})
                texts[out] = expected
    run_jobs(tmp_path, jobs)
    for out, expected in texts.items():
        assert torch.equal(torch.load(out, weights_only=False)["generated"].long(), expected), out


def test_top_k_and_top_p_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    model = their_model("llama")
    save(model, tmp_path / "llama")
    tokens = torch.randint(99, (16, 9), generator=generator("sampling"))
    torch.save({"input_ids": tokens}, tmp_path / "in")
    job = {"folder": str(tmp_path / "llama"), "inputs": str(tmp_path / "in")}
    cases = [(0.7, 0, 1.0), (1.5, 12, 1.0), (0.8, 0, 0.6), (1.0, 20, 0.9), (1.0, 0, 1e-9)]
    jobs = []
    for i, (temperature, top_k, top_p) in enumerate(cases):
        wanted = {"count": 2, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        jobs.append({**job, "outputs": str(tmp_path / f"{i}.out"), "generate": wanted})
    run_jobs(tmp_path, jobs)
    with torch.no_grad():
        logits = model(tokens).logits[:, -1]
    for i, (temperature, top_k, top_p) in enumerate(cases):
        expected = TemperatureLogitsWarper(temperature)(tokens, logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(tokens, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(tokens, expected)
        out = torch.load(tmp_path / f"{i}.out", weights_only=False)
        assert torch.equal(out["filtered"].isinf(), expected.isinf()), cases[i]
        kept = ~expected.isinf()
        assert torch.allclose(out["filtered"][kept], expected[kept], atol=1e-5)
        # What was drawn is among them.
        assert kept.gather(1, out["generated"][:, 9:10].long()).all()


def test_weights_go_both_ways(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Through engines of 1 and 2 ranks: what transformers reads again computes the same bits."""
    jobs: list[dict[str, Any]] = []
    models = {}
    for name in CASES:
        models[name] = their_model(name)
        save(models[name], tmp_path / name)
        given = inputs_of(name)[0]
        torch.save(our_inputs(name, given), tmp_path / f"{name}.in")
        for stage, ranks in ((0, 2), (3, 1), (3, 2)):
            end = f"{name}-{stage}-{ranks}"
            job: dict[str, Any] = {"folder": str(tmp_path / name), "inputs": str(tmp_path / f"{name}.in")}
            job |= {"export": str(tmp_path / end), "outputs": str(tmp_path / f"{end}.out")}
            jobs.append({**job, "stage": stage, "ranks": ranks})
    run_jobs(tmp_path, jobs)
    for name, model in models.items():
        given = inputs_of(name)[0]
        for stage, ranks in ((0, 2), (3, 1), (3, 2)):
            end = f"{name}-{stage}-{ranks}"
            assert compare(name, model, given, torch.load(tmp_path / f"{end}.out", weights_only=False)) <= 1e-5, end
            again, report = type(model).from_pretrained(tmp_path / end, output_loading_info=True)
            for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                assert not report[what], (end, what, report[what])
            again.eval()
            assert tied(again) == tied(model), end
            with torch.no_grad():
                for key, value in model(**given).items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(value, again(**given)[key]), (end, key)
            # And config.json is the same configuration.
            ours, theirs = again.config.to_dict(), model.config.to_dict()
            for key in set(theirs) - CONFIG_NOT_COMPARED:
                assert ours.get(key) == theirs[key], (end, key)


def tied(model: Any) -> set[str]:
    """Names whose tensor has another name too."""
    state = model.state_dict()
    addresses = [value.data_ptr() for value in state.values()]
    return {name for name, value in state.items() if addresses.count(value.data_ptr()) > 1}
