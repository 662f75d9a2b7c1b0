"""What a checkpoint has of a Python program besides tensors: the program's own state, the extra state of modules
(get_extra_state), and what torch's schedulers keep in the groups of the optimizer."""

from __future__ import annotations

import argparse
import base64
import importlib
import io
import json
import os
import pickle
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from libzero.errors import IoError

_MARK = "libzero.carried"
_SUFFIX = "_extra_state"  # of torch's keys
_MINE = ("params", "lr", "pattern")
_PLAIN = (bool, int, float, str, type(None))


def _accepted() -> list[Any]:
    """Classes that programs keep values in, and that run nothing when they are loaded, on top of torch's own."""
    classes: list[Any] = [argparse.Namespace, types.SimpleNamespace]
    numpy = sys.modules.get("numpy")  # where it was not imported no value is of it
    if numpy is not None:
        array = numpy.empty(0).__reduce__()[0]  # its maker, whose module depends on the version
        scalar = numpy.float64(0).__reduce__()[0]
        kinds = {type(numpy.dtype(kind)) for kind in numpy.sctypeDict.values()}
        classes += [numpy.ndarray, numpy.dtype, array, scalar, *kinds]
    return classes


def encoded(value: Any, what: str) -> str:
    """[local] As text. TypeError that names `what` for what decoded() would not read."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        text = base64.b64encode(buffer.getvalue()).decode("ascii")
        decoded(text)
    except (pickle.PickleError, AttributeError, TypeError) as fault:  # the last two: of what pickle cannot write
        raise TypeError(
            f"{what}: got an object that cannot be loaded safely, expected tensors, numbers, text, arrays of numpy, "
            f"and lists, tuples, dicts and argparse.Namespaces of them. {str(fault).splitlines()[0]}"
        ) from None
    return text


def _loaded(data: BinaryIO) -> Any:
    try:
        return torch.load(data, weights_only=True)
    except pickle.UnpicklingError:
        importlib.import_module("numpy")
        data.seek(0)
        with torch.serialization.safe_globals(_accepted()):
            return torch.load(data, weights_only=True)


def decoded(text: str) -> Any:
    """[local] What encoded() wrote. Executes nothing of the text."""
    return _loaded(io.BytesIO(base64.b64decode(text)))


def decoded_file(path: str | os.PathLike[str]) -> Any:
    """[local] The same of a file that torch.save() wrote. IoError for one with other objects."""
    with open(path, "rb") as file:
        try:
            return _loaded(file)
        except pickle.UnpicklingError as fault:
            raise IoError(
                f"[checkpoint] {path}: got an object that cannot be loaded safely, expected tensors, numbers, text, "
                f"lists, tuples and dicts. {str(fault).splitlines()[0]}"
            ) from None


def modules_with_extra_state(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """[local] By torch's key in a state dict; a module that is registered twice has two keys."""
    plain = torch.nn.Module.get_extra_state
    return {
        f"{path}.{_SUFFIX}" if path else _SUFFIX: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not plain
    }


def extra_states(model: torch.nn.Module) -> dict[str, str]:
    """[local] This rank's, encoded. TypeError for one that could not be loaded."""
    known: dict[int, str] = {}
    found = {}
    for key, module in modules_with_extra_state(model).items():
        if id(module) not in known:
            known[id(module)] = encoded(module.get_extra_state(), f"the extra state of {key.removesuffix(_SUFFIX)!r}")
        found[key] = known[id(module)]
    return found


def kept_in_groups(groups: Sequence[Mapping[str, Any]], but: Sequence[str]) -> list[dict[str, Any]]:
    """[local] The numbers and texts of each group except `but`, such as a scheduler's initial_lr and max_lr."""
    kept = []
    for group in groups:
        values = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in group.items()}
        kept.append({k: v for k, v in values.items() if isinstance(v, _PLAIN) and k not in (*_MINE, *but)})
    return kept


@dataclass(frozen=True)
class Carried:
    """The text that a checkpoint stores as its user state, and its parts."""

    user_state: Any = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By key, the different values: {"value": encoded, "ranks": those that have it}."""
    world: int = 1
    rules: list[str] = field(default_factory=list)
    """What ranks have of a program's optimizer, encoded: ClientRule.kept()."""
    equal_counts: bool = True
    """All trained parameters have had as many updates."""

    @classmethod
    def of(
        cls,
        user_state: Any,
        groups: list[dict[str, Any]],
        by_rank: Sequence[Mapping[str, str]],
        rules: Sequence[str] = (),
    ) -> Carried:
        """by_rank: what extra_states() gave on each rank; empty where no module has any."""
        extra: dict[str, list[dict[str, Any]]] = {}
        for rank, states in enumerate(by_rank):
            for key, value in states.items():
                values = extra.setdefault(key, [])
                same = next((each for each in values if each["value"] == value), None)
                if same is None:
                    values.append({"value": value, "ranks": [rank]})
                else:
                    same["ranks"].append(rank)
        return cls(user_state, groups if any(groups) else [], extra, len(by_rank) or 1, list(rules))

    @property
    def text(self) -> str:
        """The user state alone where there is nothing else, so that programs in other languages read it as it is."""
        state = self.user_state
        more = self.groups or self.extra or self.rules or not self.equal_counts
        if more or (isinstance(state, dict) and _MARK in state):
            parts = {"groups": self.groups, "extra": self.extra, "world": self.world}
            if self.rules:
                parts["rules"] = self.rules
            if not self.equal_counts:
                parts["equal_counts"] = False
            state = {_MARK: parts, "user_state": state}
        return "" if state is None else json.dumps(state)

    @classmethod
    def read(cls, text: str) -> Carried:
        """The parts of a text, which another program may have written."""
        state = json.loads(text) if text else None
        if not (isinstance(state, dict) and set(state) == {_MARK, "user_state"}):
            return cls(state)
        parts = state[_MARK]
        rules, equal = parts.get("rules", []), parts.get("equal_counts", True)
        return cls(state["user_state"], parts["groups"], parts["extra"], parts["world"], rules, equal)

    def extra_of(self, rank: int) -> dict[str, Any]:
        """This rank's extra states by key. At another number of ranks W: those of rank % W, else the first that has."""
        found = {}
        for key, values in self.extra.items():
            own = next((each for each in values if rank % self.world in each["ranks"]), values[0])
            found[key] = decoded(own["value"])
        return found
