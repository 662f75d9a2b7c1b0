"""One rank of Ulysses' attention alone: attention.py libzero|deepspeed|local RECIPE --out FILE [options]; rank 0 writes JSON.

Forward and backward of one causal attention whose tokens are divided over the ranks: libzero.attention_over_heads
(ZERO_TRANSPORT=shm zero run -n 2 python attention.py libzero ...), DeepSpeed's DistributedAttention over gloo (torchrun
--nproc-per-node 2 attention.py deepspeed ...); `local` is the attention of a rank's share of the heads over all tokens, on all
ranks at once, without exchanges.
Of the shortest sequence, output and gradients are compared with the whole attention first.
"""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("who", choices=["libzero", "deepspeed", "local"])
parser.add_argument("recipe", choices=["fp32", "bf16"])
parser.add_argument("--out", required=True)
parser.add_argument("--sequences", default="1024,2048,4096,8192")
for name, value in dict(heads=8, width=64, steps=5, warmup=1, threads=1).items():
    parser.add_argument("--" + name, type=int, default=value)
o = parser.parse_args()
os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from parallel import local_attention

torch.set_num_threads(o.threads)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dtype = torch.bfloat16 if o.recipe == "bf16" else torch.float32
versions, transport = {"torch": torch.__version__}, "gloo"
if o.who == "libzero":
    import libzero

    comm = libzero.default_communicator()
    mesh = libzero.Mesh.of({"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": world}, comm)
    versions["libzero"], transport, barrier = libzero.__version__, comm.transport, comm.barrier

    def attend(q, k, v, tokens):
        return libzero.attention_over_heads(q, k, v, local_attention, mesh=mesh, tokens=tokens)

elif o.who == "deepspeed":
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed("gloo")
    versions["deepspeed"], barrier = deepspeed.__version__, dist.barrier
    exchanged = DistributedAttention(local_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q, k, v, tokens):
        return exchanged(q, k, v, 0)

else:
    dist.init_process_group("gloo")
    barrier = dist.barrier

    def attend(q, k, v, tokens):
        return local_attention(q, k, v)


def tensors(sequence, heads):
    """q, k, v and the gradient of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(sequence)
    return [torch.randn(1, sequence, heads, o.width, generator=generator).to(dtype) for _ in range(4)]


def run(q, k, v, gradient, tokens):
    """Output, gradients and the times of forward and backward."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    barrier()
    start = time.perf_counter()
    out = attend(*inputs, tokens)
    forward = time.perf_counter()
    out.backward(gradient)
    end = time.perf_counter()
    return [out.detach()] + [x.grad for x in inputs], forward - start, end - forward


def check(sequence):
    whole = tensors(sequence, o.heads)
    inputs = [x.clone().requires_grad_() for x in whole[:3]]
    out = local_attention(*inputs)
    out.backward(whole[3])
    expected = [out.detach()] + [x.grad for x in inputs]
    own = slice(rank * sequence // world, (rank + 1) * sequence // world)
    got, _, _ = run(*(x[:, own].contiguous() for x in whole), sequence)
    for name, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v"), got, expected):
        apart = ((a - b[:, own]).norm() / b[:, own].norm()).item()
        if apart > (1e-5 if o.recipe == "fp32" else 1e-2):
            raise SystemExit(f"Error: {o.who}, {o.recipe}: the {name} is apart from the whole attention's by {apart:.2e}")


lengths = [int(word) for word in o.sequences.split(",")]
if o.who != "local":
    check(min(lengths))
runs = []
for sequence in lengths:
    # A rank's share: some tokens of all heads, or without exchanges some heads of all tokens.
    share = tensors(sequence, o.heads // world) if o.who == "local" else [x[:, :sequence // world].contiguous()
                                                                         for x in tensors(sequence, o.heads)]
    samples = {"forward_s": [], "backward_s": []}
    for k in range(o.warmup + o.steps):
        _, forward, backward = run(*share, sequence)
        if k >= o.warmup:
            samples["forward_s"].append(forward)
            samples["backward_s"].append(backward)
    runs.append({"sequence_tokens": sequence, "samples": samples})
document = {"schema": "zero.bench.attention/1", "who": o.who, "transport": transport, "recipe": o.recipe, "versions": versions,
            "world": world, "heads": o.heads, "width": o.width, "steps": o.steps, "warmup": o.warmup, "runs": runs}
if rank == 0:
    with open(o.out + ".part", "w") as file:
        json.dump(document, file)
    os.replace(o.out + ".part", o.out)
barrier()
if dist.is_initialized():
    os._exit(0)  # as peer.py
