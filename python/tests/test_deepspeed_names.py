"""Small modules of DeepSpeed that programs call without an engine, with the results that DeepSpeed 0.19.8 gives."""

import argparse
import base64
import importlib.machinery
import itertools
import json
import math
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Programs, find_zero, under_the_runner

import libzero
import libzero.deepspeed as deepspeed
from libzero.deepspeed import DeepSpeedConfig, _names


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
        assert config.zero_enabled and config.zero_optimization_stage == 3 and config.zero_config.overlap_comm
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

    from libzero.deepspeed import runtime
    from libzero.deepspeed.runtime.config import get_gradient_clipping, get_log_level
    from libzero.deepspeed.runtime.config_utils import DeepSpeedConfigModel, get_scalar_param, pp_int
    from libzero.deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from libzero.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum

    class Mine(DeepSpeedConfigModel):
        new: int = 1
        old: str | None = Field(
            None,
            json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda text: int(text or 0)},
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
    clipped = {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 3}}}
    assert runtime.config.get_optimizer_gradient_clipping(clipped) == 3


def test_a_topology_has_ranks_in_row_major_order() -> None:
    from libzero.deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology

    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=2)
    assert grid.world_size() == 12 and grid.get_axis_names() == ["pipe", "data", "model"]
    for pipe, data, model in itertools.product(range(2), range(2), range(3)):
        rank = (pipe * 2 + data) * 3 + model
        assert grid.get_rank(pipe=pipe, data=data, model=model) == rank
        assert tuple(grid.get_coord(rank)) == (pipe, data, model) and grid.get_coord(rank).data == data
    assert grid.get_axis_comm_lists("data") == [[i, i + 3] for i in (0, 1, 2, 6, 7, 8)]
    assert grid.get_axis_comm_lists("none") == [] and grid.get_dim("none") == 0 and grid.get_dim("model") == 3
    assert grid.filter_match(pipe=1, data=0) == [6, 7, 8] and grid.get_axis_list("model", 1) == [1, 4, 7, 10]
    assert grid.get_rank_repr(4) == "model_01" and grid.get_rank_repr(7, omit_axes=[]) == "pipe_01-data_00-model_01"
    one = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert one.get_rank_repr(3, inner_sep=".", outer_sep="+") == "a.01+b.01"
    with pytest.raises(ValueError):
        one.get_rank(a=1)
    with pytest.raises(AssertionError):
        one.get_rank(a=2, b=0)
    with pytest.raises(ValueError):
        one.get_coord(4)


@pytest.mark.parametrize(("batches", "stages"), [(1, 1), (3, 1), (2, 3), (8, 3), (5, 4), (4, 4)])
def test_stages_of_a_pipeline_fit_together(batches: int, stages: int) -> None:
    """Every micro-batch passes each stage once each way, what is received was sent, and buffers are not overwritten."""
    from libzero.deepspeed.runtime.pipe import schedule

    every = [schedule.TrainSchedule(batches, stages, stage) for stage in range(stages)]
    times = [list(each) for each in every]
    assert {len(each) for each in times} == {2 * (batches + stages - 1)}
    for stage, (plan, steps) in enumerate(zip(every, times, strict=True)):
        held: dict[int, int] = {}
        forward = backward = 0
        for time, step in enumerate(steps):
            names = [each.name for each in step]
            for each in step:
                if each.name == "ForwardPass":
                    assert each.buffer_id not in held and time == 2 * forward + stage
                    held[each.buffer_id] = forward
                    forward += 1
                elif each.name == "BackwardPass":
                    assert held.pop(each.buffer_id) == backward and time == 2 * backward + 2 * stages - 1 - stage
                    backward += 1
            if stage + 1 < stages:  # the neighbour does the other half at the same time
                other = [each.name for each in times[stage + 1][time]]
                assert ("SendActivation" in names) == ("RecvActivation" in other)
                assert ("RecvGrad" in names) == ("SendGrad" in other)
            assert ("LoadMicroBatch" in names) == (stage in (0, stages - 1) and "ForwardPass" in names)
        assert forward == backward == batches and len(held) == 0
        assert [each.name for each in steps[-1][-3:]] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        assert plan.num_pipe_buffers() == max(2, min(stages - stage, batches))
        only = list(schedule.InferenceSchedule(batches, stages, stage))
        assert [t for t, step in enumerate(only) if "ForwardPass" in [each.name for each in step]] == [
            stage + m for m in range(batches)
        ]
    assert repr(schedule.SendGrad(3)) == "SendGrad(buffer_id=3)"


def test_layers_are_described_and_pipelines_are_refused() -> None:
    from libzero.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    spec = LayerSpec(torch.nn.Linear, 2, 3, bias=False)
    assert repr(spec) == "Linear((2, 3), {'bias': False})"
    built = spec.build()
    assert isinstance(built, torch.nn.Linear) and built.bias is None and built.out_features == 3
    tied = TiedLayerSpec("embedding", torch.nn.Embedding, 4, 2, tied_weight_attr="weight")
    assert (tied.key, tied.tied_weight_attr, tied.forward_fn) == ("embedding", ["weight"], None)
    with pytest.raises(RuntimeError):
        LayerSpec(dict)  # type: ignore[arg-type]
    assert not isinstance(built, PipelineModule)
    with pytest.raises(NotImplementedError, match="PipelineModule is not built: there is no pipeline parallelism"):
        PipelineModule(layers=[spec], num_stages=2)


