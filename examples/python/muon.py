"""A loop of torch with Muon for matrices and AdamW's rule for the rest, sharded at stage 3.

    zero run -n 2 python examples/python/muon.py

Muon needs whole matrices: each has an owner rank, which gets it for the update and sends it back (docs/optimizers.md).
"""

import torch

import libzero
from libzero.muon import Muon, muon_groups


def main() -> None:
    comm = libzero.default_communicator()
    torch.manual_seed(0)
    width = 64
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, 1),
    )
    optimizer = Muon(muon_groups(model, adam={"lr": 3e-3}))
    config = {"train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 3}}
    engine = libzero.Engine(model, config, optimizer=optimizer, comm=comm)
    data = torch.Generator().manual_seed(1 + comm.rank)
    for step in range(60):
        x = torch.randn(32, 16, generator=data)
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        loss.backward()
        norm = engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}, norm {norm:.3f}")
    engine.close()


if __name__ == "__main__":
    main()
