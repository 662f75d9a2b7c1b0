"""Cases of deepspeed_program.py: functions and classes that programs call with or without an engine."""

import argparse
import base64
import csv
import inspect
import json
import math
import os
import types

import deepspeed
import torch
from deepspeed.checkpoint import DeepSpeedCheckpoint, ds_to_universal, get_model_3d_descriptor, model_3d_desc
from deepspeed.git_version_info import git_branch, git_hash, installed_ops, version
from deepspeed.launcher import runner
from deepspeed.linear import LoRAConfig, OptimizedLinear, QuantizationConfig, init_lora
from deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating
from deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import lr_schedules
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig, get_gradient_clipping
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    comms_logging,
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    timer,
    unset_z3_leaf_modules,
    zero_to_fp32,
)
from deepspeed.utils.nvtx import instrument_w_nvtx
from deepspeed.utils.torch import required_torch_version
from deepspeed_program import HIDDEN, Numbers, SimpleModel, config, model, start
from deepspeed_program_loops import folder_of_rank_0, refused, run, sums


# ---- configurations ----
ATTRIBUTES = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params", "zero_enabled",
    "zero_optimization_stage", "zero_allow_untested_optimizer", "steps_per_print", "prescale_gradients",
    "gradient_predivide_factor", "dump_state", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last",
    "torch_autocast_enabled", "world_size", "checkpoint_tag_validation_enabled", "checkpoint_tag_validation_fail",
    "load_universal_checkpoint", "grad_accum_dtype", "disable_allgather", "log_level",
)  # fmt: skip
ZERO = (
    "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "max_live_parameters",
    "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold", "contiguous_gradients",
    "reduce_scatter", "round_robin_gradients", "ignore_unused_parameters", "gather_16bit_weights_on_model_save",
    "elastic_checkpoint", "zero_hpz_partition_size", "load_from_fp32_weights",
)  # fmt: skip
HJSON = """
{
  # of the program
  train_micro_batch_size_per_gpu: 4
  steps_per_print: 1000
  optimizer: {
    type: AdamW
    params: {lr: 1e-2, weight_decay: 0.1}
  }
  zero_optimization: {stage: 2, "overlap_comm": false}
  zero_allow_untested_optimizer: 1  // a number
}
"""


def configurations():
    """Attributes of DeepSpeedConfig, whatever form it reads, and what contradicts itself."""
    given = {
        **config(3, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}}, bf16={"enabled": True}),
        "gradient_accumulation_steps": 3,
        "csv_monitor": {"enabled": True, "output_path": "here", "job_name": "job"},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
        "checkpoint": {"tag_validation": "Fail"},
        "log_level": "error",
    }
    seen = {}
    with folder_of_rank_0() as folder:
        path = os.path.join(folder, f"config{deepspeed.comm.get_rank()}.json")
        with open(path, "w") as file:
            json.dump(given, file)
        text = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
        for name, form in {"dict": given, "file": path, "text": text}.items():
            read = DeepSpeedConfig(form)
            seen[name] = {attribute: getattr(read, attribute) for attribute in ATTRIBUTES}
        seen["zero"] = {attribute: getattr(read.zero_config, attribute) for attribute in ZERO}
        seen["blocks"] = [read.bfloat16_config.enabled, read.float16_config.enabled, read.monitor_config.enabled,
                          read.monitor_config.csv_monitor.job_name,
                          read.activation_checkpointing_config.number_checkpoints]  # fmt: skip
        with open(path, "w") as file:
            file.write(HJSON)
        read = DeepSpeedConfig(path)
        seen["hjson"] = [read.train_batch_size, read.optimizer_params, read.zero_allow_untested_optimizer,
                         read.zero_config.overlap_comm]  # fmt: skip
        arguments = argparse.Namespace(deepscale_config=path)
        for name, words in {"--deepscale_config": {"args": arguments}, "path": {"config": path}}.items():
            seen[name] = run(deepspeed.initialize(model=model(), **words)[0], 3)
    defaults = DeepSpeedZeroConfig(stage=1)
    seen["defaults"] = {attribute: getattr(defaults, attribute) for attribute in ZERO}
    seen["clipping"] = [get_gradient_clipping({}), get_gradient_clipping({"gradient_clipping": 2.0})]
    sizes = [
        {"train_batch_size": 18, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4},
        {"gradient_accumulation_steps": 2},
        {"train_batch_size": 0},
        {"train_batch_size": 4, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
    ]
    seen["assertions"] = [refused(AssertionError, DeepSpeedConfig, wrong) for wrong in sizes]
    values = [{"communication_data_type": "int8"}, {"zero_optimization": {"stage": 1, "no_such_key": 1}},
              {"fp16": {"enabled": True, "loss_scale": -1}}, {"zero_optimization": {"stage": 4}}]  # fmt: skip
    seen["values"] = [refused(ValueError, DeepSpeedConfig, {"train_batch_size": 4, **wrong}) for wrong in values]
    return seen


def loose_configurations():
    """1 for true, an AdamW that says adam_w_mode false, keys of an optimizer's block."""
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}}
    plain = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}}
    seen = {}
    for name, more in {
        "numbers": {"zero_allow_untested_optimizer": 1, "wall_clock_breakdown": 0},
        "AdamW": {"optimizer": adam},
        "Adam": {"optimizer": plain},
        "torch": {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}, "torch_adam": True}},
    }.items():
        seen[name] = run(start(1, **more), 3)
    return seen


