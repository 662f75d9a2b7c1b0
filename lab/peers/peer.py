"""One rank of one peer: torchrun --nproc-per-node 2 peer.py PEER RECIPE --out FILE [options]; rank 0 writes one JSON document.

Times the steps as `zero bench step` does, on the same tokens, and then reads the peak of proportional set size (PSS) in
three more steps that are not timed. `compute` is the plain module's forward and backward without any communication, ranks
side by side, and a fused AdamW step over 1/world of the parameters' number.

libzero0 and libzero3 are libzero's Python package at that stage (zero run -n 2 python peer.py libzero3 RECIPE ...), and
twin0 and twin3 the same with twin.py's model, whose operations are those of the C++ program.
dtensor, autotp, autotpsegments, autotpparts, ulysses0 and ulysses3 divide each sample's computation over the ranks: see parallel.py.
`alone` compares a loop in plain PyTorch with both stages at world 1 (python peer.py alone RECIPE ...): three processes
that take turns at every step, so that all three meet the same phases of the machine.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time

PEERS = ["compute", "ddp", "ddpbf16", "zro", "fsdp1", "fsdp1grad", "fsdp2", "fsdp2bf16", "fsdp2noreshard",
         "ds0", "ds1", "ds2", "ds3", "ds3cpu", "ds3nvme", "libzero0", "libzero3", "twin0", "twin3", "dtensor", "autotp",
         "autotpsegments", "autotpparts", "ulysses0", "ulysses3"]
ALONE = ["plain", "libzero0", "libzero3"]  # what `alone` compares
CLIPPING = 1.0  # by the global norm, everywhere: libzero's and DeepSpeed's default, and what GPTs are trained with
MEMORY_STEPS = 3
SAMPLE_PERIOD_S = 0.002

parser = argparse.ArgumentParser()
parser.add_argument("peer", choices=[*PEERS, "plain", "alone"])
parser.add_argument("recipe", choices=["fp32", "bf16"])
parser.add_argument("--out", required=True)
parser.add_argument("--nvme", help="folder of the files of ds3nvme")
parser.add_argument("--config", help="a config.json: transformers' model instead of the GPT, with its sizes")
for name, value in dict(layers=8, hidden=512, heads=8, vocabulary=8192, sequence=128, batch=1, steps=20, warmup=5, threads=1).items():
    parser.add_argument("--" + name, type=int, default=value)
parser.add_argument("--turns", action="store_true", help="wait for a line on stdin before each step, print one after")
o = parser.parse_args()
if o.peer in ("ddpbf16", "fsdp2bf16") and o.recipe != "bf16":
    parser.error(f"{o.peer}: got {o.recipe}, expected bf16")
is_deepspeed = o.peer.startswith(("ds", "autotp", "ulysses"))
shares_samples = o.peer.startswith(("dtensor", "autotp", "ulysses"))  # all ranks read the same samples
is_libzero = o.peer.startswith(("libzero", "twin"))
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if o.peer in ("plain", "alone") and world > 1:
    parser.error(f"{o.peer}: got {world} ranks, expected one")


def write(document):
    """Whole or not at all."""
    with open(o.out + ".part", "w") as file:
        json.dump(document, file)
    os.replace(o.out + ".part", o.out)


def take_turns():
    """Runs the programs of ALONE, each in a process, step by step in turns; writes their documents as one."""
    words = [sys.executable, *sys.argv, "--turns", "--out"]
    processes = []
    for peer in ALONE:
        own = [peer if word == "alone" else word for word in words] + [f"{o.out}.{peer}"]
        processes.append(subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for k in range(o.warmup + o.steps):
        for process in processes:  # in one order, so that each finds the caches as another program left them
            process.stdin.write("step\n")
            process.stdin.flush()
            if process.stdout.readline() != "done\n":
                raise SystemExit(f"Error: {' '.join(process.args)} ended in step {k}")
    runs = []
    for process, peer in zip(processes, ALONE):
        if process.wait() != 0:
            raise SystemExit(f"Error: {' '.join(process.args)} failed")
        with open(f"{o.out}.{peer}") as file:
            runs.append(json.load(file))
        os.remove(f"{o.out}.{peer}")
    write(dict(runs[0], peer="alone", runs=runs))


if o.peer == "alone":
    take_turns()
    sys.exit()
if is_deepspeed:
    os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch._dynamo  # noqa: F401  the first optimizer loads it: 110 MiB that are not the model's
import torch.distributed as dist
import parallel
from gpt import GPT, Block
from twin import Twin

if o.config:
    from huggingface import HuggingFace

torch.set_num_threads(o.threads)
versions = {"torch": torch.__version__}
if o.peer == "plain":

    def barrier():
        pass

    def gather(value):
        return [value]

elif is_libzero:
    import libzero

    versions["libzero"] = libzero.__version__
    comm = libzero.default_communicator()
    barrier = comm.barrier

    def gather(value):
        return [json.loads(one) for one in comm.all_gather_bytes(json.dumps(value).encode())]

elif is_deepspeed:
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

if dist.is_initialized():
    barrier = dist.barrier

    def gather(value):
        values = [None] * world
        dist.all_gather_object(values, value)
        return values


def pss_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


def of_one_kind(tensors):
    """Torch's functions for many tensors take DTensors or others: the groups of both."""
    tensors = list(tensors)
    if o.peer != "dtensor":
        return [tensors]
    from torch.distributed.tensor import DTensor

    return [[t for t in tensors if isinstance(t, DTensor)], [t for t in tensors if not isinstance(t, DTensor)]]


