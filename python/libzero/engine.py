"""One engine for all ZeRO stages; see the package's documentation for the loop."""

from __future__ import annotations

import atexit
import copy
import json
import logging
import math
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch.utils._pytree import tree_map

from libzero import _native
from libzero._model import compiled_from, exact_pattern
from libzero._carried import Carried, decoded, encoded, extra_states, modules_with_extra_state
from libzero._divided import hand_over
from libzero._native import Options
from libzero.config import Config, as_options
from libzero._updates import Updates, client_updates
from libzero._whole import ModelHooks, groups_of, load, refuse_copy, states_by_name
from libzero.communicator import Communicator, default_communicator
from libzero.errors import ConfigError
from libzero.memory import Memory
from libzero.mesh import Mesh
from libzero.moe import MoE
from libzero.muon import tables_of
from libzero.optimizer import Optimizer, ProgramOptimizer, same_object
from libzero.optimizers import ClientRule, Make

__all__ = ["Engine", "ExportReport", "ImportReport", "StepResult", "TraceSummary", "build"]

Selection: TypeAlias = str | torch.nn.Module | torch.nn.Parameter
M = TypeVar("M", bound=torch.nn.Module)

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


@dataclass(frozen=True)
class StepResult:
    """The result of one step() call."""

    updated: bool
    """False between accumulation boundaries, and on overflow."""
    overflow: bool
    """A gradient was not finite on some rank, so the update was skipped."""
    grad_norm: float
    """Global L2 norm before clipping, without the loss scale; -1 when not finite."""
    loss_scale: float
    """The loss scale of the next backward()."""
    lr: float
    """The learning rate of this step (first group)."""
    global_step: int
    """Number of attempted steps, including this one."""


@dataclass(frozen=True)
class TraceSummary:
    """Medians over the traced steps of this rank, in seconds; see docs/trace.md."""

    steps: int
    step_s: float
    compute_s: float
    gather_wait_s: float
    reduce_wait_s: float
    optimizer_s: float
    communication_s: float
    hidden: float
    file: str
    joined: bool


@dataclass(frozen=True)
class ExportReport:
    """What export_weights() wrote."""

    files: list[str]
    """Names in the folder; of "pt" the path."""
    tensors: int
    bytes: int
    remarks: list[str]
    """What was left out or changed, a line each."""


@dataclass(frozen=True)
class ImportReport:
    """What import_weights() read: names of the model's tensors, except `unexpected`."""

    taken: list[str]
    converted: list[str]
    """Of these, those stored in another dtype: "name: F64, largest change 5e-8"."""
    tied: list[str]
    """Filled from the tensor that they are tied to in the file."""
    missing: list[str]
    """Left as they were."""
    unexpected: list[str]
    """Of the file: tensors that repeat one that is taken."""
    bytes_read: int
    """By this rank."""


def build(make: Callable[[], M], config: Config | None = None, device: torch.device | str | None = None) -> M:
    """[local] Runs make() with unallocated parameters and returns its module; an Engine initialises it unit by unit.

    The values are those of an eager build with the same torch.manual_seed. The module cannot run before it is passed to
    an Engine. config: only checked, so that errors are reported before the model is built. device: where the Engine
    puts the model, as model.to(device) would; make() creates its tensors on the CPU.
    """
    if config is not None:
        as_options(config)
    made: M = _native.build(make, None if device is None else torch.device(device))
    return made


def _with_tables(
    options: _native.Options, config: Config, settings: dict[str, Any], model: torch.nn.Module
) -> _native.Options:
    """Options of Muon know which matrices are the weights of embeddings, which the native engine cannot see."""
    effective = options.effective()
    if effective.get("optimizer.type") != '"Muon"' or not (tables := tables_of(model)):
        return options
    named = json.loads(effective["optimizer.params.adam_parameters"])
    key = "optimizer.params.adam_parameters"
    return as_options(config, {**settings, key: [*named, *map(exact_pattern, tables)]})


def _copied(p: torch.nn.Parameter) -> torch.nn.Parameter:
    """[local] One that belongs to no engine."""
    made = torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    return made


def engine_of(parameter: torch.Tensor) -> Engine | None:
    """[local] The open engine that holds a parameter."""
    return next((each for each in list(_live) if id(parameter) in each._names and not each.closed), None)


