"""deepspeed.runtime.config.DeepSpeedConfig and get_*: a configuration as an object, for programs that check one.

Keys and defaults are DeepSpeed's constants. The engine does not read this; it reads the configuration itself.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from libzero.deepspeed import comm
from libzero.deepspeed._refuse import AssertedConfigError
from libzero.deepspeed.runtime import _models
from libzero.deepspeed.runtime.config import DeepSpeedConfigError, read_config
from libzero.deepspeed.utils.logging import logger

_constants = importlib.import_module("libzero.deepspeed.runtime.constants")

_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
}


def _scalar(key: str, default: Any = ...) -> Callable[[Mapping[str, Any]], Any]:
    """The function get_KEY: the value of a key at the top, or its default."""

    def get(param_dict: Mapping[str, Any]) -> Any:
        return param_dict.get(key, getattr(_constants, f"{key.upper()}_DEFAULT") if default is ... else default)

    get.__name__ = f"get_{key}"
    return get


get_train_batch_size = _scalar("train_batch_size")
get_train_micro_batch_size_per_gpu = _scalar("train_micro_batch_size_per_gpu")
get_gradient_accumulation_steps = _scalar("gradient_accumulation_steps")
get_managed_gradient_accumulation = _scalar("managed_gradient_accumulation")
get_steps_per_print = _scalar("steps_per_print")
get_dump_state = _scalar("dump_state")
get_disable_python_gc = _scalar("disable_python_gc")
get_disable_allgather = _scalar("disable_allgather")
get_prescale_gradients = _scalar("prescale_gradients")
get_gradient_predivide_factor = _scalar("gradient_predivide_factor")
get_gradient_clipping = _scalar("gradient_clipping")
get_wall_clock_breakdown = _scalar("wall_clock_breakdown")
get_memory_breakdown = _scalar("memory_breakdown")
get_dataloader_drop_last = _scalar("dataloader_drop_last")
get_log_level = _scalar("log_level")
get_zero_allow_untested_optimizer = _scalar("zero_allow_untested_optimizer")
get_zero_force_ds_cpu_optimizer = _scalar("zero_force_ds_cpu_optimizer")
get_expert_data_topo_config = _scalar("use_data_before_expert_parallelism", False)
get_checkpoint_params = _scalar("checkpoint", {})
get_data_types_params = _scalar("data_types", {})


def get_gradient_allreduce_op(param_dict: Mapping[str, Any]) -> str:
    """[local] "mean" or "sum"."""
    value = str(param_dict.get("gradient_allreduce_op", "mean")).lower()
    if value not in ("mean", "sum"):
        raise DeepSpeedConfigError(f'gradient_allreduce_op: got {value!r}, expected "mean" or "sum"')
    return value


def get_communication_data_type(
    param_dict: Mapping[str, Any], comm_type: str = "communication_data_type", comm_data_type_default: Any = None
) -> torch.dtype | None:
    """[local] The dtype of reductions; None: that of the gradients."""
    value = param_dict.get(comm_type, comm_data_type_default)
    if value is None:
        return None
    if str(value).lower() not in ("fp32", "fp16", "bf16"):
        raise DeepSpeedConfigError(f"{comm_type}: got {value!r}, expected fp32, fp16 or bf16")
    return _DTYPES[value.lower()]


def _part(block: str, name: str, default: Any = None) -> Callable[[Mapping[str, Any]], Any]:
    """The function that gets one key of a block, or None where there is no block."""
    return lambda param_dict: param_dict.get(block, {}).get(name, default)


get_optimizer_name = _part("optimizer", "type")
get_optimizer_params = _part("optimizer", "params")
get_optimizer_legacy_fusion = _part("optimizer", "legacy_fusion", False)
get_scheduler_name = _part("scheduler", "type")
get_scheduler_params = _part("scheduler", "params")
get_torch_autocast_enabled = _part("torch_autocast", "enabled", False)
get_lower_precision_safe_modules = _part("torch_autocast", "lower_precision_safe_modules")


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """[local] max_grad_norm of the optimizer's params."""
    return (get_optimizer_params(param_dict) or {}).get("max_grad_norm")


def get_torch_autocast_dtype(param_dict: Mapping[str, Any]) -> torch.dtype | None:
    """[local] torch_autocast.dtype"""
    name = _part("torch_autocast", "dtype")(param_dict)
    if name is not None and name not in _DTYPES:
        raise DeepSpeedConfigError(f"torch_autocast.dtype: got {name!r}, expected float16, bfloat16 or float32")
    return None if name is None else _DTYPES[name]


