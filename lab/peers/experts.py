"""One rank of DeepSpeed's layers of experts: experts.py RECIPE --out FILE [options]; rank 0 writes JSON.

What `zero bench experts` does, written as DeepSpeed's users write it: x = x + MoE(LayerNorm(x)) for each layer, experts of
Linear, GELU and Linear, the mean square of x and 0.01 times the auxiliary losses, AdamW in parameter groups of
split_params_into_different_moe_groups_for_optimizer, clipping at 1 (torchrun --nproc-per-node 2 experts.py bf16 ...).
DeepSpeed refuses stage 3 with experts.
"""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("recipe", choices=["fp32", "bf16"])
parser.add_argument("--out", required=True)
for name, value in dict(stage=1, ep=1, layers=2, hidden=256, inner=1024, experts=8, top_k=1, tokens=1024, steps=20, warmup=5,
                        threads=1).items():
    parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
parser.add_argument("--skew", type=float, default=0.0)
parser.add_argument("--capacity-factor", type=float, default=1.0)
o = parser.parse_args()
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

torch.set_num_threads(o.threads)
deepspeed.init_distributed("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dtype = torch.bfloat16 if o.recipe == "bf16" else torch.float32


class Nothing(nn.Identity):
    """DeepSpeed refuses experts without parameters; this one takes no part."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(o.hidden) for _ in range(o.layers))
        expert = nn.Sequential(nn.Linear(o.hidden, o.inner), nn.GELU("tanh"), nn.Linear(o.inner, o.hidden)) if o.inner else Nothing()
        self.moes = nn.ModuleList(
            MoE(o.hidden, expert, num_experts=o.experts, ep_size=o.ep, k=o.top_k, capacity_factor=o.capacity_factor)
            for _ in range(o.layers))
        for moe in self.moes:
            with torch.no_grad():
                moe.deepspeed_moe.gate.wg.weight[0, 0] = o.skew

    def forward(self, x):
        auxiliary = 0
        for norm, moe in zip(self.norms, self.moes):
            y, l_aux, _ = moe(norm(x))
            x = x + y
            auxiliary = auxiliary + l_aux
        return x.float().square().mean() + 0.01 * auxiliary


torch.manual_seed(0)
module = Layers()
groups = split_params_into_different_moe_groups_for_optimizer({"params": list(module.parameters()), "name": "all"})
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": o.stage},
}
if o.recipe == "bf16":
    config["bf16"] = {"enabled": True}
model, _, _, _ = deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(groups, lr=3e-4, fused=True), config=config)
torch.manual_seed(1 + rank)  # of the gate's draws
times = {"step_s": [], "forward_s": [], "backward_s": [], "optimizer_s": []}
losses = []
for k in range(o.warmup + o.steps):
    x = torch.randn(o.tokens, o.hidden, generator=torch.Generator().manual_seed(1 + 1000 * k + rank))
    if o.skew:
        x[:, 0] = 4
    x = x.to(dtype)
    if k == o.warmup:
        dist.barrier()
    start = time.perf_counter()
    loss = model(x)
    forward = time.perf_counter()
    model.backward(loss)
    backward = time.perf_counter()
    model.step()
    end = time.perf_counter()
    losses.append(loss.item())
    if k >= o.warmup:
        for name, seconds in zip(times, (end - start, forward - start, backward - forward, end - backward)):
            times[name].append(seconds)
document = {"schema": "zero.bench.experts.peer/1", "recipe": o.recipe, "world": world,
            "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__}, "task": vars(o), "samples": times,
            "first_loss": losses[0], "last_loss": losses[-1]}
if rank == 0:
    with open(o.out + ".part", "w") as file:
        json.dump(document, file)
    os.replace(o.out + ".part", o.out)
dist.barrier()
os._exit(0)  # as peer.py
