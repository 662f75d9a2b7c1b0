"""Optimizers that a program brings: any torch.optim.Optimizer whose updates are possible on an engine's shards.

The engine holds masters and states; for an update it gives the optimizer 1-d pieces of parameters, or whole ones, with
their gradients and states. probe() finds out beforehand whether that is the optimizer that the program wrote.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from libzero.errors import ConfigError

if TYPE_CHECKING:
    from libzero._native import UpdatePiece
    from libzero.engine import Engine

__all__ = ["Properties", "probe"]

Make: TypeAlias = Callable[[list[Any]], torch.optim.Optimizer]
"""Makes an optimizer of parameters, or of groups of them."""

Piece: TypeAlias = "UpdatePiece | _Shard"

MOST_STATES = 8
"""Of an element, besides the master: kMaxSlots of the engine."""
_EXACT = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.bool)
"""Dtypes of states whose values fp32 holds."""
_NUMBER = (bool, int, float, str, type(None))
_LONGEST = 1 << 16
"""Of a list of numbers in a group."""


def rule_of(step: Any) -> Any:
    """[local] The function behind the wrappers that torch's optimizers and schedulers put around step()."""
    step = getattr(step, "__func__", step)
    while hasattr(step, "__wrapped__") and step.__globals__["__name__"].startswith("torch.optim"):
        step = step.__wrapped__
    return step


@dataclass(frozen=True)
class Properties:
    """What probe() found of an optimizer."""

    policy: str
    """"elements": parts of parameters can be updated by themselves. "whole": those of some groups only as a whole.
    "coupled": all parameters only together. "refused": it cannot run in an engine."""
    groups: tuple[str, ...] = ()
    """"elements" or "whole", for each of the optimizer's groups."""
    exact: bool = False
    """Updates of parts, or of one parameter after another, have the same bits as one step() of all."""
    states: tuple[str, ...] = ()
    """Names of the states that have a value per element, which the engine shards."""
    states_of_groups: tuple[tuple[str, ...], ...] = ()
    """Those of the parameters of each of the optimizer's groups."""
    numbers: tuple[str, ...] = ()
    """Names of the other states, which each parameter has once."""
    difference: float = 0.0
    """Of the weights after 13 steps as the engine makes them, relative to their largest change."""
    reason: str = ""
    """Why not "elements", in words."""

    @property
    def hint(self) -> str:
        """What to use instead of one that is coupled or refused."""
        if self.policy == "coupled":
            return (
                "gradient_clipping of the configuration in place of a norm in the optimizer; optimizer_policy of the "
                'Engine, "elements" or "whole", if the difference does not matter'
            )
        return "an optimizer whose step() takes no closure and draws no random numbers (docs/optimizers.md)"


def _numbers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are numbers, texts, tuples and lists of them, or small tensors."""

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return len(value) <= _LONGEST and all(map(plain, value))
        return isinstance(value, _NUMBER) or (isinstance(value, torch.Tensor) and value.numel() == 1)

    return {key: value for key, value in values.items() if key != "params" and plain(value)}


def _assign(values: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Copies of the numbers; tensors in place, since a program may hold a rate that it has made one."""
    for key, value in numbers.items():
        now = values.get(key)
        tensors = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
        if tensors and now.shape == value.shape and now.dtype == value.dtype:  # type: ignore[union-attr]
            with torch.no_grad():
                now.copy_(value)  # type: ignore[union-attr]
        else:
            values[key] = copy.deepcopy(value)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors in them by their elements."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return tensors and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)


@dataclass
class _Record:
    """What a parameter has besides its states per element."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Of those of the states per element that it has."""
    values: dict[str, Any] = field(default_factory=dict)
    update: int = 0
    """The number of the update that left it. Of parameters that other ranks update a rank has old ones."""


@dataclass(frozen=True)
class _Filled:
    """A state per element that begins with this value."""

    value: float
    dtype: torch.dtype