def copied_state(
    module: torch.nn.Module, device: str | None = None, copies: dict[int, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """[local] Copies of its state dict's values, tensors on `device` or where they are. Tied parameters stay tied.

    copies: taken instead of copies of the tensors with these ids.
    """
    copies = dict(copies or {})

    def copied(value: Any) -> Any:  # also of a module's extra state, which may be anything
        return value.detach().to(device=device, copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for value in state.values():
        if id(value) not in copies:
            copies[id(value)] = tree_map(copied, value)
    return {name: copies[id(value)] for name, value in state.items()}


def _sizes_of(model: torch.nn.Module) -> dict[str, torch.Size]:
    # What is not a module, or has no shape yet, is an error of the engine.
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    return {name: p.shape for name, p in named if not torch.nn.parameter.is_lazy(p)}


def _divided_experts(model: torch.nn.Module) -> set[str]:
    """[local] The parameters of experts that this rank or another one has."""
    names: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, MoE) and module.ep_size > 1:
            prefix = f"{path}.experts" if path else "experts"
            names.update(name for name, _ in module.experts.named_parameters(prefix))
    return names


def _patterns(partial: str | Sequence[str]) -> list[str]:
    return [partial] if isinstance(partial, str) else list(partial)


class Engine:
    """Trains an ordinary torch.nn.Module with states sharded over the ranks as the configuration's stage requires.

    [collective] The engine takes over the parameters (floating-point, on one device, any shapes): it casts them to the
    configuration's dtype, but for those that libzero.keep_fp32 names, broadcasts rank 0's values, and shards them. The
    module is used as before; its `.grad` belongs to the engine from backward() to step(). A model has one engine at a
    time: close() the first.

    model: on its device and with its values loaded.
    config: a path, a dict, JSON text or Options, with DeepSpeed's keys.
    comm: default_communicator() if not given.
    mesh: Mesh.of(config, comm), where the program uses it before; instead of comm.
    units: modules that are unsharded as one unit: module classes (all their instances) or names of modules. Default:
        the entries of the outermost ModuleList and Sequential.
    optimizer: any optimizer of the program over model.parameters() (docs/optimizers.md), or a function that makes it of
        the trained parameters; in place of the configuration's. Its groups, and schedulers of torch over it, drive the
        updates. It must not have stepped. Its own step() and zero_grad(), and loss.backward(), are then the engine's,
        so that a loop of torch runs as it is:

            loss = model(x)
            loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        With gradient_accumulation_steps 1 several backward() before a step() add up. gradient_clipping is 0 unless the
        configuration sets it.
    optimizer_policy: "elements" or "whole": how the program's optimizer is sharded, instead of what a trial finds; also
        for one that couples parameters, whose updates are then others than in a plain loop. The log says it.
    rule: what libzero.deepspeed has made of a program's optimizer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        *,
        comm: Communicator | None = None,
        mesh: Mesh | None = None,
        units: Iterable[str | type[torch.nn.Module]] | None = None,
        optimizer: torch.optim.Optimizer | Make | None = None,
        optimizer_policy: str = "auto",
        rule: ClientRule | None = None,
    ) -> None:
        # Names are those of the module that torch.compile wrapped, so that checkpoints do not depend on it.
        self._original: torch.nn.Module = compiled_from(model)
        if isinstance(model, torch.nn.Module):
            hand_over(self._original)
        settings: dict[str, Any] = {} if units is None else {"libzero.units": _unit_names(self._original, units)}
        updates: Updates | None = None
        if optimizer is None and optimizer_policy != "auto":
            got = f"[Engine] optimizer_policy: got {optimizer_policy!r}"
            raise ConfigError(f"{got} without an optimizer of the program. Hint: optimizer=, or leave it out.")
        if optimizer is not None:
            updates = _updates_of(optimizer, self._original, optimizer_policy)
            settings.update(_settings_of(updates, config))
            rule = updates.rule
        options = _with_tables(as_options(config, settings), config, settings, self._original)
        if mesh is not None and comm is not None:
            raise ConfigError("[Engine] got comm and mesh, expected one of them. Hint: the mesh has its Communicator.")
        self.comm = mesh.world if mesh is not None else default_communicator() if comm is None else comm
        self._sizes = _sizes_of(self._original)  # before they are cut
        if rule is not None and json.loads(options.effective()["zero_optimization.delayed_update.enabled"]) is True:
            raise ConfigError(
                f"[Engine] zero_optimization.delayed_update: got true with {rule.name}, expected false: the program's "
                "own step() cannot run in the background. Hint: leave it out."
            )
        native_mesh = None if mesh is None else mesh._native
        self._native = _native.Engine(self._original, options, self.comm, native_mesh, rule)
        self._rule = rule
        self._divided = _divided_experts(self._original)
        self._has_extra = bool(modules_with_extra_state(self._original))
        if self._divided:  # ranks have different experts
            self._has_extra = any(map(int, self.comm.all_gather_bytes(str(int(self._has_extra)).encode())))
        self.module = model
        self._alone = self.comm.size == 1
        held = dict(self._original.named_parameters())
        self._names: dict[int, str] = {id(p): name for name, p in held.items()}
        self._groups = Optimizer(self._native, self._original)
        self.optimizer: Optimizer | ProgramOptimizer = self._groups
        """For torch's schedulers; see Optimizer, and ProgramOptimizer for a program's."""
        self._takes_torchs_loop = updates is not None
        self._groups.belong_to(self)
        self._hooks = ModelHooks(self)
        if updates is not None and updates.optimizer is not None:
            self.optimizer = client = same_object(updates.optimizer, ProgramOptimizer)
            client.bind(self, updates, self._groups._scheduled)
            client.pull()
            self._native.accept_backward()
            self._native.add_up()
            self._native.leave_out(list(updates.unlisted))
        for p in held.values():
            p.__dict__.update(__deepcopy__=refuse_copy, __reduce_ex__=refuse_copy)
        _live.add(self)

    # ---- training ----
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. [collective] at stage 3."""
        if self._alone:
            return self.module(*args, **kwargs)
        with self._native.forward_scope():
            return self.module(*args, **kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        recoverable: bool = False,
        tokens: int | None = None,
    ) -> None:
        """[collective] Backpropagates `loss` (one element, floating-point). Replaces loss.backward().

        Scales by the loss scale, divides by the accumulation steps, accumulates and reduces.
        retain_graph: another backward() on this graph follows. create_graph: gradients stay in .grad, with a graph.
        recoverable: copies the gradients of the step's earlier micro-batches until this one has ended.
        tokens: `loss` is a sum over so many tokens of this rank, not a mean; 0 is allowed. The gradient is that of the
        sum over all ranks divided by their tokens. All ranks give a number or none does.
        """
        self._native.backward(loss, retain_graph, create_graph, recoverable, tokens)

    def step(self) -> StepResult:
        """[collective] Unscales, clips and updates at an accumulation boundary; does nothing otherwise ([local])."""
        r = self.optimizer.step()
        return StepResult(r.updated, r.overflow, r.grad_norm, r.loss_scale, r.lr, r.global_step)

    def discard_micro_batch(self) -> int:
        """[collective] Drops the micro-batch that failed on every rank; returns how many micro-batches are left."""
        return self._native.discard_micro_batch()

    def flush(self) -> None:
        """[collective] Finishes a delayed update, before an evaluation."""
        self._native.flush()

    def train(self, mode: bool = True) -> Engine:
        """[local] Calls the module's train()."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """[local] Calls the module's eval()."""
        return self.train(False)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """[local] The loss in fp32 times the loss scale: engine.scale(loss).backward() in a loop of torch in fp16."""
        return self._native.scale(loss)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """[collective] As torch.nn.utils.clip_grad_norm_ of all parameters, between the last backward() and step().

        Returns the norm before, fp32; infinity if it is not finite. The update is clipped to the smallest max_norm of
        the step, whatever gradient_clipping says.
        """
        self.optimizer._push()
        norm = self._native.clip_grad_norm(float(max_norm))
        return torch.tensor(norm if norm >= 0 else math.inf)

    def clip_grad_value_(self, clip_value: float) -> None:
        """[collective] As torch.nn.utils.clip_grad_value_ of all parameters, between the last backward() and step().

        Gradients that are not finite stay as they are, for step() to find.
        """
        self.optimizer._push()
        norm = self._native.grad_norm()
        if norm < 0:
            return
        limit = self._native.take_clip()  # what clip_grad_norm_() has scaled
        factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        for name, p in self._original.named_parameters():
            if not p.requires_grad:
                continue
            _, own = self._native.own_gradient(name)
            if own is not None:
                self._native.set_own_gradient(name, (own * factor).clamp(-clip_value, clip_value))

    def gradient(self, parameter: str | torch.nn.Parameter) -> torch.Tensor | None:
        """[collective] The gradient that step() will use, before clipping: fp32, in the parameter's shape.

        Available from the step's last backward() to step(). None if the parameter is frozen.
        """
        return self._native.gradient(self._name(parameter))

    def own_gradient(self, parameter: str | torch.nn.Parameter) -> tuple[int, torch.Tensor | None]:
        """[local] The part of that gradient in this rank's shard: its offset in the flat parameter, and its values."""
        return self._native.own_gradient(self._name(parameter))

    def set_gradient(self, parameter: str | torch.nn.Parameter, values: torch.Tensor) -> None:
        """[collective] Replaces that gradient on all ranks by rank 0's `values`, of the parameter's shape.

        step() clips and uses the new values, rounded to the dtype in which gradients are accumulated.
        """
        self._native.set_gradient(self._name(parameter), values)

    def set_own_gradient(self, parameter: str | torch.nn.Parameter, values: torch.Tensor) -> None:
        """[collective] The same, each rank its own shard."""
        self._native.set_own_gradient(self._name(parameter), values)

    # ---- parameters ----
    @contextmanager
    def gathered_parameters(
        self, what: Selection | Iterable[Selection] | None = None, *, modify: bool = False
    ) -> Iterator[None]:
        """[collective] Context in which parameters are unsharded on every rank, in their shape and the compute dtype.

        what: names or patterns (* and ?) of parameters or units, modules, parameters; None: all. All parameters of
        their units are unsharded. modify: parameters may be written in place (copy_, load_state_dict) under
        torch.no_grad(); rank 0's values are broadcast at the end. backward() and step() are not allowed inside.

        With tensor parallelism a parameter that is cut stays this rank's part, in its part's shape; modify then takes
        the values of the first rank with the same part. For whole tensors: state_dict(), parameter_state(),
        set_parameter_state(). Of a layer whose experts are divided, this rank's are unsharded; modify takes the values
        of the first rank that has an expert.
        """
        names = None if what is None else self._selected(what)
        scope = self._native.gathered_parameters(names, modify)
        try:
            yield
        finally:
            scope.close()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """[collective] A copy of the model's state dict on every rank: parameters in the compute dtype, and buffers.

        Parameters are whole with tensor parallelism as well, and the experts of all ranks are there. Needs memory for
        two unsharded models while it runs; with tensor or expert parallelism, fp32 masters in rank 0's host memory. For
        these see full_state_dict().
        """
        state = self._whole_state()
        assert state is not None
        return state

    def _whole_state(self, device: str | None = None, *, everywhere: bool = True) -> dict[str, torch.Tensor] | None:
        """[collective] state_dict() on `device`; not everywhere: on rank 0 only, None on other ranks."""
        wanted = everywhere or self.comm.rank == 0
        if not self._cut_parameters() and not self._divided:
            with self.gathered_parameters():
                return copied_state(self._original, device) if wanted else None
        masters = self.full_state_dict()
        whole: dict[int, torch.Tensor] = {}
        for name, p in self._original.named_parameters():
            value = masters.pop(name) if self.comm.rank == 0 else torch.empty(self._sizes[name])
            value = value.to(p.dtype)
            if everywhere:
                self.comm.broadcast(value.view(-1), 0).wait()
            if wanted:
                whole[id(p)] = value.to(p.device if device is None else device)
        extra = Carried.of(None, [], self._all_extra_states()).extra_of(self.comm.rank)
        if not wanted:
            return None
        state = copied_state(self._original, device, whole)
        return {key: extra[key] if key.startswith(self._foreign_experts()) and key in extra else value
                for key, value in state.items()}  # fmt: skip

    def _cut_parameters(self) -> dict[str, torch.Size]:
        """[local] The whole sizes of the parameters of which this rank has a part."""
        named = self._original.named_parameters()
        return {name: self._sizes[name] for name, p in named if p.shape != self._sizes.get(name, p.shape)}

    def _parts_among(self, parameters: Iterable[torch.nn.Parameter]) -> list[str]:
        """[local] The names of those that are cut, or are of experts that are divided over ranks."""
        parts = self._cut_parameters().keys() | self._divided
        return sorted({self._name(p) for p in parameters} & parts)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """[collective] Unsharded fp32 masters by parameter name, in host memory of rank 0; empty on other ranks."""
        return self._native.full_state_dict()

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """[collective] The optimizer's states and groups as torch.distributed.checkpoint has them: {"state": {name:
        {"step": .., "exp_avg": ..}}, "param_groups": [{"lr": .., "params": [name]}]}.

        Whole tensors in host memory of rank 0; empty on other ranks. States of 16 and 8 bits of a built-in rule in
        fp32. get_optimizer_state_dict(model, optimizer) of torch gives the same, and set_optimizer_state_dict() or
        set_full_optimizer_state_dict() takes it.
        """
        states = states_by_name(self, self.optimizer, everywhere=False, host=True)
        if self.comm.rank != 0:
            return {}
        return {"state": states, "param_groups": groups_of(self.optimizer, lambda p: self._names[id(p)])}

    def set_full_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """[collective] Takes rank 0's, between steps: states, numbers of the groups, and the count of updates.

        ConfigError for states that do not fit, and for flags of groups that make another rule.
        """
        load(self, self.optimizer, state_dict, complete=True)

    def parameter_state(self, parameter: str | torch.nn.Parameter, state: str = "master") -> torch.Tensor:
        """[collective] One fp32 state of a parameter, of its shape, on every rank.

        state: "master", or a state of the optimizer ("exp_avg", "exp_avg_sq"). ConfigError lists the names.
        """
        return self._native.parameter_state(self._name(parameter), state)

    def own_parameter_state(
        self, parameter: str | torch.nn.Parameter, state: str = "master"
    ) -> tuple[int, torch.Tensor]:
        """[local] This rank's shard of it: its offset in the flat parameter, and its values."""
        return self._native.own_parameter_state(self._name(parameter), state)

    def set_parameter_state(self, parameter: str | torch.nn.Parameter, state: str, values: torch.Tensor) -> None:
        """[collective] Replaces the state on all ranks by rank 0's `values`, of the parameter's shape, between steps.

        The parameter follows its "master".
        """
        self._native.set_parameter_state(self._name(parameter), state, values)

    def set_own_parameter_state(self, parameter: str | torch.nn.Parameter, state: str, values: torch.Tensor) -> None:
        """[collective] The same, each rank its own shard."""
        self._native.set_own_parameter_state(self._name(parameter), state, values)

    def state_hash(self) -> str:
        """[collective] Hex digest of all ranks' masters and optimizer states; equal on all ranks and at all stages."""
        return self._native.state_hash()

    def logical_hash(self) -> str:
        """[collective] The same of values and names, with frozen parameters and the buffers that all ranks share.

        It does not depend on the number of ranks, and equals the digest of a checkpoint (`zero checkpoint digest`).
        """
        self._native.refresh_buffers(self._original)
        return self._native.logical_hash()

    # ---- checkpoints ----
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        tag: str,
        *,
        user_state: Any = None,
        weights_only: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """[collective] Writes the checkpoint PATH/TAG. user_state: stored with it as JSON; rank 0's is saved.

        With it go the rates of optimizer.param_groups and what schedulers keep there, and the extra states of modules
        (get_extra_state), each rank's own where they differ.

        weights_only: masters, frozen parameters and buffers alone; only load_checkpoint(weights_only=True) takes it.
        exclude_frozen_parameters: without those of a base model; load_checkpoint(partial=) has to name them.
        With "checkpoint": {"writer": {"decoupled": true}} files are written while training continues. The checkpoint is
        complete after finish_checkpoint(), or the first step() that finds it written.
        """
        self._prepare_save(user_state)
        self._native.save_checkpoint(os.fspath(path), tag, weights_only, exclude_frozen_parameters)

    def keep_snapshot(self, path: str | os.PathLike[str], *, user_state: Any = None) -> None:
        """[collective] After every step: keeps states in memory for restarts (docs/checkpoints.md, Kept snapshots)."""
        self._prepare_save(user_state)
        self._native.keep_snapshot(os.fspath(path))

    def _prepare_save(self, user_state: Any) -> None:
        """[collective] if modules have an extra state: all ranks store all of them."""
        self.optimizer._prepare_save()
        carried = Carried.of(user_state, self.optimizer._kept(), self._all_extra_states(), self._all_rules())
        self._groups.look_at_flags()
        carried = replace(carried, equal_counts=self._groups.counts_are_equal)
        self._native.set_user_state(carried.text)
        self._native.refresh_buffers(self._original)

    def _all_extra_states(self) -> list[dict[str, str]]:
        """[collective] Of each rank, encoded; of experts that are divided, on the ranks that run them."""
        if not self._has_extra:
            return []
        own: dict[str, Any] = {}
        try:
            foreign = self._foreign_experts()
            states = extra_states(self._original)
            own["states"] = {key: value for key, value in states.items() if not key.startswith(foreign)}
        except TypeError as fault:  # told to all ranks, which would wait for this one
            own["fault"] = str(fault)
        all_ranks = [json.loads(part) for part in self.comm.all_gather_bytes(json.dumps(own).encode())]
        if faults := [each["fault"] for each in all_ranks if "fault" in each]:
            raise TypeError(faults[0])
        return [each["states"] for each in all_ranks]

    def _all_rules(self) -> list[str]:
        """[collective] What each rank has of a program's optimizer, encoded; equal ones once."""
        if self._rule is None:
            return []
        own: dict[str, str] = {}
        try:
            own["state"] = encoded(self._rule.kept(), f"the states of {self._rule.name}")
        except TypeError as fault:
            own["fault"] = str(fault)
        all_ranks = [json.loads(part) for part in self.comm.all_gather_bytes(json.dumps(own).encode())]
        if faults := [each["fault"] for each in all_ranks if "fault" in each]:
            raise TypeError(faults[0])
        return list(dict.fromkeys(each["state"] for each in all_ranks))

    def _foreign_experts(self) -> tuple[str, ...]:
        """[local] Beginnings of the names of experts that other ranks run."""
        names: list[str] = []
        for path, module in self._original.named_modules(remove_duplicate=False):
            if isinstance(module, MoE) and module.ep_size > 1:
                place, mine = self.mesh.experts(module.ep_size).expert.rank, module.num_experts // module.ep_size
                prefix = f"{path}.experts." if path else "experts."
                names += [f"{prefix}{c}." for c in range(module.num_experts) if c // mine != place]
        return tuple(names)

    @property
    def checkpoint_pending(self) -> bool:
        """[local] Whether a save in the background is not complete."""
        return self._native.checkpoint_pending()

    def finish_checkpoint(self) -> str:
        """[collective] Completes the save in the background. Returns the tag of the last save.

        "" if there was none, or if it has failed and libzero.save_errors is "warn".
        """
        return self._native.finish_checkpoint()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        tag: str = "",
        *,
        weights_only: bool = False,
        partial: str | Sequence[str] = (),
    ) -> str:
        """[collective] Loads PATH/TAG, or the newest complete checkpoint; returns its tag. Restores `user_state`,
        the rates of optimizer.param_groups and what schedulers keep there, and extra states of modules.

        weights_only (DeepSpeed: load_module_only): for another optimizer, and for checkpoints of weights only. States
        of the optimizer start at their initial values, steps at 0; learning rates and `user_state` stay. partial:
        patterns (* matches any text) of parameters that may be missing or have another shape; they keep their values.
        ConfigError with all that does not fit, IoError for damaged files.
        """
        self._native.refresh_buffers(self._original)
        taken = self._native.load_checkpoint(os.fspath(path), tag, weights_only, _patterns(partial))
        if weights_only:
            self.optimizer._pull_unless_set()
            # The user state stays, but extra states belong to the modules.
            manifest = Path(path) / taken / "manifest.json"
            if self._rule is not None:
                self._rule.forget()
            carried = Carried.read(json.loads(manifest.read_text())["user_state"] if self._has_extra else "")
            self._groups.forget_counts()
        else:
            carried = Carried.read(self._native.user_state())
            if self._rule is not None:
                try:
                    self._restore_rule(carried, Path(path) / taken)
                except ConfigError as fault:
                    self._native.close()
                    message = f"{fault} The engine is closed, because it has the checkpoint's weights."
                    raise ConfigError(message) from None
            self.optimizer._pull()
            self.optimizer._restore(carried.groups)
            self._groups.forget_counts(carried.equal_counts and not _missed_steps(Path(path) / taken))
        self._restore_extra(carried)
        return taken

    def _restore_rule(self, carried: Carried, checkpoint: Path) -> None:
        """[local] A program's optimizer: its numbers, or the count of updates of a checkpoint without any, which was
        imported from files of other libraries, or saved by the engine's own rule of this name."""
        assert self._rule is not None
        kind, missed = "", {}
        if not carried.rules and (file := checkpoint / "manifest.json").exists():
            kind, missed = json.loads(file.read_text())["optimizer"]["type"], _missed_steps(checkpoint)
        if kind == self._rule.name:
            counts = {name: self._updates() - missed.get(name, 0) for name in self._trained()}
            self._rule.take_counts(counts, self._sizes)
        else:
            self._rule.restore([decoded(part) for part in carried.rules])

    def _restore_extra(self, carried: Carried) -> None:
        """[local] As Module.load_state_dict() does."""
        if not self._has_extra:
            return
        found = carried.extra_of(self.comm.rank)
        done: set[int] = set()
        for key, module in modules_with_extra_state(self._original).items():
            if id(module) in done:
                continue
            done.add(id(module))
            if key in found and type(module).set_extra_state is not torch.nn.Module.set_extra_state:
                module.set_extra_state(found[key])
            else:
                why = "the checkpoint has none" if key not in found else "its class has no set_extra_state()"
                logging.getLogger("libzero").warning("load_checkpoint: %s was not restored: %s", key, why)

    def export_weights(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "hf",
        dtype: str = "fp32",
        names: str = "",
        prefix: str = "",
        shard_bytes: int = 5_000_000_000,
        duplicate_tied: bool = False,
        allow_overflow: bool = False,
        heads: int = 0,
        config: Mapping[str, Any] | None = None,
        only: str | Sequence[str] = (),
        stem: str = "model",
        extra_files: Mapping[str, str | bytes] | None = None,
        change: Mapping[str, Callable[[int, torch.Tensor], object]] | None = None,
    ) -> ExportReport:
        """[collective] Writes the masters, and buffers, for other libraries; each rank its own elements, no gather.

        format: "hf" (a folder of safetensors), "pt" (a file for torch.load(weights_only=True)) or "universal" (a
        checkpoint for DeepSpeed, with the optimizer's states). dtype: "fp32", "bf16", "fp16", or "" for the parameters'
        own. names: a name map ("gpt2", "llama", "bert", "t5", "vit", or a file); prefix: put before every name. heads,
        config: the attention heads, and fields that tensors do not tell, for config.json.

        only: parameters and buffers, by pattern of their names in the model (* matches any text, {i} a number); empty:
        all. Of "hf": stem is that of the files' names ("adapter_model" gives adapter_model.safetensors, the path that
        an import of it takes), extra_files are names and contents of further files, such as a tokenizer's, those of
        rank 0; a config.json among them is in place of the map's.

        change: by parameter, the same names on every rank: a function that changes what is written, not the model.
        values, fp32 on the CPU, are elements [begin, begin + len(values)) of the flattened master, to be written in
        place during the call; the ranks that hold them call it, once or more often, in any order. ConfigError if the
        path exists or names do not fit, IoError if writing fails. See docs/interchange.md.
        """
        self._native.refresh_buffers(self._original)
        self.optimizer._look_at_parameters()
        options = _native.ExportOptions()
        options.format = format
        options.dtype = dtype
        options.names = names
        options.prefix = prefix
        options.shard_bytes = shard_bytes
        options.duplicate_tied = duplicate_tied
        options.allow_overflow = allow_overflow
        options.heads = heads
        options.config = [f"{key}={json.dumps(value)}" for key, value in (config or {}).items()]
        options.only = _patterns(only)
        options.stem = stem
        files: list[Any] = list((extra_files or {}).items())
        options.extra_files = files
        report = ExportReport(**self._native.export_weights(os.fspath(path), options, dict(change or {})))
        return self._with_remarks(report)

    def _with_remarks(self, report: ExportReport) -> ExportReport:
        """[local] Adds what an export leaves out because it is no tensor."""
        report.remarks.extend(
            f"{key}: the extra state of a module is left out" for key in modules_with_extra_state(self._original)
        )
        return report

    def save_16bit_model(
        self,
        path: str | os.PathLike[str],
        filename: str = "pytorch_model.bin",
        *,
        exclude_frozen_parameters: bool = False,
    ) -> ExportReport:
        """[collective] Writes PATH/FILENAME for torch.load, in the dtypes that forward reads; no gather.

        Replaces the file if it exists. At every stage, whatever stage3_gather_16bit_weights_on_model_save says.
        """
        self._native.refresh_buffers(self._original)
        self.optimizer._look_at_parameters()
        report = ExportReport(**self._native.save_16bit_model(os.fspath(path), filename, exclude_frozen_parameters))
        return self._with_remarks(report)

    def import_weights(
        self,
        path: str | os.PathLike[str],
        *,
        names: str = "",
        key: str = "",
        prefix: str = "",
        partial: str | Sequence[str] = (),
        optimizer: bool = False,
        untie: Sequence[str] = (),
        only: str | Sequence[str] = (),
    ) -> ImportReport:
        """[collective] Reads weights of any kind of file; each rank what it stores. Nothing in a file is executed.

        Safetensors, files of torch.save, and checkpoints of DeepSpeed, torch.distributed and libzero. names, prefix:
        as in export_weights(). key: of a nested dictionary, such as "model". partial: as in load_checkpoint().
        optimizer: also its states. untie: of tied tensors that are stored twice and differ, the names of those to take.
        only: patterns of the parameters and buffers that are wanted; all others keep their values, and the files must
        not have them.
        Between steps. ConfigError with all that does not fit, IoError for damaged files.
        """
        self._native.refresh_buffers(self._original)
        if optimizer and self._rule is not None:  # before anything changes
            for file in (Path(path) / "manifest.json", *Path(path).glob("*/manifest.json")):
                kind = json.loads(file.read_text())["optimizer"]["type"] if file.is_file() else self._rule.name
                if kind != self._rule.name:
                    raise ConfigError(
                        f"[import_weights] optimizer: got states of {kind} in {file.parent}, expected those of "
                        f"{self._rule.name}. Hint: optimizer=False takes the weights."
                    )
            self._rule.counted(dict.fromkeys(self._trained(), 0), self._sizes)
        if optimizer:
            self.optimizer._push()  # which are compared with the files'
        options = _native.ImportOptions()
        options.names = names
        options.key = key
        options.prefix = prefix
        options.partial = _patterns(partial)
        options.optimizer = optimizer
        options.untie = list(untie)
        options.only = _patterns(only)
        found = self._native.import_weights(os.fspath(path), options)
        if optimizer:
            self.optimizer._pull()
            self._groups.forget_counts()
            if self._rule is not None:
                self._rule.take_counts(dict.fromkeys(self._trained(), self._updates()), self._sizes)
        return ImportReport(**found)

    def _trained(self) -> list[str]:
        """[local] The parameters that a program's optimizer updates."""
        return [name for name in self._rule.parameters() if name in self._groups.trained] if self._rule else []

    def _updates(self) -> int:
        return self.global_step - self.skipped_steps

    load_weights = import_weights

    @property
    def user_state(self) -> Any:
        """[local] The user_state of the last save_checkpoint() or load_checkpoint(); None if it had none."""
        return Carried.read(self._native.user_state()).user_state

    def unsharded_copy(self) -> torch.nn.Module:
        """[collective] A plain module with whole values on every rank, as copy.deepcopy(model) without an engine.

        For an average of weights, a reference or a target network. Parameters in the compute dtype.
        """
        with self.gathered_parameters():
            whole = {id(p): _copied(p) for p in self._original.parameters()}
            self._hooks.remove()
            try:
                return copy.deepcopy(self._original, whole)
            finally:
                self._hooks.add()

    # ---- state and measurements ----
    def memory(self) -> Memory:
        """[local] Bytes of this rank by purpose and tier, now and at the peak."""
        return Memory.of(self._native.memory())

    def reset_peak_memory(self) -> None:
        """[local] Sets the peak to the current bytes."""
        self._native.reset_peak_memory()

    def units(self) -> list[tuple[str, int]]:
        """[local] Names and numbers of elements of the units in which parameters are communicated."""
        return self._native.units()

    def start_trace(self, file: str | os.PathLike[str], *, first: int = 1, last: int | None = None) -> None:
        """[collective] Starts a trace of the steps `first` to `last`, for ui.perfetto.dev."""
        self._native.start_trace(os.fspath(file), first, last)

    def stop_trace(self) -> TraceSummary:
        """[collective] Ends the trace and joins the parts of all ranks into one file."""
        return TraceSummary(**self._native.stop_trace())

    def times(self) -> dict[str, float]:
        """[local] Accumulated seconds of this rank by kind; zeros unless wall_clock_breakdown is true."""
        return self._native.times()

    @property
    def options(self) -> Options:
        """[local] The configuration."""
        return self._native.options()

    @property
    def is_gradient_accumulation_boundary(self) -> bool:
        """[local] Whether the next step() updates the parameters."""
        return self._native.is_gradient_accumulation_boundary()

    @property
    def global_step(self) -> int:
        """[local] Number of attempted steps."""
        return self._native.global_step()

    @property
    def skipped_steps(self) -> int:
        """[local] Number of steps skipped because of overflow."""
        return self._native.skipped_steps()

    @property
    def global_samples(self) -> int:
        """[local] Number of samples of all ranks in all attempted steps, also those before a resume."""
        return self._native.global_samples()

    @property
    def accumulation_steps(self) -> int:
        """[local] Micro-batches per optimizer step."""
        return self._native.accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """[local] Samples per rank and forward."""
        return self._native.micro_batch_size()

    @property
    def mesh(self) -> Mesh:
        """[local] The ranks of the run as a grid of data, sequence and tensor parallelism (docs/parallelism.md)."""
        return Mesh(self._native.mesh())

    @property
    def loss_scale(self) -> float:
        """[local] The loss scale of the next backward()."""
        return self._native.loss_scale()

    @property
    def closed(self) -> bool:
        """[local] Whether the engine is closed."""
        return not self._native.alive()

    def close(self) -> None:
        """[local] Releases the model. Below stage 3 it keeps its parameters; at stage 3 they are freed.

        [collective] if checkpoint_pending: completes that save first. An Engine that ends in another way loses it.
        """
        if not self.closed and self._native.checkpoint_pending():
            self._native.finish_checkpoint()
        self._release()

    def _release(self) -> None:
        if self.closed:
            return
        self._native.close()
        self._hooks.remove()
        for p in self.module.parameters():
            for name in ("__deepcopy__", "__reduce_ex__"):
                p.__dict__.pop(name, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def __del__(self) -> None:
        if "optimizer" in self.__dict__:
            self._release()

    def __getstate__(self) -> NoReturn:
        raise ConfigError("[Engine] cannot be copied or pickled. Hint: engine.save_checkpoint(dir, tag).")

    def __repr__(self) -> str:
        if self.closed:
            return "libzero.Engine(closed)"
        return f"libzero.Engine({type(self.module).__name__}, {len(self.units())} units, {self.comm!r})"

    def _name(self, parameter: str | torch.nn.Parameter) -> str:
        if isinstance(parameter, str):
            return parameter
        if id(parameter) not in self._names:
            raise ConfigError(f"[Engine] got a parameter of shape {tuple(parameter.shape)}, expected the model's.")
        return self._names[id(parameter)]

    def _selected(self, what: Selection | Iterable[Selection]) -> list[str]:
        # A single module (Sequential) or parameter may be iterable.
        each = [what] if isinstance(what, str | torch.nn.Module | torch.nn.Parameter) else list(what)
        names: list[str] = []
        for one in each:
            parameters = one.parameters() if isinstance(one, torch.nn.Module) else [one]
            names += [p if isinstance(p, str) else exact_pattern(self._name(p)) for p in parameters]
        return names


def _updates_of(optimizer: torch.optim.Optimizer | Make, model: torch.nn.Module, policy: str) -> Updates:
    """[local] Of a program's optimizer, or one that a function makes of the parameters that are trained."""
    made = optimizer
    if not isinstance(made, torch.optim.Optimizer):
        made = made([p for p in model.parameters() if p.requires_grad])
    updates = client_updates(made, model, policy=policy)
    if missing := [name for name, p in updates.unlisted.items() if p.requires_grad]:
        raise ConfigError(
            f"[Engine] the optimizer has not {', '.join(missing[:3])}{' and more' if missing[3:] else ''}, which the "
            "model trains. Hint: requires_grad_(False), or model.parameters() for the optimizer."
        )
    return updates


def _settings_of(updates: Updates, config: Config) -> dict[str, Any]:
    """[local] What a program's optimizer says in place of the configuration, by dotted key."""
    options = as_options(config)
    effective = options.effective()
    kind, schedule = (json.loads(effective.get(key) or "null") for key in ("optimizer.type", "scheduler.type"))
    if kind:
        raise ConfigError(
            f"[Engine] got an optimizer of the program, {type(updates.optimizer).__name__}, and optimizer.type in the "
            "configuration, expected one of them. Hint: leave the block optimizer out."
        )
    settings: dict[str, Any] = {}
    if not options.is_set("gradient_clipping"):  # the program clips where it wants to
        settings["gradient_clipping"] = 0.0
    if updates.block is not None:
        settings["optimizer.type"] = updates.block["type"]
        settings.update({f"optimizer.params.{key}": value for key, value in updates.block["params"].items()})
    if schedule and schedule != "WarmupCosineLR":  # it sets the rates of all groups
        for pattern in updates.patterns:
            pattern.pop("lr", None)
    if updates.patterns:
        settings["libzero.parameter_groups"] = updates.patterns
    return settings


def _missed_steps(checkpoint: Path) -> dict[str, int]:
    """[local] Of parameters that were frozen in some updates of the run that saved it."""
    file = checkpoint / "manifest.json"  # a kept snapshot is no file
    missed: dict[str, int] = json.loads(file.read_text())["program"]["missed_steps"] if file.exists() else {}
    return missed


def _unit_names(model: torch.nn.Module, units: Iterable[str | type[torch.nn.Module]]) -> list[str]:
    names: list[str] = []
    for unit in [units] if isinstance(units, str | type) else units:
        if isinstance(unit, str):
            names.append(unit)
            continue
        found = [name for name, module in model.named_modules() if isinstance(module, unit) and name]
        if not found:
            raise ConfigError(f"[Engine] units: the model has no {unit.__name__}. Hint: one of its modules, or names.")
        names += found
    return list(dict.fromkeys(names))


@atexit.register
def _close_all() -> None:
    # Before the interpreter ends, because an engine's threads may need the GIL to log.
    for engine in list(_live):
        engine._native.close()
