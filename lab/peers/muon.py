"""A step with Muon: libzero's at stage 3, and FSDP2's with the usual Muon over DTensors, which gathers each momentum and
orthogonalizes it on every rank. Rounds alternate between the two programs. The model, tokens and learning rates are the same.

    python lab/peers/muon.py [--size 8x512x8x8192x128x1] [--rounds 3] [--steps 6] [--warmup 2] [--world 2] [--dtype bf16]
    python lab/peers/muon.py --learn FILE [--rounds 3] [--steps 300]      held-out loss of a GPT of 0.2 M parameters on a text

Needs the package (PYTHONPATH=build/python) and torch. Prints each round, then libzero's median step over FSDP2's, by round.
--learn: Muon's and AdamW's losses at several rates, a round for each seed, one rank, fp32.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PEERS = ("libzero", "fsdp2")
RATES = {"lr": 0.02, "adam_lr": 3e-4}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8x512x8x8192x128x1", help="layers x hidden x heads x vocabulary x sequence x batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="6; with --learn 300")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--learn", type=Path, metavar="FILE")
    parser.add_argument("--peer", choices=PEERS, help="of this rank; given by the program that alternates")
    found = parser.parse_args()
    found.steps = found.steps or (300 if found.learn else 6)
    return found


def compare(o):
    ratios = []
    for round_ in range(o.rounds):
        step = {}
        for peer in PEERS if round_ % 2 == 0 else PEERS[::-1]:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(o.world), "--master-port",
                       str(29000 + os.getpid() % 900 + round_), __file__, *sys.argv[1:], "--peer", peer]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
            step[peer] = json.loads(text.splitlines()[-1])
        ratios.append(step["libzero"]["step_s"] / step["fsdp2"]["step_s"])
        losses = " and ".join(f"{step[peer]['loss']:.4f}" for peer in PEERS)
        seconds = ", ".join(f"{peer} {step[peer]['step_s']:.3f} s" for peer in PEERS)
        print(f"round {round_ + 1}: {seconds}, ratio {ratios[-1]:.2f}; last losses {losses}", flush=True)
    print(f"libzero / fsdp2, {o.dtype}, {o.world} ranks, {o.size}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


def orthogonal(x, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.bfloat16()
    if tall := x.size(0) > x.size(1):
        x = x.mT
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def gathered_muon(matrices, momentum=0.95):
    from torch.distributed.tensor import distribute_tensor

    means = {p: torch.zeros_like(p) for p in matrices}

    @torch.no_grad()
    def step():
        for p, mean in means.items():
            mean.lerp_(p.grad, 1 - momentum)
            whole = p.grad.lerp(mean, momentum).full_tensor()
            rows, columns = whole.shape
            update = orthogonal(whole).to(p.dtype) * (RATES["lr"] * max(1.0, rows / columns) ** 0.5)
            p.sub_(distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None))

    return step


def train(o):
    layers, hidden, heads, vocabulary, sequence, batch = map(int, o.size.split("x"))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = GPT(layers, hidden, heads, vocabulary, sequence)
    matrices = [p for name, p in module.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
    bf16 = o.dtype == "bf16"
    if o.peer == "libzero":
        import libzero

        params = {**RATES, "adam_parameters": ["head.weight"]}
        model = libzero.Engine(module, {
            "train_micro_batch_size_per_gpu": batch, "gradient_clipping": 0.0, "bf16": {"enabled": bf16},
            "optimizer": {"type": "Muon", "params": params}, "zero_optimization": {"stage": 3}})
        rank, world = model.comm.rank, model.comm.size
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.distributed.init_process_group("gloo")
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        options = dict(mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
        for block in module.blocks:
            fully_shard(block, **options)
        model = fully_shard(module, **options)
        matrices = [p for name, p in module.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
        others = [p for p in module.parameters() if not any(p is m for m in matrices)]
        adam = torch.optim.AdamW(others, lr=RATES["adam_lr"], betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
        muon = gathered_muon(matrices)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocabulary, (o.warmup + o.steps, world, batch, sequence + 1), generator=generator)
    seconds, loss = [], None
    for k in range(len(tokens)):
        part = tokens[k, rank]
        start = time.perf_counter()
        loss = model(part[:, :-1], part[:, 1:])
        if o.peer == "libzero":
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            adam.step()
            muon()
            model.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({"step_s": statistics.median(seconds[o.warmup:]), "loss": float(loss.detach())}), flush=True)


def learn(o):
    import libzero

    text = torch.tensor(list(o.learn.read_bytes()))
    held_out, length, batch = text[-(1 << 17):], 128, 8
    text = text[:len(text) - len(held_out)]
    torch.set_num_threads(os.cpu_count())

    def loss_of(kind, rate, seed):
        torch.manual_seed(seed)
        module = GPT(4, 64, 4, 256, length)
        params = {"lr": rate, "adam_lr": 3e-3, "adam_parameters": ["head.weight"]} if kind == "Muon" else {"lr": rate, "betas": [0.9, 0.95]}
        engine = libzero.Engine(module, {
            "train_micro_batch_size_per_gpu": batch, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
            "optimizer": {"type": kind, "params": {"weight_decay": 0.01, **params}}})
        generator = torch.Generator().manual_seed(seed)
        for step in range(o.steps):
            for group in engine.optimizer.param_groups:  # falls to a tenth
                group["lr"] = rate * (1 - 0.9 * step / o.steps)
            begins = torch.randint(0, len(text) - length - 1, (batch,), generator=generator)
            part = torch.stack([text[k:k + length + 1] for k in begins.tolist()])
            engine.backward(engine(part[:, :-1], part[:, 1:]))
            engine.step()
        rows = held_out[:len(held_out) // (length + 1) * (length + 1)].view(-1, length + 1)
        with torch.no_grad():
            losses = [module(part[:, :-1], part[:, 1:]).item() * len(part) for part in rows.split(64)]
        return sum(losses) / len(rows)

    for kind, rates in (("AdamW", (1e-3, 3e-3, 1e-2)), ("Muon", (0.005, 0.01, 0.02, 0.05))):
        for rate in rates:
            found = [loss_of(kind, rate, seed) for seed in range(1, o.rounds + 1)]
            print(f"{kind} {rate:g}: {', '.join(f'{loss:.4f}' for loss in found)}, mean {statistics.mean(found):.4f}", flush=True)


options = arguments()
if options.peer is None and options.learn is None:
    compare(options)
else:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from gpt import GPT

    if options.learn:
        learn(options)
    else:
        train(options)