# ---- schedules ----
def schedule_methods():
    """Over an optimizer that no engine owns."""

    def optimizer(kind=torch.optim.Adam):
        return kind([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.2)], lr=0.1)

    cosine = lr_schedules.WarmupCosineLR(optimizer(), 8, 0.1, 2)
    cycle = lr_schedules.OneCycle(optimizer(), 0.01, 0.2, cycle_first_step_size=3, cycle_second_step_size=5,
                                  cycle_min_mom=0.7, cycle_max_mom=0.95)  # fmt: skip
    stairs = lr_schedules.OneCycle(optimizer(), 0.01, [0.2, 0.3], cycle_first_step_size=4, cycle_first_stair_count=2)
    warm = lr_schedules.WarmupLR(optimizer(), 0.0, 0.3, 4, "linear")
    log = lr_schedules.WarmupDecayLR(optimizer(), 8, warmup_num_steps=4)
    still = lr_schedules.OneCycle(optimizer(torch.optim.SGD), 0.01, 0.2, cycle_first_step_size=3)
    seen = {
        "numbers": [cycle.min_lrs, cycle.max_lrs, cycle.step_ratio, cycle.total_size, warm.min_lrs, warm.max_lrs,
                    warm.warmup_num_steps, warm.warmup_type, log.warmup_type, log.total_num_steps],
        "no momentum": [still.cycle_momentum, still.get_mom()],
        "rows": [],
    }  # fmt: skip
    for place in [None, None, 3, 7, None, 1, 20]:
        for schedule in (cosine, cycle, stairs, warm, log):
            schedule.step(place)
        seen["rows"].append([
            cosine.get_lr_ratio(), cosine.get_lr(), [list(pair) for pair in cycle.get_mom()], cycle.get_lr(),
            stairs.get_lr(), warm.get_lr(), log.get_last_lr(), warm.state_dict()["last_batch_iteration"],
        ])  # fmt: skip
    warm.load_state_dict({"last_batch_iteration": 2})
    warm.step()
    seen["loaded"] = warm.get_last_lr()
    wrong = [
        lambda: lr_schedules.LRRangeTest(optimizer(), lr_range_test_step_size=0),
        lambda: lr_schedules.LRRangeTest(optimizer(), lr_range_test_min_lr=[0.1]),
        lambda: lr_schedules.OneCycle(optimizer(), 0.1, 0.2, cycle_first_step_size=-5),
        lambda: lr_schedules.OneCycle(optimizer(), [0.1], 0.2),
        lambda: lr_schedules.WarmupLR(optimizer(), warmup_max_lr=[0.1]),
    ]
    seen["refused"] = [refused(ValueError, call) for call in wrong]
    return seen


