"""One rank of one peer: torchrun --nproc-per-node 2 peer.py PEER RECIPE --out FILE [options]; rank 0 writes one JSON document.

Times the steps as `zero bench step` does, on the same tokens, and then reads the peak of proportional set size (PSS) in
three more steps that are not timed. `compute` is the plain module's forward and backward without any communication, ranks
side by side, and a fused AdamW step over 1/world of the parameters' number.
"""

import argparse
import contextlib
import json
import math
import os
import threading
import time

PEERS = ["compute", "ddp", "ddpbf16", "zro", "fsdp1", "fsdp1grad", "fsdp2", "fsdp2bf16", "fsdp2noreshard", "ds0", "ds1", "ds2", "ds3", "ds3cpu", "ds3nvme"]
CLIPPING = 1.0  # by the global norm, everywhere: libzero's and DeepSpeed's default, and what GPTs are trained with
MEMORY_STEPS = 3
SAMPLE_PERIOD_S = 0.002

parser = argparse.ArgumentParser()
parser.add_argument("peer", choices=PEERS)
parser.add_argument("recipe", choices=["fp32", "bf16"])
parser.add_argument("--out", required=True)
parser.add_argument("--nvme", help="folder of the files of ds3nvme")
for name, value in dict(layers=8, hidden=512, heads=8, vocabulary=8192, sequence=128, batch=1, steps=20, warmup=5, threads=1).items():
    parser.add_argument("--" + name, type=int, default=value)
o = parser.parse_args()
if o.peer in ("ddpbf16", "fsdp2bf16") and o.recipe != "bf16":
    parser.error(f"{o.peer}: got {o.recipe}, expected bf16")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if o.peer.startswith("ds"):
    os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from gpt import GPT, Block

torch.set_num_threads(o.threads)
versions = {"torch": torch.__version__}
if o.peer.startswith("ds"):
    import deepspeed

    versions["deepspeed"] = deepspeed.__version__
    deepspeed.init_distributed("gloo")
else:
    dist.init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel


def pss_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class MasterAdamW:
    """AdamW over fp32 masters of bf16 parameters, as a user of DDP writes it: cast the reduced gradients, clip, update, cast back."""

    def __init__(self, parameters, **settings):
        self.parameters = list(parameters)
        self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)  # kept over steps
        self.adamw = torch.optim.AdamW(self.masters, fused=True, **settings)

    @torch.no_grad()
    def step(self):
        torch._foreach_copy_([master.grad for master in self.masters], [p.grad for p in self.parameters])
        torch.nn.utils.clip_grad_norm_(self.masters, CLIPPING)
        self.adamw.step()
        torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self, set_to_none):
        for p in self.parameters:
            p.grad = None if set_to_none else p.grad.zero_()


