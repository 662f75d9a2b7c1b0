"""deepspeed.checkpointing: segments that are recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.utils.checkpoint

from libzero.deepspeed._held import require_no_model_parallel
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.runtime.activation_checkpointing._random_states import PARALLEL, TRACKER, CudaRNGStatesTracker
from libzero.deepspeed.runtime.config import NOT_CHECKPOINTED, read_config
from libzero.deepspeed.utils.debug import see_memory_usage

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "reset",
    "see_memory_usage",
]

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
    require_no_model_parallel(mpu_, "cannot configure checkpointing")
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
    """[local] function(*args, **kwargs), of which only the inputs are kept until backward computes it again.

    Random numbers are the same ones then, also those of get_cuda_rng_tracker().
    """
    if states := TRACKER.get_states():
        kwargs = {"context_fn": lambda: (nullcontext(), TRACKER.again(states)), **kwargs}
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """[local] configure() was called."""
    return _configured


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """[local] That of this process."""
    return TRACKER


_OFFSET = 2718
"""DeepSpeed's and Megatron's, of the state for what differs between tensor-parallel ranks."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """[local] Seeds the device's generator, and the tracker's one state, which begins as on tensor-parallel rank 0."""
    TRACKER.reset()
    get_accelerator().manual_seed(seed)
    TRACKER.add(PARALLEL, seed + _OFFSET)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """[local] Seeds the tracker's state alone."""
    with TRACKER.fork():
        get_accelerator().manual_seed(seed + _OFFSET)


def reset() -> None:
    """[local] Nothing: no buffers are kept between iterations."""


__getattr__ = module_getattr("deepspeed.checkpointing")
