"""An AdamW update of a peer over one flat tensor, in libzero's jobs: adam.py PEER MILLIONS THREADS --out FILE

PEER is torch (torch.optim.AdamW, fused) or deepspeed (DeepSpeedCPUAdam). Jobs, as in `zero bench optimizer`: fp32, the update alone;
bf16, all that stands between bf16 gradients and bf16 parameters with an fp32 master: cast, unscale, update, cast. Writes one JSON
document with the seconds of every update, and of its parts in bf16.
"""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("peer", choices=["torch", "deepspeed"])
parser.add_argument("millions", type=float)
parser.add_argument("threads", type=int)
parser.add_argument("--iterations", type=int, default=10)
parser.add_argument("--warmup", type=int, default=2)
parser.add_argument("--out", required=True)
options = parser.parse_args()
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = str(options.threads)  # DeepSpeed's own code goes by it
import torch

elements = int(options.millions * 1e6)
torch.set_num_threads(options.threads)
torch.manual_seed(1)
settings = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
LOSS_SCALE = 65536.0
versions = {"torch": torch.__version__}


def optimizer_of(parameter):
    if options.peer == "torch":
        return torch.optim.AdamW([parameter], fused=True, **settings)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    versions["deepspeed"] = deepspeed.__version__
    return DeepSpeedCPUAdam([parameter], adamw_mode=True, fp32_optimizer_states=True, **settings)


def spread_of(update):
    """Seconds of every measured update; update() returns its parts in seconds."""
    samples = {}
    for k in range(-options.warmup, options.iterations):
        start = time.perf_counter()
        parts = update()
        parts["samples_s"] = time.perf_counter() - start
        if k >= 0:
            for name, seconds in parts.items():
                samples.setdefault(name, []).append(seconds)
    return samples


@torch.no_grad()
def fp32():
    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements) * 1e-3
    optimizer = optimizer_of(parameter)

    def update():
        optimizer.step()
        return {}

    return spread_of(update)


@torch.no_grad()
def bf16():
    master = torch.nn.Parameter(torch.randn(elements))
    parameter = master.detach().to(torch.bfloat16)
    gradient = (torch.randn(elements) * (1e-3 * LOSS_SCALE)).to(torch.bfloat16)
    master.grad = torch.zeros(elements)  # kept over updates: no peer pays for fresh pages
    optimizer = optimizer_of(master)

    def update():
        start = time.perf_counter()
        master.grad.copy_(gradient)
        cast = time.perf_counter()
        master.grad.mul_(1 / LOSS_SCALE)
        unscaled = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        parameter.copy_(master)
        end = time.perf_counter()
        return {"cast_s": cast - start, "unscale_s": unscaled - cast, "update_s": stepped - unscaled, "publish_s": end - stepped}

    samples = spread_of(update)
    if not torch.equal(parameter, master.detach().to(torch.bfloat16)):
        raise SystemExit("adam.py: error: got bf16 parameters that are not the master's")
    return samples


runs = [{"job": job.__name__, "threads": options.threads, **job()} for job in (fp32, bf16)]
with open(options.out, "w") as out:
    json.dump({"schema": "zero.bench.adam/1", "peer": options.peer, "elements": elements, "versions": versions, "runs": runs}, out)
