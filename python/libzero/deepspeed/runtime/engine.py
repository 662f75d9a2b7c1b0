"""DeepSpeedEngine: DeepSpeed's calls over libzero.Engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from libzero._carried import Carried, decoded, encoded
from libzero._divided import cast, hand_over
from libzero.communicator import default_communicator
from libzero.compiled import compile as compile_units
from libzero.deepspeed._held import mark, was_rounded
from libzero.deepspeed._refuse import AssertedConfigError, asserted, module_getattr, refusal
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.moe.layer import MoE as DeepSpeedMoE
from libzero.deepspeed.monitor.monitor import MonitorMaster
from libzero.deepspeed.ops import EngineOptimizer
from libzero.deepspeed.runtime._program_optimizer import program_optimizer
from libzero.deepspeed.runtime.base_optimizer import (
    DeepSpeedOptimizer,
    ModelParameters,
    client_updates,
    config_updates,
    configured,
    numbers_of,
    with_own_numbers,
    wrapped,
)
from libzero.deepspeed.runtime.config import (
    KeptFp32,
    gathers_on_save,
    native_config,
    options_of,
    recipe_of,
    stage_of,
    tell_left_over,
    with_groups,
)
from libzero.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from libzero.deepspeed.runtime.lr_schedules import EngineSchedule, schedule_class
from libzero.deepspeed.runtime.sequence_parallel.ulysses_sp import watched
from libzero.deepspeed.runtime.tensor_parallel import automatic_plan
from libzero.deepspeed.runtime.torch_autocast import TorchAutocast
from libzero.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from libzero.deepspeed.utils import groups
from libzero.deepspeed.utils.logging import log_dist, log_dist_once, logger
from libzero.deepspeed.utils.timer import ThroughputTimer
from libzero.deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
from libzero.deepspeed.utils.zero_to_fp32 import latest_tag, read_manifest, read_tensors, write_script
from libzero._model import compiled_from
from libzero._updates import Updates
from libzero.engine import Engine, engine_of
from libzero.errors import ConfigError
from libzero.moe import MoE

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"]

DeepSpeedOptimizerCallable: TypeAlias = Callable[[ModelParameters | None], torch.optim.Optimizer]
DeepSpeedSchedulerCallable: TypeAlias = Callable[[torch.optim.Optimizer], Any]

_VALUES = {
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "steps_per_print": "steps_per_print",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "memory_breakdown": "memory_breakdown",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "communication_data_type": "communication_data_type",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bfloat16_enabled": "bf16.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "autotp_size": "tensor_parallel.autotp_size",
    "zero_log_trace_cache_warnings": "zero_optimization.log_trace_cache_warnings",
}
"""Calls that return a value of the configuration, by the key."""


def _cast_parameters(model: torch.nn.Module, keep: KeptFp32, recipe: torch.dtype) -> None:
    # DeepSpeed's masters begin with the rounded values.
    kept = keep.of(model)
    rounded = [name for name, p in model.named_parameters() if id(p) in kept and was_rounded(p)]
    if rounded:
        raise ConfigError(
            f"[deepspeed.initialize] cannot keep {', '.join(rounded)} in fp32: deepspeed.zero.Init has rounded it. "
            "Hint: give zero.Init the same configuration, and name a tied parameter in libzero.keep_fp32 by the name "
            "that it has first."
        )
    for p in model.parameters():
        if p.is_floating_point():
            cast(p, torch.float32 if id(p) in kept else recipe)


def _complete_plan(native: dict[str, Any], model: torch.nn.Module) -> None:
    block = native.get("tensor_parallel")
    if not isinstance(block, dict) or block.get("preset_model") or block.get("partition_config"):
        return
    degree = block.get("autotp_size", 1)
    if isinstance(degree, int) and degree > 1:
        native["tensor_parallel"] = {**block, "partition_config": automatic_plan(model, degree)}


_HOLDER = "_libzero_engine"
"""The attribute of a model at stage 3 that keeps its engine, and so its values, where a program drops the engine."""


def _take_from_before(model: torch.nn.Module) -> None:
    """[collective] Closes the engine that holds this model, if there is one. The model keeps its values.

    Parts of parameters are left to that engine, and the new one refuses the model.
    """
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    before = next(map(engine_of, parameters), None)
    if before is None or before._original is not model or before._cut_parameters() or before._divided:
        return
    sharded = before.options.effective()["zero_optimization.stage"] == "3"
    copies = []
    if sharded:
        with before.gathered_parameters():
            copies = [p.detach().clone() for p in parameters]
    before.close()
    model.__dict__.pop(_HOLDER, None)
    for p, value in zip(parameters, copies, strict=sharded):
        p.data = value


@contextmanager
def _frozen_while(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


class DeepSpeedEngine(torch.nn.Module):
    """What deepspeed.initialize() returns. Names of the model that the engine has not are the model's.

    [collective] and [local] as in libzero.Engine. ConfigError for a call out of order.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: dict[str, Any],
        *,
        optimizer: torch.optim.Optimizer | DeepSpeedOptimizerCallable | None = None,
        model_parameters: ModelParameters | None = None,
        training_data: Dataset[Any] | None = None,
        lr_scheduler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        mpu: Any = None,
    ) -> None:
        """[collective] See libzero.deepspeed.initialize()."""
        super().__init__()
        comm = default_communicator()
        self.world_size, self.global_rank, self.local_rank = comm.size, comm.rank, comm.local_rank
        self.device = torch.device(get_accelerator().device_name(self.local_rank))
        get_accelerator().set_device(self.local_rank)
        _take_from_before(compiled_from(model))
        self.module = model.to(self.device)
        self.config = config
        self.collate_fn = collate_fn
        self._managed = config.get("managed_gradient_accumulation", True) is not False
        self._boundary: bool | None = None
        self._inside_no_sync = False
        self._by_program = False
        """The engine does not count: gradients add up until a step() at a boundary."""
        self._applied = False
        self._retains = False
        """The last backward() kept its graph: another loss of the same micro-batch may follow."""
        self.is_compiled = False
        self._norm: float | None = None
        self.global_steps = 0
        """Updates so far, skipped ones included."""
        self.micro_steps = 0
        self._since_update = 0
        """step() calls since the last one that updated."""
        self._accumulation: int | None = None
        self._micro_batch: int | None = None
        """Those that the program has set, in place of the configuration's."""
        self.global_samples = 0
        self.skipped_steps = 0

        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model_parameters if model_parameters is not None else model.parameters())
        native = native_config(config, comm.size)
        if (recipe := recipe_of(native)) is not None:
            _cast_parameters(compiled_from(self.module), KeptFp32(native), recipe)
        _complete_plan(native, compiled_from(self.module))
        hand_over(compiled_from(self.module))
        self._autocast = TorchAutocast.of(config, self.device.type)
        if isinstance(lr_scheduler, EngineSchedule):
            lr_scheduler.hand_over()  # the optimizer has its own rates again, from which the engine's schedule begins
        updates, self._trains = self._updates_of(optimizer, model_parameters, native)
        if updates.block is not None:
            native["optimizer"] = updates.block
        self.optimizer: DeepSpeedOptimizer | None = None
        if updates.optimizer is not None:
            effective = options_of(with_groups(native, len(updates.groups)), config).effective()
            self.optimizer = wrapped(updates.optimizer, effective)
        self.client_optimizer = optimizer
        self.basic_optimizer = updates.optimizer
        self.lr_scheduler = self._scheduler_of(lr_scheduler, native)
        if isinstance(self.lr_scheduler, EngineSchedule):
            native["scheduler"] = updates.scheduled(self.lr_scheduler.config)
        if updates.patterns:
            native["libzero"] = {**native.get("libzero", {}), "parameter_groups": updates.patterns}

        zero = config.get("zero_optimization")
        if isinstance(zero, Mapping) and isinstance(zero.get("leaf_module"), Mapping):
            apply_zero_leaf_module_config(self.module, zero["leaf_module"])
        self._autocast.mark(compiled_from(self.module))
        self._autocast.scale(native)
        if stage_of(native) > 0 and "communication_data_type" not in native:
            native.update(self._autocast.communication(compiled_from(self.module)))
        self._unlisted = set(map(id, updates.unlisted.values()))
        with _frozen_while(updates.unlisted.values()):  # without masters and states
            self._engine = Engine(self.module, options_of(native, config), comm=comm, rule=updates.rule)
        layers = [layer for layer in self.module.modules() if isinstance(layer, MoE)]
        self.has_moe_layers, self.num_experts = bool(layers), [layer.num_experts for layer in layers]
        inside = [layer.deepspeed_moe for layer in layers if isinstance(layer, DeepSpeedMoE)]
        self.moe_layers, self.gate_modules = inside, [part.gate for part in inside]
        """See deepspeed.moe.layer.MoE.deepspeed_moe."""
        groups.use_mesh(self._engine.mesh, {layer.ep_size for layer in layers}, mpu)
        self.sequence_parallel_size = self._engine.mesh.size("sp")
        self.seq_dp_world_size = self._engine.mesh.size("dp_sp")
        self.mpu, self.mesh_device = mpu, groups.mesh_device if self.sequence_parallel_size > 1 else None
        if self.mesh_device is not None:
            self._sequence_group = groups.HeldGroup(groups._get_sequence_parallel_group())
        self._effective = self._engine.options.effective()
        tell_left_over(native, self._effective)
        self._counts = native.get("managed_gradient_accumulation") is False
        if self._trains:
            self._engine._native.accept_backward()
            self._engine._native.leave_out(list(updates.unlisted))
        else:
            self._engine._native.leave_out([name for name, _ in self._engine._original.named_parameters()])
        if self.optimizer is not None:
            scheduled = isinstance(self.lr_scheduler, EngineSchedule)
            self.optimizer.bind(self._engine, updates, scheduled)
            self.optimizer.pull()
        if isinstance(updates.optimizer, EngineOptimizer) and updates.rule is None:
            updates.optimizer.owned = True
        if self.zero_optimization_stage() == 3:
            mark(self.module.parameters())
            self._engine._original.__dict__[_HOLDER] = self._engine
        self.monitor = MonitorMaster(self._engine.options, self.global_rank, config)
        clock = SimpleNamespace(enabled=False, synchronized=False)
        self.tput_timer = ThroughputTimer(clock, self.train_batch_size())
        """For programs that read its counters; the engine does not start it. See Engine.times()."""
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)

    def _updates_of(
        self,
        optimizer: torch.optim.Optimizer | None,
        model_parameters: ModelParameters | None,
        native: dict[str, Any],
    ) -> tuple[Updates, bool]:
        """And whether the engine trains: without an optimizer it only evaluates."""
        if optimizer is None:
            optimizer = program_optimizer(native.get("optimizer"), model_parameters, self.module)
            if optimizer is not None:
                del native["optimizer"]
        if optimizer is not None:
            if "optimizer" in native:
                logger.warning("the program's optimizer is used, not the block optimizer of the configuration")
                del native["optimizer"]
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
            return client_updates(optimizer, self.module), True
        if "optimizer" not in native:
            if native.pop("scheduler", None) is not None:
                raise ConfigError("[deepspeed] scheduler: got one and no optimizer, expected both")
            block = {"type": "SGD", "params": {"lr": 0.0}}  # has no states
            return Updates([], [], block=block), False
        effective = options_of(with_groups(native, 1), self.config).effective()
        keys = numbers_of(json.loads(effective["optimizer.type"]))
        numbers = {k: json.loads(effective[f"optimizer.params.{k}"]) for k in ("lr", "weight_decay", *keys)}
        if "betas" in numbers:
            numbers["betas"] = tuple(numbers["betas"])
        updates = config_updates(model_parameters, self.module, numbers)
        own = {key: float(updates.base[key]) for key in ("lr", "weight_decay")}
        if any(own[key] != numbers[key] for key in own):  # the engine's group 0 has the numbers of the block
            block = native["optimizer"]
            updates.block = {**block, "params": {**block.get("params", {}), **own}}
        updates.optimizer = configured(updates.groups, effective, native["optimizer"])
        if with_own_numbers(updates, self.module, numbers):
            del native["optimizer"]
        return updates, True

    def _scheduler_of(self, given: Any, native: dict[str, Any]) -> Any:
        """The engine computes DeepSpeed's schedules; another object is stepped after each update."""
        if callable(given) and not hasattr(given, "step"):
            given = given(self.optimizer)
        configured = isinstance(native.get("scheduler"), dict) and native["scheduler"].get("type")
        if given is None and configured and self.optimizer is not None:
            count = len(self.optimizer.param_groups)
            effective = options_of(with_groups(native, count), self.config).effective()
            made: Any = schedule_class(json.loads(effective["scheduler.type"]))
            keys = {name: f"scheduler.params.{name}" for name in made.names}
            params = {name: json.loads(effective[key]) for name, key in keys.items() if key in effective}
            params["last_batch_iteration"] = max(-1, params.get("last_batch_iteration", -1))
            given = made(self.optimizer, **{name: value for name, value in params.items() if value is not None})
        if "scheduler" in native:
            del native["scheduler"]
        if isinstance(given, EngineSchedule):
            given.hand_over(self.optimizer)
        return given

    # ---- training ----
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward. [collective] at stage 3.

        [collective] A backward() of its outputs, or of what is computed from them, is backward() here. In fp16 only of
        scale(loss).
        """
        self._begin_step()
        with self._autocast.around(), watched(self.mpu, self.module, kwargs):
            outputs = self._engine(*inputs, **kwargs)
        # Within a transform of torch.func the values are no tensors of autograd.
        if self._trains and torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            for value in tree_leaves(outputs):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    self._engine._native.follow(value)
        return outputs

    def _begin_step(self) -> None:
        """[local] Before the first micro-batch of a step: who counts them."""
        by_program = self._boundary is False or self._inside_no_sync or self._accumulation is not None
        if by_program != self._by_program and not self._counts and self._engine._native.micro_batches() == 0:
            self._engine._native.count_micro_batches(not by_program)
            self._by_program = by_program

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """[local] The loss in fp32 times the loss scale: scale(loss).backward() instead of backward(loss)."""
        if not self._trains:
            raise AssertedConfigError("[deepspeed] cannot scale a loss: the engine has no optimizer")
        if loss.numel() != 1 or not loss.requires_grad:
            raise AssertedConfigError(
                f"[deepspeed] scale: got a loss of {loss.numel()} elements, requires_grad {loss.requires_grad}, "
                "expected a scalar that requires grad"
            )
        return self._engine._native.scale(loss)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """[local] libzero.compile() of the model, once. schedule, compiled_autograd_enabled: NotImplementedError."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError(
                "[deepspeed] engine.compile: schedule (DeepCompile) and compiled_autograd_enabled are not built. "
                "Hint: engine.compile(backend, compile_kwargs)."
            )
        if not self.is_compiled:
            compile_units(self._engine, **{**(compile_kwargs or {}), "backend": backend})
            self.is_compiled = True

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """[collective] Instead of loss.backward(); `loss` has one element.

        Multiplied by the loss scale and, unless scale_wrt_gas is False, divided by the accumulation steps. Returns the
        loss so divided, without its graph.
        """
        if not self._trains:
            raise AssertedConfigError("[deepspeed] cannot run backward: the engine has no optimizer")
        steps = self.gradient_accumulation_steps()
        self._begin_step()
        counted = steps == 1 and not self._counts and not self._by_program
        if counted and self._engine._native.micro_batches() > 0 and not self._retains:
            raise ConfigError(
                "[deepspeed] backward: got a second loss before step(), expected step(): gradient_accumulation_steps "
                "is 1. Hint: for one update of several losses call set_gradient_accumulation_boundary(False) before "
                "the first of them and set_gradient_accumulation_boundary(True) before the last; or add the losses up."
            )
        self._retains = retain_graph
        with asserted():  # unused parameters
            self._engine.backward(loss if scale_wrt_gas else loss * steps, retain_graph=retain_graph)
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """[collective] At an accumulation boundary clips, updates and moves the schedule; else only counts.

        lr_kwargs go to the scheduler's step(). The schedule stays where an overflow skipped the update.
        """
        if self.optimizer is None:
            raise AssertedConfigError("[deepspeed] cannot step: the engine has no optimizer")
        if self._inside_no_sync:
            raise AssertedConfigError(
                "[deepspeed] cannot step within no_sync() or coalesce_grad_reduction(). Hint: leave its with block "
                "first."
            )
        self._applied = False
        accumulated = self._engine._native.micro_batches()
        if self.is_gradient_accumulation_boundary():
            result = self.optimizer.step()
            self._applied = not result.overflow
            if result.overflow:
                self.skipped_steps += 1
                logger.info("step %d: a gradient was not finite; skipped, loss scale %g", self.global_steps + 1,
                            result.loss_scale)  # fmt: skip
            else:
                self._norm = result.grad_norm
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
            self.global_samples += (
                self.train_batch_size()
                if self._managed
                else accumulated * self.train_micro_batch_size_per_gpu() * self.dp_world_size
            )
            self._report()
            self._since_update = 0
        else:
            self._since_update += 1
        self.micro_steps += 1

    def _report(self) -> None:
        interval = self.steps_per_print()
        if interval and self.global_steps % interval == 0:
            text = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
            log_dist(text, ranks=[0])
        if self.monitor.enabled:
            events = [("Train/Samples/lr", self.get_lr()[0], self.global_samples)]
            if self.fp16_enabled():
                events.append(("Train/Samples/loss_scale", self._engine.loss_scale, self.global_samples))
            self.monitor.write_events(events)

    def is_gradient_accumulation_boundary(self) -> bool:
        """[local] Whether the next step() updates."""
        if self._boundary is not None:
            return self._boundary
        return not self._managed or self._since_update + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """[local] Whether the next step() updates, from now on: the program counts micro-batches.

        False before the first backward() of a step lets gradients add up, whatever gradient_accumulation_steps says,
        by which each loss is divided. ConfigError with managed_gradient_accumulation false.
        """
        if not self._managed:
            raise ConfigError(
                "[deepspeed] cannot set the boundary: managed_gradient_accumulation is false, and every step() updates"
            )
        self._boundary = is_boundary
        self._begin_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """[local] Micro-batches within it only accumulate; step() comes after it. ConfigError at stages 2 and 3."""
        if self.zero_optimization_stage() >= 2:
            raise AssertedConfigError(
                f"[deepspeed] cannot use no_sync() at stage {self.zero_optimization_stage()}: gradients are sharded. "
                "Hint: gradient_accumulation_steps, or stage 1."
            )
        with self._accumulating("no_sync()"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """[local] Several backward() within it are of one step, and step() comes after it; each is reduced as always.

        NotImplementedError at stage 0, ConfigError with managed_gradient_accumulation false.
        """
        if not self._managed:
            raise AssertedConfigError(
                "[deepspeed] cannot use coalesce_grad_reduction(): managed_gradient_accumulation is false, and every "
                "step() updates"
            )
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError("cannot use coalesce_grad_reduction() at stage 0. Hint: no_sync().")
        with self._accumulating("coalesce_grad_reduction()"):
            yield

    @contextmanager
    def _accumulating(self, call: str) -> Iterator[None]:
        if self._inside_no_sync:
            raise AssertedConfigError(f"[deepspeed] cannot use {call} within no_sync() or coalesce_grad_reduction()")
        self._inside_no_sync = True
        self._begin_step()
        try:
            yield
        finally:
            self._inside_no_sync = False

    def was_step_applied(self) -> bool:
        """[local] The last step() updated."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """[local] Nothing between steps: step() does it. NotImplementedError where gradients would be lost."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def get_lr(self) -> list[float]:
        """[local] Rates of the next step, by parameter group."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """[local] The rate of all groups from the next step on. ConfigError in step() where a schedule moves it."""
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """[local] betas, or momentum of SGD, by parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group["betas"] if "betas" in group else group["momentum"] for group in groups
                if "betas" in group or "momentum" in group]  # fmt: skip

    def get_global_grad_norm(self) -> float | None:
        """[local] The norm of all gradients in the last update, before clipping; None before the first."""
        return self._norm

    @property
    def cur_scale(self) -> float:
        """[local] The loss scale of the next backward()."""
        return self._engine.loss_scale

    # ---- what it is ----
    def load_universal_checkpoint(self) -> bool:
        """[local] The configuration's checkpoint.load_universal."""
        block = self.config.get("checkpoint")
        return isinstance(block, Mapping) and block.get("load_universal") is True

    def log_level(self) -> str | None:
        """[local] The configuration's log_level."""
        level: str | None = self.config.get("log_level")
        return level

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """[local] On CPUs nothing moves and no memory is released: all states are in host memory, which a notice says.

        NotImplementedError on a GPU, where states rest as zero_optimization.offload_optimizer says. ValueError for
        "nvme", ConfigError without an optimizer and with zero_optimization.offload_param.
        """
        self._expect_movable()
        if device == OffloadDeviceEnum.none:
            logger.warning("offload_states: got the device none: nothing moves")
            return
        if device != OffloadDeviceEnum.cpu:
            raise ValueError(f"offload_states: got the device {device!r}, expected OffloadDeviceEnum.cpu")
        if self.device.type != "cpu":
            raise NotImplementedError(
                "cannot move states of an engine on a GPU. Hint: zero_optimization.offload_optimizer keeps those of "
                "the optimizer in host memory; engine.save_checkpoint() and engine.destroy() release all of them."
            )
        log_dist_once("offload_states: the engine runs on CPUs, and its states stay in host memory", ranks=(0,))

    def reload_states(self, non_blocking: bool = False) -> None:
        """[local] Nothing: offload_states() has moved nothing."""
        self._expect_movable()

    def _expect_movable(self) -> None:
        if not self._trains:
            raise AssertedConfigError("[deepspeed] cannot move states: the engine has no optimizer")
        if self._value("zero_optimization.offload_param.device") not in (None, "none"):
            raise AssertedConfigError(
                "[deepspeed] cannot move states: zero_optimization.offload_param says where parameters rest"
            )

    def empty_partition_cache(self) -> None:
        """[local] Nothing: between steps no parameter is whole at stage 3 but within GatheredParameters."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """[local] Between updates, on all ranks: changes how many micro-batches make an update.

        ValueError for what is no multiple of a micro-batch of all data-parallel ranks. Not in checkpoints: a program
        that resumes sets it again.
        """
        one = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < one or train_batch_size % one != 0:
            raise ConfigError(
                f"[deepspeed] set_train_batch_size: got {train_batch_size}, expected a multiple of {one}: "
                f"{self.train_micro_batch_size_per_gpu()} samples on each of {self.dp_world_size} ranks"
            )
        steps = train_batch_size // one
        if steps == self.gradient_accumulation_steps():
            return
        if not self._managed:
            raise ConfigError(
                "[deepspeed] cannot set the batch: managed_gradient_accumulation is false, and every step() updates"
            )
        self._engine._native.set_accumulation_steps(steps)
        self._accumulation, self._by_program = steps, True

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """[local] On all ranks: the size that the program's micro-batches have from now on.

        train_batch_size() follows; the loader of initialize() keeps its own.
        """
        if micro_batch_size < 1:
            raise ConfigError(
                f"[deepspeed] set_train_micro_batch_size: got {micro_batch_size}, expected at least 1"
            )
        self._micro_batch = micro_batch_size

    def train_batch_size(self) -> int:
        """[local] Samples of one update over all data-parallel ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """[local] Samples of a forward."""
        return self._micro_batch or self._engine.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """[local] Micro-batches of one update."""
        return self._accumulation or self._engine.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """[local] train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def managed_gradient_accumulation(self) -> bool:
        """[local] step() counts micro-batches."""
        return self._managed

    def torch_autocast_enabled(self) -> bool:
        """[local] forward() runs under torch.autocast."""
        return self._autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """[local] The block's dtype; None where it has none."""
        return self._autocast.dtype

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """[local] The classes of modules whose gradients may be reduced in this dtype."""
        return list(self._autocast.names)

    def zero_optimization(self) -> bool:
        """[local] The stage is above 0."""
        return bool(self.zero_optimization_stage() > 0)

    def zero_optimization_partition_gradients(self) -> bool:
        """[local] The stage is above 1."""
        return bool(self.zero_optimization_stage() >= 2)

    def zero_optimization_partition_weights(self) -> bool:
        """[local] The stage is 3."""
        return bool(self.zero_optimization_stage() == 3)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """[local] save_16bit_model() saves at stage 3."""
        return gathers_on_save(self.config)

    def zero_cpu_offload(self) -> bool:
        """[local] Optimizer states rest in host memory."""
        return bool(self._value("zero_optimization.offload_optimizer.device") == "cpu")

    def zero_nvme_offload_optimizer(self) -> bool:
        """[local] Optimizer states rest in files."""
        return bool(self._value("zero_optimization.offload_optimizer.device") == "nvme")

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """[local] Of parameters, and of accumulated gradients."""
        model = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        names = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        return model, names.get(self._value("data_types.grad_accum_dtype"), model)

    def dynamic_loss_scale(self) -> bool:
        """[local] fp16 with a scale that moves."""
        return bool(self.fp16_enabled() and self.loss_scale() == 0)

    def loss_scale(self) -> float:
        """[local] The configuration's fixed scale; 0: dynamic."""
        return float(self._value("fp16.loss_scale"))

    def initial_dynamic_scale(self) -> int:
        """[local] The first dynamic scale."""
        return int(2 ** self._value("fp16.initial_scale_power"))

    def postscale_gradients(self) -> bool:
        """[local] Gradients are divided after the reduction."""
        return not self._value("prescale_gradients")

    def optimizer_name(self) -> str | None:
        """[local] The block optimizer's type; the class of the program's optimizer."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        return self.config.get("optimizer", {}).get("type")  # type: ignore[no-any-return]

    def optimizer_params(self) -> dict[str, Any] | None:
        """[local] The block optimizer's params."""
        return self.config.get("optimizer", {}).get("params")  # type: ignore[no-any-return]

    def scheduler_name(self) -> str | None:
        """[local] The block scheduler's type."""
        return self.config.get("scheduler", {}).get("type")  # type: ignore[no-any-return]

    def scheduler_params(self) -> dict[str, Any] | None:
        """[local] The block scheduler's params."""
        return self.config.get("scheduler", {}).get("params")  # type: ignore[no-any-return]

    def get_data_parallel_rank(self) -> int:
        """[local] This rank's coordinate among the data-parallel ranks."""
        return self._engine.mesh.rank("dp")

    @property
    def seq_parallel_group(self) -> ProcessGroup:
        """[local] The sequence-parallel ranks as a group of torch. AttributeError without such ranks."""
        group: ProcessGroup = self._sequence_group()
        return group

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """[local] The same."""
        return self.seq_parallel_group

    def get_model_parallel_rank(self) -> int:
        """[local] This rank's coordinate among the tensor-parallel ranks."""
        return self._engine.mesh.rank("tp")

    get_tensor_parallel_rank = get_model_parallel_rank

    @property
    def dp_world_size(self) -> int:
        """[local] The number of data-parallel ranks."""
        return self._engine.mesh.size("dp")

    def _value(self, key: str) -> Any:
        return json.loads(self._effective[key])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        if name in _VALUES and "_effective" in self.__dict__:
            value = self._value(_VALUES[name])
            return lambda: value
        text = refusal("DeepSpeedEngine", name)
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and "is not a name" in text and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(text)

    # ---- data ----
    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """[local] Batches of this rank. route "eval" or "predict": in order, not shuffled."""
        if not isinstance(dataset, IterableDataset) and not (hasattr(dataset, "__getitem__")):
            raise ValueError(f"training_data: got {type(dataset).__name__}, expected a torch Dataset")
        if data_sampler is None and route in ("eval", "predict"):
            data_sampler = DistributedSampler(
                dataset, num_replicas=self.dp_world_size, rank=self.get_data_parallel_rank(), shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            pin_memory=pin_memory and self.device.type == "cuda",
            world_size=self.dp_world_size,
            rank=self.get_data_parallel_rank(),
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            dataloader_drop_last=self.dataloader_drop_last(),
        )

    # ---- weights ----
    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, torch.Tensor]:
        """The module's state dict: whole parameters below stage 3; at stage 3 they are sharded ([local]).

        ConfigError with tensor parallelism, where the module has parts of its parameters, and for a layer whose experts
        are divided over ranks.
        """
        if self._engine._cut_parameters() or self._engine._divided:
            kind = "tensor parallelism" if self._engine._cut_parameters() else "experts divided over ranks"
            raise ConfigError(
                f"[deepspeed] module_state_dict: got a model with {kind}, of which this rank has parts. "
                "Hint: save_16bit_model(), or convert_zero_checkpoint_to_fp32_state_dict() after save_checkpoint()."
            )
        state: dict[str, torch.Tensor] = self._engine._original.state_dict(prefix=prefix, keep_vars=keep_vars)
        if destination is not None:
            destination.update(state)
            state = destination
        return self._without_frozen(state, prefix) if exclude_frozen_parameters else state

    def _without_frozen(self, state: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
        named = self._engine._original.named_parameters(remove_duplicate=False)
        frozen = {prefix + name for name, p in named if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> None:
        """[collective] Loads rank 0's checkpoint["module"] into the module and the masters."""
        state = checkpoint["module"]
        cut, divided = self._engine._cut_parameters(), self._engine._divided
        if cut or divided:
            self._expect_loadable(cut, custom_load_fn)
        original = self._engine._original
        taken = self._with_parts(state, cut) if cut else state
        with self._engine.gathered_parameters(modify=True), torch.no_grad():
            if custom_load_fn is not None:
                custom_load_fn(src=state, dst=original)
            elif divided:
                self._load_but(divided, taken, strict)
            else:
                original.load_state_dict(taken, strict=strict)
        for name in [*cut, *sorted(divided)]:
            if name in state:
                self._engine.set_parameter_state(name, "master", state[name])

    def _load_but(self, names: set[str], state: Mapping[str, Any], strict: bool) -> None:
        """[local] Loads what is not of `names`. RuntimeError as of torch where strict keys do not match."""
        rest = {name: value for name, value in state.items() if name not in names}
        result = self._engine._original.load_state_dict(rest, strict=False)
        missing = [name for name in result.missing_keys if name not in state]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"[deepspeed] load_module_state_dict: missing keys {missing}, unexpected keys {result.unexpected_keys}"
            )

    def _with_parts(self, state: Mapping[str, Any], cut: Mapping[str, torch.Size]) -> dict[str, Any]:
        """[local] The state dict with the module's own parts of the parameters that are cut."""
        original = self._engine._original
        parts = {id(p) for name, p in original.named_parameters() if name in cut}
        own = {name: p for name, p in original.state_dict(keep_vars=True).items() if id(p) in parts}
        return {name: own[name].detach() if name in own else value for name, value in state.items()}

    def _expect_loadable(self, cut: Mapping[str, torch.Size], custom_load_fn: Callable[..., None] | None) -> None:
        """ConfigError for what cannot be loaded into parts."""
        if custom_load_fn is not None:
            raise ConfigError(
                "[deepspeed] load_module_state_dict: got custom_load_fn with tensor parallelism or experts divided "
                "over ranks, where the module has parts of its parameters, expected none. Hint: leave it out."
            )
        frozen = [name for name, p in self._engine._original.named_parameters() if name in cut and not p.requires_grad]
        if frozen:
            raise ConfigError(
                f"[deepspeed] load_module_state_dict: {frozen[0]} is frozen and cut by tensor parallelism, and its "
                "whole value cannot be set. Hint: load the weights into the model before deepspeed.initialize()."
            )

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """[collective] Whole parameters in the compute dtype and buffers on rank 0, in host memory; None elsewhere.

        Takes memory for the whole model on every rank while it runs.
        """
        state = self._engine._whole_state("cpu", everywhere=False)
        return self._without_frozen(state) if state is not None and exclude_frozen_parameters else state

    # accelerate takes this one with tensor parallelism.
    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """[collective] Rank 0 writes whole parameters in the compute dtype, and buffers, with torch.save.

        False, and nothing is written, at stage 3 unless stage3_gather_16bit_weights_on_model_save is true.
        """
        path = Path(save_dir) / save_filename
        if self.zero_optimization_partition_weights() and not self.zero_gather_16bit_weights_on_model_save():
            logger.info("%s was not saved: stage3_gather_16bit_weights_on_model_save is false", path)
            return False
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
        self._engine.comm.barrier()
        return True

    save_fp16_model = save_16bit_model

    # ---- checkpoints ----
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """[collective] Writes SAVE_DIR/TAG in libzero's format (docs/checkpoints.md); tag: "global_stepN" if not given.

        client_state: rank 0's is saved; tensors, numbers, text, arrays of numpy, lists, tuples, dicts and
        argparse.Namespaces of them. TypeError for other objects. save_latest: a load without a tag takes this one.
        exclude_frozen_parameters: without them, and load_checkpoint() leaves the model's as they are. False: with
        libzero.save_errors "warn" it has failed. Of a save in the background (checkpoint.writer.decoupled) True says
        that it has begun. zero_to_fp32.py in SAVE_DIR writes a checkpoint's weights in fp32.
        """
        state = {
            "client_state": dict(client_state or {}),
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "groups": self.optimizer.kept() if self.optimizer else [],
            "rates": [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else [],
            "lr_scheduler": self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None,
        }
        latest = Path(save_dir) / "latest"
        before = latest.read_bytes() if not save_latest and latest.is_file() else None
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        if self.optimizer is not None:
            self.optimizer.push()
        without = exclude_frozen_parameters and bool(self._frozen())
        texts = {"deepspeed": encoded(state, "client_state"), **({"without_frozen": True} if without else {})}
        with asserted():  # tags of ranks that differ
            self._engine.save_checkpoint(save_dir, name, user_state=texts, exclude_frozen_parameters=without)
        saved = True
        if not save_latest:
            saved = self._engine.finish_checkpoint() != ""  # the tag of rank 0, if ranks passed several
        if not save_latest and saved and self.global_rank == 0:
            if before is None:
                latest.unlink()
            else:
                latest.write_bytes(before)
        if saved and self.global_rank == 0:
            write_script(save_dir)
        self._engine.comm.barrier()
        return saved

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """[collective] Loads LOAD_DIR/TAG, without a tag the one in LOAD_DIR/latest; returns its path and client_state.

        With checkpoint.load_universal the file is latest_universal, which deepspeed.checkpoint.ds_to_universal writes.
        (None, None) where it is not there. IoError for a checkpoint that is missing or damaged.
        load_module_only: weights and buffers, no counters, rates and moments. load_optimizer_states=False: no moments;
        masters are the weights. custom_load_fn(src=state_dict, dst=module) loads the weights; it needs one of these.
        """
        latest = "latest_universal" if self.load_universal_checkpoint() else "latest"
        taken = str(tag) if tag is not None else latest_tag(load_dir, latest)
        if taken is None:
            logger.warning("cannot find the latest checkpoint: %s is not there", Path(load_dir) / latest)
            return None, None
        whole = load_optimizer_states and not load_module_only
        if whole and custom_load_fn is not None:
            raise NotImplementedError(
                "cannot load optimizer states with a custom_load_fn. Hint: load_module_only=True."
            )
        if whole:
            self._engine.load_checkpoint(load_dir, taken, partial=_left_out(load_dir, taken, self._frozen()))
            text = self._engine.user_state
        else:
            path, manifest = read_manifest(load_dir, taken)
            weights = read_tensors(path, manifest, ("master", "param", "buffer"))
            carried = Carried.read(manifest["user_state"])
            weights.update(carried.extra_of(self.global_rank))
            self.load_module_state_dict({"module": weights}, load_module_strict, custom_load_fn)
            text = carried.user_state
        state: dict[str, Any] = decoded(text["deepspeed"]) if isinstance(text, dict) and "deepspeed" in text else {}
        if not load_module_only:
            for name, value in state.get("counters", {}).items():
                setattr(self, name, value)
            if self.optimizer is not None and whole:
                for group, rate in zip(self.optimizer.param_groups, state.get("rates", []), strict=False):
                    group["lr"] = rate
                self.optimizer.restore(state.get("groups", []))
                self.optimizer.pull()
            if isinstance(self.lr_scheduler, EngineSchedule):
                if whole:  # the engine has restored the place of its schedule
                    self.lr_scheduler.placed(state.get("lr_scheduler") or {})
            elif load_lr_scheduler_states and state.get("lr_scheduler") is not None and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        return str(Path(load_dir) / taken), state.get("client_state", {})

    def _frozen(self) -> list[str]:
        """[local] The names of parameters that are frozen or in no group of the optimizer, all those of tied ones."""
        named = self._engine._original.named_parameters(remove_duplicate=False)
        return [name for name, p in named if not p.requires_grad or id(p) in self._unlisted]

    def destroy(self) -> None:
        """[local] Lets go of the model; see libzero.Engine.close(), which completes a save in the background."""
        self._engine.close()
        self._engine._original.__dict__.pop(_HOLDER, None)


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def _left_out(folder: str | os.PathLike[str], tag: str, frozen: list[str]) -> list[str]:
    """Those of these parameters that a checkpoint saved with exclude_frozen_parameters has not."""
    if not frozen:
        return []
    _, manifest = read_manifest(folder, tag)
    state = json.loads(manifest["user_state"]) if manifest["user_state"] else None
    if not isinstance(state, dict) or state.get("without_frozen") is not True:
        return []
    stored = {tensor["name"] for tensor in manifest["tensors"]}
    return [name for name in frozen if name not in stored]


__getattr__ = module_getattr("deepspeed.runtime.engine")
