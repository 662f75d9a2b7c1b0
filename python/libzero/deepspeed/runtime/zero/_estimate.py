"""Bytes of model states before a run, from libzero's planner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import libzero


@dataclass(frozen=True)
class Estimate:
    """Bytes of one host's memory and of one GPU."""

    host: int
    device: int


def estimate(
    parameters: int, stage: int, gpus: int, nodes: int, *, offload_optimizer: bool, offload_param: bool = False
) -> Estimate:
    """[local] Of bf16 training with Adam, at rest."""
    zero: dict[str, object] = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_param:
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    memory = libzero.plan(parameters, config, libzero.Machine(hosts=nodes, ranks_per_host=gpus)).memory
    return Estimate(host=memory.current("host") * gpus, device=memory.current("device"))


def count(model: torch.nn.Module) -> int:
    """[local] Its parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def table(heading: str, rows: list[tuple[Estimate, str]]) -> None:
    """[local] Prints the rows."""
    print(heading)
    print(f"{'host':>12} {'each GPU':>12}  options")
    for found, options in rows:
        print(f"{found.host / 2**30:>9.2f} GB {found.device / 2**30:>9.2f} GB  {options}")
