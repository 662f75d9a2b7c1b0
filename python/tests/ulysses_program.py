"""Models of transformers whose tokens two ranks share, against the same models in this process; written for DeepSpeed.

    python -m libzero.deepspeed.run --num_gpus 2 ulysses_program.py --out FILE [--every-stage] [--only CASE...]

Rank 0 writes what it saw: by case and stage, the losses of both and the largest difference of a parameter.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP

Batch = dict[str, torch.Tensor]
VOCABULARY, STEPS, TOKENS = 37, 3, 12
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
RATES = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}  # gradients that are 0 but for rounding stay small
SIZES |= {"num_attention_heads": 6, "attn_implementation": "sdpa"}


def llama(**more: Any) -> torch.nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **more}))


def gpt2() -> torch.nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "attn_implementation": "sdpa"}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def mistral() -> torch.nn.Module:
    return MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=5, head_dim=4))


def qwen() -> torch.nn.Module:
    layers = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "num_attention_heads": 3}, num_key_value_heads=3, **layers))


def made(model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(1)
    return model()


def drawn(tokens: int, samples: int, seed: int) -> Batch:
    """Samples of one document each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (samples, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : tokens // 3] = -100  # a prompt: the ranks have different numbers of labels
    return {"input_ids": ids, "position_ids": torch.arange(tokens).repeat(samples, 1), "labels": labels}


def fixed(step: int, d: int) -> Batch:
    return drawn(TOKENS, 2, 10 * step + d)


def varied(step: int, d: int) -> Batch:
    return drawn(TOKENS - 2 * step, 1 + step % 2, 10 * step + d)


def padded(step: int, d: int) -> Batch:
    """The first sample begins with padding, and the second one ends with it."""
    batch = drawn(TOKENS, 2, 10 * step + d)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, : 2 + step] = mask[1, TOKENS - 7 :] = 0
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def packed(step: int, d: int) -> Batch:
    batch = drawn(TOKENS, 2, 10 * step + d)
    batch["position_ids"] = torch.stack([documents(4, 5 + step, 3 - step), documents(7, 5)])
    return batch


def documents(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


Made = tuple[Callable[[], torch.nn.Module], Callable[[int, int], Batch]]
CASES: dict[str, Made] = {
    "llama": (llama, fixed),
    "one head of keys": (lambda: llama(num_key_value_heads=1), fixed),
    "three heads of keys": (lambda: llama(num_key_value_heads=3), fixed),
    "gpt2": (gpt2, fixed),
    "lengths": (llama, varied),
    "a window": (mistral, fixed),
    "a window in some layers, three heads": (qwen, fixed),
    "padding": (llama, padded),
    "packed documents": (lambda: llama(use_cache=False), packed),
    "packed documents, a window": (lambda: llama_with(mistral(), use_cache=False), packed),
    "checkpointed": (lambda: checkpointed(llama()), fixed),
}
EVERY_STAGE = ("llama",)


def llama_with(model: torch.nn.Module, **words: Any) -> torch.nn.Module:
    model.config.update(words)
    return model


def checkpointed(model: torch.nn.Module) -> torch.nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def plain(model: torch.nn.Module, batches: Callable[[int, int], Batch], copies: int) -> tuple[list[float], Any]:
    """The losses of a loop of torch over whole samples, of all data-parallel ranks, and the model."""
    optimizer = torch.optim.AdamW(model.parameters(), **RATES)
    losses = []
    for step in range(STEPS):
        each = [model(**batches(step, d)).loss for d in range(copies)]
        loss = sum(each) / copies
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def cut(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's part, as the adapter of loaders makes it."""
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    whole = {**{name: value for name, value in batch.items() if name != "labels"}, "shift_labels": labels}
    return {name: value.chunk(ranks, 1)[rank].contiguous() for name, value in whole.items()}


def whole_loss(loss: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
    """The mean over the labels of all ranks, as published programs compute it."""
    count = (labels != -100).sum()
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    if dist.get_world_size() == dist.get_world_size(group):
        losses = dist.nn.functional.all_gather(loss, group=group)
        total = sum(each * n for each, n in zip(losses, counts, strict=True) if n > 0)
    else:  # torch's own all_gather has no gradient over gloo where ranks are divided into groups
        total = dist.nn.functional.all_reduce(loss * count if count > 0 else loss.nan_to_num() * 0, group=group)
    return total / sum(counts)


def divided(model: torch.nn.Module, batches: Callable[[int, int], Batch], stage: int, **words: Any) -> tuple[Any, Any]:
    """The losses of an engine over a rank's part, and the engine."""
    engine, *_ = deepspeed.initialize(model=model, config=settings(stage), **words)
    group = engine.seq_parallel_group
    d, rank, ranks = engine.get_data_parallel_rank(), dist.get_rank(group), dist.get_world_size(group)
    losses = []
    for step in range(STEPS):
        batch = cut(batches(step, d), rank, ranks)
        labels = batch.pop("shift_labels")
        logits = engine(**batch).logits
        loss = engine.module.loss_function(logits, None, VOCABULARY, shift_labels=labels)
        loss = whole_loss(loss, labels, group)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses, engine


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": RATES},
        "zero_optimization": {"stage": stage},
    }


def difference(engine: Any, model: torch.nn.Module) -> float:
    """The largest one of a parameter."""
    expected = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = dict(engine.module.named_parameters())
        return max((found[name] - p).abs().max().item() for name, p in expected.items())


def compare(only: list[str], every_stage: bool, ranks: int, seen: dict[str, Any]) -> None:
    copies = dist.get_world_size() // ranks
    cases = {name: case for name, case in CASES.items() if not only or name in only}
    # First of all: later models of this process compute over the ranks.
    references = {name: plain(made(model), batches, copies) for name, (model, batches) in cases.items()}
    for name, (model, batches) in cases.items():
        for stage in range(4) if every_stage or name in EVERY_STAGE else (3,):
            own = made(model)
            mpu = UlyssesSPAttentionHF.register_with_transformers(own, "sdpa", ranks, 2)
            losses, engine = divided(own, batches, stage, mpu=mpu)
            expected, reference = references[name]
            seen[f"{name}, stage {stage}"] = [expected, losses, difference(engine, reference)]
            engine.destroy()


def tiles(seen: dict[str, Any]) -> None:
    """The model with tiles against the same without them, on the same parts."""
    whole, stages = LlamaMLP.forward, {}

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        return TiledMLP.apply(whole, self, x, 4, list(self.parameters()))

    for stage in (0, 3):
        for forward in (whole, mlp):
            LlamaMLP.forward = forward
            model = made(llama)
            losses, engine = divided(model, fixed, stage, mpu=parallel_state_sp)
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                stages[forward is mlp] = losses, [p.detach().clone() for p in engine.module.parameters()]
            engine.destroy()
        LlamaMLP.forward = whole
        pairs = zip(stages[True][1], stages[False][1], strict=True)
        differences = [(a - b).abs().max().item() for a, b in pairs]
        seen[f"tiles, stage {stage}"] = [stages[False][0], stages[True][0], max(differences)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--every-stage", action="store_true")
    parser.add_argument("--ranks", type=int, default=2, help="that share the tokens of a sample")
    parser.add_argument("--local_rank", type=int)
    words = parser.parse_args()
    deepspeed.init_distributed()
    seen: dict[str, Any] = {}
    compare(words.only, words.every_stage, words.ranks, seen)
    if not words.only or "tiles" in words.only:
        tiles(seen)
    if dist.get_rank() == 0:
        words.out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
