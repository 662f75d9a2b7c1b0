"""Whole states of an engine's model and optimizer as torch's state dicts have them.

The functions of torch.distributed.checkpoint.state_dict call state_dict() and load_state_dict() of the model and of the
optimizer. All ranks call them, and want whole values. Other callers, such as frameworks at each of their saves, may be
one rank alone: for them these methods stay local. So the methods look for torch's function among their callers.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
import sys
import tempfile
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from libzero import _native
from libzero._carried import decoded, encoded
from libzero._model import exact_pattern
from libzero.errors import ConfigError

if TYPE_CHECKING:
    from libzero.engine import Engine
    from libzero.optimizer import Optimizer, ProgramOptimizer

_CALLER = "torch.distributed.checkpoint.state_dict"


def wanted() -> tuple[bool, bool] | None:
    """[local] None unless torch.distributed.checkpoint.state_dict is among the callers.

    Else how it wants the values: on every rank (else on rank 0), and in host memory.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CALLER:
            info = frame.f_locals.get("info")
            host = bool(getattr(info, "cpu_offload", False))
            first = host and bool(getattr(info, "full_state_dict", False)) and torch.distributed.is_initialized()
            return not first, host
        frame = frame.f_back  # type: ignore[assignment]
    return None


def refuse_copy(*_: object) -> NoReturn:
    """ConfigError for an attempt to copy or pickle a parameter, or a model, of an engine."""
    raise ConfigError(
        "[Engine] cannot copy or pickle a parameter: it belongs to an engine. Hint: engine.unsharded_copy(), "
        "engine.state_dict(), engine.full_state_dict(), or model.state_dict() inside engine.gathered_parameters()."
    )


def _refuse_divided(engine: Engine) -> None:
    if engine._divided:
        raise ConfigError(
            "[state_dict] cannot give or take whole states: experts are divided over the ranks. Hint: "
            "engine.save_checkpoint(dir, tag), or engine.full_state_dict() for the weights."
        )


# ---- the model -------------------------------------------------------------------------------------------------------


def whole_values(engine: Engine, *, everywhere: bool, host: bool) -> dict[str, torch.Tensor]:
    """[collective] Masters in fp32, and frozen parameters in their dtype. Not everywhere: on rank 0, else empty."""
    masters = engine.full_state_dict()
    found = {}
    for name, p in engine._original.named_parameters():
        whole = masters.pop(name) if engine.comm.rank == 0 else torch.empty(engine._sizes[name])
        value = whole if name in engine._groups.trained else whole.to(p.dtype)
        if everywhere and value.numel() > 0 and engine.comm.size > 1:
            value = value.to(p.device)
            engine.comm.broadcast(value.view(-1), 0).wait()
        if everywhere or engine.comm.rank == 0:
            found[name] = value.to("cpu" if host else p.device)
    return found


