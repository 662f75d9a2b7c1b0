"""deepspeed.checkpointing: segments that are recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.config import NOT_CHECKPOINTED, read_config
from libzero.deepspeed.utils.debug import see_memory_usage

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset", "see_memory_usage"]

_configured = False


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """[local] Takes the block activation_checkpointing of a configuration, and arguments on top of it.

    partition_activations and synchronize are accepted: a rank holds its own activations, and the CPU has nothing to
    wait for. contiguous_checkpointing, checkpoint_in_cpu and profile are NotImplementedError where they are true.
    """
    global _configured
    block = read_config(deepspeed_config).get("activation_checkpointing", {}) if deepspeed_config is not None else {}
    if mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
        raise NotImplementedError("cannot configure checkpointing: mpu has more than one model-parallel rank")
    wanted = {
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "profile": profile,
    }
    for (argument, value), key in zip(wanted.items(), NOT_CHECKPOINTED, strict=True):
        if value if value is not None else block.get(key, False):
            raise NotImplementedError(
                f"cannot configure checkpointing: {argument} is not built for Python models. "
                f"Hint: leave it and activation_checkpointing.{key} out."
            )
    _configured = True


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """[local] function(*args, **kwargs), of which only the inputs are kept until backward computes it again."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """[local] configure() was called."""
    return _configured


def reset() -> None:
    """[local] Nothing: no buffers are kept between iterations."""


__getattr__ = module_getattr("deepspeed.checkpointing")