@torch.no_grad()
def copy_all(to, of):
    """torch._foreach_copy_, which knows no DTensors: each rank copies its parts."""
    to, of = ([getattr(t, "_local_tensor", t) for t in tensors] for tensors in (to, of))
    torch._foreach_copy_(to, of)


def clip(parameters):
    groups = of_one_kind(parameters)
    if len(groups) == 1:
        return torch.nn.utils.clip_grad_norm_(groups[0], CLIPPING)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    norm = torch.linalg.vector_norm(torch.stack([norms[0].full_tensor(), norms[1]]))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, CLIPPING, norm)


class MasterAdamW:
    """AdamW over fp32 masters of bf16 parameters, as a user of DDP writes it: cast the reduced gradients, clip, update, cast back."""

    def __init__(self, parameters, **settings):
        self.parameters = of_one_kind(parameters)
        self.masters = [[p.detach().float().requires_grad_() for p in group] for group in self.parameters]
        for master in (master for group in self.masters for master in group):
            master.grad = torch.zeros_like(master)  # kept over steps
        self.adamw = torch.optim.AdamW([{"params": group} for group in self.masters], fused=True, **settings)

    @torch.no_grad()
    def step(self):
        for masters, parameters in zip(self.masters, self.parameters):
            copy_all([master.grad for master in masters], [p.grad for p in parameters])
        clip(master for group in self.masters for master in group)
        self.adamw.step()
        for masters, parameters in zip(self.masters, self.parameters):
            copy_all(parameters, masters)

    def zero_grad(self, set_to_none):
        for p in (p for group in self.parameters for p in group):
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


barrier()  # everyone has loaded what ranks share
before = pss_bytes()
barrier()
torch.manual_seed(0)
adamw = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
bf16 = o.recipe == "bf16"
if o.config:
    import transformers

    versions["transformers"] = transformers.__version__
    module = HuggingFace(o.config)
    o.vocabulary = module.config.vocab_size
else:
    kind = Twin if o.peer.startswith("twin") else parallel.UlyssesGPT if o.peer.startswith("ulysses") else GPT
    module = kind(o.layers, o.hidden, o.heads, o.vocabulary, o.sequence)
parameters = sum(p.numel() for p in module.parameters())
readers = 1 if shares_samples else world
tokens = torch.randint(0, o.vocabulary, (o.warmup + o.steps, readers, o.batch, o.sequence + 1), generator=torch.Generator().manual_seed(1))
own_tokens = slice(0, o.sequence)
autocast = False
if o.peer == "compute":
    model = module.bfloat16() if bf16 else module
    share = torch.nn.Parameter(torch.zeros(math.ceil(parameters / world)))
    share.grad = torch.full_like(share, 1e-3)
    optimizer = torch.optim.AdamW([share], fused=True, **adamw)
