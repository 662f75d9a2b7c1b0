"""Blocks of a configuration as objects that programs read. They need the package pydantic, as in DeepSpeed.

They are for programs that check or show a configuration. The engine reads it with libzero.Options.
"""

from __future__ import annotations

import functools
import math
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from libzero.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from libzero.deepspeed.utils.logging import logger


class DeepSpeedConfigModel(BaseModel):
    """The base of all: unknown keys are errors, and "auto" is a key left out unless strict.

    A field with json_schema_extra={"deprecated": True, "new_param": "name"} sets the other one, through new_param_fn.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if value != "auto" or key == "replace_method"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            extra: Any = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, old: str, extra: dict[str, Any]) -> None:
        new = extra.get("new_param", "")
        use = f" Hint: {new}." if new else ""
        logger.warning(f"{old}: the key is deprecated. {extra.get('deprecated_msg', '')}{use}")
        if not new or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", lambda same: same)(getattr(self, old))
        delattr(self, old)
        *path, last = new.split(".")
        owner = functools.reduce(getattr, path, self)
        if last in owner.model_fields_set:
            raise AssertionError(f"got {old} and {new}, expected one: the first is the old name of the second")
        setattr(owner, last, value)


class pp_int(int):  # noqa: N801
    """An integer that is shown with commas, or as the text."""

    custom_print_str: str | None

    def __new__(cls, val: float, custom_print_str: str | None = None) -> pp_int:
        made = super().__new__(cls, val)
        made.custom_print_str = custom_print_str
        return made

    def __repr__(self) -> str:
        return self.custom_print_str or f"{self.real:,}"


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The block bf16."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The block fp16; loss_scale 0 is a dynamic scale."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _number(cls, value: Any, info: ValidationInfo) -> Any:
        try:
            usable = not isinstance(value, bool) and math.isfinite(float(value))
        except (TypeError, ValueError):
            usable = False
        if not usable or (info.field_name == "loss_scale" and float(value) < 0):
            raise ValueError(f"fp16.{info.field_name}: got {value!r}, expected a finite number, 0 or more")
        return value

    @model_validator(mode="after")
    def _dynamic(self) -> DeepSpeedFP16Config:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"fp16.{name}: got {getattr(self, name)}, expected 1 or more for a dynamic scale")
        return self

    def initial_dynamic_scale(self) -> int:
        """2 ** initial_scale_power"""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The numbers of a dynamic scale, by DeepSpeed's names."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class ZeroStageEnum(int, Enum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """The block zero_optimization.offload_param."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(pp_int(1e8), ge=0)
    max_in_cpu: int = Field(pp_int(1e9), ge=0)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """The block zero_optimization.offload_optimizer."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with updates."""
        return self.pipeline_read or self.pipeline_write


DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{family}.modeling_{family}.{name}SparseMoeBlock"
    for family, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """The block zero_optimization.leaf_module, which has no effect here."""

    classes: list[str] = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: list[str] = []
    name_suffixes: list[str] = []

    @field_validator("classes", "names", "name_suffixes", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return list(dict.fromkeys([value] if isinstance(value, str) else value))


def _old(new: str, block: type[DeepSpeedConfigModel] | None = None) -> Any:
    """A deprecated field: True is the block with states in host memory."""
    extra: dict[str, Any] = {"deprecated": True, "new_param": new, "set_new_param": block is not None}
    if block is not None:
        extra["new_param_fn"] = lambda value: block(device="cpu") if value else None
    return Field(None, json_schema_extra=extra)


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The block zero_optimization."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(pp_int(5e8), gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(pp_int(5e8), ge=0)
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: dict[str, Any] | None = None
    sub_group_size: int = Field(pp_int(1e9), ge=0)
    cpu_offload_param: bool | None = _old("offload_param", DeepSpeedZeroOffloadParamConfig)
    cpu_offload_use_pin_memory: bool | None = _old("offload_param or offload_optimizer")
    cpu_offload: bool | None = _old("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig)
    prefetch_bucket_size: int = Field(pp_int(5e7), ge=0, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(pp_int(1e5), ge=0, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(
        pp_int(sys.maxsize, "sys.maxsize"), ge=0, alias="stage3_model_persistence_threshold"
    )
    max_live_parameters: int = Field(pp_int(1e9), ge=0, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(pp_int(1e9), ge=0, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(pp_int(0), alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = Field(
        False, json_schema_extra={"deprecated": True, "new_param": "gather_16bit_weights_on_model_save"}
    )
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="after")
    def _consistent(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError("compute_grad_norm: got false, expected true unless stage is 1 or 2")
        if self.offload_optimizer and self.offload_optimizer.ratio < 1 and self.stage != ZeroStageEnum.weights:
            raise AssertionError(f"offload_optimizer.ratio: got a part at stage {int(self.stage)}, expected stage 3")
        return self


class TensorBoardConfig(DeepSpeedConfigModel):
    """The block tensorboard."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVConfig(TensorBoardConfig):
    """The block csv_monitor."""


class WandbConfig(DeepSpeedConfigModel):
    """The block wandb."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(DeepSpeedConfigModel):
    """The block comet."""

    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The blocks of all monitors."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)

    @property
    def enabled(self) -> bool:
        """Whether one is."""
        return any(getattr(self, name).enabled for name in ("tensorboard", "comet", "wandb", "csv_monitor"))


class CommsLoggerConfig(DeepSpeedConfigModel):
    """The block comms_logger."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = []
    verbose: bool = False
    debug: bool = False


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """The block timers.throughput."""

    enabled: bool = True
    synchronized: bool = True


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """[local] The blocks of monitors in a configuration."""
    names = DeepSpeedMonitorConfig.model_fields
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name, {}) for name in names})


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """[local] The block bf16, or bfloat16."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    """[local] The block fp16."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """[local] The block zero_optimization; its old form `true` is stage 1."""
    block = param_dict.get("zero_optimization", {})
    return DeepSpeedZeroConfig(**({"stage": int(block)} if isinstance(block, bool) else block))


def get_timers_config(param_dict: dict[str, Any]) -> DeepSpeedThroughputTimerConfig:
    """[local] The block timers.throughput."""
    return DeepSpeedThroughputTimerConfig(**param_dict.get("timers", {}).get("throughput", {}))


def get_scalar_param(param_dict: dict[str, Any], param_name: str, param_default_value: Any) -> Any:
    """[local] A key's value, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """[local] The dict of pairs. ValueError for a key that comes twice."""
    found = dict(ordered_pairs)
    if len(found) != len(ordered_pairs):
        keys = [key for key, _ in ordered_pairs]
        raise ValueError(f"got a key twice: {sorted({key for key in keys if keys.count(key) > 1})}")
    return found


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """[local] A field's default."""
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        raise AssertionError(f"{config.__name__}.{field_name}: got no field with a default of this name")
    return field.get_default()
