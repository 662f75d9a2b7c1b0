"""One rank of one peer: torchrun --nproc-per-node 2 checkpoints.py PEER --dir DIR --out FILE [options]; rank 0 writes one JSON document.

Saves and loads what `zero bench checkpoint` does, with the model, recipe (bf16 compute, fp32 masters) and optimizer of it: `dcp` is
torch.distributed.checkpoint of FSDP2 (save), `dcp_async` its async_save in a thread, `torch` one torch.save per rank with fsync, `ds2` and
`ds3` DeepSpeed's save_checkpoint at that stage. The files are dropped from the cache before the load. Times are the slowest rank's.
DeepSpeed loads at another number of ranks after a conversion: rank 0 converts with DeepSpeed's function, in its own process, and a job of
one rank loads the result (--universal). After every load, masters and moments must have the bits that they had at the save.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("peer", choices=["dcp", "dcp_async", "torch", "ds2", "ds3"])
parser.add_argument("--dir", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--universal", action="store_true", help="only loads what DeepSpeed's conversion has put into --dir")
for name, value in dict(layers=6, hidden=384, heads=6, vocabulary=256, sequence=256, steps=6, threads=1, rest=0).items():
    parser.add_argument("--" + name, type=int, default=value)
o = parser.parse_args()
deepspeed_stage = int(o.peer[2]) if o.peer.startswith("ds") else None
if deepspeed_stage is not None:
    os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch._dynamo  # noqa: F401  the first optimizer loads it
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Block

torch.set_num_threads(o.threads)
versions = {"torch": torch.__version__}
if deepspeed_stage is not None:
    import deepspeed

    versions["deepspeed"] = deepspeed.__version__
    deepspeed.init_distributed("gloo")
else:
    dist.init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
rank, world = dist.get_rank(), dist.get_world_size()
adamw = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

torch.manual_seed(1)
module = GPT(o.layers, o.hidden, o.heads, o.vocabulary, o.sequence)
if deepspeed_stage is not None:
    model, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": deepspeed_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "gradient_clipping": 1.0,
        "checkpoint": {"load_universal": o.universal}})
    optimizer = None
else:
    # The thread of async_save communicates while the steps do: without a group of its own, both wait for each other for ever.
    checkpoint_group = dist.new_group(backend="gloo") if o.peer == "dcp_async" else None
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (world,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    model = fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
tokens = torch.randint(0, o.vocabulary, (1, o.sequence + 1))


def step():
    loss = model(tokens[:, : o.sequence], tokens[:, 1:])
    if deepspeed_stage is not None:
        model.backward(loss)
        model.step()
        return
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def pss_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.ends, self.highest = threading.Event(), 0
        self.start()

    def run(self):
        while not self.ends.wait(0.002):
            self.highest = max(self.highest, pss_bytes())

    def stop(self):
        self.ends.set()
        self.join()
        return max(self.highest, pss_bytes())


def gather(value):
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


def state():
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optim": optim}


def bits():
    """Of masters and both moments, over all ranks: the sums of their bit patterns, which other numbers of ranks share."""
    if deepspeed_stage is None:
        slots = optimizer.state
        masters = list(model.parameters())
    else:
        slots = model.optimizer.optimizer.state
        masters = model.optimizer.fp32_partitioned_groups_flat if deepspeed_stage == 3 else model.optimizer.single_partition_of_fp32_groups
    sums = []
    for tensors in (masters, [slots[p]["exp_avg"] for p in masters], [slots[p]["exp_avg_sq"] for p in masters]):
        parts = [(t.to_local() if hasattr(t, "to_local") else t).detach().contiguous() for t in tensors]
        assert all(t.dtype == torch.float32 for t in parts), "masters and moments are fp32"
        sums.append(sum(gather(sum(int(t.view(torch.int32).sum(dtype=torch.int64)) for t in parts))))
    return sums


def compare(saved, what):
    loaded = bits()
    if loaded != saved:
        raise SystemExit(f"checkpoints.py: error: {o.peer}: {what} has sums of bits {loaded}, expected {saved} as saved")


def begin_save(folder):
    """Returns what waits until the checkpoint is on disk."""
    if deepspeed_stage is not None:
        model.save_checkpoint(folder, tag="t")
        return lambda: None
    if o.peer == "dcp":
        dcp.save(state(), checkpoint_id=folder)
        return lambda: None
    if o.peer == "dcp_async":
        return dcp.async_save(state(), checkpoint_id=folder, process_group=checkpoint_group).result
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/rank-{rank}.pt", "wb") as file:
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    return lambda: None


def load(folder):
    if deepspeed_stage is not None:
        path, _ = model.load_checkpoint(folder, tag=None if o.universal else "t")
        assert path is not None, "DeepSpeed loaded nothing"
    elif o.peer == "torch":
        parts = torch.load(f"{folder}/rank-{rank}.pt", weights_only=False)
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optim"])
    else:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        parts = state()
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optim"])


def drop_from_cache(folder):
    for where, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(where, name), os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(body):
    dist.barrier()
    begin = time.perf_counter()
    result = body()
    return time.perf_counter() - begin, result


def steps(count):
    for _ in range(count):
        step()


def rest():
    """For the disk only: a machine that idles answers more slowly afterwards."""
    if o.rest:
        one = max(gather(timed(step)[0]))
        steps(int(o.rest / one))


def timed_load(folder):
    if rank == 0:
        drop_from_cache(folder)
    rest()
    return timed(lambda: (load(folder), dist.barrier()))[0]


def hand_over(result):
    with open(o.out + ".part", "w") as file:
        json.dump(result, file)
    os.replace(o.out + ".part", o.out)


def convert(folder, saved):
    """Seconds of DeepSpeed's conversion of a checkpoint, and of its load by one rank. saved: bits() at the save."""
    from deepspeed.checkpoint.ds_to_universal import main

    drop_from_cache(folder)
    time.sleep(o.rest)
    begin = time.perf_counter()
    main(argparse.Namespace(input_folder=folder + "/t", output_folder=folder + "/universal", num_extract_workers=2, num_merge_workers=2,
                            keep_temp_folder=False, strict=True, inject_missing_state=True))
    converted = time.perf_counter() - begin
    words = [word for name in ("layers", "hidden", "heads", "vocabulary", "sequence", "threads", "rest") for word in ("--" + name, str(getattr(o, name)))]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", __file__, o.peer, "--universal",
                    "--dir", folder, "--out", o.out + ".universal", *words],
                   check=True, env={k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")})
    with open(o.out + ".universal") as file:
        loaded = json.load(file)
    os.remove(o.out + ".universal")
    if loaded["bits"] != saved:
        raise SystemExit(f"checkpoints.py: error: {o.peer}: the load of the converted checkpoint has sums of bits {loaded['bits']}, expected {saved}")
    return {"convert_s": converted, "load_converted_s": loaded["load_s"]}


if o.universal:
    load_s = timed_load(o.dir)
    hand_over({"load_s": load_s, "bits": bits()})
    dist.destroy_process_group()
    sys.exit(0)
if rank == 0:
    shutil.rmtree(o.dir, ignore_errors=True)
dist.barrier()
steps(2)
without, _ = timed(lambda: (steps(o.steps), dist.barrier()))
peak = Peak()
steps(2)
usual = peak.stop()
rest()
dist.barrier()
begin = time.perf_counter()
durable = begin_save(o.dir + "/first")
call = time.perf_counter() - begin
steps(o.steps)
with_save = time.perf_counter() - begin
durable()
dist.barrier()
complete = time.perf_counter() - begin
saved = bits()
peak = Peak()
durable = begin_save(o.dir + "/second")
steps(2)
durable()
highest = peak.stop()
dist.barrier()
assert bits() != saved, "steps change the state, so that only a load brings it back"
load_s = timed_load(o.dir + "/second")
compare(saved, "a load")
size = sum(os.path.getsize(os.path.join(where, name)) for where, _, names in os.walk(o.dir + "/second") for name in names)
result = {
    "peer": o.peer, "versions": versions, "bytes": size,
    "without_s": max(gather(without)), "call_s": max(gather(call)), "stall_s": max(gather(with_save)) - max(gather(without)),
    "durable_s": max(gather(complete if o.peer == "dcp_async" else call)), "peak_bytes": gather(max(0, highest - usual)),
    "load_s": max(gather(load_s)),
}
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    hand_over(result | (convert(o.dir + "/second", saved) if deepspeed_stage is not None else {}))
    shutil.rmtree(o.dir, ignore_errors=True)