elif o.peer == "plain":
    model = module.bfloat16() if bf16 else module
    optimizer = (MasterAdamW(model.parameters(), **adamw) if bf16
                 else torch.optim.AdamW(model.parameters(), fused=True, **adamw))
elif is_libzero:
    config = {
        "train_micro_batch_size_per_gpu": o.batch,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": adamw},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": int(o.peer[-1])},
    }
    model = libzero.Engine(module, config)
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
elif o.peer == "dtensor":
    parallel.with_parts(module, o.hidden)
    model = parallel.dtensor(module.bfloat16() if bf16 else module, init_device_mesh("cpu", (world,)))
    optimizer = (MasterAdamW(model.parameters(), **adamw) if bf16 else
                 torch.optim.AdamW([{"params": group} for group in of_one_kind(model.parameters())], fused=True, **adamw))
else:
    stage = 0 if o.peer.startswith("autotp") else int(o.peer.removeprefix("ds").removeprefix("ulysses")[0])
    config = {
        "train_micro_batch_size_per_gpu": o.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    if o.peer.startswith("autotp"):
        config["tensor_parallel"] = parallel.autotp_config(world)
        parallel.with_parts(module, o.hidden)
    if o.peer.startswith("ulysses"):
        config |= {"sequence_parallel_size": world, "data_parallel_size": 1}
        own_tokens = parallel.ulysses(module, dist.group.WORLD, o.sequence, o.hidden)
    if bf16:
        config["bf16"] = {"enabled": True}
    if o.peer in ("ds3cpu", "ds3nvme"):  # ZeRO-Offload and ZeRO-Infinity: everything on that tier, with DeepSpeed's own optimizer for hosts
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
    if o.peer in ("autotpsegments", "autotpparts"):
        parallel.checkpointed(module, partitioned=o.peer == "autotpparts")

times = {"step_s": [], "forward_s": [], "backward_s": [], "optimizer_s": []}
losses = []


def step(k, measured=True):
    part = tokens[k % len(tokens), rank % readers]
    inputs, targets = part[:, :-1][:, own_tokens], part[:, 1:][:, own_tokens]
    if o.peer == "compute":
        barrier()  # so that no rank ever has the machine's memory for itself
    if o.turns and not sys.stdin.readline():
        raise SystemExit("Error: the program that gives turns has ended")
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = model(inputs, targets)
    forward = time.perf_counter()
    if is_deepspeed or is_libzero:
        model.backward(loss)
        update = backward = time.perf_counter()
        model.step()
    else:
        loss.backward()
        update = backward = time.perf_counter()
        if o.peer == "compute":
            model.zero_grad(set_to_none=True)
            barrier()
            update = time.perf_counter()
        elif o.peer.startswith("fsdp1"):
            model.clip_grad_norm_(CLIPPING)
        elif not isinstance(optimizer, MasterAdamW):  # which clips its masters' gradients
            clip(model.parameters())
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
    if o.turns:
        print("done", flush=True)


for k in range(o.warmup + o.steps):
    if k == o.warmup:
        barrier()
        if is_libzero:
            comm.reset_stats()
    step(k, k >= o.warmup)
document = {
    "schema": "zero.bench.peer/1", "peer": o.peer, "recipe": o.recipe, "versions": versions,
    "torch_commit": torch.version.git_version, "world": world, "threads_per_rank": o.threads,
    "parameters_elements": parameters, "gradient_clipping": CLIPPING, "micro_batch_size": o.batch, "steps": o.steps,
    "warmup": o.warmup, "samples": times, "first_loss": losses[0], "last_loss": losses[-1],
}
if is_libzero:
    document |= {"transport": comm.transport, "bytes_sent_per_step": comm.stats()["bytes_sent"] / o.steps}
if not o.turns:
    barrier()
    sampler = PssSampler()
    sampler.start()
    for k in range(MEMORY_STEPS):
        step(k, measured=False)
    peaks = gather(max(0, sampler.stop() - before))
    document["peak_pss_bytes"] = {"highest": max(peaks), "by_rank": peaks}
if rank == 0:
    write(document)
barrier()
# All measurements are complete. torch 2.11 over gloo sometimes aborts while the interpreter ends ("terminate called
# without an active exception"); this must not count as a failure of the training.
if dist.is_initialized():
    os._exit(0)