def test_parts_of_a_list_are_deepspeeds() -> None:
    """Recorded from DeepSpeed 0.19.8."""
    from libzero.deepspeed.runtime.utils import partition_balanced, partition_uniform, prefix_sum_inc

    uniform = {(10, 3): [0, 4, 7, 10], (4, 4): [0, 1, 2, 3, 4], (2, 4): [0, 1, 2, 2, 2], (11, 4): [0, 3, 6, 9, 11]}
    for (items, parts), found in uniform.items():
        assert partition_uniform(items, parts) == found
    balanced = {
        ((1.0,) * 8, 4): [0, 2, 4, 6, 8],
        ((0.0, 1.0, 2.0, 3.0, 3.0, 3.0), 4): [0, 3, 4, 5, 6],
        ((1.0, 2.0, 1.0), 2): [0, 2, 3],
        ((5, 1, 1, 1, 1, 5, 1, 1), 3): [0, 1, 5, 8],
        ((3, 9, 2, 2, 8, 1, 4, 4, 1, 6), 4): [0, 2, 5, 8, 10],
        ((2, 3), 4): [0, 1, 2, 2, 2],
    }
    for (weights, parts), found in balanced.items():
        assert partition_balanced(list(weights), parts) == found, (weights, parts)
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]


def test_functions_on_gradients_and_nested_tensors() -> None:
    from libzero.deepspeed import runtime
    from libzero.deepspeed.runtime.utils import CheckOverflow, call_to_str, get_global_norm, move_to_device

    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    for p in parameters:
        p.grad = torch.full_like(p, 2.0)
    check = CheckOverflow([parameters])
    assert check.check() is False and check.has_overflow_serial(parameters) is False
    assert parameters[1].grad is not None
    parameters[1].grad[0] = math.inf
    assert check.check() is True and check.has_overflow(parameters[:1]) is False
    assert get_global_norm([3.0, 4.0]) == 5.0 and get_global_norm([3.0, math.nan]) == math.inf
    assert get_global_norm([-1.0]) == math.inf
    assert call_to_str("f", 1, "a", k=2) == "f(1, 'a', k=2)" and call_to_str("f") == "f()"
    kept = torch.ones(2)
    moved = move_to_device({"a": [kept], "b": (torch.ones(1),)}, "cpu", lambda each: isinstance(each, torch.Tensor))
    assert moved["a"][0] is kept and isinstance(moved["b"], tuple)
    assert move_to_device([kept], "meta")[0].device.type == "meta" and kept.device.type == "cpu"
    assert runtime.utils.has_inf_or_nan(torch.tensor([1.0, math.nan])) and not runtime.utils.has_inf_or_nan(kept)
    assert runtime.utils.is_invalid_grad_norm(torch.tensor(-1.0)) and not runtime.utils.is_invalid_grad_norm(0.0)
    assert runtime.utils.get_tensor_bytes([kept, {"a": kept.double()}]) == 24


DIVIDED = """
import deepspeed
import torch
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.utils import PartitionedTensor, clip_grad_norm_

deepspeed.init_distributed()
rank = torch.distributed.get_rank()
for numbers in (torch.arange(12.0).view(3, 4), torch.arange(7.0)):
    part = PartitionedTensor(numbers, torch.distributed.group.WORLD)
    assert torch.equal(part.full(), numbers) and part.full_size() == list(numbers.shape)
    again = PartitionedTensor.from_meta(part.to_meta(), part.data(), torch.distributed.group.WORLD, "cpu")
    assert torch.equal(again.full(), numbers) and again.local_size() == part.local_size()
parts = reduce_scatter_coalesced([torch.arange(4.0).view(2, 2) * (1 + rank), torch.arange(5.0) + rank, torch.ones(1)])
expected = [[0.0, 1.5], [0.5, 1.5, 2.5], [1.0]] if rank == 0 else [[3.0, 4.5], [3.5, 4.5], []]
assert [part.tolist() for part in parts] == expected
weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.tensor([3.0, 4.0]) * (1 + rank)
norm = clip_grad_norm_([weight, torch.nn.Parameter(torch.zeros(1))], max_norm=1.5)
assert abs(norm.item() - 7.5) < 1e-5  # the mean of 5 and 10
torch.testing.assert_close(weight.grad, torch.tensor([3.0, 4.0]) * (1 + rank) * 1.5 / 7.5)
weight.grad = torch.tensor([1.0, 2.0])
assert abs(clip_grad_norm_(weight, 1.0, norm_type=float("inf")).item() - 2) < 1e-5

deepspeed.comm.configure(enabled=True)
deepspeed.comm.all_reduce(torch.ones(256), log_name="mine")
deepspeed.comm.all_reduce(torch.ones(256), log_name="mine")
deepspeed.comm.broadcast(torch.ones(3), 0)
deepspeed.comm.configure(enabled=False)
deepspeed.comm.all_reduce(torch.ones(2))
found = deepspeed.comm.log_summary(show_straggler=True, return_dict=True)
record = found["summary"]["mine"][1024]
assert record["count"] == 2 and record["msg_size_str"] == "1.0 KB" and record["total_latency_ms"] > 0
assert abs(record["tput_avg_gbps"] - 2 * record["busbw_avg_gbps"]) < 1e-6  # of two ranks
assert sorted(deepspeed.comm.get_logged_comm_ops()) == ["broadcast", "mine"]
assert found["straggler_analysis"]["broadcast"][12]["total_straggler_ms"] >= 0
assert found["metadata"]["world_size"] == 2 and deepspeed.comm.get_comm_operation_count() == 3
deepspeed.comm.reset_log()
assert not deepspeed.comm.has_comm_data()
"""


