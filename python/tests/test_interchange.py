"""Weights that libzero writes, read by transformers, torch and DeepSpeed; and models of transformers through it.

Needs the program `zero`; each test names the package that it needs.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, Programs, find_zero

pytestmark = pytest.mark.nightly
MODELS = REPOSITORY / "tests" / "golden" / "interchange"
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 32, "vocabulary": 256}


def run(*words: str) -> str:
    program = find_zero()
    if program is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained(folder: Path, tied: bool = True) -> str:
    """The checkpoints of two ranks that trained the built-in GPT for a few steps."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "libzero": {"model": {**SIZES, "tied": tied}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    program = find_zero()
    if program is None:
        pytest.skip("the program `zero` is not built: set ZERO_PROGRAM")
    words = ["train", str(folder / "config.json"), "--steps", "5", "--out", str(folder / "out")]
    words += ["--export", str(folder / "live"), "--export-names", "gpt2"]
    run("run", "-n", "2", program, *words, "--checkpoint-dir", str(folder / "run"))
    return str(folder / "run")


def gpt(state: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """models/gpt.h in plain torch."""
    functional = torch.nn.functional

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, state[name + ".weight"], state[name + ".bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], state[name + ".weight"], state[name + ".bias"])

    batch, time = tokens.shape
    x = state["token.weight"][tokens] + state["position.weight"][:time]
    for layer in range(SIZES["layers"]):
        block = f"blocks.{layer}."
        parts = linear(norm(x, block + "norm1"), block + "qkv").chunk(3, -1)
        q, k, v = (part.view(batch, time, SIZES["heads"], -1).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, -1)
        x = x + linear(mixed, block + "projection")
        hidden = functional.gelu(linear(norm(x, block + "norm2"), block + "up"), approximate="tanh")
        x = x + linear(hidden, block + "down")
    return norm(x, "norm") @ state.get("output.weight", state["token.weight"]).T


def load(transformers: Any, kind: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    capfd.readouterr()
    model, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[what], (what, report[what])
    printed = capfd.readouterr()
    assert "warn" not in (printed.out + printed.err).lower(), printed
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_our_gpt(tmp_path: Path, capfd: pytest.CaptureFixture[str], tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoints = trained(tmp_path, tied)
    run("checkpoint", "export", checkpoints, str(tmp_path / "ours.pt"), "--to", "pt")
    state = torch.load(tmp_path / "ours.pt", weights_only=True)
    tokens = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(1))
    expected = gpt(state, tokens)
    assert expected.abs().max() > 0.5
    for words in ([], ["--shard-bytes", "40kB"], ["--duplicate-tied"], ["--dtype", "bf16"]):
        out = tmp_path / f"hf{len(words)}{words[:1]}"
        run("checkpoint", "export", checkpoints, str(out), "--to", "hf", "--names", "gpt2", *words)
        if not words:  # the run wrote the same at its end
            for name in ("model.safetensors", "config.json"):
                assert (out / name).read_bytes() == (tmp_path / "live" / name).read_bytes()
        model = load(transformers, "GPT2LMHeadModel", out, capfd)
        assert (model.lm_head.weight is model.transformer.wte.weight) == tied
        with torch.no_grad():
            logits = model(tokens).logits
        if "bf16" in words:
            rounded = {name: value.bfloat16() for name, value in state.items()}
            assert torch.equal(model.transformer.wte.weight, rounded["token.weight"])
        else:
            assert (logits - expected).abs().max() <= 1e-5
        assert (out / "model.safetensors.index.json").exists() == ("--shard-bytes" in words)


@pytest.mark.parametrize(
    ("name", "kind", "inputs"),
    [
        ("hf-gpt2", "GPT2LMHeadModel", ("input_ids",)),
        ("hf-llama", "LlamaForCausalLM", ("input_ids",)),
        ("hf-llama-tied", "LlamaForCausalLM", ("input_ids",)),
        ("hf-bert", "BertForMaskedLM", ("input_ids",)),
        ("hf-t5", "T5ForConditionalGeneration", ("input_ids", "decoder_input_ids")),
    ],
)
def test_models_of_transformers_come_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, kind: str, inputs: tuple[str, ...]
) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(48, (4, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = load(transformers, kind, MODELS / name, capfd)(**dict.fromkeys(inputs, tokens)).logits
    names = name.split("-")[1]
    if names == "gpt2":  # its map goes from our names
        run("checkpoint", "convert", str(MODELS / name), str(tmp_path / "out"), "--to", "hf")
        (tmp_path / "out" / "config.json").write_bytes((MODELS / name / "config.json").read_bytes())
        with torch.no_grad():
            logits = load(transformers, kind, tmp_path / "out", capfd)(**dict.fromkeys(inputs, tokens)).logits
        assert torch.equal(logits, expected)
        return
    # config.json is ours: heads and the length of sequences are what tensors do not tell.
    heads = ["--heads", "2"]
    given = {"llama": [*heads, "--config-field", "max_position_embeddings=16"], "bert": heads, "t5": []}[names]
    automatic = {"llama": "CausalLM", "bert": "MaskedLM", "t5": "Seq2SeqLM"}[names]
    for words in ([], ["--duplicate-tied"], ["--shard-bytes", "1kB"]):
        out = tmp_path / "-".join(["out", *words])
        run("checkpoint", "convert", str(MODELS / name), str(out), "--to", "hf", "--names", names, *given, *words)
        for loader in (kind, "AutoModelFor" + automatic):
            model = load(transformers, loader, out, capfd)
            assert type(model).__name__ == kind
            with torch.no_grad():
                logits = model(**dict.fromkeys(inputs, tokens)).logits
            assert torch.equal(logits, expected)


def test_torch_loads_our_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for name in ("hf-llama", "hf-llama-tied", "hf-t5"):
        out = tmp_path / f"{name}.pt"
        run("checkpoint", "convert", str(MODELS / name), str(out), "--to", "pt", "--names", name.split("-")[1])
        assert zipfile.ZipFile(out).testzip() is None  # all CRCs
        state = torch.load(out, weights_only=True)
        expected = safetensors.load_file(MODELS / name / "expected.safetensors")
        assert {"state." + key for key in state} == set(expected)
        for key, value in state.items():
            assert torch.equal(value.float(), expected["state." + key]), key
        mapped = torch.load(out, weights_only=True, mmap=True)
        assert all(torch.equal(mapped[key], value) for key, value in state.items())
        if name == "hf-llama-tied":
            assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    # Types of all widths, scalars and empty tensors.
    odd = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "long": torch.tensor([2**40]),
    }
    safetensors.save_file(odd, tmp_path / "odd.safetensors")
    run("checkpoint", "convert", str(tmp_path / "odd.safetensors"), str(tmp_path / "odd.pt"), "--to", "pt")
    loaded = torch.load(tmp_path / "odd.pt", weights_only=True)
    assert set(loaded) == set(odd)
    for key, value in odd.items():
        assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value), key


DEEPSPEED = """
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
state = torch.load(sys.argv[1], weights_only=True)
moments = torch.load(sys.argv[2], weights_only=True)

class Holder(torch.nn.Module):
    # Parameters under the names of the checkpoint, whatever dots they have.
    def __init__(self):
        super().__init__()
        for name, value in state.items():
            owner = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(torch.full_like(value, 0.25)))
    def forward(self):
        return sum(p.square().sum() for p in self.parameters())

for stage in (1, 2, 3):
    model = Holder()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}})
    path, _ = engine.load_checkpoint(sys.argv[3])
    assert path is not None and engine.global_steps == 5, (path, engine.global_steps)
    for name, p in engine.module.named_parameters():
        for key, values in (("fp32", state), ("exp_avg", moments["exp_avg"]), ("exp_avg_sq", moments["exp_avg_sq"])):
            mine = safe_get_full_fp32_param(p) if key == "fp32" else safe_get_full_optimizer_state(p, key)
            assert torch.equal(mine.cpu().reshape(values[name].shape), values[name]), (stage, name, key)
    assert engine.optimizer.optimizer.param_groups[0]["lr"] == 0.5
    engine.backward(engine())
    engine.step()
    assert engine.global_steps == 6
    print("stage", stage, "loaded", flush=True)
"""


def test_deepspeed_continues_from_our_universal_checkpoint(programs: Programs, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    checkpoints = trained(tmp_path)
    run("checkpoint", "export", checkpoints, str(tmp_path / "universal"), "--to", "universal")
    run("checkpoint", "export", checkpoints, str(tmp_path / "ours.pt"), "--to", "pt")
    # The states from the ranks' files, without libzero.
    tag = json.loads(run("checkpoint", "inspect", checkpoints, "--json"))
    moments: dict[str, dict[str, torch.Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    folder = Path(checkpoints) / tag["tag"]
    files = [bytearray((folder / file["name"]).read_bytes()) for file in tag["manifest"]["files"]]
    for tensor in tag["manifest"]["tensors"]:
        if not tensor["kind"].startswith("opt."):
            continue
        # Each part: the file, the offset of its first byte there, and its elements.
        parts = sorted(tensor["parts"], key=lambda part: int(part[2]))
        whole = torch.cat(
            [torch.frombuffer(files[file], dtype=torch.float32, count=n, offset=at) for file, at, _, n in parts]
        )
        moments[tensor["kind"][4:]][tensor["name"]] = whole.view(tensor["shape"])
    torch.save(moments, tmp_path / "moments.pt")
    program = programs.write(DEEPSPEED)
    words = [program, str(tmp_path / "ours.pt"), str(tmp_path / "moments.pt"), str(tmp_path / "universal")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words],
        env={**programs.environment(), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("loaded") == 6


def test_deepspeeds_loss_scaler_continues(tmp_path: Path) -> None:
    """Through a checkpoint of ours and back: an object of DeepSpeed's class, whose rule gives the same scales."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist = type("Rank", (), {"get_rank": staticmethod(lambda: 1)})
    scalers = json.loads((MODELS / "deepspeed-fp16" / "scalers.json").read_text())
    for name, wanted in scalers.items():
        run("checkpoint", "import", str(MODELS / "deepspeed-fp16" / name), "--into", str(tmp_path / name), "--tag", "t")
        out = tmp_path / f"{name}-universal"
        run("checkpoint", "export", str(tmp_path / name), str(out), "--to", "universal")
        tag = (out / "latest_universal").read_text()
        for overflow in ("clean", "overflow"):
            states = torch.load(out / tag / "zero" / "optimizer_state.pt", weights_only=False)
            scaler = states["loss_scaler"]
            static = bool(wanted["static"])
            assert type(scaler) is (loss_scaler.LossScaler if static else loss_scaler.DynamicLossScaler)
            assert states["dynamic_loss_scale"] is not static
            scales = []
            for step in range(len(wanted[overflow])):
                scaler.update_scale(overflow == "overflow" and step == 3)
                scales.append(float(scaler.cur_scale))
            assert scales == wanted[overflow], (name, overflow)
            if not static:
                assert scaler.dtype is torch.float16 and scaler.scale_window == wanted["window"]


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Shapes, types and values of any kind; some tensors have two names."""
    generator = torch.Generator().manual_seed(seed)

    def below(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(2 + below(8)):
        shape = [0 if below(9) == 0 else 1 + below(40) for _ in range(below(4))]
        values = torch.randn(shape, generator=generator) * 100
        tensors[f"layer{below(3)}.{i}"] = values.to(types[below(len(types))])
    if below(2):
        tensors["tied"] = next(iter(tensors.values()))
    return tensors


@pytest.mark.parametrize("seed", range(12))
def test_safetensors_reads_random_exports(tmp_path: Path, seed: int) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = random_tensors(seed)
    torch.save(tensors, tmp_path / "source.pt")
    words = [[], ["--duplicate-tied"], ["--shard-bytes", "2kB"]][seed % 3]
    run("checkpoint", "convert", str(tmp_path / "source.pt"), str(tmp_path / "out"), "--to", "hf", *words)
    read: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        read |= safetensors.load_file(path)
    tied = "tied" in tensors and "--duplicate-tied" not in words
    assert len(read) == len(tensors) - tied
    for name, value in tensors.items():
        if name == "tied" and tied and name not in read:
            continue
        stored = read[name] if name in read else read["tied"]
        assert stored.dtype == value.dtype and stored.shape == value.shape
        assert torch.equal(stored.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
