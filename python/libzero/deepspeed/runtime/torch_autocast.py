"""The block "torch_autocast": forward() under torch.autocast, over parameters that stay as they are."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.logging import log_dist
from libzero.errors import ConfigError

__all__ = [
    "LOWER_PRECISION_SAFE_MODULES",
    "TorchAutocast",
    "autocast_if_enabled",
    "get_all_comm_dtypes",
    "get_autocast_dtype",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "is_autocast_initialized",
    "sort_dtypes",
]

LOWER_PRECISION_SAFE_MODULES: list[type[torch.nn.Module]] = [
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
]
"""Gradients of their parameters may be reduced in the dtype of autocast, unless the block lists other classes."""

_KEYS = ("enabled", "dtype", "lower_precision_safe_modules")
_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.bfloat16: "torch.bfloat16 bf16 bfloat16",
        torch.float16: "torch.float16 fp16 float16 half",
    }.items()
    for name in names.split()
}
_MARK = "comm_dtype"
_latest: torch.dtype | None = None
"""Of the engine that was made last."""


def get_default_autocast_lower_precision_modules() -> list[str]:
    """[local] LOWER_PRECISION_SAFE_MODULES by name."""
    return [f"{each.__module__}.{each.__name__}" for each in LOWER_PRECISION_SAFE_MODULES]


@dataclass(frozen=True)
class TorchAutocast:
    """What the block says."""

    device: str
    enabled: bool = False
    dtype: torch.dtype | None = None
    """As written; None: torch's of the device."""
    names: tuple[str, ...] = ()
    classes: tuple[type, ...] = ()

    @staticmethod
    def of(config: Mapping[str, Any], device: str) -> TorchAutocast:
        """[local] Of a configuration, for a device type. ConfigError for what it does not know."""
        given = config.get("torch_autocast")
        block = {} if given is None else given
        unknown = [key for key in block if key not in _KEYS] if isinstance(block, Mapping) else [given]
        if unknown:
            _refuse("", unknown[0], f"an object with keys of {', '.join(_KEYS)}")
        enabled = block.get("enabled", False)
        if enabled not in (0, 1):
            _refuse(".enabled", enabled, "true or false")
        written = block.get("dtype")
        if written is not None and written not in _DTYPES:
            _refuse(".dtype", written, "bfloat16 or float16")
        dtype = None if written is None else _DTYPES[written]
        names = block.get("lower_precision_safe_modules")
        if names is None:
            names = get_default_autocast_lower_precision_modules()
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            _refuse(".lower_precision_safe_modules", names, "a list of names of classes")
        if not enabled:
            return TorchAutocast(device, dtype=dtype, names=tuple(names))
        return TorchAutocast(device, True, dtype, tuple(names), tuple(map(_class_of, names)))

    @contextmanager
    def around(self) -> Iterator[None]:
        """[local] torch.autocast with the dtype; without the block what the program has set."""
        if not self.enabled:
            yield
            return
        with torch.autocast(self.device, self.dtype):
            yield

    def mark(self, model: torch.nn.Module) -> None:
        """[local] Notes the parameters whose gradients may be reduced in the dtype."""
        global _latest
        if not self.enabled:
            return
        _latest = self.computes_in
        safe = {id(p) for m in model.modules() if type(m) in self.classes for p in m.parameters(recurse=False)}
        for p in model.parameters():
            if id(p) in safe:
                setattr(p, _MARK, _latest)
            elif hasattr(p, _MARK):  # by another engine
                delattr(p, _MARK)

    @property
    def computes_in(self) -> torch.dtype:
        """[local] The dtype of the operators that autocast chooses one for."""
        return self.dtype or torch.get_autocast_dtype(self.device)

    def scale(self, config: dict[str, Any]) -> None:
        """[local] Enables the loss scale of torch.amp.GradScaler in a configuration: fp16 loses gradients without.

        The initial scale 2**16 is halved at each overflow and doubled after 2,000 steps without one.
        """
        if not self.enabled or self.computes_in is not torch.float16:
            return
        blocks = [config.get(name) or {} for name in ("fp16", "libzero")]
        if not all(isinstance(block, Mapping) for block in blocks) or blocks[0].get("enabled") is True:
            return  # options refuse what is no block
        config["libzero"] = {**blocks[1], "loss_scaling": True}
        config["fp16"] = {"enabled": False, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}

    def communication(self, model: torch.nn.Module) -> dict[str, str]:
        """[local] Its key of the configuration, after mark(): the engine has one dtype for all gradients."""
        if not self.enabled:
            return {}
        narrow = "bf16" if self.computes_in is torch.bfloat16 else "fp16"
        others = sum(not has_comm_dtype(p) for p in model.parameters() if p.requires_grad)
        if others == 0:
            return {"communication_data_type": narrow}
        log_dist(
            f"torch_autocast: gradients are reduced in fp32, because {others} parameters are not of "
            f'lower_precision_safe_modules. Hint: "communication_data_type": "{narrow}" is for all of them.',
            ranks=[0],
        )
        return {}


def _refuse(where: str, got: Any, expected: str) -> None:
    raise ConfigError(f"[deepspeed] torch_autocast{where}: got {got!r}, expected {expected}")


def _class_of(name: str) -> type:
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last)
    except (AttributeError, ImportError, ValueError) as fault:
        raise ConfigError(
            f"[deepspeed] torch_autocast.lower_precision_safe_modules: cannot import {name}: {fault}"
        ) from None
    if not isinstance(found, type):
        _refuse(".lower_precision_safe_modules", name, "the name of a class")
    return found  # type: ignore[no-any-return]


def has_comm_dtype(param: torch.Tensor) -> bool:
    """[local] torch_autocast has a dtype for the reduction of its gradient."""
    return hasattr(param, _MARK)


def get_comm_dtype(param: torch.Tensor) -> torch.dtype:
    """[local] The narrowest dtype that torch_autocast allows for the reduction of a parameter's gradient."""
    found: torch.dtype = getattr(param, _MARK, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """[local] Those of some parameters."""
    return {get_comm_dtype(p) for p in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """[local] In the order of their names."""
    return sorted(dtypes, key=str)


def is_autocast_initialized() -> bool:
    """[local] An engine with torch_autocast was made."""
    return _latest is not None


def get_autocast_dtype() -> torch.dtype | None:
    """[local] The dtype of the one that was made last."""
    return _latest


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """[local] What an engine's forward() runs under."""
    with engine._autocast.around():
        yield


__getattr__ = module_getattr("deepspeed.runtime.torch_autocast")
