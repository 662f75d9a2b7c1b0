"""deepspeed.accelerator: the device that this process trains on."""

from __future__ import annotations

import os
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr, refusal

__all__ = ["Accelerator", "get_accelerator", "is_current_accelerator_supported"]


class Accelerator:
    """The GPU of the rank, or the CPU (no GPU, or DS_ACCELERATOR=cpu). All calls are local."""

    def __init__(self) -> None:
        gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "") != "cpu"
        self._name = "cuda" if gpu else "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """ "cpu", "cuda" or "cuda:1"."""
        return self._name if self._name == "cpu" or device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which this device is the current one."""
        return torch.cuda.device(device_index) if self._name == "cuda" else torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Makes it the current one."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def current_device(self) -> int | str:
        """Its number; "cpu" on the CPU."""
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def current_device_name(self) -> str:
        """ "cpu" or "cuda:1"."""
        return f"cuda:{torch.cuda.current_device()}" if self._name == "cuda" else "cpu"

    def device_count(self) -> int:
        """GPUs of this process; on the CPU the ranks of this host."""
        return torch.cuda.device_count() if self._name == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def is_available(self) -> bool:
        """True."""
        return True

    def is_synchronized_device(self) -> bool:
        """Calls have ended when they return."""
        return self._name == "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for the device."""
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """torch.distributed's backend for its tensors."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """True: the engine's recipe works everywhere."""
        return True

    def is_fp16_supported(self) -> bool:
        """True: the engine's recipe works everywhere."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Of parameters."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        """torch.manual_seed."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """torch.manual_seed; it seeds all devices."""
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """torch.initial_seed."""
        return torch.initial_seed()

    def random(self) -> Any:
        """torch's module of random numbers."""
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Of the device's generator."""
        return torch.cuda.get_rng_state(device_index or 0) if self._name == "cuda" else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Of the device's generator."""
        if self._name == "cuda":
            torch.cuda.set_rng_state(new_state, device_index or 0)
        else:
            torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Frees what torch's allocator keeps."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the GPU; 0 on the CPU. engine.memory() of libzero has both."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most of memory_allocated()."""
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begins a new maximum."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the GPU, or of the host's memory."""
        if self._name == "cuda":
            return int(torch.cuda.get_device_properties(device_index or 0).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Page-locked with a GPU; the tensor itself on the CPU."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Page-locked."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """The tensor lies on this device."""
        return tensor.device.type == self._name

    def range_push(self, msg: str) -> None:
        """Begins a range of a profiler; nothing on the CPU."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """Ends it."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(refusal("deepspeed.accelerator.get_accelerator()", name))


_accelerator: Accelerator | None = None


def get_accelerator() -> Accelerator:
    """[local] The device of this process."""
    global _accelerator
    if _accelerator is None:
        _accelerator = Accelerator()
    return _accelerator


def is_current_accelerator_supported() -> bool:
    """[local] True."""
    return True


__getattr__ = module_getattr("deepspeed.accelerator")