class PssSampler(threading.Thread):
    """The highest PSS between start() and stop(); libtorch's operators leave the interpreter's lock to it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ends, self.highest = threading.Event(), 0

    def run(self):
        while not self.ends.wait(SAMPLE_PERIOD_S):
            self.highest = max(self.highest, pss_bytes())

    def stop(self):
        self.ends.set()
        self.join()
        return max(self.highest, pss_bytes())


dist.barrier()  # everyone has loaded what ranks share
before = pss_bytes()
dist.barrier()
torch.manual_seed(0)
adamw = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
bf16 = o.recipe == "bf16"
module = GPT(o.layers, o.hidden, o.heads, o.vocabulary, o.sequence)
parameters = sum(p.numel() for p in module.parameters())
tokens = torch.randint(0, o.vocabulary, (o.warmup + o.steps, world, o.batch, o.sequence + 1), generator=torch.Generator().manual_seed(1))
autocast = False
if o.peer == "compute":
    model = module.bfloat16() if bf16 else module
    share = torch.nn.Parameter(torch.zeros(math.ceil(parameters / world)))
    share.grad = torch.full_like(share, 1e-3)
    optimizer = torch.optim.AdamW([share], fused=True, **adamw)
elif o.peer == "ddp":
    autocast = bf16
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
elif o.peer == "ddpbf16":
    module.bfloat16()
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
    optimizer = MasterAdamW(model.parameters(), **adamw)
elif o.peer == "zro":
    autocast = bf16
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **adamw)
elif o.peer.startswith("fsdp1"):
    strategy = ShardingStrategy.SHARD_GRAD_OP if o.peer == "fsdp1grad" else ShardingStrategy.FULL_SHARD
    model = FullyShardedDataParallel(
        module, sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16) if bf16 else None)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
elif o.peer.startswith("fsdp2"):
    options = dict(mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=o.peer != "fsdp2noreshard",
                   mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if o.peer == "fsdp2bf16" else torch.float32) if bf16
                   else MixedPrecisionPolicy())
    for block in module.blocks:
        fully_shard(block, **options)
    model = fully_shard(module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
else:
    config = {
        "train_micro_batch_size_per_gpu": o.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(o.peer[2])},
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    if len(o.peer) > 3:  # ZeRO-Offload and ZeRO-Infinity: everything on that tier, with DeepSpeed's own optimizer for hosts
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        tier = {"device": o.peer[3:], "nvme_path": o.nvme} if o.peer == "ds3nvme" else {"device": "cpu"}
        config["zero_optimization"] |= {
            "offload_optimizer": dict(tier, pipeline_read=True, pipeline_write=True, buffer_count=16) if o.peer == "ds3nvme" else tier,
            # One buffer per parameter: the prefetcher needs more than the default of 5 and would fail an assertion.
            "offload_param": dict(tier, max_in_cpu=0, buffer_size=max(p.numel() for p in module.parameters()) + 4096,
                                  buffer_count=len(list(module.parameters())) + 8)
            if o.peer == "ds3nvme" else tier,
            "sub_group_size": 2**24, "stage3_prefetch_bucket_size": 2**22,
        }
        config["aio"] = {"block_size": 2**20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}
        adam = DeepSpeedCPUAdam(module.parameters(), adamw_mode=True, **adamw)
    else:
        adam = torch.optim.AdamW(module.parameters(), fused=True, **adamw)
    model, optimizer, _, _ = deepspeed.initialize(model=module, optimizer=adam, config=config)

times = {"step_s": [], "forward_s": [], "backward_s": [], "optimizer_s": []}
losses = []


def step(k, measured=True):
    part = tokens[k % len(tokens), rank]
    if o.peer == "compute":
        dist.barrier()  # so that no rank ever has the machine's memory for itself
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = model(part[:, :-1], part[:, 1:])
    forward = time.perf_counter()
    if o.peer.startswith("ds"):
        model.backward(loss)
        update = backward = time.perf_counter()
        model.step()
    else:
        loss.backward()
        update = backward = time.perf_counter()
        if o.peer == "compute":
            model.zero_grad(set_to_none=True)
            dist.barrier()
            update = time.perf_counter()
        elif o.peer.startswith("fsdp1"):
            model.clip_grad_norm_(CLIPPING)
        elif o.peer != "ddpbf16":  # which clips its masters' gradients
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        if o.peer != "compute":
            optimizer.zero_grad(set_to_none=True)
    end = time.perf_counter()
    if measured:
        times["step_s"].append((backward if o.peer == "compute" else end) - start)
        times["forward_s"].append(forward - start)
        times["backward_s"].append(backward - forward)
        times["optimizer_s"].append(end - update)
    losses.append(loss.item())


for k in range(o.warmup + o.steps):
    if k == o.warmup:
        dist.barrier()
    step(k, k >= o.warmup)
measured_losses = list(losses)
dist.barrier()
sampler = PssSampler()
sampler.start()
for k in range(MEMORY_STEPS):
    step(k, measured=False)
peaks = [None] * world
dist.all_gather_object(peaks, max(0, sampler.stop() - before))
if rank == 0:
    document = {
        "schema": "zero.bench.peer/1", "peer": o.peer, "recipe": o.recipe, "versions": versions, "world": world, "threads_per_rank": o.threads,
        "parameters_elements": parameters, "gradient_clipping": CLIPPING, "micro_batch_size": o.batch, "steps": o.steps, "warmup": o.warmup, "samples": times,
        "peak_pss_bytes": {"highest": max(peaks), "by_rank": peaks}, "first_loss": measured_losses[0], "last_loss": measured_losses[-1],
    }
    with open(o.out + ".part", "w") as file:
        json.dump(document, file)
    os.replace(o.out + ".part", o.out)  # whole or not at all
dist.barrier()
# All measurements are complete. torch 2.11 over gloo sometimes aborts while the interpreter ends ("terminate called
# without an active exception"); this must not count as a failure of the training.
os._exit(0)
