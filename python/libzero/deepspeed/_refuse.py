"""How a name that is not built is refused: an AttributeError that names it and says what to use."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from libzero.deepspeed import _names

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def refusal(owner: str, name: str) -> str:
    """The text for `owner`.`name`."""
    found = _names.reason(owner, name)
    if found is not None:
        kind, reason = found
        return f"{owner}.{name} is {kind}: {reason}"
    return (
        f"{owner}.{name} is not a name of libzero.deepspeed. "
        f"Hint: docs/deepspeed-compatibility.md lists what there is; it mirrors DeepSpeed {_names.VERSION}."
    )


def _imports(frame: FrameType) -> bool:
    """Whether the frame is at `from module import name`."""
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


def module_getattr(owner: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that stands for `owner`."""

    def look_up(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        # `from module import name` would replace an AttributeError by "cannot import name". Of a name that is not known
        # it first looks for a module that is being imported.
        if _names.reason(owner, name) is not None and _imports(sys._getframe(1)):
            raise ImportError(refusal(owner, name), name=owner)
        raise AttributeError(refusal(owner, name))

    return look_up