class _Hook:
    """Of a module, which is not copied or pickled with it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *words: Any, **named: Any) -> None:
        self._call(*words, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


class ModelHooks:
    """Makes state_dict() and load_state_dict() of an engine's model right under torch.distributed.checkpoint, and its
    zero_grad() that of the program's optimizer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._model = weakref.ref(engine._original)
        self._taken: set[str] = set()
        self._handles: list[Any] = []
        self.add()

    def add(self) -> None:
        """[local] Registers them."""
        model: Any = self._model()
        engine = self._engine()
        if engine is not None and engine._takes_torchs_loop and "zero_grad" not in model.__dict__:
            model.__dict__["zero_grad"] = _Hook(self._zero_grad)
        self._handles = [
            model._register_state_dict_hook(_Hook(self._after_save)),
            model._register_load_state_dict_pre_hook(_Hook(self._before_load)),
            model.register_load_state_dict_post_hook(_Hook(self._after_load)),
        ]

    def remove(self) -> None:
        """[local] Before the module is copied, and at the end."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        model = self._model()
        if model is not None and isinstance(model.__dict__.get("zero_grad"), _Hook):
            del model.__dict__["zero_grad"]

    def _zero_grad(self, *words: Any, **named: Any) -> None:
        engine, model = self._engine(), self._model()
        if engine is not None and not engine.closed:
            engine._native.discard_gradients()
        if model is not None:
            type(model).zero_grad(model, *words, **named)

    def _keys(self, engine: Engine, prefix: str) -> Iterator[tuple[str, str]]:
        """Keys of torch's dictionary and names of the engine's parameters; tied ones have several keys."""
        for name, p in engine._original.named_parameters(remove_duplicate=False):
            if id(p) in engine._names:
                yield prefix + name, engine._names[id(p)]

    def _after_save(self, _: torch.nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        engine, how = self._engine(), wanted()
        if engine is None or engine.closed or how is None:
            return
        _refuse_divided(engine)
        everywhere, host = how
        values = whole_values(engine, everywhere=everywhere, host=host)
        for key, name in self._keys(engine, prefix):
            if key in state and name in values:
                state[key] = values[name]

    def _before_load(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        errors: list[str] = others[-1]
        engine = self._engine()
        if engine is None or engine.closed or wanted() is None:
            return
        _refuse_divided(engine)
        values: dict[str, torch.Tensor] = {}
        for key, name in self._keys(engine, prefix):
            if key not in state:
                continue
            value = state.pop(key)
            self._taken.add(key)
            if not isinstance(value, torch.Tensor) or value.shape != engine._sizes[name]:
                got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                errors.append(f"size mismatch for {key}: got {got}, expected {tuple(engine._sizes[name])}.")
            values[name] = value
        if not errors:
            for name, value in values.items():
                engine.set_parameter_state(name, "master", value)

    def _after_load(self, _: torch.nn.Module, found: Any) -> None:
        found.missing_keys[:] = [key for key in found.missing_keys if key not in self._taken]
        self._taken = set()


# ---- the optimizer ---------------------------------------------------------------------------------------------------

_UNCOUNTED = ("SGD", "Lion")
"""Rules whose states in torch have no number of updates."""
_HOW = ("foreach", "capturable", "fused", "set_grad_none", "params", "param_names")
"""Keys of a group that say how a rule is computed, not what."""


class HeldStates(dict[Any, Any]):
    """`optimizer.state` of an engine's optimizer: for each parameter the names of its states, which the engine has.

    Never empty, since torch.distributed.checkpoint would call step() for an optimizer without states.
    """

    def __init__(self, names: Callable[[Any], Sequence[str]], first: Mapping[Any, Any]) -> None:
        super().__init__(first)
        self._names = names

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, parameter: Any) -> Mapping[str, Any]:
        return _Elsewhere(self._names(parameter))


class _Elsewhere(Mapping[str, Any]):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __getitem__(self, key: str) -> NoReturn:
        if key not in self._names:
            raise KeyError(key)
        raise ConfigError(
            f"[optimizer.state] got {key!r} of a parameter, whose values are divided over the ranks. Hint: "
            "engine.parameter_state(parameter, key), engine.full_optimizer_state_dict()."
        )


def _kind(engine: Engine) -> str:
    kind: str = json.loads(engine.options.effective().get("optimizer.type") or "null") or ""
    return kind


def _per_element(engine: Engine, name: str) -> tuple[str, ...]:
    """[local] Names of a parameter's states that have a value per element."""
    return tuple(engine._native.state_names(name))


def _is_counted(engine: Engine, states: Sequence[str]) -> bool:
    """Whether torch's class of the built-in rule counts the updates of a parameter with these states."""
    kind = _kind(engine)
    return bool(states) and kind not in _UNCOUNTED and not (kind == "Muon" and "momentum_buffer" in states)


def names_of_states(engine: Engine, parameter: torch.Tensor) -> tuple[str, ...]:
    """[local] Of one parameter, numbers too, under torch's names; none if it is frozen."""
    name = engine._names.get(id(parameter))
    if name is None or name not in engine._groups.trained:
        return ()
    if engine._rule is not None:
        return engine._rule.names_of_states(name, engine._sizes[name])
    states = _per_element(engine, name)
    if not _is_counted(engine, states):
        return states
    return ("step", *states, "mu_product") if _kind(engine) == "NAdam" else ("step", *states)