# ---- optimizers without an engine ----
def rules():
    seen = {}
    for name, make in {
        "CPUAdam": lambda groups: DeepSpeedCPUAdam(groups, lr=0.01, weight_decay=0.1),
        "CPUAdam, decay in the gradient": lambda groups: DeepSpeedCPUAdam(
            groups, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, adamw_mode=False
        ),
        "CPUAdam, no correction": lambda groups: DeepSpeedCPUAdam(groups, lr=0.01, bias_correction=False),
        "FusedAdam": lambda groups: FusedAdam(groups, lr=0.01, eps=1e-6, weight_decay=0.1),
        "FusedAdam, decay in the gradient": lambda groups: FusedAdam(
            groups, lr=0.01, weight_decay=0.1, adam_w_mode=False
        ),
    }.items():
        network = model()
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(network.linears, (0.01, 0.02))]
        optimizer = make(groups)
        generator = torch.Generator().manual_seed(7)
        losses = []
        for _ in range(4):
            x, y = torch.randn(4, HIDDEN, generator=generator), torch.randint(0, HIDDEN, (4,), generator=generator)
            loss = network(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = optimizer.state[network.linears[0].weight]
        seen[name] = [losses, sums(network), float(state["exp_avg"].sum()), float(state["exp_avg_sq"].sum())]
    return seen


# ---- functions ----
def functions():
    """Of runtime.utils."""
    norms = []
    for most, kind in ((1.5, 2), (0.5, float("inf")), (100.0, 2)):
        weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
        for p in weights:
            p.grad = torch.arange(1.0, 1 + p.numel()) * (1 + deepspeed.comm.get_rank())
        norm = float(runtime_utils.clip_grad_norm_(weights, max_norm=most, norm_type=kind))
        norms.append([norm, [p.grad.tolist() for p in weights]])
    check = runtime_utils.CheckOverflow([weights])
    overflows = [bool(check.check()), bool(check.has_overflow(weights))]
    weights[1].grad[0] = math.inf
    overflows += [bool(check.check()), bool(check.has_overflow(weights)), bool(check.has_overflow(weights[:1]))]
    tensors = [torch.arange(4.0), torch.ones(2, 2)]
    total = float(runtime_utils.get_global_norm_of_tensors(tensors))
    clipped = float(runtime_utils.clip_tensors_by_global_norm(tensors, max_norm=1.0))
    moved = runtime_utils.move_to_device({"a": [torch.ones(2)], "b": (torch.ones(1),)}, "cpu")
    weights = [5, 1, 1, 1, 1, 5, 1, 1]
    return {
        "balanced": [[int(at) for at in runtime_utils.partition_balanced(list(numbers), parts)] for numbers, parts in (
            ([1.0] * 8, 4), ([0, 1, 2, 3, 3, 3], 4), (weights, 3), ([3, 9, 2, 2, 8, 1, 4, 4, 1, 6], 4), ([2, 3], 4))],
        "uniform": [runtime_utils.partition_uniform(*pair) for pair in ((10, 3), (4, 4), (2, 4), (11, 4))],
        "prefix": runtime_utils.prefix_sum_inc([3, 4, 5]),
        "calls": [runtime_utils.call_to_str("f", 1, "a", k=2), runtime_utils.call_to_str("f"),
                  runtime_utils.call_to_str("f", k=[1])],
        "norms": norms,
        "overflows": overflows,
        "tensors": [total, clipped, [t.tolist() for t in tensors]],
        "global": [float(runtime_utils.get_global_norm([3.0, 4.0])), float(runtime_utils.get_global_norm([-1.0]))],
        "moved": [sorted(moved), type(moved["b"]).__name__],
        "bytes": runtime_utils.get_tensor_bytes([torch.ones(2), {"a": torch.ones(2, dtype=torch.float64)}]),
        "unique": [runtime_utils.get_only_unique_item([3, 3]),
                   refused(RuntimeError, runtime_utils.get_only_unique_item, [1, 2])],
        "not finite": [bool(runtime_utils.has_inf_or_nan(torch.tensor([1.0, value]))) for value in (2.0, math.nan)],
    }  # fmt: skip


def launcher():
    lines = ["# hosts", "", "worker-0 slots=2", "  worker-1 slots=4  "]
    wrong = (["worker-0 slots=2", "worker-0 slots=3"], ["worker-0"], ["worker-0 slots=x"], ["# none"], [])
    hosts = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}
    included = ("worker-1:2", "worker-1", "worker-0:1@worker-1:0,2", "worker-1:1@worker-0", "worker-1:3,0@worker-1:3")
    excluded = ("worker-1", "worker-1:0,1,2,3", "worker-0:0@worker-1:1,2", "worker-0@worker-1")
    with folder_of_rank_0() as folder:
        path = os.path.join(folder, f"hosts{deepspeed.comm.get_rank()}")
        with open(path, "w") as file:
            file.write("\n".join(lines))
        pool = runner.fetch_hostfile(path)
        none = runner.fetch_hostfile(path + "none")
    words = ["--num_gpus", "2", "--master_port=1234", "-H", "h", "-i", "a:0", "--no_local_rank", "train.py", "--x", "1"]
    parsed = vars(runner.parse_args(words))

    def pairs(hosts):
        return [list(pair) for pair in hosts.items()]

    found = {
        "file": [pairs(pool), none],
        "wrong files": [refused(ValueError, runner._parse_hostfile, each) for each in wrong],
        "included": [pairs(runner.parse_resource_filter(hosts, include_str=text)) for text in included],
        "excluded": [pairs(runner.parse_resource_filter(hosts, exclude_str=text)) for text in excluded],
        "both": refused(ValueError, runner.parse_resource_filter, hosts, "worker-0", "worker-1"),
        "wrong": [refused(ValueError, runner.parse_resource_filter, hosts, include_str=text)
                  for text in ("jeff", "worker-0:9", "worker-1:4@worker-0")],
        "pool": pairs(runner.parse_inclusion_exclusion(pool, "worker-1:1,2", "")),
        "first": [pairs(runner.apply_num_nodes_and_gpus(hosts, nodes, gpus))
                  for nodes, gpus in ((-1, -1), (1, -1), (-1, 2), (2, 1))],
        "nodes": [list(runner.parse_node_config(text)) for text in ("worker-0", "worker-0:1,0")],
        "encoded": runner.encode_world_info({"worker-0": [0, 1]}),
        "arguments": {name: parsed[name] for name in (
            "num_gpus", "num_nodes", "master_port", "master_addr", "hostfile", "include", "exclude", "no_local_rank",
            "launcher", "module", "no_python", "user_script", "user_args", "node_rank", "force_multi", "save_pid",
            "bind_cores_to_rank", "bind_core_list", "no_ssh_check", "launcher_args", "no_ssh")},
        "environment": [runner.DEEPSPEED_ENVIRONMENT_NAME, len(runner.DEEPSPEED_ENVIRONMENT_PATHS)],
    }  # fmt: skip
    return found


