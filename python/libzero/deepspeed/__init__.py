"""DeepSpeed's interface over libzero: the names that programs use, with DeepSpeed's documented behaviour.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")

`python -m libzero.deepspeed.run script.py` puts it under the name `deepspeed`, so that a program runs without an edit.
docs/deepspeed-compatibility.md lists the names. One that is not built can be imported; its call is an error that says
what to use.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from libzero.deepspeed import _names, accelerator, checkpoint, comm, module_inject, moe, monitor, ops, runtime, utils
from libzero.deepspeed._refuse import AssertedConfigError, module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.comm import TORCH_DISTRIBUTED_DEFAULT_PORT, init_distributed
from libzero.deepspeed.git_version_info import git_branch, git_hash
from libzero.deepspeed.runtime import lr_schedules, zero
from libzero.deepspeed._held import require_no_model_parallel
from libzero.deepspeed.module_inject.layers import set_autotp_mode
from libzero.deepspeed.runtime.activation_checkpointing import checkpointing
from libzero.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ModelParameters
from libzero.deepspeed.runtime.config import DeepSpeedConfigError, read_config, with_sequence_ranks
from libzero.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from libzero.deepspeed.runtime.engine import (
    DeepSpeedEngine,
    DeepSpeedOptimizerCallable,
    DeepSpeedSchedulerCallable,
)
from libzero.deepspeed.runtime.tensor_parallel.init_utils import (
    merge_tp_model_init_into_config,
    record_tp_model_init_args,
)
from libzero.deepspeed.utils import OnDevice, log_dist, logger
from libzero.muon import muon_groups

__version__ = version = _names.VERSION
__git_hash__, __git_branch__ = git_hash, git_branch
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("."))

__all__ = [
    "MUON_OPTIMIZER",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "OnDevice",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "lr_schedules",
    "module_inject",
    "moe",
    "monitor",
    "ops",
    "runtime",
    "set_autotp_mode",
    "set_optimizer_flags",
    "tp_model_init",
    "utils",
    "version",
    "zero",
]


MUON_OPTIMIZER = "muon"


def set_optimizer_flags(config_class: Any, model: torch.nn.Module) -> None:
    """[local] With optimizer.type Muon: marks the model's parameters with `use_muon`, as libzero.muon.muon_groups()."""
    if str(getattr(config_class, "optimizer_name", "")).lower() == MUON_OPTIMIZER:
        for group in muon_groups(model):
            for parameter in group["params"]:
                parameter.use_muon = group["use_muon"]


def tp_model_init(
    model: torch.nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **words: Any
) -> torch.nn.Module:
    """[local] Notes tensor_parallel.autotp_size and the recipe for the next initialize(). Returns the model as it is.

    Which layers are cut is up to the configuration, or made of the model: docs/parallelism.md. tp_group: neighbours.
    """
    record_tp_model_init_args(tp_size, dtype, words.pop("tp_group", None))
    if config is not None or words:
        given = ", ".join(["config"] * (config is not None) + [*words])
        log_dist(f"tp_model_init: {given}: no effect, as in DeepSpeed. Hint: initialize(config=).", ranks=[0])
    return model


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | DeepSpeedOptimizerCallable | None = None,
    model_parameters: ModelParameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, DeepSpeedOptimizer | None, DeepSpeedDataLoader | None, Any]:
    """[collective] Makes the engine of a model. Returns it, its optimizer, the loader of training_data, the scheduler.

    model: moved to the rank's device; the engine takes its parameters over (libzero.Engine).
    optimizer: any of torch (docs/optimizers.md), or a callable of the parameters that returns one; its groups drive the
        updates. None: the configuration's, over model_parameters (parameters or groups; None: all). Without both the
        engine only evaluates.
    lr_scheduler: an object whose step() follows each update, or a callable of the optimizer that returns one. None:
        the configuration's.
    training_data: a map-style or iterable dataset; see DeepSpeedDataLoader.
    config (or config_params, args.deepspeed_config, args.deepscale_config): a path, a dict, or base64 text, of JSON or
        Hjson (with the package hjson): DeepSpeed's keys, checked strictly (docs/configuration.md).
    mesh_param: (data-parallel, sequence-parallel) ranks: data_parallel_size and sequence_parallel_size.
    mpu: an object whose sequence-parallel ranks are taken, as of UlyssesSPAttentionHF.register_with_transformers().
    dist_init_required: False where torch.distributed is to be started already; else it is started if it is not.

    ConfigError for what does not fit, on every rank. NotImplementedError for an mpu whose ranks divide the model.
    """
    if model is None:
        raise AssertedConfigError("[deepspeed] initialize: got no model, expected a torch.nn.Module")
    require_no_model_parallel(mpu, "cannot use mpu")
    given = _configuration(args, config if config is not None else config_params)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    found = with_sequence_ranks(merge_tp_model_init_into_config(read_config(given)), mpu, mesh_param)
    _log_collectives(found.get("comms_logger"))
    engine = DeepSpeedEngine(
        model,
        found,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        mpu=mpu,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _configuration(args: Any, config: Any) -> Any:
    """The one that the program gave: config, or a file that the command line names."""
    given = {"config=": config}
    given.update((f"--{name}", getattr(args, name, None)) for name in ("deepspeed_config", "deepscale_config"))
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise AssertedConfigError(
            f"[deepspeed] initialize: got {' and '.join(given)}, expected one configuration. "
            "Hint: leave the others out."
        )
    if not given:
        raise AssertedConfigError(
            "[deepspeed] initialize: got no configuration, expected config= or --deepspeed_config"
        )
    return next(iter(given.values()))


def _log_collectives(block: Any) -> None:
    """As the block comms_logger says."""
    if isinstance(block, Mapping) and block.get("enabled") is True:
        words = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
        comm.configure(**{word: block[word] for word in words if word in block})
        log_dist(
            "comms_logger: the program's own collectives of deepspeed.comm are recorded, not the engine's. "
            "Hint: engine.start_trace() of libzero.",
            ranks=[0],
        )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """[local] Adds --deepspeed and --deepspeed_config FILE, and the same with the old name deepscale."""
    group = parser.add_argument_group("DeepSpeed")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="for the program: whether to use it")
        group.add_argument(f"--{name}_config", metavar="FILE", help="the configuration, for initialize(args)")
    return parser


__getattr__ = module_getattr("deepspeed")
