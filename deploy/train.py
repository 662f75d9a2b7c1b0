"""The program that docs/deployment.md starts: a small GPT at stage 3. It continues from the newest checkpoint.

Rank 0 prints the ranks, the last loss and the hash of all states, which is the same however the ranks were started.
"""

import argparse
import os

import torch

import libzero
from libzero import demo

TEXT = torch.tensor(list(b"Ranks of one host share memory; ranks of several hosts use TCP. " * 8))


def train(engine: libzero.Engine, steps: int, checkpoints: str = "", every: int = 10) -> str:
    """[collective] Trains until `steps` updates are done and returns what rank 0 prints."""
    if checkpoints and os.path.exists(os.path.join(checkpoints, "latest")):
        engine.load_checkpoint(checkpoints)
    begin, loss = engine.global_step, torch.tensor(float("nan"))
    for step in range(begin, steps):
        # By step and rank, so that a run that was interrupted draws what it would have drawn.
        generator = torch.Generator().manual_seed(1000 * step + engine.comm.rank)
        at = torch.randint(0, len(TEXT) - 65, (4,), generator=generator)
        loss = engine(torch.stack([TEXT[i : i + 65] for i in at.tolist()]))
        engine.backward(loss)
        engine.step()
        if checkpoints and ((step + 1) % every == 0 or step + 1 == steps):
            engine.save_checkpoint(checkpoints, f"step-{step + 1}")
    return f"{engine.comm.size} ranks, steps {begin} to {steps}, loss {loss.item():.6f}, state {engine.state_hash()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoints", default="", help="a folder that all hosts share")
    words = parser.parse_args()
    engine = libzero.Engine(demo.model(), demo.config(3, 4))
    text = train(engine, words.steps, words.checkpoints)
    if engine.comm.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