def pipes():
    """Arithmetic of pipelines, and layers that are described."""
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=2)
    one = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    spec = LayerSpec(torch.nn.Linear, 2, 3, bias=False)
    tied = TiedLayerSpec("table", torch.nn.Embedding, 4, 2, tied_weight_attr="weight")
    return {
        "names": [grid.world_size(), grid.get_axis_names(), [grid.get_dim(name) for name in ("pipe", "model", "none")]],
        "ranks": [grid.get_rank(pipe=p, data=d, model=m) for p in range(2) for d in range(2) for m in range(3)],
        "places": [list(grid.get_coord(rank)) for rank in range(12)],
        "groups": {name: grid.get_axis_comm_lists(name) for name in ("pipe", "data", "model", "none")},
        "found": [grid.filter_match(pipe=1, data=0), grid.get_axis_list("model", 1)],
        "texts": [grid.get_rank_repr(4), grid.get_rank_repr(7, omit_axes=[]),
                  one.get_rank_repr(3, inner_sep=".", outer_sep="+")],
        "refused": [refused(ValueError, one.get_rank, a=1), refused(AssertionError, one.get_rank, a=2, b=0),
                    refused(ValueError, one.get_coord, 4)],
        "layers": [repr(spec), list(spec.build().weight.shape), tied.key, list(tied.build().weight.shape)],
        "not one": [isinstance(spec.build(), PipelineModule), refused(RuntimeError, LayerSpec, dict)],
    }  # fmt: skip


