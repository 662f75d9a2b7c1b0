"""deepspeed.moe.utils: which parameters are of experts, and groups of an optimizer for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from libzero import moe
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.moe.layer import MoE

__all__ = [
    "MoE",
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]


def has_moe_layers(m: torch.nn.Module) -> tuple[bool, int]:
    """[local] Whether the module has a layer of experts, and the number of experts of the first one, or 0."""
    layers = [layer for layer in m.modules() if isinstance(layer, moe.MoE)]
    return bool(layers), layers[0].num_experts if layers else 0


def is_moe_param(param: torch.Tensor) -> bool:
    """[local] It is a parameter of an expert of deepspeed.moe.layer.MoE."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """[local] It is a group for experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """[local] Those of no expert, and those of experts."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """[local] The .grad of those of no expert, and of those of experts, where there is one."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = 178956971,
) -> list[dict[str, Any]]:
    """[local] The groups without experts, then for each of them and each ep_size one of its experts ("moe": True).

    A list is changed: the new groups are appended to it, and it is returned; in every case the given groups lose their
    experts. Groups of more than max_group_size elements are divided; None: none is. A new group has the other values of
    the group it comes from, lr and weight_decay among them. While these stay equal, updates are those without the new
    groups: the norm counts each expert once in both cases. ValueError for what is no group.
    """
    if isinstance(param_groups, dict):
        groups = [param_groups]
    elif isinstance(param_groups, list | tuple):
        groups = param_groups if isinstance(param_groups, list) else list(param_groups)
    else:
        raise ValueError(f"param_groups: got {type(param_groups).__name__}, expected a dict, or a list of them")
    for group in list(groups):
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        by_name: dict[str, list[torch.nn.Parameter]] = {}
        for p in experts:
            by_name.setdefault(p.group_name, []).append(p)  # type: ignore[attr-defined]
        for name, params in by_name.items():
            groups += [{**group, "name": name, "moe": True, "params": part} for part in _parts(params, max_group_size)]
    return groups


def _parts(params: list[torch.nn.Parameter], most: float | None) -> list[list[torch.nn.Parameter]]:
    """[local] In order, each of `most` elements or less, or of one parameter."""
    parts: list[list[torch.nn.Parameter]] = []
    size = 0.0
    for p in params:
        if not parts or (most is not None and size + p.numel() > most):
            parts.append([])
            size = 0
        parts[-1].append(p)
        size += p.numel()
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """[local] The same of a list of parameters or of groups; groups that have experts apart already, as they are."""
    if not isinstance(model_parameters, list) or not all(isinstance(p, torch.Tensor | dict) for p in model_parameters):
        raise TypeError("model_parameters: expected a list of parameters, or of groups")
    if model_parameters and isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})


__getattr__ = module_getattr("deepspeed.moe.utils")