def test_tensors_are_divided_and_gradients_clipped_over_ranks(tmp_path: Path) -> None:
    program = tmp_path / "divided.py"
    program.write_text(DIVIDED)
    under_the_runner(tmp_path, str(program))


def test_hosts_are_read_and_filtered_as_by_deepspeeds_launcher(tmp_path: Path) -> None:
    from libzero.deepspeed.launcher import runner

    lines = ["# hosts", "", "worker-0 slots=2", "  worker-1 slots=4  "]
    assert list(runner._parse_hostfile(lines).items()) == [("worker-0", 2), ("worker-1", 4)]
    for wrong in (["worker-0 slots=2", "worker-0 slots=3"], ["worker-0"], ["worker-0 slots=x"], ["# none"], []):
        with pytest.raises(ValueError):
            runner._parse_hostfile(wrong)
    file = tmp_path / "hostfile"
    file.write_text("\n".join(lines))
    pool = runner.fetch_hostfile(str(file))
    assert pool is not None and pool["worker-1"] == 4 and runner.fetch_hostfile(str(tmp_path / "none")) is None
    hosts = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}
    included = {
        "worker-1:2": {"worker-1": [2]},
        "worker-1": {"worker-1": [0, 1, 2, 3]},
        "worker-0:1@worker-1:0,2": {"worker-0": [1], "worker-1": [0, 2]},
        "worker-1:1@worker-0": {"worker-0": [0, 1, 2, 3], "worker-1": [1]},
        "worker-1:3,0@worker-1:3": {"worker-1": [0, 3]},
    }
    for text, found in included.items():
        assert dict(runner.parse_resource_filter(hosts, include_str=text)) == found
    excluded = {
        "worker-1": {"worker-0": [0, 1, 2, 3]},
        "worker-1:0,1,2,3": {"worker-0": [0, 1, 2, 3]},
        "worker-0:0@worker-1:1,2": {"worker-0": [1, 2, 3], "worker-1": [0, 3]},
        "worker-0@worker-1": {},
    }
    for text, found in excluded.items():
        assert dict(runner.parse_resource_filter(hosts, exclude_str=text)) == found
    assert runner.parse_resource_filter(hosts) == hosts
    for wrong in ("jeff", "worker-0:9", "worker-1:4@worker-0"):
        with pytest.raises(ValueError):
            runner.parse_resource_filter(hosts, include_str=wrong)
    with pytest.raises(ValueError):
        runner.parse_resource_filter(hosts, include_str="worker-0", exclude_str="worker-1")
    assert dict(runner.parse_inclusion_exclusion(pool, "worker-1:1", "")) == {"worker-1": [1]}
    assert dict(runner.apply_num_nodes_and_gpus(hosts, 1, 2)) == {"worker-0": [0, 1]}
    assert json.loads(base64.urlsafe_b64decode(runner.encode_world_info(hosts))) == hosts
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    given = runner.parse_args(["--num_gpus", "2", "-i", "a@b", "train.py", "--lr", "0.1"])
    assert (given.num_gpus, given.include, given.user_script) == (2, "a@b", "train.py")
    assert given.user_args == ["--lr", "0.1"] and given.master_port == 29500 and given.launcher == "pdsh"


