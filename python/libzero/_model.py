"""The module behind a model, and patterns of its parameters' names."""

from __future__ import annotations

import re
import sys

import torch


def exact_pattern(name: str) -> str:
    """[local] The pattern that matches this name alone: keys of a ModuleDict may contain * and ?."""
    return re.sub(r"[*?\\]", r"\\\g<0>", name)


def compiled_from(model: torch.nn.Module) -> torch.nn.Module:
    """[local] The module that torch.compile wrapped, else the model itself.

    Not by getattr(): a module that wraps another often passes its attributes on.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        return model.__dict__["_modules"]["_orig_mod"]  # type: ignore[no-any-return]
    return model