class _Shards:
    """Gathers states of parameters, each element sent once: engine.parameter_state() gathers a parameter's whole unit.

    [collective]
    """

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        engine.flush()
        self._engine = engine
        own = {name: engine.own_parameter_state(name) for name in names}
        mine = {name: (begin, values.numel()) for name, (begin, values) in own.items()}
        cut = engine._cut_parameters()  # by tensor parallelism: shards are of a rank's part
        mine.update(dict.fromkeys(mine.keys() & cut.keys(), (0, -1)))
        told = [json.loads(part) for part in engine.comm.all_gather_bytes(json.dumps(mine).encode())]
        self._parts = {name: _covering([each[name] for each in told], math.prod(engine._sizes[name])) for name in names}

    def whole(self, name: str, state: str, device: torch.device) -> torch.Tensor:
        """On every rank, fp32, on the device of the engine's parameters."""
        engine, parts = self._engine, self._parts[name]
        if parts is None:
            return engine.parameter_state(name, state)
        begin, own = engine.own_parameter_state(name, state)
        whole = torch.empty(math.prod(engine._sizes[name]), dtype=torch.float32, device=device)
        for rank, first, last in parts:
            if rank == engine.comm.rank:
                whole[first:last] = own[first - begin : last - begin].to(device)
            if engine.comm.size > 1:
                engine.comm.broadcast(whole[first:last], rank).wait()
        return whole.view(engine._sizes[name])


def _covering(shards: Sequence[Sequence[int]], numel: int) -> list[tuple[int, int, int]] | None:
    """Ranks and the elements [first, last) that are taken of theirs; None if they are not all of the parameter."""
    parts, end = [], 0
    if any(count < 0 for _, count in shards):
        return None
    while end < numel:
        last, rank = max((begin + count, -rank) for rank, (begin, count) in enumerate(shards) if begin <= end)
        if last <= end:
            return None
        parts.append((-rank, end, last))
        end = last
    return parts


def _mu_product(group: Mapping[str, Any], updates: int) -> float:
    """NAdam's, as torch multiplies it."""
    beta, decay = group["betas"][0], group["momentum_decay"]
    product = 1.0
    for step in range(1, updates + 1):
        product *= beta * (1.0 - 0.5 * 0.96 ** (step * decay))
    return product