def _initial_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the class gives each parameter when it is constructed, as Adagrad does; most give nothing.

    ConfigError unless all have the same.
    """
    initial: dict[str, Any] = {}
    for p, state in optimizer.state.items():
        if not isinstance(p, torch.Tensor) or not isinstance(state, Mapping):
            raise ConfigError(f"it keeps a state that is no parameter's: {str(p)[:60]}")
        for name, value in state.items():
            made: Any = value
            if isinstance(value, torch.Tensor) and value.shape == p.shape and value.dim() > 0:
                first = value.reshape(-1)[:1]
                made = _Filled(first.item() if first.numel() else 0.0, value.dtype)
                if not bool((value == first).all()):
                    raise ConfigError(f"it makes its first state {name} of a parameter's values")
            if name in initial and not _same(initial[name], made):
                raise ConfigError(f"its first state {name} is another one for another parameter")
            initial[name] = copy.deepcopy(made)
    return initial


def _made(initial: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    return {
        name: torch.full_like(like, value.value, dtype=value.dtype) if isinstance(value, _Filled)
        else copy.deepcopy(value)
        for name, value in initial.items()
    }  # fmt: skip


@dataclass
class _Shard:
    """A Piece."""

    parameter: str
    count: int
    master: torch.Tensor
    gradient: torch.Tensor | None
    states: list[torch.Tensor]


class ClientRule:
    """A program's optimizer as the engine's update rule; the engine calls begin_step(), update() and end_step().

    The optimizer is the program's object: its groups are read at each step, and only during update() they have pieces
    in place of the parameters. It may update a unit in several calls, each from the numbers that the step began with.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Mapping[str, int],
        states: Sequence[Sequence[str]],
        whole: Collection[int] = (),
        lr: float = 0.0,
    ) -> None:
        """groups: number of the optimizer's group, by parameter. states: by group, those that have a value per element.

        whole: numbers of the groups whose parameters are updated as a whole. lr: that of most parameters, for messages
        and the configuration's schedules.
        """
        self.name = type(optimizer).__name__
        self._states = [list(names) for names in states]
        self.lr = lr
        self._optimizer = optimizer
        self._step = rule_of(type(optimizer).step)  # hooks are for a step of all units
        self._modes: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
            mode: getattr(type(optimizer), mode) for mode in ("train", "eval") if hasattr(type(optimizer), mode)
        }
        self._groups = groups
        self._whole = frozenset(whole)
        self._initial = _initial_state(optimizer)
        self._copy = _copied(optimizer)
        self._attributes = set(vars(optimizer))  # of its class, not those that an engine adds
        self._records: dict[str, _Record] = {}
        self._next: dict[str, _Record] = {}
        self._began: list[dict[str, Any]] = []
        self._updates = 0
        self._first = self._numbers()
        self._counters: set[tuple[int, str]] = set()  # numbers that step() changes, by holder and name
        self._flags = self._choices_of_groups()
        self._ended: list[dict[str, Any]] | None = None

    def states_of(self, parameter: str, shape: Sequence[int] = ()) -> list[str]:
        """Names of a parameter's states that have a value per element."""
        return self._states[self._groups[parameter]] if parameter in self._groups else []

    def is_whole(self, parameter: str, shape: Sequence[int]) -> bool:
        """Whether a parameter is updated as a whole."""
        return self._groups.get(parameter) in self._whole

    def parameters(self) -> list[str]:
        """Names of those that it updates."""
        return list(self._groups)

    def cost(self, parameter: str, shape: Sequence[int]) -> float:
        """The work of its update, in any unit: that of a product with its square, which Muon and the like compute."""
        return math.prod(shape) * float(min(shape) if len(shape) > 1 else 1)

    def choices(self) -> int:
        """A hash of the numbers that the next update uses, which must be equal on all ranks."""
        return zlib.crc32(repr([sorted(_numbers_of(group).items()) for group in self._optimizer.param_groups]).encode())

    def begin_step(self) -> None:
        """Before the pieces of a step."""
        if (flags := self._choices_of_groups()) != self._flags:
            raise ConfigError(
                f"[{self.name}] a choice in its groups was changed since its last update, {self._flags} to {flags}: "
                "it may make another rule, which was not tried. Hint: set it before the engine is made."
            )
        self._next = {}
        self._updates += 1
        self._began = self._numbers()
        self._ended = None

    def update(self, pieces: Sequence[Piece]) -> None:
        """Updates masters and states of the pieces in place."""
        self._call(self._step, pieces)

    def switch(self, mode: str, engine: Engine) -> None:
        """[collective] The optimizer's own train() or eval(), which move the weights (schedule-free).

        They see each parameter's shard with its states, as step() does. ConfigError for groups of whole parameters.
        """
        if self._whole:
            raise self._error(f"its {mode}() moves whole parameters")
        self._began, self._ended = self._numbers(), None
        for name, p in engine._original.named_parameters():
            if name not in self._groups or not p.requires_grad:
                continue
            master = engine.own_parameter_state(name)[1].clone()
            names = self.states_of(name)
            states = [engine.own_parameter_state(name, state)[1].clone() for state in names]
            if name in self._records and master.numel() > 0:  # others have no states yet
                self._call(self._modes[mode], [_Shard(name, 2, master, None, states)])
            for state, values in zip(("master", *names), (master, *states), strict=True):
                engine.set_own_parameter_state(name, state, values)
        if self._ended is None:
            self._call(self._modes[mode], [])
        self._records.update(self._next)
        self._next = {}
        self._flags = self._choices_of_groups()

    def _call(self, step: Callable[[torch.optim.Optimizer], Any], pieces: Sequence[Piece]) -> None:
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        if self._ended is not None:
            self._set_numbers(self._began)
        given: list[tuple[Piece, torch.nn.Parameter]] = []
        lists: list[list[torch.Tensor]] = [[] for _ in groups]
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for piece in pieces:
            p = torch.nn.Parameter(piece.master)
            p.grad = piece.gradient
            if piece.count > 1 or piece.parameter in self._records:  # of a dictionary, without its count
                state[p] = self._state_of(piece)
            elif self._initial:
                state[p] = _made(self._initial, piece.master)
            lists[self._groups[piece.parameter]].append(p)
            given.append((piece, p))
        held, held_state, before = [group["params"] for group in groups], optimizer.state, set(vars(optimizer))
        try:
            optimizer.state = state
            for group, some in zip(groups, lists, strict=True):
                group["params"] = some
            step(optimizer)
        finally:
            optimizer.state = held_state
            for group, all_of_it in zip(groups, held, strict=True):
                group["params"] = all_of_it
        self._attributes |= vars(optimizer).keys() - before
        if foreign := [key for key in state if not any(key is p for _, p in given)]:
            raise self._error(f"it keeps a state that is no parameter's: {str(foreign[0])[:60]}")
        for piece, p in given:
            self._take(piece, p, state.get(p, {}))
        ended = self._numbers()
        if self._ended is not None:
            self._keep_marks(ended[-1], self._ended[-1])
            if not _same(ended, self._ended):
                raise self._error("its groups got different numbers from different parameters")
        self._ended = ended
        for i, (was, now) in enumerate(zip(self._began, ended, strict=True)):
            self._counters.update((i, key) for key in now if key not in was or not _same(was[key], now[key]))

    def _keep_marks(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        """A mark that some parameters set in the object, such as that a warning was given, is set after all of them.

        Each update begins without it, so a rule that depends on it has other values than in a plain loop.
        """
        for key in now.keys() ^ before.keys():
            if now.get(key, before.get(key)) is True:
                now[key] = before[key] = vars(self._optimizer)[key] = True

    def _choices_of_groups(self) -> list[dict[str, Any]]:
        """What is no number in the groups: flags and texts."""
        groups = [_numbers_of(group) for group in self._optimizer.param_groups]
        return [{key: value for key, value in group.items() if isinstance(value, bool | str)} for group in groups]

    def end_step(self) -> None:
        """After the pieces of a step."""
        if self._ended is None:  # the numbers of groups change without parameters, too
            self.update([])
        self._records.update(self._next)
        self._next = {}
        self._flags = self._choices_of_groups()

    def _numbers(self) -> list[dict[str, Any]]:
        """Copies of the numbers in the groups, and last of the object's own attributes."""
        own = {name: value for name, value in vars(self._optimizer).items() if name in self._attributes}
        return [copy.deepcopy(_numbers_of(values)) for values in (*self._optimizer.param_groups, own)]

    def _set_numbers(self, numbers: list[dict[str, Any]]) -> None:
        """As they were; what the last call has added goes."""
        for values, now, then in zip(self._holders(), self._numbers(), numbers, strict=True):
            for key in now.keys() - then.keys():
                del values[key]
            _assign(values, then)

    def _holders(self) -> list[dict[str, Any]]:
        return [*self._optimizer.param_groups, vars(self._optimizer)]

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"[{self.name}.step] {what}, expected a rule for each element by itself")

    def _state_of(self, piece: Piece) -> dict[str, Any]:
        """The state of a piece that was updated before."""
        record = self._records.get(piece.parameter)
        if record is None:
            raise ConfigError(
                f"[{self.name}.step] got no state of {piece.parameter} for its update {piece.count}. Hint: of a "
                "checkpoint of another optimizer, load_checkpoint(weights_only=True) takes the weights."
            )
        state = copy.deepcopy(_numbers_of(record.values))
        for name, value in record.values.items():
            if name not in state:
                state[name] = value.to(piece.master.device) if isinstance(value, torch.Tensor) else value
        for name, values in zip(self.states_of(piece.parameter), piece.states, strict=True):
            dtype = record.dtypes.get(name)
            if dtype is not None:
                state[name] = values if dtype == torch.float32 else values.to(dtype)
        return state

    def _take(self, piece: Piece, p: torch.nn.Parameter, state: dict[str, Any]) -> None:
        """Keeps what step() left in the state of a piece."""
        if p.data_ptr() != piece.master.data_ptr():
            piece.master.copy_(p.detach())
        record = _Record(update=self._updates)
        slots = dict(zip(self.states_of(piece.parameter), piece.states, strict=True))
        places = {slot.data_ptr(): name for name, slot in slots.items()}
        for name, value in list(state.items()):  # step() may have exchanged states, or given one to two names
            if isinstance(value, torch.Tensor) and places.get(value.data_ptr(), name) != name:
                state[name] = value.clone()
        for name, value in state.items():
            if name not in slots or not isinstance(value, torch.Tensor):
                part = self._groups[piece.parameter] not in self._whole
                if part and isinstance(value, torch.Tensor) and value.shape == p.shape and value.numel() > 1:
                    raise self._error(f"it has begun a state {name} that it had not when it was tried")
                record.values[name] = value
                continue
            slot = slots[name]
            if value.numel() != slot.numel() or value.dtype not in _EXACT:
                raise self._error(
                    f"the state {name} of {piece.parameter} has {value.numel()} elements of {value.dtype} for "
                    f"{slot.numel()}"
                )
            record.dtypes[name] = value.dtype
            if value.data_ptr() != slot.data_ptr() or value.dtype != slot.dtype:
                slot.copy_(value.detach().reshape(slot.shape))
        before = self._next.setdefault(piece.parameter, record)
        if before is not record and not (before.dtypes == record.dtypes and _same(before.values, record.values)):
            raise self._error(f"two parts of {piece.parameter} have different states")

    # ---- checkpoints ----
    def kept(self) -> dict[str, Any]:
        """What this rank has of the optimizer besides the states per element: as text, numbers and tensors."""
        records: list[dict[str, Any]] = []
        parameters: dict[str, list[int]] = {}
        for name, record in self._records.items():
            dtypes = {key: str(dtype).removeprefix("torch.") for key, dtype in record.dtypes.items()}
            entry = {"dtypes": dtypes, "values": record.values}
            same = next((i for i, other in enumerate(records) if _same(entry, other)), len(records))
            if same == len(records):
                records.append(entry)
            parameters[name] = [same, record.update]
        return {"name": self.name, "updates": self._updates, "groups": self._numbers(), "records": records,
                "parameters": parameters}  # fmt: skip

    @staticmethod
    def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, _Record]:
        """Of what kept() gave on all ranks: the newest record of each parameter."""
        records: dict[str, _Record] = {}
        for part in parts:
            for name, (number, update) in part["parameters"].items():
                entry = part["records"][number]
                dtypes = {key: getattr(torch, dtype) for key, dtype in entry["dtypes"].items()}
                if name not in records or update > records[name].update:
                    records[name] = _Record(dtypes, copy.deepcopy(entry["values"]), update)
        return records

    def first_record(self, parameter: str, shape: Sequence[int]) -> _Record:
        """What torch.distributed.checkpoint sees of a parameter before its first update: the states after one with
        a rate of 0 and a gradient of zeros. ConfigError if the optimizer cannot do that."""
        group = self._optimizer.param_groups[self._groups[parameter]]
        numbers = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in numbers:
            numbers["lr"] = numbers["lr"] * 0
        p = torch.nn.Parameter(torch.zeros(tuple(shape)))
        p.grad = torch.zeros_like(p)
        try:
            with _undisturbed():
                made = self._copy([{**numbers, "params": [p]}])
                if callable(train := getattr(made, "train", None)):
                    train()
                self._step(made)
        except Exception as fault:
            raise ConfigError(
                f"[{self.name}] has no states of {parameter} before its first update: {type(fault).__name__}: {fault}. "
                "Hint: after a step()."
            ) from None
        record = _Record()
        for name, value in made.state.get(p, {}).items():
            if name in self.states_of(parameter) and isinstance(value, torch.Tensor):
                record.dtypes[name] = value.dtype
            else:
                record.values[name] = value
        return record

    def names_of_states(self, parameter: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Of one parameter; a rank has records of those that it updates."""
        record = self._records.get(parameter) or self.first_record(parameter, shape)
        return (*record.values, *record.dtypes)

    def take(self, numbers: Mapping[str, dict[str, Any]], dtypes: Mapping[str, Mapping[str, str]]) -> None:
        """Of a state dict, by parameter: the states that have no value per element, and the dtypes of the others."""
        for name, values in numbers.items():
            kinds = {key: getattr(torch, dtype.removeprefix("torch.")) for key, dtype in dtypes[name].items()}
            self._records[name] = _Record(kinds, copy.deepcopy(values), self._updates)
        self._flags = self._choices_of_groups()

    def counted(self, updates: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> dict[str, _Record]:
        """What take_counts() takes. ConfigError for an optimizer that has other numbers, too."""
        records = {}
        for name, count in updates.items():
            whole = self._groups[name] in self._whole
            shape = shapes[name] if whole else [min(n, 2) for n in shapes[name]]  # keys and dtypes are the same
            records[name] = record = self.first_record(name, shape)
            if others := sorted(record.values.keys() - {"step"}):
                raise ConfigError(
                    f"[{self.name}] files of other libraries have no {', '.join(others)} of {name}. Hint: "
                    "optimizer.load_state_dict() of a dictionary of torch."
                )
            step = record.values.get("step")
            if step is not None:
                tensor = isinstance(step, torch.Tensor)
                record.values["step"] = torch.full_like(step, count) if tensor else type(step)(count)
        return records

    def take_counts(self, updates: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> None:
        """The number of updates of each parameter, for states per element that other libraries' files had."""
        self._records = self.counted(updates, shapes)
        self._updates = max(updates.values(), default=0)
        self._flags = self._choices_of_groups()

    def restore(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """The same from a checkpoint, of all ranks that saved it. ConfigError for another optimizer's."""
        if not parts or parts[0]["name"] != self.name:
            found = f"those of {parts[0]['name']}" if parts else "none"
            raise ConfigError(
                f"[load_checkpoint] expected numbers of a {self.name} of the program, got {found}. Hint: the "
                "checkpoint was saved by another optimizer: load_checkpoint(weights_only=True) takes the weights alone."
            )
        groups = parts[0]["groups"]
        if len(groups) != len(self._optimizer.param_groups) + 1:
            raise ConfigError(
                f"[load_checkpoint] got an optimizer with {len(groups) - 1} groups, expected "
                f"{len(self._optimizer.param_groups)}"
            )
        self._records = self.merged(parts)
        self._updates = parts[0]["updates"]
        self._attributes |= groups[-1].keys()
        *found_in_groups, own = copy.deepcopy(groups)
        for values, numbers in zip(self._optimizer.param_groups, found_in_groups, strict=True):
            _assign(values, {key: value for key, value in numbers.items() if key != "lr"})
        _assign(vars(self._optimizer), own)
        self._flags = self._choices_of_groups()

    def forget(self) -> None:
        """The states and counters start again: what load_checkpoint(weights_only=True) leaves."""
        self._records = {}
        holders = self._holders()
        for i, key in self._counters:
            if key in self._first[i]:
                _assign(holders[i], {key: self._first[i][key]})
            else:
                holders[i].pop(key, None)
        self._flags = self._choices_of_groups()


# ---- the probe -------------------------------------------------------------------------------------------------------

_SHAPES: tuple[tuple[int, ...], ...] = ((64, 129), (37,), (5, 7), (8192,), (1,), (6, 3, 3, 2), (4, 5, 3), ())
_STEPS = 13
_SEED = 20231
_CLOSE = 1e-6
_MOST_TRIED = 1 << 16
"""Elements of a parameter that are tried."""
_FAILED = float("inf")


@dataclass
class _Group:
    """A group of the probe: the numbers of one of the optimizer's, and parameters of as many dimensions."""

    numbers: dict[str, Any]
    dimensions: frozenset[int]
    largest: frozenset[tuple[int, ...]] = frozenset()
    """Shapes of the program, the largest of each number of dimensions: a rule may look at sizes."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys([*(s for s in _SHAPES if len(s) in self.dimensions), *sorted(self.largest)]))


class _Trial:
    """An optimizer over the probe's parameters."""

    def __init__(self, make: Make, groups: Sequence[_Group]) -> None:
        self.make, self.groups = make, groups
        self.names = {f"{g}.{shape}": (g, shape) for g, group in enumerate(groups) for shape in group.shapes}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(_SEED)
        return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, (_, shape) in
                self.names.items()}  # fmt: skip

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        """Every third step has large ones."""
        generator = torch.Generator().manual_seed(_SEED + 1 + step)
        size = 20.0 if step % 3 == 2 else 1.0
        return {name: torch.randn(shape, generator=generator) * size for name, (_, shape) in self.names.items()}

    def over(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        members = [[p for name, p in parameters.items() if self.names[name][0] == g] for g in range(len(self.groups))]
        made = self.make([{**copy.deepcopy(group.numbers), "params": some} for group, some in
                          zip(self.groups, members, strict=True)])  # fmt: skip
        if callable(train := getattr(made, "train", None)):  # schedule-free ones refuse step() before
            train()
        return made

    def joint(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        """One optimizer of all parameters: their values after the last step, and their states."""
        parameters = self.parameters()
        optimizer = self.over(parameters)
        for step in range(_STEPS):
            for name, gradient in self.gradients(step).items():
                parameters[name].grad = gradient
            rule_of(type(optimizer).step)(optimizer)
        return (
            {name: p.detach() for name, p in parameters.items()},
            {name: dict(optimizer.state.get(p, {})) for name, p in parameters.items()},
        )

    def in_engine(self, states: Sequence[Sequence[str]], whole: Collection[int], cuts: int) -> dict[str, torch.Tensor]:
        """As an engine updates: one parameter after another, in parts or whole, with states that the engine holds."""
        masters = {name: p.detach() for name, p in self.parameters().items()}
        groups = {name: g for name, (g, _) in self.names.items()}
        held = {name: [torch.zeros_like(master) for _ in states[groups[name]]] for name, master in masters.items()}
        rule = ClientRule(self.over(self.parameters()), groups, states, whole)
        for step in range(_STEPS):
            gradients = self.gradients(step)
            rule.begin_step()
            for name, master in masters.items():
                if groups[name] in whole:
                    rule.update([_Shard(name, step + 1, master, gradients[name], held[name])])
                    continue
                cut = (master.numel() // 3) // cuts * cuts
                ends = sorted({0, cut, min(master.numel(), cut + 5 * cuts), master.numel()})
                flat, gradient, slots = master.view(-1), gradients[name].view(-1), [s.view(-1) for s in held[name]]
                fakes = [_Shard(name, step + 1, flat[a:b], gradient[a:b].clone(), [s[a:b] for s in slots])
                         for a, b in zip(ends, ends[1:], strict=False)]  # fmt: skip
                rule.update(fakes[:2])
                if len(fakes) > 2:
                    rule.update(fakes[2:])
            rule.update([])  # a rank may have no elements of a group, or of the model
            rule.end_step()
        return masters

    def difference(self, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], group: int = -1) -> float:
        """0 for equal bits. group: of this one only."""
        names = [name for name in a if group in (-1, self.names[name][0])]
        if all(torch.equal(a[name], b[name]) for name in names):
            return 0.0
        start = self.parameters()
        moved = max(float((a[name] - start[name]).abs().max()) for name in names) or 1.0
        found = max(float((a[name] - b[name]).abs().max()) for name in names) / moved or 1e-30
        return found if math.isfinite(found) else _FAILED


def _holds_parameters(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.optim.Optimizer | torch.nn.Module):
        return True
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if depth > 0 and isinstance(value, Mapping):
        return any(_holds_parameters(each, depth - 1) for each in value.values())
    if depth > 0 and isinstance(value, list | tuple | set):
        return any(_holds_parameters(each, depth - 1) for each in value)
    return False


def _copied(optimizer: torch.optim.Optimizer) -> Make:
    """Makes optimizers of the same class with the same attributes over other groups. ConfigError if that cannot be."""
    left_out = ("param_groups", "state", "step")
    attributes = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    if held := sorted(name for name, value in attributes.items() if _holds_parameters(value)):
        raise ConfigError(f"it keeps parameters or another optimizer in {', '.join(held)}, which the engine cannot cut")

    initial, kind = _initial_state(optimizer), type(optimizer)  # which an engine changes

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = object.__new__(kind)
        made.__dict__.update(copy.deepcopy(attributes))
        made.param_groups, made.state = groups, defaultdict(dict)
        if initial:
            for group in groups:
                made.state.update({p: _made(initial, p.detach()) for p in group["params"]})
        return made

    return make


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The program's random numbers stay as they are."""
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        random.setstate(before)


def probe(optimizer: torch.optim.Optimizer, policy: str = "auto") -> Properties:
    """[local] Runs a copy of the optimizer on small parameters, and says how an engine can shard its updates.

    The copy has its class, attributes and groups' numbers. The optimizer, its parameters and the random numbers of the
    program stay as they are. policy: "elements" or "whole": how far updates in that way are from step()'s.
    """
    if policy not in ("auto", "elements", "whole"):
        raise ConfigError(f"[probe] policy: got {policy!r}, expected auto, elements or whole")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return Properties("refused", reason="step() needs a closure, but the engine runs backward()")
    kinds: list[_Group] = []  # equal groups are tried once
    kind_of: list[int] = []
    for group in optimizer.param_groups:
        numbers = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        dimensions = frozenset(min(p.dim(), 4) for p in group["params"]) or frozenset((1, 2))
        made = _Group(numbers, dimensions, _largest(group["params"]))
        found = (k for k, kind in enumerate(kinds) if (kind.dimensions, kind.largest) == (dimensions, made.largest)
                 and _same(kind.numbers, numbers))  # fmt: skip
        kind_of.append(next(found, len(kinds)))
        if kind_of[-1] == len(kinds):
            kinds.append(made)
    try:
        make = _copied(optimizer)
    except ConfigError as fault:
        return Properties("refused", reason=str(fault))
    with _undisturbed():
        try:
            properties = _probed(_Trial(make, kinds), policy)
        except Exception as fault:  # of a class that does what nobody expects
            return Properties("refused", reason=f"it cannot be tried: {type(fault).__name__}: {fault}")
    if not properties.groups:
        return properties
    return replace(
        properties,
        groups=tuple(properties.groups[k] for k in kind_of),
        states_of_groups=tuple(properties.states_of_groups[k] for k in kind_of),
    )


def _largest(parameters: Sequence[torch.Tensor]) -> frozenset[tuple[int, ...]]:
    """Of each number of dimensions; not above what can be tried in a moment."""
    shapes: dict[int, tuple[int, ...]] = {}
    for p in parameters:
        shape = tuple(p.shape)
        if math.prod(shape) <= _MOST_TRIED and math.prod(shape) > math.prod(shapes.get(len(shape), (0,))):
            shapes[len(shape)] = shape
    return frozenset(shapes.values())


def _probed(trial: _Trial, policy: str) -> Properties:
    try:
        _seed(1)
        values, states = trial.joint()
    except Exception as fault:
        return Properties("refused", reason=f"step() failed: {type(fault).__name__}: {fault}")
    _seed(2)
    if trial.difference(values, trial.joint()[0]) != 0:
        return Properties("refused", reason="its updates are drawn at random, or differ each time")
    elements, numbers = _divided(states, {name: shape for name, (_, shape) in trial.names.items()})
    for name in elements:
        dtypes = {state[name].dtype for state in states.values() if state.get(name) is not None}
        if wide := dtypes - set(_EXACT):
            return Properties("refused", reason=f"its state {name} is {wide.pop()}; the engine's are fp32")
    if len(elements) > MOST_STATES:
        return Properties("refused", reason=f"it has {len(elements)} states per element, expected up to {MOST_STATES}")

    of_groups = tuple(
        tuple(name for name in elements if any(name in states[p] for p, (of, _) in trial.names.items() if of == g))
        for g in range(len(trial.groups))
    )

    def compared(whole: Collection[int], group: int = -1) -> tuple[float, str]:
        """The difference, the larger one of two ways to cut, and what failed."""
        largest = 0.0
        for cuts in (16, 1):
            try:
                largest = max(largest, trial.difference(values, trial.in_engine(of_groups, whole, cuts), group))
            except Exception as fault:
                return _FAILED, f"step() of parts of parameters failed: {type(fault).__name__}: {fault}"
            if largest > _CLOSE:
                break
        return largest, f"updates of parts of a parameter differ by {largest:.0e}"

    count = len(trial.groups)
    if policy != "auto":
        difference, reason = compared(range(count) if policy == "whole" else ())
        if difference == _FAILED:
            return Properties("refused", reason=f"updates of {policy} are not possible: {reason}")
        by = f"updates differ by {difference:.0e} of their size" if difference > _CLOSE else ""
        return Properties(policy, (policy,) * count, difference == 0, elements, of_groups, numbers, difference, by)
    difference, reason = compared(())
    if difference <= _CLOSE:
        return Properties("elements", ("elements",) * count, difference == 0, elements, of_groups, numbers, difference)
    every = range(count)
    whole = [g for g in every if compared([h for h in every if h != g], g)[0] > _CLOSE]
    together, failed = compared(whole)
    if together > _CLOSE:
        by = f"the update of one needs the others (a difference of {together:.0e})"
        apart = failed if together == _FAILED else by
        return Properties("coupled", (), False, elements, (), numbers, together, f"it couples parameters: {apart}")
    groups = tuple("whole" if g in whole else "elements" for g in every)
    return Properties("whole", groups, together == 0, elements, of_groups, numbers, together, reason)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def _divided(
    states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the states that have a value per element, and of the others."""
    names = list(dict.fromkeys(key for state in states.values() for key in state))

    def per_element(key: str) -> bool:
        found = [(state[key], torch.Size(shapes[name])) for name, state in states.items()
                 if state.get(key) is not None]  # fmt: skip
        tensors = all(isinstance(value, torch.Tensor) and value.shape == shape for value, shape in found)
        return tensors and any(shape.numel() > 1 for _, shape in found)

    elements = tuple(name for name in names if per_element(name))
    return elements, tuple(name for name in names if name not in elements)
