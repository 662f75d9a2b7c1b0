"""Puts libzero.deepspeed under the name `deepspeed`, in this process only."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from email.message import Message
from types import ModuleType
from typing import Any

from libzero.deepspeed import _names

_OURS, _THEIRS = "libzero.deepspeed", "deepspeed"


class _Loader(importlib.abc.Loader):
    """Gives the module of ours, the same object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__  # the import system writes that of the new name; the module keeps its own
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(importlib.abc.MetaPathFinder):
    """Finds deepspeed and deepspeed.x.y as libzero.deepspeed.x.y. ModuleNotFoundError with a reason for others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _THEIRS and not fullname.startswith(_THEIRS + "."):
            return None
        ours = _OURS + fullname[len(_THEIRS) :]
        found = importlib.util.find_spec(ours)
        if found is None:
            raise ModuleNotFoundError(
                f"{fullname} is not a module of libzero.deepspeed. "
                f"Hint: docs/deepspeed-compatibility.md lists what there is; it mirrors DeepSpeed {_names.VERSION}.",
                name=fullname,
            )
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(ours), origin=found.origin)
        if found.submodule_search_locations is not None:
            spec.submodule_search_locations = list(found.submodule_search_locations)
        return spec


class Distribution(importlib.metadata.Distribution):
    """What importlib.metadata says of `deepspeed`: the version that is mirrored."""

    def read_text(self, filename: str) -> str | None:
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        message = Message()
        message["Metadata-Version"] = "2.1"
        message["Name"] = _THEIRS
        message["Version"] = _names.VERSION
        message["Summary"] = "libzero.deepspeed under the name deepspeed"
        return message.as_string()

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return os.path.join(os.path.dirname(__file__), path)


class _Distributions(importlib.metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = importlib.metadata.DistributionFinder.Context()
    ) -> Iterable[importlib.metadata.Distribution]:
        return [Distribution()] if context.name in (None, _THEIRS) else []


def install() -> None:
    """[local] From now on `import deepspeed` is libzero.deepspeed. ImportError if another one was imported before."""
    imported = sys.modules.get(_THEIRS)
    if imported is not None and imported is not sys.modules.get(_OURS):
        raise ImportError(f"cannot take the name deepspeed: {imported.__file__} was imported before")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path[:0] = [_Finder(), _Distributions()]
