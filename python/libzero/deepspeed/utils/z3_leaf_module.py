"""Modules that DeepSpeed gathers as one. The engine gathers what an operator uses, so a mark changes nothing here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.logging import logger

__all__ = [
    "apply_zero_leaf_module_config",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
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


def _marked(found: Iterable[torch.nn.Module], flag: bool) -> list[torch.nn.Module]:
    """The modules, each once, with the mark set or removed."""
    modules = list(dict.fromkeys(found))
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _set(
    model: torch.nn.Module, classes: Iterable[type[torch.nn.Module] | str], flag: bool, must_find: bool
) -> list[torch.nn.Module]:
    wanted = list(classes)
    types = tuple(each for each in wanted if isinstance(each, type))
    names = {each for each in wanted if isinstance(each, str)}
    if not all(isinstance(each, type | str) for each in wanted):
        raise AssertionError(f"leaf_module_classes: got {wanted}, expected classes and names of classes")
    found = [
        module
        for module in model.modules()
        if isinstance(module, types)
        or {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"} & names
    ]
    if must_find and not found:
        text = ", ".join(each if isinstance(each, str) else each.__name__ for each in wanted)
        raise ValueError(f"leaf_module_classes: the model has none of {text}")
    return _marked(found, flag)


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[type[torch.nn.Module] | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """[local] Marks modules of these classes and their subclasses, or of classes with these names, and returns them.

    ValueError where there are none.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Iterable[type[torch.nn.Module] | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """[local] Removes the marks and returns the modules. ValueError where there are none."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def _set_by(
    model: torch.nn.Module, wanted: Mapping[str, list[torch.nn.Module]], flag: bool, must_find: bool, kind: str
) -> tuple[list[torch.nn.Module], list[str]]:
    missing = [name for name, found in wanted.items() if not found]
    if missing and must_find:
        raise ValueError(f"{kind}: the model has no module {', '.join(missing)}")
    return _marked([module for found in wanted.values() for module in found], flag), missing


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """[local] Marks the modules of these names. Returns them and the names without one: a ValueError unless allowed."""
    modules = dict(model.named_modules())
    wanted = {name: [modules[name]] if name in modules else [] for name in module_names}
    return _set_by(model, wanted, flag, raise_if_not_found, "module_names")


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """[local] The same for modules whose names end so."""
    wanted = {
        suffix: [module for name, module in model.named_modules() if name.endswith(suffix)]
        for suffix in module_name_suffixes
    }
    return _set_by(model, wanted, flag, raise_if_not_found, "module_name_suffixes")


def apply_zero_leaf_module_config(model: torch.nn.Module, leaf_cfg: Any) -> list[torch.nn.Module]:
    """[local] Marks what a block zero_optimization.leaf_module names, and returns it. A warning for what is not there.

    leaf_cfg: an object, or a dict, with classes, names and name_suffixes: text or lists. None: nothing.
    """
    given = leaf_cfg if isinstance(leaf_cfg, Mapping) else vars(leaf_cfg) if leaf_cfg is not None else {}
    lists = {key: [value] if isinstance(value, str) else list(value) for key, value in given.items() if value != "auto"}
    found = set_z3_leaf_modules(model, lists.get("classes", ()), raise_if_not_found=False)
    for key, mark in (("names", set_z3_leaf_modules_by_name), ("name_suffixes", set_z3_leaf_modules_by_suffix)):
        more, missing = mark(model, lists.get(key, ()), raise_if_not_found=False)
        found += more
        if missing:
            logger.warning(f"zero_optimization.leaf_module.{key}: the model has no module {', '.join(missing)}")
    return list(dict.fromkeys(found))


__getattr__ = module_getattr("deepspeed.utils.z3_leaf_module")
