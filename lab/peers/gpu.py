"""A training step of the measuring protocol's GPT on one GPU by a plain PyTorch loop, DDP and FSDP2: python gpu.py RECIPE [options].

All are built in one process and take turns of some steps each, with one synchronization a turn; each then trains alone for
its peak of allocated memory. Prints one JSON document. bf16 of the plain loop and of DDP is a bf16 model with fp32 masters,
updated by the fused AdamW; FSDP2's is its own mixed precision.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from gpt import GPT
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

SHAPES = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}

parser = argparse.ArgumentParser()
parser.add_argument("recipe", choices=["fp32", "bf16"])
parser.add_argument("--model", choices=list(SHAPES), default="gpt2")
parser.add_argument("--peers", default="plain,ddp,fsdp2")
for name, value in dict(batch=16, turns=8, turn=5, warmup=2, vocabulary=50257, sequence=1024).items():
    parser.add_argument("--" + name, type=int, default=value)
parser.add_argument("--clipping", type=float, default=1.0)
o = parser.parse_args()
bf16 = o.recipe == "bf16"
adamw = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29511"))
dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
tokens = torch.randint(0, o.vocabulary, (8, o.batch, o.sequence + 1), device="cuda")


class Peer:
    def __init__(self, name):
        torch.manual_seed(1)
        with torch.device("cuda"):
            module = GPT(*SHAPES[o.model], o.vocabulary, o.sequence)
        self.masters = None
        if name == "fsdp2":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
            for block in module.blocks:
                fully_shard(block, mp_policy=policy)
            self.model = fully_shard(module, mp_policy=policy)
        else:
            module = module.bfloat16() if bf16 else module
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True) if name == "ddp" else module
        self.parameters = list(self.model.parameters())
        if bf16 and name != "fsdp2":
            self.masters = [p.detach().float() for p in self.parameters]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        self.adamw = torch.optim.AdamW(self.masters or self.parameters, **adamw)
        self.count = 0

    def step(self):
        part = tokens[self.count % len(tokens)]
        self.count += 1
        loss = self.model(part[:, :-1], part[:, 1:])
        loss.backward()
        with torch.no_grad():
            if self.masters:
                torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.parameters])
            if o.clipping:
                torch.nn.utils.clip_grad_norm_(self.masters or self.parameters, o.clipping, foreach=True)
            self.adamw.step()
            if self.masters:
                torch._foreach_copy_(self.parameters, self.masters)
        self.model.zero_grad(set_to_none=True)
        return loss


def turn(peer):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(o.turn):
        loss = peer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / o.turn, loss.item()


names = o.peers.split(",")
peers = {name: Peer(name) for name in names}
rounds = []
for k in range(o.warmup + o.turns):
    row = {name: turn(peers[name])[0] for name in names}
    if k >= o.warmup:
        rounds.append(row)
document = {"schema": "zero.bench.gpu_peers/1", "torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "recipe": o.recipe, "model": o.model,
            "parameters_elements": sum(p.numel() for p in peers[names[0]].parameters), "batch": o.batch, "sequence": o.sequence, "rounds": rounds, "peers": {}}
for name in names:
    document["peers"][name] = {"step_s": statistics.median(row[name] for row in rounds),
                               "over_plain": statistics.median(row[name] / row[names[0]] for row in rounds)}
peers.clear()
for name in names:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    peer = Peer(name)
    turn(peer)
    torch.cuda.reset_peak_memory_stats()
    turn(peer)
    document["peers"][name] |= {"at_rest_bytes": torch.cuda.memory_allocated() - before, "peak_bytes": torch.cuda.max_memory_allocated() - before}
    del peer
print(json.dumps(document), flush=True)
os._exit(0)  # without the teardown of the process group, which can hang