# ---- experts ----
def gates():
    """The gating functions on logits of one seed."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(12, 4, generator=generator)
    used = torch.arange(12) % 2
    torch.manual_seed(5)
    calls = {
        "1": lambda: top1gating(logits, 4.0, 0, use_rts=False),
        "1, drawn": lambda: top1gating(logits, 0.5, 1),
        "1, noise": lambda: top1gating(logits, 1.0, 1, noisy_gate_policy="RSample"),
        "1, used": lambda: top1gating(logits, 1.0, 0, used_token=used, drop_tokens=False),
        "2": lambda: top2gating(logits.clone(), 1.0, 0, top2_2nd_expert_sampling=False),
        "2, drawn": lambda: top2gating(logits.clone(), 0.5, 1),
        "2, all": lambda: top2gating(logits.clone(), 0.5, 1, drop_tokens=False),
        "3": lambda: topkgating(logits, 3, 0.5, 0),
        "3, position": lambda: topkgating(logits, 3, 0.5, 0, drop_policy="position"),
        "2 of k, all": lambda: topkgating(logits, 2, 0.5, 0, drop_tokens=False),
    }
    seen = {}
    for name, call in calls.items():
        loss, weights, mask, counts = call()
        places = torch.arange(1.0, 1 + weights[0].numel()).view(weights.shape[1:])
        rows = (weights * places).sum((1, 2)).tolist()  # says which expert and place each token has
        seen[name] = [float(loss), list(weights.shape), rows, int(mask.sum()), counts.tolist()]
    torch.manual_seed(6)
    loss, capacity, experts, chosen, places, weights, counts = topkgating(logits, 2, 0.5, 0, sparse_routes=True)
    kept = chosen >= 0
    seen["routes"] = [float(loss), int(capacity), experts, chosen.tolist(), (places * kept).tolist(),
                      (weights * kept).tolist(), counts.tolist()]  # fmt: skip
    gate = TopKGate(3, 4, k=2, min_capacity=0, top2_2nd_expert_sampling=False)
    loss, weights, _, counts = gate(torch.randn(8, 3, generator=generator))[:4]
    seen["gate"] = [float(loss), float(weights.sum()), counts.tolist()]
    seen["refused"] = [refused(AssertionError, top1gating, logits, 1.0, 13),
                       refused(ValueError, topkgating, logits, 2, 1.0, 0, drop_policy="none")]  # fmt: skip
    return seen


class Special(torch.nn.Linear):
    """A subclass of the class that is marked."""


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Pairs(SimpleModel):
    def __init__(self):
        super().__init__()
        self.linears = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, HIDDEN), Pair(), Pair()])


def leaves():
    network = torch.nn.Sequential(torch.nn.Sequential(Special(2, 2), torch.nn.Linear(2, 2)), torch.nn.ReLU())
    names = {id(module): name for name, module in network.named_modules()}

    def named(modules):
        return sorted(names[id(module)] for module in modules)

    seen = {"none": named(get_z3_leaf_modules(network))}
    seen["class"] = named(set_z3_leaf_modules(network, [torch.nn.Linear]))
    seen["marked"] = named(get_z3_leaf_modules(network))
    seen["unset"] = named(unset_z3_leaf_modules(network, [torch.nn.Linear]))
    for name, call in {"name": set_z3_leaf_modules_by_name, "suffix": set_z3_leaf_modules_by_suffix}.items():
        found, missing = call(network, ["0.1", "1", "x"], raise_if_not_found=False)
        marked = named(get_z3_leaf_modules(network))
        seen[name] = [named(found), missing, marked, refused(ValueError, call, network, ["x"])]
        call(network, ["0.1", "1"], flag=False)
    seen["text"] = named(set_z3_leaf_modules(network, ["Special"]))
    seen["refused"] = refused(ValueError, set_z3_leaf_modules, network, [torch.nn.Conv2d])
    block = {"stage": 3, "leaf_module": {"classes": ["Pair"]}}
    torch.manual_seed(1)
    engine = start(3, network=Pairs(), zero_optimization=block)
    seen["configured"] = len(get_z3_leaf_modules(engine.module))
    seen["trained"] = run(engine, 3)
    return seen


# ---- what watches ----
def rows_of(folder):
    found = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), newline="") as file:
            found[name] = list(csv.reader(file))
    return found


def monitors():
    """Files of csv; clocks and numbers that programs log."""
    seen = {}
    with folder_of_rank_0() as folder:
        block = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "mine"}}
        read = get_monitor_config(block)
        seen["read"] = [read.enabled, read.csv_monitor.enabled, read.tensorboard.enabled]
        seen["read"].append(DeepSpeedMonitorConfig().enabled)
        watch = csvMonitor(read.csv_monitor)
        watch.write_events([("Train/Samples/my lr", 0.5, 8), ("Train/Samples/my lr", 0.25, 16), ("plain", 3, 1)])
        seen["words"] = [watch.enabled, watch.job_name]
        block["csv_monitor"]["job_name"] = "all"
        MonitorMaster(get_monitor_config(block)).write_events([("a/b", 2.0, 3)])
        block["csv_monitor"]["job_name"] = "engine"
        engine = start(1, **block, gradient_accumulation_steps=2)
        run(engine, 4)
        deepspeed.comm.barrier()
        if deepspeed.comm.get_rank() == 0:
            seen["files"] = {name: rows_of(os.path.join(folder, name)) for name in ("mine", "all")}
            rates = rows_of(os.path.join(folder, "engine"))["Train_Samples_lr.csv"]
            seen["rates"] = [rates[0], [[int(step), float(rate)] for step, rate in rates[1:]]]
    clocks = timer.SynchronizedWallClockTimer()
    clocks("a").start()
    again = refused(AssertionError, clocks("a").start)
    clocks("a").stop()
    seen["clocks"] = [again, refused(AssertionError, clocks("a").stop), clocks("a").elapsed() > 0,
                      clocks("a").elapsed(), list(clocks.get_timers())]  # fmt: skip
    clock = timer.ThroughputTimer(types.SimpleNamespace(enabled=True, synchronized=False), 4, start_step=1)
    for _ in range(3):
        clock.start()
        clock.stop(global_step=True)
    seen["counts"] = [clock.global_step_count, clock.micro_step_count, clock.avg_samples_per_sec() > 0]
    clock.update_epoch_count()
    seen["counts"] += [clock.epoch_count, clock.micro_step_count]
    seen["means"] = [timer.trim_mean([100, 1, 2, 3, 4, 5, 6, 7, 8, -50], 0.1), timer.trim_mean([], 0.1)]
    seen["sizes"] = [comms_logging.convert_size(size) for size in (0, 1023, 1536, 3 << 30)]
    seen["rates of"] = [list(comms_logging.calc_bw_log(kind, 1000, 2.0)) for kind in (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all_single", "broadcast", "send")]  # fmt: skip
    log = comms_logging.CommsLogger()
    for milliseconds, size in ((1.0, 1000), (3.0, 1000), (3.0, 8)):
        log.append("broadcast", "b", milliseconds, size)
    seen["log"] = [log.comms_dict["b"][1000][0], sorted(log.comms_dict["b"])]
    return seen


def versions():
    """Names that programs import at their head."""
    classes = (BF16_Optimizer, FP16_Optimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    with torch.no_grad():
        doubled = instrument_w_nvtx(lambda x: 2 * x)(3)
    return {
        "version": [version, deepspeed.__version__, git_hash, git_branch, deepspeed.__git_hash__],
        "built": [[builder.NAME, builder().absolute_name()] for builder in (
            AsyncIOBuilder, CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder)],
        "there": [CPUAdamBuilder().is_compatible(), deepspeed.ops.__compatible_ops__["cpu_adam"],
                  isinstance(installed_ops["cpu_adam"], bool)],
        "torch": [required_torch_version(min_version=2.0), required_torch_version(min_version="99.1"),
                  required_torch_version(max_version=1.13), required_torch_version(min_version="2.0", max_version="99"),
                  refused(AssertionError, required_torch_version)],
        "called": doubled,
        "classes": [inspect.isclass(each) for each in classes],
        "not one": [isinstance(model(), each) for each in classes],
        "found": [hasattr(deepspeed.runtime.utils, "see_memory_usage"), hasattr(deepspeed, "pipe"),
                  inspect.isclass(UlyssesSPAttentionHF)],
    }  # fmt: skip


# ---- layers ----
def layers():
    seen = {}
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 8, generator=generator)

    def filled(layer):
        for number, p in enumerate(layer.parameters()):
            with torch.no_grad():
                p.copy_(torch.linspace(-1, 1 + number, p.numel()).view(p.shape))
        return layer

    plain = OptimizedLinear(8, 3, dtype=torch.float32)
    seen["plain"] = [type(plain).__name__, plain.bias is None, filled(plain)(x).tolist()]
    adapted = OptimizedLinear(8, 3, lora_config=LoRAConfig(lora_r=2, lora_alpha=6), dtype=torch.float32)
    trains = [name for name, p in adapted.named_parameters() if p.requires_grad]
    seen["adapter"] = [trains, float(adapted.lora_weight_2.weight.abs().sum()), filled(adapted)(x).tolist()]
    late = OptimizedLinear(8, 3, lora_config=LoRAConfig(delay_lora_init=True), dtype=torch.float32)
    seen["late"] = [refused(AssertionError, late, x)]
    init_lora(torch.nn.ModuleList([late]))
    seen["late"] += [list(late.lora_weight_1.weight.shape), list(late(x).shape)]
    seen["refused"] = refused(ValueError, OptimizedLinear, 8, 3, lora_config={"lora_r": 2})
    numbers = QuantizationConfig()
    seen["numbers"] = [numbers.q_bits, numbers.mantissa_bits, numbers.group_size, LoRAConfig().lora_alpha]
    tiled = deepspeed.zero.TiledLinear(8, 5, in_splits=3, out_splits=2)
    seen["tiles"] = [tiled.in_parts, tiled.out_parts]
    source = filled(torch.nn.Linear(8, 5))
    tiled.copy_params_from(source)
    output = tiled(x)
    output.square().sum().backward()
    seen["tiled"] = [output.tolist(), sum(float(p.grad.sum()) for p in tiled.parameters())]
    split = deepspeed.zero.TiledLinear(8, 6, out_splits=2, combine_out_splits=False)
    seen["split"] = [list(part.shape) for part in split(x)]
    linear = filled(LinearModuleForZeroStage3(8, 3))
    seen["linear"] = linear(x).tolist()
    return seen


def workers():
    """The number of processes that read, set after initialize()."""
    engine, _, loader, _ = deepspeed.initialize(model=model(), config=config(1), training_data=Numbers())
    before = loader.num_local_io_workers
    loader.num_local_io_workers = 0
    rows = [batch[1].tolist() for batch in loader]
    return {"before": before, "rows": rows, "length": len(loader)}


# ---- checkpoints ----
def tools():
    """What reads a checkpoint without an engine."""
    seen = {}
    with folder_of_rank_0() as folder:
        for stage in (2, 3):
            path = os.path.join(folder, str(stage))
            engine = start(stage)
            run(engine, 2)
            engine.save_checkpoint(path, tag="one", client_state={"iteration": 7})
            deepspeed.comm.barrier()
            whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(path)
            each = {"weights": {name: [list(value.shape), str(value.dtype), float(value.sum())]
                                for name, value in whole.items()}}  # fmt: skip
            other = model(2)
            zero_to_fp32.load_state_dict_from_zero_checkpoint(other, path, tag="one")
            each["loaded"] = sums(other)
            state = torch.load(zero_to_fp32.get_model_state_file(os.path.join(path, "one"), stage), weights_only=False)
            each["state"] = [state[name] for name in ("iteration", "global_steps", "global_samples", "dp_world_size")]
            files = zero_to_fp32.get_optim_files(os.path.join(path, "one"))
            found = torch.load(files[0], weights_only=False)["optimizer_state_dict"]
            each["optimizer"] = int(found["zero_stage"])
            each["none"] = refused(FileNotFoundError, zero_to_fp32.get_optim_files, os.path.join(path, "two"))
            if deepspeed.comm.get_rank() == 0:
                words = argparse.Namespace(input_folder=os.path.join(path, "one"), keep_temp_folder=False, strict=True,
                                           output_folder=os.path.join(path, "one_universal"), num_extract_workers=1,
                                           num_merge_workers=1, inject_missing_state=True)  # fmt: skip
                ds_to_universal.main(words)
            deepspeed.comm.barrier()
            again = start(stage, seed=2, checkpoint={"load_universal": True})
            again.load_checkpoint(path, tag="one_universal")
            each["universal"] = [again.load_universal_checkpoint(), sums(again.module)]
            each["again"] = run(again, 2)
            seen[str(stage)] = each
        read = DeepSpeedCheckpoint(os.path.join(folder, "2", "one"))
        seen["grid"] = [read.tp_degree, read.pp_degree, read.dp_degree, read.world_size, read.get_iteration(),
                        read.is_change_dp_degree()]  # fmt: skip
        seen["descriptor"] = get_model_3d_descriptor(os.path.join(folder, "2", "one")).get_desc()
    old = model_3d_desc(2, 2, 2)
    seen["reshaped"] = [[part.map for part in grid.reshape(model_3d_desc(*to))] for grid, to in (
        (old, (1, 2, 1)), (model_3d_desc(2, 2, 4), (2, 1, 2)))]  # fmt: skip
    seen["fits"] = [old.can_reshape(model_3d_desc(4, 2, 1))[0], old.is_valid(1, 1, 1)[0], old.is_valid(2, 0, 2)[0],
                    refused(AssertionError, old.reshape, model_3d_desc(2, 2, 4))]  # fmt: skip
    return seen


CASES = [
    configurations, loose_configurations, schedule_methods, rules, functions, launcher, pipes, gates, leaves,
    monitors, versions, layers, workers, tools,
]  # fmt: skip
