"""Estimates of memory, traffic and step time of a configuration before a run. Needs no other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libzero import _native
from libzero.config import Config, as_options
from libzero.memory import Memory

__all__ = ["Machine", "Plan", "plan", "plan_all"]


@dataclass(frozen=True)
class Plan:
    """One configuration on one machine; bytes and seconds of one rank."""

    stage: int
    offload: str
    """"none", "cpu" or "nvme" """
    checkpointing: bool
    micro_batch: int
    accumulation: int
    memory: Memory
    """current: at rest between steps; peak: within a step"""
    fits: bool
    misses: str
    """the first tier that is too small: "device", "host", "file" """
    refusal: str
    """the Engine's error if memory budgets cannot be met; empty: they can"""
    largest_micro_batch: int
    largest_model: int
    """parameters; -1: no limit was given"""
    bytes_sent: int
    """by one rank in one optimizer step"""
    volume: float
    """the same in units of (N-1)/N times the bytes of the parameters: 2 or 3"""
    step_s: float
    """0: no profile was given"""
    bound: str
    """"compute", "network", "PCIe", "disk", "update"; empty: unknown"""
    notices: tuple[str, ...]
    """where the plan may differ from a run, in sentences"""

    @classmethod
    def _of(cls, plan: _native.Plan) -> Plan:
        return cls(
            stage=plan.stage,
            offload=plan.offload,
            checkpointing=plan.checkpointing,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            memory=Memory.of(plan.memory),
            fits=plan.fits,
            misses=plan.misses,
            refusal=plan.refusal,
            largest_micro_batch=plan.largest_micro_batch,
            largest_model=plan.largest_model,
            bytes_sent=plan.bytes_sent,
            volume=plan.volume,
            step_s=plan.step_s,
            bound=plan.bound,
            notices=tuple(plan.notices),
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a plan. Sizes in bytes; 0: no limit."""

    hosts: int = 1
    ranks_per_host: int = 1
    gpu: bool = True
    device_bytes: int = 0
    host_bytes: int = 0
    file_bytes: int = 0
    shared_memory: bool = False
    profile: str = ""
    """JSON text written by `zero bench profile`; empty: no predicted times"""

    def _native(self) -> _native.PlanMachine:
        return _native.PlanMachine(**vars(self))


def _model_of(model: str | int | torch.nn.Module) -> _native.PlanModel:
    if isinstance(model, str):
        return _native.PlanModel.named(model)
    if isinstance(model, torch.nn.Module):
        model = sum(p.numel() for p in model.parameters())
    return _native.PlanModel.of_count(model)


def plan(model: str | int | torch.nn.Module, config: Config, machine: Machine | None = None) -> Plan:
    """[local] Memory, traffic and time of `config`.

    model: a name ("gpt2", "llama-3-70b"), a number of parameters, or a module, of which only the number of parameters
    is used. Names of GPTs have the activations of the built-in GPT, as with `zero plan --model`.
    """
    return Plan._of(_native.plan(_model_of(model), as_options(config), (machine or Machine())._native()))


def plan_all(model: str | int | torch.nn.Module, config: Config, machine: Machine | None = None) -> list[Plan]:
    """[local] Plans for all stages, offload and checkpointing choices; everything else as in `config`."""
    found = _native.plan_all(_model_of(model), as_options(config), (machine or Machine())._native())
    return [Plan._of(each) for each in found]
