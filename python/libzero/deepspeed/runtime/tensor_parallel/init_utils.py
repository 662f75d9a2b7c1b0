"""deepspeed.runtime.tensor_parallel.init_utils: what tp_model_init() notes for initialize()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.config import recipe_of
from libzero.errors import ConfigError

__all__ = ["merge_tp_model_init_into_config", "record_tp_model_init_args"]

_BLOCKS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class _Noted:
    size: int
    dtype: torch.dtype


_noted: _Noted | None = None


def record_tp_model_init_args(tp_size: int, dtype: torch.dtype, tp_group: Any = None, dist_module: Any = None) -> None:
    """[local] For the next initialize(). ConfigError for what differs from what was noted and not used yet."""
    global _noted
    if tp_group is not None and tp_group is not dist.group.WORLD:
        ranks = dist.get_process_group_ranks(tp_group)
        if ranks != [*range(ranks[0], ranks[0] + tp_size)] or ranks[0] % tp_size != 0:
            raise ConfigError(
                f"[tp_model_init] tp_group: got the ranks {ranks}, expected {tp_size} neighbours that begin at a "
                f"multiple of {tp_size}, which the engine cuts layers over. Hint: leave tp_group out."
            )
    given = _Noted(tp_size, dtype)
    if _noted not in (None, given):
        raise ConfigError(f"[tp_model_init] got {given}, expected {_noted}, which was given before.")
    _noted = given


def merge_tp_model_init_into_config(config: dict[str, Any]) -> dict[str, Any]:
    """[local] The configuration with what tp_model_init() was given since the last call.

    ConfigError where the two differ; tensor_parallel.autotp_size and a recipe that are missing are filled in.
    """
    global _noted
    noted, _noted = _noted, None
    if noted is None:
        return config
    block = config.get("tensor_parallel") or {}
    size, recipe = block.get("autotp_size", noted.size), recipe_of(config)
    if size != noted.size:
        raise ConfigError(
            f"[tp_model_init] tp_size: got {noted.size}, expected {size}, which tensor_parallel.autotp_size says."
        )
    merged = {**config, "tensor_parallel": {**block, "autotp_size": size}}
    wanted = None if noted.dtype == torch.float32 else noted.dtype
    if recipe is None and noted.dtype in _BLOCKS:
        return {**merged, _BLOCKS[noted.dtype]: {**(config.get(_BLOCKS[noted.dtype]) or {}), "enabled": True}}
    if recipe != wanted:
        raise ConfigError(
            f"[tp_model_init] dtype: got {noted.dtype}, expected {recipe or torch.float32}, the configuration's recipe."
        )
    return merged


__getattr__ = module_getattr("deepspeed.runtime.tensor_parallel.init_utils")