def test_the_command_deepspeed_is_written_where_one_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from libzero.deepspeed import shim

    started: list[list[str]] = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        started.append(command[1:])
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setenv("ZERO_PROGRAM", "/bin/zero")
    shim.main([str(tmp_path)])
    written = tmp_path / "deepspeed"
    assert capsys.readouterr().out == f"{written}\n" and written.stat().st_mode & 0o111 == 0o111
    shim.main([str(tmp_path)])  # its own file is written again
    monkeypatch.setattr("sys.argv", ["deepspeed", "--num_gpus=2", "train.py", "--lr", "1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(written), run_name="__main__")
    assert started == [["run", "--deepspeed", "--num_gpus=2", "train.py", "--lr", "1"]]
    written.write_text("#!/bin/sh\n")
    for wrong in ([str(tmp_path)], [], [str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as end:
            shim.main(wrong)
        assert end.value.code == 2
    assert written.read_text() == "#!/bin/sh\n"


def test_a_package_of_the_name_is_written_where_one_asks_for_it(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process that no runner of libzero has started, frameworks find the package, its version and its modules."""
    from libzero.deepspeed import shim

    folder = tmp_path / "packages"
    folder.mkdir()
    for _ in range(2):  # its own files are written again
        shim.main(["--package", str(folder)])
        seen = capsys.readouterr()
        assert seen.out == f"{folder / 'deepspeed'}\n" and "is not in PYTHONPATH" in seen.err
    shown = programs.run(f"""
        sys.path.insert(0, {str(folder)!r})
        import importlib.metadata, importlib.util
        assert importlib.util.find_spec("deepspeed") and "deepspeed" not in sys.modules
        assert "deepspeed" in importlib.metadata.packages_distributions()["deepspeed"]
        import deepspeed.comm as comm
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        import deepspeed, libzero.deepspeed
        assert deepspeed is libzero.deepspeed and comm is libzero.deepspeed.comm
        assert sys.modules["deepspeed.runtime"] is libzero.deepspeed.runtime
        print(importlib.metadata.version("deepspeed"), deepspeed.__version__)
    """)
    assert shown.split() == [_names.VERSION] * 2
    recorded = next(folder.glob("*.dist-info")).joinpath("RECORD").read_text().split(",,\n")
    assert sorted(recorded[:-1]) == sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    )
    with pytest.raises(SystemExit):
        shim.main([str(folder)])  # the command would have the package's place
    assert f"{folder / 'deepspeed'} is there, and is not of libzero" in capsys.readouterr().err
    (folder / "deepspeed" / "__init__.py").write_text("theirs = 1\n")
    with pytest.raises(SystemExit) as end:
        shim.main(["--package", str(folder)])
    assert end.value.code == 2 and (folder / "deepspeed" / "__init__.py").read_text() == "theirs = 1\n"


def test_monitors_write_what_the_engine_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from libzero.deepspeed.monitor.comet import CometMonitor
    from libzero.deepspeed.monitor.config import CometConfig, DeepSpeedMonitorConfig, WandbConfig, get_monitor_config
    from libzero.deepspeed.monitor.csv_monitor import csvMonitor
    from libzero.deepspeed.monitor.monitor import MonitorMaster
    from libzero.deepspeed.monitor.tensorboard import TensorBoardMonitor
    from libzero.deepspeed.monitor.wandb import WandbMonitor

    blocks = {name: {"enabled": True, "output_path": str(tmp_path), "job_name": name}
              for name in ("csv_monitor", "tensorboard")}  # fmt: skip
    config = DeepSpeedConfig({"train_batch_size": 1, **blocks}).monitor_config
    assert config.enabled and not DeepSpeedMonitorConfig().enabled
    monitor = csvMonitor(config.csv_monitor)
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (True, str(tmp_path), "csv_monitor")
    monitor.write_events([("Train/Samples/my lr", 0.5, 8), ("Train/Samples/my lr", 0.25, 16)])
    MonitorMaster(config).write_events([("a/b", 2.0, 3)])
    TensorBoardMonitor(config.tensorboard).write_events([("a/b", torch.tensor(1.0), 3)])
    rows = (tmp_path / "csv_monitor" / "Train_Samples_my_lr.csv").read_text().split("\n")
    assert [row.strip() for row in rows[:3]] == ["step,my lr", "8,0.5", "16,0.25"]
    assert len(list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))) >= 1
    assert not csvMonitor(DeepSpeedMonitorConfig().csv_monitor).enabled

    seen: list[Any] = []
    wandb: Any = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", importlib.machinery.BuiltinImporter, origin="here")
    wandb.init = lambda **named: seen.append(named)
    wandb.log = lambda data, step=None, commit=None: seen.append((data, step))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    WandbMonitor(WandbConfig(enabled=True, group="g", team="t", project="p")).write_events([("lr", 0.1, 4)])
    assert seen == [{"project": "p", "group": "g", "entity": "t"}, ({"lr": 0.1}, 4)]
    seen.clear()
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(2, 1),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "log_level": "error",
                "comms_logger": {"enabled": True, "prof_ops": ["reduce"]},
                "wandb": {"enabled": True, "project": "mine"}},
    )  # fmt: skip
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert seen == [{"project": "mine", "group": None, "entity": None}, ({"Train/Samples/lr": 0.5}, 1)]
    assert deepspeed.comm.comms_logger.enabled and deepspeed.comm.comms_logger.prof_ops == ["reduce"]
    deepspeed.comm.configure(enabled=False, prof_ops=[])
    assert engine.log_level() == "error" and engine.tput_timer.batch_size == 1
    assert engine.tput_timer.avg_samples_per_sec() == -math.inf

    class Experiment:
        def set_name(self, name: str) -> None:
            seen.append(name)

        def __internal_api__log_metric__(self, **named: Any) -> None:
            seen.append(tuple(named.values()))

    comet: Any = types.ModuleType("comet_ml")
    comet.__version__ = "3.41.0"
    comet.__spec__ = importlib.machinery.ModuleSpec("comet_ml", importlib.machinery.BuiltinImporter, origin="here")
    comet.start = lambda **named: Experiment()
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    seen.clear()
    sent = CometMonitor(CometConfig(enabled=True, samples_log_interval=10, experiment_name="x"))
    sent.write_events([("lr", 0.1, 0), ("lr", 0.2, 9), ("loss", 1.0, 9), ("lr", 0.3, 10)])
    assert seen == ["x", ("lr", 0.1, 0), ("loss", 1.0, 9), ("lr", 0.3, 10)]
    assert get_monitor_config({"comet": {"enabled": True}}).enabled
    comet.__version__ = "3.40.9"
    with pytest.raises(ImportError, match="got comet_ml 3.40.9, expected 3.41.0 or newer"):
        CometMonitor(CometConfig(enabled=True))


@pytest.mark.parametrize("block", ["wandb", "comet"])
def test_a_service_without_its_package_is_an_error(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank, as the program would train without its metrics; a folder of runs of the name is no package."""
    from libzero.deepspeed.monitor import utils

    package = {"wandb": "wandb", "comet": "comet_ml"}[block]
    for place in sys.path:
        if place and (Path(place) / package / "__init__.py").is_file():
            pytest.skip(f"{package} is installed")
    (tmp_path / package).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = f"{block}.enabled: got true, and the package {package} is not installed. Hint: pip install"
    with pytest.raises(ImportError, match=re.escape(expected)):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), config={"train_batch_size": 1, block: {"enabled": True}})
    with pytest.raises(ImportError, match="not installed"):
        {"wandb": utils.check_wandb_availability, "comet": utils.check_comet_availability}[block]()
    utils.check_tb_availability()
    deepspeed.initialize(model=torch.nn.Linear(2, 1), config={"train_batch_size": 1, block: {"enabled": False}})


def test_clocks_and_the_log_of_collectives_count() -> None:
    from libzero.deepspeed.utils.comms_logging import CommsLogger, calc_bw_log, convert_size
    from libzero.deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean

    assert trim_mean([100, 1, 2, 3, 4, 5, 6, 7, 8, -50], 0.1) == 4.5 and trim_mean([], 0.1) == 0
    timers = SynchronizedWallClockTimer()
    timers("a").start()
    with pytest.raises(AssertionError):
        timers("a").start()
    timers("a").stop()
    with pytest.raises(AssertionError):
        timers("a").stop()
    assert timers("a").elapsed() > 0 and timers("a").elapsed() == 0 and list(timers.get_timers()) == ["a"]
    timers.log(["a", "none"])
    assert NoopTimer()("a").elapsed() == 0
    clock = ThroughputTimer(types.SimpleNamespace(enabled=True, synchronized=False), 4, start_step=1)
    for _ in range(3):
        clock.start()
        clock.stop(global_step=True)
    assert clock.global_step_count == 3 and clock.avg_samples_per_sec() > 0
    clock.update_epoch_count()
    assert (clock.epoch_count, clock.micro_step_count) == (1, 0)
    assert convert_size(0) == "0B" and convert_size(1536) == "1.5 KB"
    assert calc_bw_log("broadcast", 1000, 2.0) == (0.004, 0.004)
    log = CommsLogger()
    log.append("broadcast", "b", 1.0, 1000)
    log.append("broadcast", "b", 3.0, 1000)
    log.append("broadcast", "b", 3.0, 8)
    summary = log.get_operation_summary("b")
    assert summary is not None and summary[1000]["count"] == 2 and summary[1000]["avg_latency_ms"] == 2.0
    assert log.get_total_operations() == 3 and log.has_data() and log.get_operation_summary("none") is None
    log.start_profiling_op(["x", "y"])
    log.stop_profiling_op(["x"])
    assert log.prof_ops == ["y"]


def test_modules_are_marked_by_class_name_and_end_of_a_name() -> None:
    from libzero.deepspeed.utils import (
        get_z3_leaf_modules,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
    )

    class Block(torch.nn.Linear):
        pass

    class Special(Block):
        pass

    model = torch.nn.Sequential(Block(2, 2), torch.nn.Sequential(Special(2, 2), torch.nn.Linear(2, 2)))
    assert set(set_z3_leaf_modules(model, [Block])) == {model[0], model[1][0]} == set(get_z3_leaf_modules(model))
    assert set_z3_leaf_modules(model, ["Special"]) == [model[1][0]]
    assert set(unset_z3_leaf_modules(model, [torch.nn.Linear])) == {model[0], *model[1]}
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules_by_name(model, ["1.0", "0"]) == ([model[1][0], model[0]], [])
    assert set_z3_leaf_modules_by_name(model, ["0", "x"], flag=False, raise_if_not_found=False) == ([model[0]], ["x"])
    assert set_z3_leaf_modules_by_suffix(model, [".1", "1"]) == ([model[1][1], model[1]], [])
    for wrong in (
        lambda: set_z3_leaf_modules(model, [torch.nn.Conv2d]),
        lambda: set_z3_leaf_modules_by_name(model, ["x"]),
        lambda: set_z3_leaf_modules_by_suffix(model, ["x"]),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(AssertionError):
        set_z3_leaf_modules(model, [3])  # type: ignore[list-item]
    zero = {"stage": 3, "leaf_module": {"classes": "Special", "names": ["0"], "name_suffixes": ["none"]}}
    plain = torch.nn.Sequential(Block(2, 2), Special(2, 2), torch.nn.Linear(2, 2))
    engine, *_ = deepspeed.initialize(model=plain, config={"train_batch_size": 1, "zero_optimization": zero})
    assert get_z3_leaf_modules(engine.module) == [plain[0], plain[1]]


def routed(logits: torch.Tensor, k: int, capacity: int, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token the weights by expert and place, and how many tokens chose each expert; one token at a time."""
    gates = torch.softmax(logits, 1).tolist()
    tokens, experts = logits.shape
    chosen = [sorted(range(experts), key=lambda e, g=gate: -g[e])[:k] for gate in gates]
    kept: list[set[int]] = [set() for _ in range(experts)]
    for e in range(experts):
        mine = [t for t in range(tokens) if e in chosen[t]]
        if policy == "probs":
            mine.sort(key=lambda t: -gates[t][e])
        elif policy == "first choices":
            mine.sort(key=lambda t: chosen[t].index(e))
        kept[e] = set(mine[:capacity])
    weights = torch.zeros(tokens, experts, capacity)
    for e in range(experts):
        order = sorted(kept[e])
        if policy == "first choices":
            order.sort(key=lambda t: chosen[t].index(e))
        for place, t in enumerate(order):
            total = sum(gates[t][other] for other in chosen[t] if t in kept[other]) if k > 1 else 1.0
            weights[t, e, place] = gates[t][e] / total
    return weights, torch.tensor([sum(e in each for each in chosen) for e in range(experts)])


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_gates_route_tokens_as_one_token_at_a_time(factor: float) -> None:
    from libzero.deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating

    torch.manual_seed(3)
    logits = 2 * torch.randn(12, 4)
    mean = torch.softmax(logits, 1).mean(0)
    found = {
        (1, "position"): top1gating(logits, factor, 0, use_rts=False),
        (2, "first choices"): top2gating(logits, factor, 0, top2_2nd_expert_sampling=False),
        (3, "probs"): topkgating(logits, 3, factor, 0),
        (3, "position"): topkgating(logits, 3, factor, 0, drop_policy="position"),
    }
    for (k, policy), (l_aux, weights, mask, counts) in found.items():
        capacity = math.ceil(12 / 4 * factor * k)
        expected, chosen = routed(logits, k, capacity, policy)
        if k == 1:  # which of equal tokens are dropped is torch's choice
            assert weights.shape == expected.shape and (weights.sum((0, 2)) > 0).tolist() == (chosen > 0).tolist()
            assert [int(n) for n in mask.sum((0, 2))] == [min(int(n), capacity) for n in chosen]
        else:
            torch.testing.assert_close(weights, expected)
        assert torch.equal(mask, weights.bool()) and torch.equal(counts, chosen)
        shares = torch.nn.functional.one_hot(logits.argmax(1), 4).float().mean(0) if k < 3 else chosen / 12 / k
        torch.testing.assert_close(l_aux, 4 * (mean * shares).sum())
    _, weights, mask, counts = topkgating(logits, 2, 0.1, 0, drop_tokens=False)
    assert mask.sum() == 24 and weights.shape[2] == counts.max()
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(12))
    used = (torch.arange(12) % 2).float()
    _, weights, _, counts = top1gating(logits, 1.0, 0, used_token=used, drop_tokens=False)
    assert weights[::2].abs().sum() == 0 and counts.sum() == 6
    _, capacity, experts, chosen, places, gates, _ = top2gating(logits, factor, 0, sparse_routes=True)
    assert (int(capacity), experts, chosen.shape) == (math.ceil(6 * factor), 4, (2, 12))
    assert int(places.max()) < int(capacity) and gates[chosen < 0].abs().sum() == 0
    with pytest.raises(AssertionError):
        top1gating(logits, 1.0, 13)
    with pytest.raises(ValueError):
        topkgating(logits, 2, 1.0, 0, drop_policy="none")
    gate = TopKGate(3, 4, k=2, min_capacity=0, top2_2nd_expert_sampling=False)
    tokens = torch.randn(8, 3)
    again = top2gating(tokens @ gate.wg.weight.T, 1.0, 0, top2_2nd_expert_sampling=False)
    torch.testing.assert_close(gate(tokens)[1], again[1])


RTS = [[1, 2, 0, 2, 0, 1, -1, -1]]
NOISY = [[2, 1, -1, 0, -1, 1, 1, 2]]
SAMPLED = [[1, 2, 0, 2, 0, 1, 0, 1], [2, 1, 1, 0, 1, 2, -1, 2]]


def test_draws_of_gates_are_deepspeeds() -> None:
    """Recorded from DeepSpeed 0.19.8: the tokens' experts (-1: dropped) after torch.manual_seed(5)."""
    from libzero.deepspeed.moe.sharded_moe import top1gating, top2gating

    logits = torch.tensor([[(3 * t + 5 * e) % 7 / 4 for e in range(3)] for t in range(8)])
    torch.manual_seed(5)
    assert top1gating(logits, 0.5, 1, sparse_routes=True)[3].tolist() == RTS
    torch.manual_seed(5)
    assert top1gating(logits, 1.0, 1, noisy_gate_policy="RSample", sparse_routes=True)[3].tolist() == NOISY
    torch.manual_seed(5)
    assert top2gating(logits, 1.0, 1, sparse_routes=True)[3].tolist() == SAMPLED


def test_experts_load_under_deepspeeds_names() -> None:
    from libzero.deepspeed.moe.layer import MoE

    layer = MoE(2, torch.nn.Linear(2, 2), num_experts=2)
    theirs = {
        "0.deepspeed_moe.gate.wg.weight": torch.full((2, 2), 5.0),
        **{f"0.deepspeed_moe.experts.deepspeed_experts.{n}.weight": torch.full((2, 2), float(n)) for n in range(2)},
        **{f"0.deepspeed_moe.experts.deepspeed_experts.{n}.bias": torch.full((2,), float(n)) for n in range(2)},
    }
    torch.nn.Sequential(layer).load_state_dict(theirs)
    assert layer.gate["wg"].weight.unique().tolist() == [5.0]
    assert [layer.experts[str(n)].weight.unique().tolist() for n in range(2)] == [[0.0], [1.0]]
    torch.nn.Sequential(layer).load_state_dict(torch.nn.Sequential(layer).state_dict())


def test_tools_of_checkpoints_work_on_those_of_libzero(tmp_path: Path) -> None:
    from libzero.deepspeed.checkpoint import ds_to_universal
    from libzero.deepspeed.checkpoint.utils import get_model_ckpt_name_for_rank, get_zero_ckpt_name_for_rank
    from libzero.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path, tag="one")
    weight = engine.module.weight.detach().clone()
    words = argparse.Namespace(input_folder=str(tmp_path / "one"), output_folder=str(tmp_path / "one_universal"))
    ds_to_universal.main(words)
    (tmp_path / "latest").unlink()
    again, *_ = deepspeed.initialize(
        model=torch.nn.Linear(2, 1), config={**config, "checkpoint": {"load_universal": True}}
    )
    path, _ = again.load_checkpoint(tmp_path)
    assert again.load_universal_checkpoint() and not engine.load_universal_checkpoint()
    assert path is not None and path.endswith("one_universal") and again.global_steps == 1
    assert torch.equal(again.module.weight, weight)
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path, "one_universal")["weight"], weight)
    (tmp_path / "other").mkdir()
    words.input_folder = str(tmp_path / "other")
    with pytest.raises(libzero.ConfigError, match="expected a checkpoint of libzero. Hint: `zero checkpoint import`"):
        ds_to_universal.main(words)
    assert get_model_ckpt_name_for_rank("d", "01") == "d/mp_rank_01_model_states.pt"
    assert get_zero_ckpt_name_for_rank("d", 3, 1) == "d/zero_pp_rank_3_mp_rank_01_optim_states.pt"


def test_a_checkpoints_grid_and_state_are_read(tmp_path: Path) -> None:
    """Of a folder of libzero, and of what it exports as DeepSpeed's universal checkpoint."""
    from libzero.deepspeed.checkpoint import DeepSpeedCheckpoint, get_model_3d_descriptor

    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    args = argparse.Namespace(lr=0.5)
    state = {"iteration": 7, "args": args, "checkpoint_info": {"v": 1}}
    engine.save_checkpoint(tmp_path, tag="one", client_state=state)
    folder, weight = tmp_path / "one", engine.module.weight.detach()
    found = DeepSpeedCheckpoint(folder)
    assert (found.get_iteration(), found.get_args(), found.get_checkpoint_info()) == (7, args, {"v": 1})
    assert (found.tp_degree, found.pp_degree, found.dp_degree, found.world_size, found.layer_count) == (1, 1, 1, 1, 0)
    assert not (found.is_change_tp_degree() or found.is_change_pp_degree() or found.is_change_dp_degree())
    assert torch.equal(found.get_2d_parallel_state(0, 0)["module"]["weight"], weight)
    found.validate_files()
    assert get_model_3d_descriptor(str(folder)).get_desc() == "PP,TP,DP = (1, 1, 1)"
    with pytest.raises(AttributeError, match="DeepSpeedCheckpoint.get_transformer_state is not built: .* Hint:"):
        found.get_transformer_state(0, 0)
    with pytest.raises(AssertionError):
        found.get_2d_parallel_state(1, 0)
    with pytest.raises(libzero.ConfigError, match="TP: got 2, expected 1 or less"):
        DeepSpeedCheckpoint(folder, tp_degree=2)
    program = find_zero()
    if program is not None:
        command = [program, "checkpoint", "export", str(folder), str(tmp_path / "all"), "--to", "universal"]
        assert subprocess.run(command, capture_output=True).returncode == 0
        (model,) = (tmp_path / "all").rglob("mp_rank_00_model_states.pt")
        whole = DeepSpeedCheckpoint(model.parent)
        whole.validate_files()
        assert torch.equal(whole.get_2d_parallel_state(0, 0)["module"]["weight"].reshape(1, 2), weight)
        assert get_model_3d_descriptor(model.parent).world_size() == 1

    grid = tmp_path / "theirs"
    grid.mkdir()
    for rank in range(2):
        (grid / f"mp_rank_0{rank}_model_states.pt").touch()
        for replica in range(4):
            (grid / f"zero_pp_rank_{replica}_mp_rank_0{rank}_optim_states.pt").touch()
    assert get_model_3d_descriptor(grid).get_desc() == "PP,TP,DP = (1, 2, 4)"
    with pytest.raises(libzero.ConfigError, match="expected a checkpoint of libzero, or a universal one. Hint:"):
        DeepSpeedCheckpoint(grid)
    with pytest.raises(FileNotFoundError):
        get_model_3d_descriptor(tmp_path / "none")


def test_files_of_a_checkpoint_that_converters_load_are_made_when_one_asks(
    tmp_path: Path, programs: Programs
) -> None:
    from libzero.deepspeed.utils import zero_to_fp32

    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
              "zero_optimization": {"stage": 2}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path, tag="one", client_state={"epoch": 3, "best": torch.ones(2)})
    before = sorted(path.name for path in (tmp_path / "one").iterdir())
    (states,) = zero_to_fp32.get_optim_files(tmp_path / "one")
    found = torch.load(states, weights_only=True)["optimizer_state_dict"]
    assert (found["zero_stage"], found["partition_count"]) == (2, 1)
    file = zero_to_fp32.get_model_state_file(str(tmp_path / "one"), 2)
    state = torch.load(file, weights_only=True)
    assert state["epoch"] == 3 and state["best"].tolist() == [1, 1] and "module" not in state
    assert (state["global_steps"], state["global_samples"], state["dp_world_size"]) == (1, 2, 1)
    assert [Path(each).name for each in zero_to_fp32.get_model_state_files(tmp_path / "one")] == [Path(file).name]
    assert before == sorted(path.name for path in (tmp_path / "one").iterdir())
    with pytest.raises(FileNotFoundError):
        zero_to_fp32.get_optim_files(tmp_path / "two")
    named = programs.run(f"""
        from libzero.deepspeed.utils import zero_to_fp32
        print(zero_to_fp32.get_model_state_file({str(tmp_path / "one")!r}, 2))
    """).strip()
    assert named.endswith("mp_rank_00_model_states.pt") and not Path(named).parents[1].exists()


def test_linear_layers_of_deepspeed_compute_and_refuse_what_is_not_built() -> None:
    from libzero.deepspeed.linear import LoRAConfig, OptimizedLinear, QuantizationConfig, init_lora
    from libzero.deepspeed.linear.optimized_linear import LoRAOptimizedLinear
    from libzero.deepspeed.runtime.zero.linear import LinearModuleForZeroStage3, zero3_linear_wrap
    from libzero.deepspeed.runtime.zero.tiling import TiledLinear

    plain = OptimizedLinear(4, 3, dtype=torch.float32)
    assert type(plain) is torch.nn.Linear and plain.bias is None
    layer = OptimizedLinear(4, 3, lora_config=LoRAConfig(lora_r=2, lora_alpha=6), dtype=torch.float32)
    assert isinstance(layer, LoRAOptimizedLinear)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == [
        "lora_weight_1.weight",
        "lora_weight_2.weight",
    ]
    x = torch.randn(5, 4)
    torch.testing.assert_close(layer(x), x @ layer.weight.T)
    torch.nn.init.normal_(layer.lora_weight_2.weight)
    adapted = layer.weight + 3 * layer.lora_weight_2.weight @ layer.lora_weight_1.weight
    torch.testing.assert_close(layer(x), x @ adapted.T)
    late = OptimizedLinear(4, 3, lora_config=LoRAConfig(delay_lora_init=True), dtype=torch.float32)
    with pytest.raises(AssertionError):
        late(x)
    init_lora(torch.nn.ModuleList([late]))
    assert late(x).shape == (5, 3) and late.lora_weight_1.weight.shape == (64, 4)
    named = torch.nn.ModuleDict({"other": OptimizedLinear(4, 3, lora_config=LoRAConfig(), dtype=torch.float32)})
    named.load_state_dict({"other.weight": torch.ones(3, 4)}, strict=False)
    torch.testing.assert_close(named["other"](x), x @ torch.ones(4, 3))
    with pytest.raises(NotImplementedError, match="quantized weights are not built. Hint: "):
        OptimizedLinear(4, 3, quantization_config=QuantizationConfig())
    with pytest.raises(NotImplementedError):
        OptimizedLinear(4, 3, lora_config=LoRAConfig(base_weight_sharding=2))
    with pytest.raises(ValueError):
        OptimizedLinear(4, 3, lora_config={"lora_r": 2})  # type: ignore[arg-type]
    tiled = TiledLinear(7, 5, in_splits=3, out_splits=2)
    assert (tiled.in_parts, tiled.out_parts) == ([0, 3, 5, 7], [0, 3, 5])
    torch.testing.assert_close(zero3_linear_wrap(x, plain.weight), plain(x))
    assert isinstance(LinearModuleForZeroStage3(4, 3), torch.nn.Linear)


def test_what_is_not_built_says_what_to_use() -> None:
    from libzero.deepspeed import init_inference, load_ds_config
    from libzero.deepspeed.module_inject.layers import LinearLayer
    from libzero.deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
    from libzero.deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
    from libzero.deepspeed.sequence import UlyssesSPViTAttention
    from libzero.deepspeed.sequence.fpdt_layer import FPDT_Attention, FPDT_FFN
    from libzero.deepspeed.utils.pin_memory_tracker import track_pinned_memory

    for name in (
        init_inference,
        load_ds_config,
        LinearLayer,
        CheckpointHiddenStatesOffload,
        SuperOffloadOptimizer_Stage3,
        UlyssesSPViTAttention,
        FPDT_Attention,
        track_pinned_memory,
    ):
        with pytest.raises(NotImplementedError, match=rf"\.{name.__name__} is not (built|meaningful here): ."):
            name(3, of="anything")
        assert not isinstance(3, name)
    with pytest.raises(AttributeError, match=r"^FPDT_FFN.apply: .*FPDT_FFN is not built: .* Hint: "):
        FPDT_FFN.apply()
    assert deepspeed.sequence.fpdt_layer is not None  # without an import of its own


def test_a_smaller_grid_reads_each_old_rank_once() -> None:
    """The two maps are recorded from DeepSpeed 0.19.8."""
    from libzero.deepspeed.checkpoint import model_3d_desc

    old = model_3d_desc(2, 2, 2)
    assert [grid.map for grid in old.reshape(model_3d_desc(1, 2, 1))] == [{"0,0": [0, 4, 2, 6], "0,1": [1, 5, 3, 7]}]
    assert [grid.map for grid in model_3d_desc(2, 2, 4).reshape(model_3d_desc(2, 1, 2))] == [
        {"0,0": [0, 4, 8, 12], "1,0": [2, 6, 10, 14]},
        {"0,0": [1, 5, 9, 13], "1,0": [3, 7, 11, 15]},
    ]
    everything = [rank for grid in model_3d_desc(4, 2, 2).reshape(model_3d_desc(2, 1, 2)) for rank in grid.get_data()]
    assert sorted(everything) == list(range(16))
    assert old.can_reshape(model_3d_desc(4, 2, 1))[0] is False and old.is_valid(1, 1, 1) == (True, [])
    assert old.is_valid(2, 0, 2)[0] is False and old.get_desc() == "PP,TP,DP = (2, 2, 2)" and old.world_size() == 8
    for larger in (model_3d_desc(2, 2, 4), model_3d_desc(2, 4, 2)):
        with pytest.raises(AssertionError):
            old.reshape(larger)
