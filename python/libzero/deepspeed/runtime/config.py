"""What a program gives as its configuration, and what the engine reads of it."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.logging import log_dist
from libzero.errors import ConfigError

__all__ = [
    "NOT_CHECKPOINTED",
    "DeepSpeedConfigError",
    "accumulates",
    "native_config",
    "native_schedule",
    "read_config",
    "recipe_of",
]

DeepSpeedConfigError = ConfigError

_GATHER_ON_SAVE = "stage3_gather_16bit_weights_on_model_save"

NOT_CHECKPOINTED = ("contiguous_memory_optimization", "cpu_checkpointing", "profile")
"""Keys of the block activation_checkpointing that are not built for Python models; configure() refuses them."""


def read_config(config: Any) -> dict[str, Any]:
    """[local] The dict of a path, a dict, or base64 text of JSON. ConfigError for anything else."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if isinstance(config, str | os.PathLike):
        text = os.fspath(config)
        if os.path.exists(text):
            with open(text, encoding="utf-8") as file:
                text = file.read()
        else:
            try:
                text = base64.urlsafe_b64decode(text).decode("utf-8")
            except (binascii.Error, UnicodeDecodeError):
                raise ConfigError(
                    f"[deepspeed] cannot read the configuration: {text} is neither a file nor base64 text of one"
                ) from None
        try:
            found = json.loads(text)
        except json.JSONDecodeError as fault:
            raise ConfigError(f"[deepspeed] cannot read the configuration: {fault}") from None
        if isinstance(found, dict):
            return found
    raise ConfigError(f"[deepspeed] config: got {config!r}, expected a path or a dict")


def recipe_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """[local] The dtype of parameters that a block fp16 or bf16 asks for."""
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if config.get(key, {}).get("enabled") is True:
            return dtype
    return None


def data_parallel_ranks(config: Mapping[str, Any], world: int) -> int:
    """[local] Ranks with different samples: not the tensor- and sequence-parallel ranks of one group."""
    degrees = (config.get("tensor_parallel", {}).get("autotp_size", 1), config.get("sequence_parallel_size", 1))
    return max(1, world // math.prod(max(1, degree) for degree in degrees if isinstance(degree, int)))


def accumulates(config: Mapping[str, Any], world: int) -> bool:
    """[local] More than one micro-batch makes a step."""
    steps = config.get("gradient_accumulation_steps")
    if isinstance(steps, int):
        return steps > 1
    total, micro = (config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    return isinstance(total, int) and isinstance(micro, int) and total > micro * data_parallel_ranks(config, world)


def gathers_on_save(config: Mapping[str, Any]) -> bool:
    """[local] save_16bit_model() may gather stage 3's parameters."""
    return bool(config.get("zero_optimization", {}).get(_GATHER_ON_SAVE, False))


def native_config(config: Mapping[str, Any], world: int) -> dict[str, Any]:
    """[local] The same for libzero.Engine: keys that this package acts on itself are left out."""
    native = copy.deepcopy(dict(config))
    zero = native.get("zero_optimization")
    if isinstance(zero, dict):
        zero.pop(_GATHER_ON_SAVE, None)
    block = native.get("activation_checkpointing")
    if isinstance(block, dict):
        left_out = [key for key in NOT_CHECKPOINTED if block.pop(key, False)]
        if left_out:
            names = ", ".join(left_out)
            log_dist(f"activation_checkpointing.{names}: not built for Python models, no effect", ranks=[0])
    interval = native.get("steps_per_print")
    if isinstance(interval, float) and math.isinf(interval):  # accelerate: never
        native["steps_per_print"] = None
    if accumulates(native, world):
        # The engine here counts, so that set_gradient_accumulation_boundary() works.
        native["managed_gradient_accumulation"] = False
    if isinstance(zero, dict) and zero.get("stage", 0) in (1, 2, 3):
        native.setdefault("prescale_gradients", True)  # as ZeRO of DeepSpeed: it decides what overflows
    if isinstance(native.get("scheduler"), dict):
        native["scheduler"] = native_schedule(native["scheduler"])
    return native


def native_schedule(block: Mapping[str, Any]) -> dict[str, Any]:
    """[local] The block "scheduler" with DeepSpeed's first rate: warm-ups begin one update later than the engine's."""
    params = dict(block.get("params", {}))
    if str(block.get("type")).startswith("Warmup"):
        params.setdefault("last_batch_iteration", -2)
    return {**block, "params": params}


__getattr__ = module_getattr("deepspeed.runtime.config")
