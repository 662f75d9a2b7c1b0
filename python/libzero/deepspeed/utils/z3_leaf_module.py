"""Modules that DeepSpeed gathers as one. The engine gathers what an operator uses, so a mark changes nothing here."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from libzero.deepspeed._refuse import module_getattr

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """[local] Whether it is marked."""
    return getattr(model, "_z3_leaf", False) is True


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """[local] Marks it, or not."""
    model._z3_leaf = flag  # type: ignore[assignment]


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """[local] The marked ones."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _set(
    model: torch.nn.Module, classes: Iterable[type[torch.nn.Module] | str], flag: bool, must_find: bool
) -> list[torch.nn.Module]:
    wanted = {each if isinstance(each, str) else each.__name__ for each in classes}
    found = []
    for module in model.modules():
        names = {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
        if names & wanted:
            set_z3_leaf_module(module, flag)
            found.append(module)
    if must_find and not found:
        raise ValueError(f"leaf_module_classes: the model has none of {', '.join(sorted(wanted))}")
    return found


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[type[torch.nn.Module] | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """[local] Marks modules of these classes and returns them. ValueError where there are none."""
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[type[torch.nn.Module] | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """[local] Removes the marks and returns the modules. ValueError where there are none."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


__getattr__ = module_getattr("deepspeed.utils.z3_leaf_module")
