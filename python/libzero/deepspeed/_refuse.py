"""Names of DeepSpeed that are not built: they can be imported, and refuse in words when they are called.

_theirs.py lists DeepSpeed's modules and names, _names.py says of those that are not built why, and what to use. From
these lists a module's `__getattr__` and a finder of modules make what no file of this package defines, so that a
program which only imports a name, or asks isinstance() of it, runs.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from libzero.deepspeed import _names, _theirs
from libzero.errors import ConfigError

_OURS, _THEIRS = "libzero.deepspeed", "deepspeed"


class Listed:
    """A module of DeepSpeed: names, each with "", "=VALUE" or the module it is imported from; modules of `import *`."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.stars: list[str] = []

    def add(self, words: Sequence[str]) -> None:
        """The words of one entry: `NAME NAME=VALUE ...` or `< MODULE: NAME ...`."""
        source = words[1].rstrip(":") if words[0] == "<" else ""
        for word in words[2:] if source else words:
            name, equals, value = word.partition("=")
            if word == "*":
                self.stars.append(source)
            else:
                self.names[name] = source or equals + value


@functools.cache
def listed() -> dict[str, Listed]:
    """DeepSpeed's modules by their names within the package, which is "" itself."""
    modules: dict[str, Listed] = {}
    for part in ("\n" + _theirs.TEXT.strip("\n")).replace("\n" + " " * 8, " ").replace("\n    ", "\t").split("\n"):
        name, *entries = part.split("\t")
        modules[name.strip(".")] = module = Listed()
        for entry in entries:
            module.add(entry.split())
    return modules


def _inside(owner: str) -> str:
    """The name within deepspeed. Pages and programs know some modules by short ones."""
    name = owner.removeprefix(_THEIRS).strip(".")
    return _names.SHORT.get(name, name)


def _is_listed(owner: str, name: str) -> bool:
    module = listed().get(_inside(owner))
    return module is not None and name in module.names


class AssertedConfigError(ConfigError, AssertionError):
    """A ConfigError where DeepSpeed has an assertion, which programs may catch."""


class NotBuiltError(NotImplementedError, AssertionError):
    """A NotImplementedError where DeepSpeed has an assertion."""


@contextmanager
def asserted() -> Iterator[None]:
    """[local] A ConfigError within it is also an AssertionError."""
    try:
        yield
    except ConfigError as fault:
        told = AssertedConfigError(str(fault))
        told.code = fault.code
        raise told from None


def refusal(owner: str, name: str) -> str:
    """The text for `owner`.`name`."""
    found = _names.reason(owner, name)
    if found is None and _is_listed(owner, name):
        found = _names.area_reason(_inside(owner))
    if found is not None:
        kind, reason = found
        return f"{owner}.{name} is {kind}: {reason}"
    return (
        f"{owner}.{name} is not a name of libzero.deepspeed. "
        f"Hint: docs/deepspeed-compatibility.md lists what there is; it mirrors DeepSpeed {_names.VERSION}."
    )


class Refused(ABCMeta):
    """The class of names that are not built, and of a program's subclasses of them: nothing can be made of one."""

    refusal: str

    def __call__(cls, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(cls.refusal)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise AttributeError(f"{cls.__name__}.{name}: {cls.refusal}")


@functools.cache
def refused(owner: str, name: str, text: str = "") -> Refused:
    """A class that stands for `owner`.`name`: nothing is an instance of it, and a call is a NotImplementedError."""
    text = text or refusal(owner, name)
    return Refused(name, (), {"__doc__": text, "__module__": owner, "refusal": text})


def _of(module: str, attribute: str, owner: str, name: str) -> Any:
    """What a module of ours has; "": the module. A class that refuses where a package that it needs is missing."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith(_OURS):
            raise
        text = f"{owner}.{name} needs the package {missing.name}. Hint: pip install {missing.name}."
        return refused(owner, name, text)
    return getattr(found, attribute) if attribute else found


def _find(owner: str, name: str) -> Any:
    inside = _inside(owner)
    path = f"{inside}.{name}".strip(".")
    theirs = listed().get(inside, Listed())
    how = theirs.names.get(name, "")
    if path in _names.ALIASES:
        module, _, attribute = _names.ALIASES[path].partition(":")
        return _of(module, attribute, owner, name)
    if path in listed():
        return importlib.import_module(f"{_OURS}.{path}")
    if how.startswith("="):
        return ast.literal_eval(how[1:])
    if how and _names.reason(owner, name) is None:
        return getattr(importlib.import_module(f"{_OURS}.{how}"), name)
    if inside in _names.MORE and not name.startswith("_"):
        found = _of(_names.MORE[inside], "", owner, name)
        if not isinstance(found, ModuleType) or name in vars(found):
            return getattr(found, name, found)
    if name in theirs.names or _names.reason(owner, name) is not None:
        return refused(owner, name)
    for star in theirs.stars:
        source = importlib.import_module(f"{_OURS}.{star}")
        if hasattr(source, name):
            return getattr(source, name)
    raise AttributeError(refusal(owner, name))


def module_getattr(owner: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that stands for `owner`: names that its file does not define.

    A module or constant of DeepSpeed as it is, another name a class that refuses to be called. AttributeError for what
    DeepSpeed has not.
    """

    def look_up(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        return _find(owner, name)

    return look_up


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of DeepSpeed of which this package has no file; it is asked last."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_OURS + ".") or fullname.removeprefix(_OURS + ".") not in listed():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        inside = module.__name__.removeprefix(_OURS + ".")
        module.__doc__ = f"{_THEIRS}.{inside}: its names can be imported. Those that are not built refuse to be called."
        module.__dict__["__getattr__"] = module_getattr(f"{_THEIRS}.{inside}")


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
