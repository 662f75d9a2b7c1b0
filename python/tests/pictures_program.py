"""A program of the shape of DeepSpeed's tutorial for pictures, of own making: its options, its kinds of parameters.

    zero run --deepspeed --num_gpus 2 pictures_program.py --out seen.json

It trains each combination of options for some steps on drawn pictures and writes the losses, the rates and a sum over
the weights of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn import functional as F

STEPS, BATCH = 6, 8


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--ep-world-size", type=int, default=1)
    parser.add_argument("--num-experts", type=int, nargs="+", default=[1])
    parser.add_argument("--mlp-type", default="standard")
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--min-capacity", type=int, default=0)
    parser.add_argument("--noisy-gate-policy", default=None)
    parser.add_argument("--moe-param-group", action="store_true")
    parser.add_argument("--rate", type=float, default=None, help="of the groups of experts")
    parser.add_argument("--scheduler", default="WarmupLR")
    return deepspeed.add_config_arguments(parser).parse_args(words)


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 24), nn.Linear(24, 20)
        self.moe = args.moe
        if args.moe:
            self.layers = nn.ModuleList(
                deepspeed.moe.layer.MoE(
                    hidden_size=20,
                    expert=nn.Linear(20, 20),
                    num_experts=number,
                    ep_size=args.ep_world_size,
                    use_residual=args.mlp_type == "residual",
                    k=args.top_k,
                    min_capacity=args.min_capacity,
                    noisy_gate_policy=args.noisy_gate_policy,
                )
                for number in args.num_experts
            )
        else:
            self.fc3 = nn.Linear(20, 20)
        self.fc4 = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        for layer in self.layers if self.moe else []:
            x, _, _ = layer(x)
        return self.fc4(x if self.moe else F.relu(self.fc3(x)))  # type: ignore[no-any-return]


class Drawn(torch.utils.data.Dataset[Any]):
    """A bar of each class at its own place, with noise."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        picture = 0.3 * torch.randn(3, 14, 14, generator=torch.Generator().manual_seed(i))
        picture[i % 3, i % 10 : i % 10 + 3] += 1
        return picture, i % 10


def settings(args: argparse.Namespace) -> dict[str, Any]:
    schedules: dict[str, dict[str, Any]] = {
        "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
        "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 2},
    }
    return {
        "train_batch_size": BATCH,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {"type": args.scheduler, "params": schedules[args.scheduler]},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 8, "hysteresis": 2, "min_loss_scale": 1},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


def train(words: list[str]) -> dict[str, Any]:
    args = options(words)
    torch.manual_seed(7)
    get_accelerator().manual_seed_all(7)
    net = Net(args)
    parameters: Any = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe_param_group:
        parameters = {"params": list(parameters), "name": "parameters"}
        parameters = split_params_into_different_moe_groups_for_optimizer(parameters)
        for group in parameters:
            if args.rate is not None and group.get("moe"):
                group["lr"] = args.rate
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Drawn(), config=settings(args)
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    losses, rates = [], []
    for pictures, labels in loader:
        pictures, labels = pictures.to(engine.device, dtype), labels.to(engine.device)
        loss = F.cross_entropy(engine(pictures).float(), labels)
        rates.append(engine.get_lr())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        engine(pictures)
    found = engine._engine.full_state_dict()
    engine.destroy()
    return {"losses": losses, "rates": rates, "sum": sum(float(value.double().abs().sum()) for value in found.values())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("--few", action="store_true", help="a combination of each kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    experts = "--moe --num-experts 4 --ep-world-size 2"
    kinds = ["", experts, f"{experts} --moe-param-group"]
    every = [f"--dtype {d} --stage {s} {k}" for d, s, k in itertools.product(("fp32", "bf16", "fp16"), range(4), kinds)]
    more = ("--mlp-type residual", "--top-k 2", "--noisy-gate-policy RSample", "--noisy-gate-policy Jitter",
            "--min-capacity 4", "--num-experts 2 4 --ep-world-size 1", "--scheduler WarmupCosineLR")  # fmt: skip
    every += [f"--stage 2 {experts}{group} {one}" for one in more for group in ("", " --moe-param-group")]
    cosine = f"--stage 2 {experts} --moe-param-group --scheduler WarmupCosineLR --rate"
    every += [f"{cosine} 0.01", f"{cosine} 0.002"]
    if asked.few:
        every = [every[-1], every[-2], "--dtype bf16 --stage 2", *(f"--stage 3 {kind}" for kind in kinds[1:])]
    seen = {" ".join(words.split()): train(words.split()) for words in every}
    if os.environ["RANK"] == "0":
        with open(asked.out, "w", encoding="utf-8") as file:
            json.dump(seen, file)


if __name__ == "__main__":
    main()
