"""How a name that is not built is refused: an AttributeError that names it and says what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from libzero.deepspeed import _names


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


def module_getattr(owner: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that stands for `owner`."""

    def look_up(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        raise AttributeError(refusal(owner, name))

    return look_up
