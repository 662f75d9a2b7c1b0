"""The optimizers that a configuration names and the engine has no rule of."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from libzero.deepspeed.ops.lamb import FusedLamb
from libzero.deepspeed.runtime.zero.muon.muon_optimizer import configured_muon, is_muon
from libzero.errors import ConfigError
from libzero.optimizer import NUMBERS_OF_RULE

_KEYS = ("type", "params", "legacy_fusion")
"""Of the block; legacy_fusion has no effect."""


def program_optimizer(
    block: Any, given: Iterable[Any] | None, model: torch.nn.Module
) -> torch.optim.Optimizer | None:
    """[local] The optimizer of a block "optimizer" whose rule the engine has not: Muon, Lamb, others of torch.optim.

    Over the program's parameters or groups, else all that are trained. None for the engine's rules, for no block, and
    for types that nobody knows. ConfigError for params that its class does not take.
    """
    name = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(name, str):
        return None
    if is_muon(block):
        _expect_keys(block)
        return configured_muon(block, given, model)
    known = FusedLamb if name.lower() == "lamb" else getattr(torch.optim, name, None)
    built_in = {each.lower() for each in NUMBERS_OF_RULE}
    if name.lower() in built_in or not isinstance(known, type) or not issubclass(known, torch.optim.Optimizer):
        return None
    _expect_keys(block)
    params = dict(block.get("params") or {})
    taken = [word for word in inspect.signature(known.__init__).parameters if word not in ("self", "params")]
    unknown = [key for key in params if key not in taken]
    if unknown:
        raise ConfigError(
            "\n".join(f"[deepspeed] optimizer.params.{key}: unknown key for type {name}" for key in unknown)
            + f". Hint: {', '.join(taken)}."
        )
    over: list[Any] = [p for p in model.parameters() if p.requires_grad] if given is None else list(given)
    try:
        return known(over, **params)
    except (TypeError, ValueError) as fault:
        raise ConfigError(f"[deepspeed] optimizer.params: {name} refused them: {fault}") from fault


def _expect_keys(block: Mapping[str, Any]) -> None:
    unknown = [key for key in block if key not in _KEYS]
    if unknown:
        raise ConfigError("\n".join(f"[deepspeed] optimizer.{key}: unknown key" for key in unknown))