def _members(engine: Engine, optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """[local] Names of the parameters with states, and their groups, in the order of the groups."""
    trained = engine._groups.trained
    return [
        (engine._names[id(p)], group)
        for group in optimizer.param_groups
        for p in group["params"]
        if engine._names[id(p)] in trained
    ]


def states_by_name(
    engine: Engine, optimizer: torch.optim.Optimizer, *, everywhere: bool, host: bool
) -> dict[str, dict[str, Any]]:
    """[collective] Whole states of each trained parameter. Not everywhere: on rank 0, else empty.

    Those of 16 and 8 bits of a built-in rule in fp32.
    """
    _refuse_divided(engine)
    rule, kind = engine._rule, _kind(engine)
    here = everywhere or engine.comm.rank == 0
    numbers: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    members = _members(engine, optimizer)
    per_element = {name: _per_element(engine, name) for name, _ in members}
    if rule is not None:
        records = rule.merged([decoded(part) for part in engine._all_rules()])
        for name, _ in members:
            record = records.get(name) or rule.first_record(name, engine._sizes[name])
            numbers[name], dtypes[name] = copy.deepcopy(record.values), record.dtypes
    elif counted := [(name, group) for name, group in members if _is_counted(engine, per_element[name])]:
        engine._groups.require_equal_counts()
        for name, group in counted:
            numbers[name] = {"step": torch.tensor(float(engine._updates()))}
            if kind == "NAdam":
                numbers[name]["mu_product"] = torch.tensor(_mu_product(group, engine._updates()))
    found: dict[str, dict[str, Any]] = {}
    device = {name: p.device for name, p in engine._original.named_parameters()}
    shards = _Shards(engine, [name for name, _ in members])
    for name, _ in members:
        state = numbers.get(name, {})
        for key in per_element[name]:
            if rule is not None and key not in dtypes[name]:
                continue
            value = shards.whole(name, key, device[name])
            if here:
                dtype = dtypes[name][key] if rule is not None else value.dtype
                state[key] = value.to("cpu" if host else value.device, dtype)
        if here and state:
            found[name] = state
    return found


def groups_of(optimizer: torch.optim.Optimizer, number: Callable[[torch.Tensor], Any]) -> list[dict[str, Any]]:
    """[local] Copies of the groups, with number(p) in place of a parameter."""
    groups = [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
              for group in optimizer.param_groups]  # fmt: skip
    for made, group in zip(groups, optimizer.param_groups, strict=True):
        made["params"] = [number(p) for p in group["params"]]
    return groups


def state_dict_for_torch(
    engine: Engine, optimizer: torch.optim.Optimizer, how: tuple[bool, bool]
) -> dict[str, Any]:
    """[collective] In the form of torch's optimizers, with numbers in place of parameters. how: see wanted()."""
    states = states_by_name(engine, optimizer, everywhere=how[0], host=how[1])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number = {id(p): i for i, p in enumerate(parameters)}
    state = {number[id(p)]: states[engine._names[id(p)]] for p in parameters if engine._names[id(p)] in states}
    return {"state": state, "param_groups": groups_of(optimizer, lambda p: number[id(p)])}


# ---- loading ---------------------------------------------------------------------------------------------------------


def _refuse(what: str) -> NoReturn:
    raise ConfigError(f"[load_state_dict] {what}")


def _ours(engine: Engine, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """[local] The states by the engine's names. As in torch, parameters are those at the same place of the groups."""
    groups, held = given["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in each] for each in (groups, held)]
    if sizes[0] != sizes[1]:
        _refuse(f"got groups of {sizes[0]} parameters, expected {sizes[1]}")
    names = {key: engine._names[id(p)] for stored, group in zip(groups, held, strict=True)
             for key, p in zip(stored["params"], group["params"], strict=True)}  # fmt: skip
    if unknown := [key for key in given["state"] if key not in names]:
        _refuse(f"got states of {', '.join(map(str, unknown[:3]))}, which are in no group of the dictionary")
    return {names[key]: dict(state) for key, state in given["state"].items() if state}


def _checked(engine: Engine, states: dict[str, dict[str, Any]]) -> int | None:
    """[local] The number of updates that the states say. ConfigError for what does not fit.

    Of a built-in rule it leaves the states that have a value per element.
    """
    trained, rule = engine._groups.trained, engine._rule
    if frozen := [name for name in states if name not in trained]:
        _refuse(f"got states of {', '.join(frozen[:3])}, which the engine does not train. Hint: requires_grad_(True)")
    counts: dict[int, str] = {}
    for name, state in states.items():
        per_element = _per_element(engine, name)
        for key, value in list(state.items()):
            whole = isinstance(value, torch.Tensor) and value.shape == engine._sizes[name]
            if key in per_element:
                if value is None:
                    del state[key]
                elif not whole:
                    got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                    _refuse(f"{key} of {name}: got {got}, expected a tensor of shape {tuple(engine._sizes[name])}")
                continue
            if key == "step":
                counts.setdefault(int(value), name)
            if rule is None:
                if key not in ("step", "mu_product") and value is not None:
                    _refuse(
                        f"got a state {key} of {name}, expected {', '.join(('step', *per_element))}. Hint: the "
                        "dictionary is of another optimizer, or of one with other flags"
                    )
                del state[key]
        if rule is None and (missing := [key for key in per_element if key not in state]):
            _refuse(f"got no {', '.join(missing)} of {name}, expected {', '.join(per_element)}")
    if rule is None and len(counts) > 1:
        (a, one), (b, other) = list(counts.items())[:2]
        _refuse(
            f"got {a} updates of {one} and {b} of {other}: parameters were frozen for some of them, and counts of "
            "each are in checkpoints alone. Hint: engine.load_checkpoint(dir)"
        )
    return max(counts, default=None)


def _set_count(engine: Engine, names: Sequence[str], updates: int) -> None:
    """[collective] The number of updates so far, which the engine takes from files: one value of one parameter, and it.

    Each host writes one of its own.
    """
    name = min(names, key=lambda each: (math.prod(engine._sizes[each]), each))
    value = engine.parameter_state(name).cpu()
    chosen = str(Path(tempfile.gettempdir()) / f"libzero-count-{uuid.uuid4().hex}")
    folder = Path(engine.comm.all_gather_bytes(chosen.encode())[0].decode())
    writes = engine.comm.local_rank == 0
    try:
        if writes:
            from torch.distributed.checkpoint.state_dict_saver import save

            count = {"state": {name: {"step": torch.tensor(float(updates))}}}
            with warnings.catch_warnings():  # that there is one process
                warnings.simplefilter("ignore")
                save({"model": {name: value}, "optim": count}, checkpoint_id=str(folder), no_dist=True)
        engine.comm.barrier()
        options = _native.ImportOptions()
        options.only = options.partial = [exact_pattern(name)]
        options.optimizer = True
        engine._native.import_weights(str(folder), options)
        engine.comm.barrier()
    finally:
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
    engine._groups.forget_counts()


def _same(a: Any, b: Any) -> bool:
    a, b = (each.tolist() if isinstance(each, torch.Tensor) else each for each in (a, b))
    return bool((list(a) if isinstance(a, tuple) else a) == (list(b) if isinstance(b, tuple) else b))


def _take_groups(optimizer: Optimizer | ProgramOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """[local] As in torch the groups get the dictionary's numbers. ConfigError for other flags, which change a rule."""
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for i, (group, stored) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in stored.items():
            if key in _HOW or (key == "lr" and optimizer._scheduled) or (key in group and _same(group[key], value)):
                continue
            now = group.get(key)
            if key in group and any(isinstance(each, bool | str | type(None)) for each in (now, value)):
                _refuse(f"param_groups[{i}][{key!r}] got {value!r}, expected {now!r}: it makes another rule")
            changes.append((group, key, tuple(value) if isinstance(now, tuple) else value))
    for group, key, value in changes:
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(float(value))
        else:
            group[key] = copy.deepcopy(value)


def load(
    engine: Engine, optimizer: Optimizer | ProgramOptimizer, given: Mapping[str, Any], *, complete: bool = False
) -> None:
    """[collective] Takes rank 0's dictionary, in torch's form with numbers or names in place of parameters.

    Parameters without states in it keep theirs; complete: ConfigError.
    """
    _refuse_divided(engine)
    mine: dict[str, str] = {}
    states: dict[str, dict[str, Any]] = {}
    rule = engine._rule
    if engine.comm.rank == 0:
        try:
            states = _ours(engine, optimizer, given)
            updates = _checked(engine, states)
            lacking = [name for name, _ in _members(engine, optimizer) if name not in states]
            if complete and lacking and names_of_states(engine, dict(engine._original.named_parameters())[lacking[0]]):
                _refuse(f"got no states of {', '.join(lacking[:3])}{' and more' if lacking[3:] else ''}")
            dtypes = {name: {key: str(value.dtype) for key, value in state.items() if key in _per_element(engine, name)}
                      for name, state in states.items()}  # fmt: skip
            numbers = {name: {key: value for key, value in state.items() if key not in _per_element(engine, name)}
                       for name, state in states.items()}  # fmt: skip
            groups = [{key: value for key, value in group.items() if key != "params"} for group in
                      given["param_groups"]]  # fmt: skip
            plan = {"updates": updates, "dtypes": dtypes, "numbers": numbers, "groups": groups}
            mine["plan"] = encoded(plan, "the state dict of an optimizer")
        except (ConfigError, TypeError, KeyError) as fault:  # told to all ranks, which would wait for this one
            mine["fault"] = f"[load_state_dict] got no {fault}" if isinstance(fault, KeyError) else str(fault)
    told = json.loads(engine.comm.all_gather_bytes(json.dumps(mine).encode())[0])
    if "fault" in told:
        raise ConfigError(told["fault"])
    plan = decoded(told["plan"])
    _take_groups(optimizer, plan["groups"])
    updates = plan["updates"]
    if updates is None and any(plan["dtypes"].values()):
        if optimizer._scheduled and engine.comm.rank == 0:
            text = "load_state_dict: the states say no number of updates; the schedule continues from %d"
            logging.getLogger("libzero").warning(text, engine._updates())
        updates = max(1, engine._updates())
    if updates is not None and (updates != engine._updates() or not engine._groups.counts_are_equal):
        _set_count(engine, [name for name, _ in _members(engine, optimizer)], updates)
    for name, keys in plan["dtypes"].items():
        for key in keys:
            value = states[name][key] if engine.comm.rank == 0 else torch.empty(engine._sizes[name])
            engine.set_parameter_state(name, key, value.float())
    if rule is not None:
        rule.take(plan["numbers"], plan["dtypes"])
    optimizer._has_states = True
    optimizer._pull_unless_set()