def get_pipeline_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """[local] The block pipeline over its defaults."""
    defaults = {"stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 0}
    return {**defaults, "pipe_partitioned": True, "grad_partitioned": True, **param_dict.get("pipeline", {})}


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """[local] WARN, IGNORE or FAIL."""
    mode = str(checkpoint_params.get("tag_validation", "WARN")).upper()
    if mode not in ("WARN", "IGNORE", "FAIL"):
        raise DeepSpeedConfigError(f"checkpoint.tag_validation: got {mode}, expected WARN, IGNORE or FAIL")
    return mode


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Mapping[str, Any]) -> bool:
    """[local] checkpoint.parallel_write.pipeline_stage"""
    value = checkpoint_params.get("parallel_write", {}).get("pipeline_stage", False)
    if value not in (True, False):
        raise DeepSpeedConfigError(f"checkpoint.parallel_write.pipeline_stage: got {value!r}, expected true or false")
    return bool(value)


def _block(module: str, prefix: str, param_dict: Mapping[str, Any]) -> SimpleNamespace:
    """A block whose keys and defaults are the constants PREFIX_KEY and PREFIX_KEY_DEFAULT of a module."""
    names = importlib.import_module("libzero.deepspeed._refuse").listed()[module].names
    constants = importlib.import_module(f"libzero.deepspeed.{module}")
    given = param_dict.get(getattr(constants, prefix), {})
    keys = [n for n in names if n.startswith(prefix + "_") and n.endswith("_DEFAULT")]
    return SimpleNamespace(
        **{
            key: given.get(key, getattr(constants, default))
            for default in keys
            for key in [getattr(constants, default.removesuffix("_DEFAULT"))]
        }
    )


