"""Memory of stage 3 before a run, and generation with whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.base_optimizer import DeepSpeedZeroOptimizer_Stage3
from libzero.deepspeed.runtime.zero._estimate import Estimate, count, estimate, table
from libzero.deepspeed.runtime.zero.partition_parameters import GatheredParameters

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """[local] Bytes of a host, of a GPU, and of the largest layer while it is whole (in the GPU's).

    The planner's figures for bf16 and Adam. zero_init=False adds the whole fp32 model of each rank to the host's.
    additional_buffer_factor has no effect: the planner counts the buffers.
    """
    found = estimate(
        total_params,
        3,
        num_gpus_per_node,
        num_nodes,
        offload_optimizer=cpu_offload,
        offload_param=cpu_offload and cpu_offload_params,
    )
    layer = 2 * largest_layer_params
    whole = 0 if zero_init else 4 * total_params * num_gpus_per_node
    return max(found.host, whole), found.device + layer, layer


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """[local] Prints the figures of all choices for a number of parameters."""
    rows = []
    for cpu_offload, cpu_offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload,
                cpu_offload_params,
                zero_init,
            )
            options = f"offload_param={'cpu' if cpu_offload_params else 'none'}, "
            options += f"offload_optimizer={'cpu' if cpu_offload else 'none'}, zero_init={int(zero_init)}"
            rows.append((Estimate(host, device), options))
    hosts = f"{num_nodes} host{'s' * (num_nodes > 1)} with {num_gpus_per_node} GPU{'s' * (num_gpus_per_node > 1)}"
    sizes = f"{total_params:,} parameters, largest layer {largest_layer_params:,}"
    table(f"Model states at stage 3, {sizes}, {hosts}", rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """[local] The same for a model."""
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    estimate_zero3_model_states_mem_needs_all_cold(count(model), largest, num_gpus_per_node, num_nodes)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[torch.nn.Module]:
    """[collective] The module of an engine, with all parameters whole at stage 3, for generate()."""
    with GatheredParameters(model.parameters()):
        yield model.module


__getattr__ = module_getattr("deepspeed.runtime.zero.stage3")
