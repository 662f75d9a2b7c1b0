"""Layers that a pipeline makes where they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.utils import call_to_str
from libzero.deepspeed.utils.logging import logger

__all__ = ["LayerSpec", "PipelineError", "TiedLayerSpec"]


class PipelineError(Exception):
    """Errors of a pipeline."""


class LayerSpec:
    """A module's class and arguments. RuntimeError for another class than a torch.nn.Module."""

    def __init__(self, typename: type[torch.nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        if not issubclass(typename, torch.nn.Module):
            raise RuntimeError(f"LayerSpec: got {typename.__name__}, expected a class of torch.nn.Module")
        self.global_rank = dist.get_rank() if dist.is_initialized() else -1

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, self.module_args, self.module_kwargs)

    def build(self, log: bool = False) -> torch.nn.Module:
        """[local] Makes the module."""
        if log:
            logger.info(f"RANK={self.global_rank} building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares the parameters `tied_weight_attr` with all others of the same key."""

    def __init__(
        self,
        key: str,
        typename: type[torch.nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


__getattr__ = module_getattr("deepspeed.runtime.pipe.module")