class DeepSpeedConfig:
    """A configuration's values with DeepSpeed's defaults, and the three batch sizes that make each other.

    config: a dict, a path, or base64 text. mpu: an object whose get_data_parallel_world_size(), or whose
    get_sequence_parallel_world_size(), says over how many ranks samples are divided; without it all ranks, divided by
    sequence_parallel_size. A contradiction is a ConfigError that is also an AssertionError.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_allreduce_op: str

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict: dict[str, Any] = read_config(config)
        given = self._param_dict
        self.global_rank = comm.get_rank() if comm.is_initialized() else 0
        self.world_size = self._samples_over(mpu, mesh_device)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                     "managed_gradient_accumulation", "steps_per_print", "dump_state", "disable_python_gc",
                     "disable_allgather", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
                     "gradient_allreduce_op", "gradient_clipping", "torch_autocast_enabled", "torch_autocast_dtype",
                     "optimizer_params", "optimizer_legacy_fusion", "zero_allow_untested_optimizer",
                     "zero_force_ds_cpu_optimizer", "scheduler_name", "scheduler_params", "memory_breakdown",
                     "dataloader_drop_last", "log_level"):  # fmt: skip
            setattr(self, name, globals()[f"get_{name}"](given))
        self.seq_parallel_communication_data_type = get_communication_data_type(
            given, "seq_parallel_communication_data_type", "fp32"
        )
        self.torch_autocast_lower_precision_safe_modules = get_lower_precision_safe_modules(given)
        name = get_optimizer_name(given)
        ours = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
        self.optimizer_name = name.lower() if name is not None and name.lower() in ours else name
        self.zero_config = _models.get_zero_config(given)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = _models.get_float16_config(given)
        self.bfloat16_config = _models.get_bfloat16_config(given)
        self.monitor_config = _models.get_monitor_config(given)
        self.timers_config = _models.get_timers_config(given)
        self.comms_config = SimpleNamespace(comms_logger_enabled="comms_logger" in given)
        if self.comms_config.comms_logger_enabled:
            self.comms_config.comms_logger = _models.CommsLoggerConfig(**given["comms_logger"])
        self.activation_checkpointing_config = _block("runtime.activation_checkpointing.config", "ACT_CHKPT", given)
        self.flops_profiler_config = _block("profiling.constants", "FLOPS_PROFILER", given)
        self.wall_clock_breakdown = bool(get_wall_clock_breakdown(given) or self.flops_profiler_config.enabled)
        self.pipeline = get_pipeline_config(given)
        self.use_data_before_expert_parallel_ = get_expert_data_topo_config(given)
        self._read_checkpoint(get_checkpoint_params(given))
        types = get_data_types_params(given)
        self.grad_accum_dtype, self.param_dtype, self.buffer_dtype = (
            types.get(key) for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype")
        )
        self._set_batch_related_parameters()
        self._check()

    def _samples_over(self, mpu: Any, mesh_device: Any) -> int:
        if not comm.is_initialized():
            return 1
        ranks: int = comm.get_world_size()
        if hasattr(mpu, "get_data_parallel_world_size"):
            return int(mpu.get_data_parallel_world_size())
        if mpu is not None:
            return ranks // int(mpu.get_sequence_parallel_world_size())
        if mesh_device is not None:
            return int(comm.get_world_size(mesh_device.get_group(mesh_dim="data_parallel")))
        return ranks // int(self._param_dict.get("sequence_parallel_size", 1))

    def _read_checkpoint(self, block: Mapping[str, Any]) -> None:
        mode = get_checkpoint_tag_validation_mode(block)
        self.checkpoint_tag_validation_enabled = mode != "IGNORE"
        self.checkpoint_tag_validation_fail = mode == "FAIL"
        self.load_universal_checkpoint = block.get("load_universal", False)
        self.use_node_local_storage = block.get("use_node_local_storage", False)
        self.checkpoint_parallel_write_pipeline = get_checkpoint_parallel_write_pipeline(block)

    def _set_batch_related_parameters(self) -> None:
        """The numbers that are left out follow from the others: total = micro-batch x accumulation x ranks."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given: list[Any] = [getattr(self, name) for name in names]
        total, micro, steps = (None if each == "auto" else each for each in given)
        if total is None and micro is None:
            raise AssertedConfigError("got neither train_batch_size nor train_micro_batch_size_per_gpu, expected one")
        if steps is None:
            steps = 1 if total is None or micro is None else total // micro // self.world_size
        if micro is None:
            micro = int(total or 0) // self.world_size // steps
        if total is None:
            total = micro * steps * self.world_size
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = (
            total, micro, steps)  # fmt: skip
        if min(total, micro, steps) <= 0 or total != micro * steps * self.world_size:
            raise AssertedConfigError(
                f"train_batch_size: got {total}, expected train_micro_batch_size_per_gpu ({micro}) x "
                f"gradient_accumulation_steps ({steps}) x ranks ({self.world_size}), all above 0"
            )

    def _check(self) -> None:
        if self.float16_config.enabled and self.bfloat16_config.enabled:
            raise AssertedConfigError("got fp16 and bf16 enabled, expected one of them")
        if self.gradient_allreduce_op == "sum" and self.zero_optimization_stage == 3:
            raise DeepSpeedConfigError('gradient_allreduce_op: got "sum" at stage 3, expected "mean"')
        narrow = (
            self.float16_config.fp16_master_weights_and_grads,
            self.bfloat16_config.bf16_master_weights_and_grads,
            self.bfloat16_config.bf16_optimizer_states,
        )
        if any(narrow) and not self.zero_enabled:
            raise AssertedConfigError("got master weights or states in 16 bits without ZeRO, expected stage 1, 2 or 3")
        if narrow[2] and not narrow[1]:
            raise AssertedConfigError("bf16_optimizer_states: got true, expected bf16_master_weights_and_grads as well")

    def print_user_config(self) -> None:
        """[local] Logs what the program wrote."""
        logger.info(f"  json = {json.dumps(self._param_dict, sort_keys=True, indent=4, default=str)}")

    def print(self, name: str) -> None:
        """[local] Logs all values."""
        logger.info(f"{name}:")
        for key in sorted(vars(self)):
            if key != "_param_dict":
                logger.info(f"  {key} {'.' * (29 - len(key))} {getattr(self, key)}")
        self.print_user_config()


class DeepSpeedConfigWriter:
    """A configuration that is read, changed and written."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = data if data is not None else {}

    def add_config(self, key: str, value: Any) -> None:
        """Sets a key at the top."""
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        """Replaces it by a file's."""
        self.data = dict(read_config(filename))

    def write_config(self, filename: str) -> None:
        """Writes a file."""
        with open(filename, "w", encoding="utf-8") as file:
            json.dump(self.data, file)
