"""Parameters, gradients and optimizer states of an engine by parameter.

What belongs to no engine is None, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.engine import Engine, engine_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


def _engine_of(param: torch.Tensor) -> Engine | None:
    return engine_of(param) if param.requires_grad else None


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """[collective] The fp32 master of a trainable parameter, of its shape, on every rank."""
    return safe_get_full_optimizer_state(param, "master")


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """[collective] Sets master and parameter to rank 0's `value`, of the parameter's shape, between steps."""
    safe_set_full_optimizer_state(param, value, "master")


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """[local] This rank's shard of the master, flat; may be empty."""
    return safe_get_local_optimizer_state(param, "master")


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """[collective] Each rank sets its shard of the master, between steps; the parameter follows."""
    safe_set_local_optimizer_state(param, value, "master")


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """[collective] "exp_avg", "exp_avg_sq" or another state of the optimizer, fp32, of the parameter's shape."""
    engine = _engine_of(param)
    return None if engine is None else engine.parameter_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """[collective] Sets it to rank 0's `value`, between steps."""
    engine = _engine_of(param)
    if engine is not None:
        engine.set_parameter_state(param, optim_state_key, value)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """[local] This rank's shard of it, flat; may be empty."""
    engine = _engine_of(param)
    return None if engine is None else engine.own_parameter_state(param, optim_state_key)[1]


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """[collective] Each rank sets its shard of it, between steps."""
    engine = _engine_of(param)
    if engine is not None:
        engine.set_own_parameter_state(param, optim_state_key, value)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """[collective] The fp32 gradient as step() will use it, before clipping, from the last backward() to step().

    Averaged over the ranks, without the loss scale. None for a frozen parameter. With gradient accumulation, call it at
    the boundary: it reduces the gradients, and a backward() before step() is then a ConfigError.
    """
    engine = engine_of(param)
    return None if engine is None else engine.gradient(param)


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """[collective] The same, what this rank's shard has of it, flat; may be empty."""
    engine = engine_of(param)
    if engine is None:
        return None
    if engine.options.effective()["managed_gradient_accumulation"] == "false":
        engine.gradient(param)  # reduces the gradients
    return engine.own_gradient(param)[1]


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """[collective] Sets it to rank 0's `value`, of the parameter's shape; step() clips and uses the new values."""
    engine = _engine_of(param)
    if engine is not None:
        engine.set_gradient(param, value)


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """[collective] Each rank sets its shard of it."""
    engine = _engine_of(param)
    if engine is not None:
        engine.set_own_gradient(param, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
) -> None:
    """[collective] Sets each parameter's gradient to `update_func(gradient, parameter)` of rank 0.

    Parameters without a gradient are left out.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


__getattr__ = module_getattr("deepspeed.utils.tensor_fragment")
