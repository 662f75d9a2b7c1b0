"""Parameters, gradients and optimizer states of an engine by parameter.

What belongs to no engine is None, as in DeepSpeed. What the engine offers no way to is a NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from libzero.deepspeed._refuse import refusal
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
]


def _refused(call: str) -> Callable[..., NoReturn]:
    """A call that can be imported and raises NotImplementedError."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(refusal("deepspeed.utils", call))

    return refuse


def _name(engine: Engine, param: torch.Tensor) -> str:
    return engine._names[id(param)]


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """[collective] The fp32 master of a trainable parameter, of its shape, on every rank.

    With fp16 and bf16 every call sends the masters of the whole model to rank 0 and this one back. For many
    parameters use engine.full_state_dict() of libzero, or utils.zero_to_fp32 on a checkpoint.
    """
    engine = engine_of(param)
    if engine is None or not param.requires_grad:
        return None
    if param.dtype == torch.float32:
        with engine.gathered_parameters(param), torch.no_grad():
            return param.detach().clone()
    masters = engine.full_state_dict()
    whole = torch.empty(param.shape, dtype=torch.float32, device=param.device)
    if engine.comm.rank == 0:
        whole.copy_(masters[_name(engine, param)])
    engine.comm.broadcast(whole.view(-1), 0).wait()
    return whole


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """[collective] Sets parameter and master to rank 0's `value`, of the parameter's shape, between steps.

    NotImplementedError with fp16 and bf16, where the master would be rounded.
    """
    engine = engine_of(param)
    if engine is None:
        return
    if param.dtype != torch.float32:
        raise NotImplementedError(
            f"cannot set a master in fp32: it would be rounded to {param.dtype}. "
            "Hint: zero.GatheredParameters(param, modifier_rank=0) where that is meant."
        )
    with engine.gathered_parameters(param, modify=True), torch.no_grad():
        param.copy_(value)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """[collective] The fp32 gradient as step() will use it, before clipping, from the last backward() to step().

    Averaged over the ranks, without the loss scale. None for a frozen parameter. ConfigError with gradient
    accumulation, where step() reduces the gradients.
    """
    engine = engine_of(param)
    return None if engine is None else engine.gradient(param)


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """[local] The same, what this rank's shard has of it, flat; may be empty."""
    engine = engine_of(param)
    return None if engine is None else engine.own_gradient(param)[1]


safe_get_full_optimizer_state = _refused("safe_get_full_optimizer_state")
safe_set_full_optimizer_state = _refused("safe_set_full_optimizer_state")
safe_set_full_grad = _refused("safe_set_full_grad")
safe_get_local_fp32_param = _refused("safe_get_local_fp32_param")
safe_set_local_fp32_param = _refused("safe_set_local_fp32_param")
safe_get_local_optimizer_state = _refused("safe_get_local_optimizer_state")
safe_set_local_optimizer_state = _refused("safe_set_local_optimizer_state")
safe_set_local_grad = _refused("safe_set_local_grad")
