"""The program of README.md: trains a small network, alone or on several ranks.

zero run -n 2 python examples/python/minimal.py
"""

import torch
from torch import nn

import libzero

comm = libzero.default_communicator()  # a world of one when run alone
config = {
    "train_micro_batch_size_per_gpu": 32,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3},
}
torch.manual_seed(1)  # for a run that can be repeated
model = libzero.build(lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)))
engine = libzero.Engine(model, config)  # the model itself is not changed
torch.manual_seed(2 + comm.rank)  # each rank draws its own data
for step in range(1, 101):
    x = torch.randn(32, 64)
    loss = nn.functional.mse_loss(model(x.bfloat16()).float(), x.mean(1, keepdim=True))
    engine.backward(loss)  # scales, accumulates, reduces over the ranks
    engine.step()  # clips, updates this rank's shard, or skips on overflow
    if step % 20 == 0 and comm.rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
if comm.rank == 0:
    print(f"bytes of rank 0\n{engine.memory()}", end="")
