"""Memory of stage 2 before a run."""

from __future__ import annotations

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.base_optimizer import DeepSpeedZeroOptimizer
from libzero.deepspeed.runtime.zero._estimate import Estimate, count, estimate, table

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """[local] Bytes of a host and of a GPU: the planner's figures for bf16 and Adam.

    The host's include the whole fp32 model of each rank while the engine is made. additional_buffer_factor has no
    effect: the planner counts the buffers.
    """
    found = estimate(total_params, 2, num_gpus_per_node, num_nodes, offload_optimizer=cpu_offload)
    return max(found.host, 4 * total_params * num_gpus_per_node), found.device


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """[local] Prints the figures of all choices for a number of parameters."""
    rows = []
    for cpu_offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node, num_nodes, cpu_offload)
        rows.append((Estimate(host, device), f"offload_optimizer={'cpu' if cpu_offload else 'none'}"))
    hosts = f"{num_nodes} host{'s' * (num_nodes > 1)} with {num_gpus_per_node} GPU{'s' * (num_gpus_per_node > 1)}"
    table(f"Model states at stage 2, {total_params:,} parameters, {hosts}", rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """[local] The same for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(count(model), num_gpus_per_node, num_nodes)


__getattr__ = module_getattr("deepspeed.runtime.zero.stage_1_and_2")
