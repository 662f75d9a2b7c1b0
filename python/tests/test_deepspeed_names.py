"""Small modules of DeepSpeed that programs call without an engine, with the results that DeepSpeed 0.19.8 gives."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import libzero
import libzero.deepspeed as deepspeed
from libzero.deepspeed import DeepSpeedConfig


class Ranks:
    """An mpu with so many data-parallel ranks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


def over(ranks: int, monkeypatch: pytest.MonkeyPatch, **config: Any) -> DeepSpeedConfig:
    monkeypatch.setattr(deepspeed.comm, "is_initialized", lambda: True)
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: ranks)
    return DeepSpeedConfig(config, mpu=Ranks(ranks))


@pytest.mark.parametrize(
    ("total", "micro", "steps", "found"),
    [
        (None, 2, None, (8, 2, 1)),
        (None, 2, 3, (24, 2, 3)),
        (32, None, None, (32, 8, 1)),
        (32, 2, None, (32, 2, 4)),
        (32, None, 2, (32, 4, 2)),
        (16, 2, 2, (16, 2, 2)),
    ],
)
def test_the_three_batch_sizes_make_each_other(
    total: int | None, micro: int | None, steps: int | None, found: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: value for name, value in zip(names, (total, micro, steps), strict=True) if value is not None}
    config = over(4, monkeypatch, **given)
    assert tuple(getattr(config, name) for name in names) == found and config.world_size == 4


def test_a_contradiction_is_an_assertion_and_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        {"train_batch_size": 18, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4},
        {"train_batch_size": 2},
        {"train_batch_size": 0},
        {"gradient_accumulation_steps": 2},
        {"train_batch_size": 4, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"train_batch_size": 4, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    ):
        with pytest.raises(AssertionError) as told:
            over(4, monkeypatch, **wrong)
        assert isinstance(told.value, libzero.ConfigError)
    for wrong in (
        {"gradient_allreduce_op": "max"},
        {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
        {"communication_data_type": "int8"},
        {"checkpoint": {"tag_validation": "maybe"}},
        {"fp16": {"enabled": True, "loss_scale": -1}},
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        {"zero_optimization": {"stage": 1, "no_such_key": 1}},
        {"zero_optimization": {"stage": 4}},
    ):
        with pytest.raises(ValueError):
            over(4, monkeypatch, train_batch_size=4, **wrong)


def test_a_configuration_is_read_from_each_form_and_has_deepspeeds_defaults(tmp_path: Path) -> None:
    given = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 2.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "stage3_max_live_parameters": 7},
        "csv_monitor": {"enabled": True, "output_path": "here"},
        "activation_checkpointing": {"partition_activations": True},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "checkpoint": {"tag_validation": "Fail"},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(given))
    for form in (given, str(file), base64.urlsafe_b64encode(json.dumps(given).encode()).decode()):
        config = DeepSpeedConfig(form)
        assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 1)
        assert (config.optimizer_name, config.optimizer_params["lr"]) == ("adamw", 0.1)
        assert (config.scheduler_name, config.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 3})
        assert config.zero_enabled and config.zero_optimization_stage == 3 and config.zero_config.overlap_comm is True
        assert config.zero_config.offload_optimizer.device == "cpu" and config.zero_config.offload_param is None
        assert config.zero_config.max_live_parameters == 7 and config.zero_config.sub_group_size == 1_000_000_000
        assert not config.bfloat16_config.enabled and config.bfloat16_config.check_grad_overflow
        assert config.float16_config.initial_dynamic_scale() == 65536
        assert config.monitor_config.enabled and config.monitor_config.csv_monitor.job_name == "DeepSpeedJobName"
        assert config.activation_checkpointing_config.partition_activations is True
        assert config.activation_checkpointing_config.number_checkpoints is None
        assert config.torch_autocast_enabled and config.torch_autocast_dtype is torch.bfloat16
        assert config.checkpoint_tag_validation_fail and config.gradient_clipping == 1.0 and config.log_level is None
        assert (config.gradient_predivide_factor, config.prescale_gradients, config.dump_state) == (1.0, False, False)
        assert config.pipeline["partition"] == "best" and config.flops_profiler_config.module_depth == -1
        config.print("configuration")
    with pytest.raises(ValueError, match="neither a file nor base64"):
        DeepSpeedConfig("no such file")


def test_models_of_a_configuration_know_old_names_and_refuse_unknown_ones() -> None:
    from pydantic import Field

    from libzero.deepspeed.runtime.config import get_gradient_clipping, get_log_level, get_optimizer_gradient_clipping
    from libzero.deepspeed.runtime.config_utils import DeepSpeedConfigModel, get_scalar_param, pp_int
    from libzero.deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from libzero.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum

    class Mine(DeepSpeedConfigModel):
        new: int = 1
        old: str | None = Field(
            None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda text: int(text or 0)}
        )

    assert Mine(old="7").new == 7 and Mine(new="auto").new == 1
    with pytest.raises(AssertionError, match="got old and new, expected one"):
        Mine(old="7", new=8)
    with pytest.raises(ValueError):
        Mine(other=3)
    assert DeepSpeedZeroConfig().overlap_comm is False and DeepSpeedZeroConfig(stage=3).stage == ZeroStageEnum.weights
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    assert DeepSpeedZeroConfig(leaf_module={"names": "a"}).leaf_module.names == ["a"]
    assert DeepSpeedZeroConfig(offload_param={"device": "nvme", "nvme_path": "/x"}).offload_param.device == "nvme"
    assert DeepSpeedBF16Config(enabled=1).enabled is True
    assert DeepSpeedFP16Config(initial_scale_power=4).dynamic_loss_scale_args()["init_scale"] == 16
    assert repr(pp_int(1e6)) == "1,000,000" and get_scalar_param({"a": 1}, "b", 2) == 2
    assert get_gradient_clipping({}) == 1.0 and get_log_level({"log_level": "debug"}) == "debug"
    assert get_optimizer_gradient_clipping({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 3}}}) == 3
