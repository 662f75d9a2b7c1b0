"""python -m libzero.demo: a small GPT in plain torch, trained at stage 3, first alone and then by two ranks.

Shows the loop, what each rank holds, and that stages give the same bits. Takes some seconds on two cores.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import libzero


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class CharacterGpt(nn.Module):
    """Predicts the next byte."""

    def __init__(self, layers: int = 3, width: int = 128, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text[:, :-1]) + self.positions.weight[: text.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def config(stage: int, batch: int) -> dict[str, object]:
    """A configuration with DeepSpeed's keys."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
    }


def model() -> CharacterGpt:
    """The model, with the same initial values on every rank."""
    torch.manual_seed(1)
    return CharacterGpt()


def train(engine: libzero.Engine, text: torch.Tensor, steps: int, batch: int) -> list[float]:
    """The training loop. Each rank draws its own samples."""
    generator = torch.Generator().manual_seed(100 + engine.comm.rank)
    losses = []
    for _ in range(steps):
        at = torch.randint(0, len(text) - 65, (batch,), generator=generator)
        loss = engine(torch.stack([text[i : i + 65] for i in at.tolist()]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(prog="python -m libzero.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    steps: int = parser.parse_args().steps
    torch.set_num_threads(1)
    assert libzero.__doc__ is not None
    text = torch.tensor(list((libzero.__doc__ + (__doc__ or "")).encode() * 4))
    begin = time.monotonic()

    engine = libzero.Engine(model(), config(3, 8))
    print(f"one rank, stage 3, {sum(n for _, n in engine.units()):,} parameters in {len(engine.units())} units")
    losses = train(engine, text, steps, 8)
    print("loss " + " ".join(f"{loss:.2f}" for loss in losses[:: max(1, steps // 8)]))
    engine.close()

    def rank(stage: int, models: list[CharacterGpt]) -> list[tuple[str, libzero.Memory]]:
        def body(comm: libzero.Communicator) -> tuple[str, libzero.Memory]:
            engine = libzero.Engine(models[comm.rank], config(stage, 4))
            train(engine, text, 5, 4)
            engine.reset_peak_memory()  # frees idle buffers
            return engine.state_hash(), engine.memory()

        return libzero.run_ranks(2, body)

    hashes = {}
    for stage in range(4):
        results = rank(stage, [model(), model()])
        hashes[stage] = results[0][0]
        held = results[0][1].current()
        print(f"two ranks (threads), stage {stage}: {held:>10,} bytes at rest on rank 0, state {hashes[stage][:16]}")
    same = len(set(hashes.values())) == 1
    print(f"{'the same bits at every stage' if same else 'DIFFERENT BITS'}; {time.monotonic() - begin:.0f} s")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
