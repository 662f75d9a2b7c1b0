"""The attributes that programs know stage 3's parameters by, and what they hand over of their own parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch

from libzero._divided import divide, identify, is_divided
from libzero.engine import engine_of


class ZeroParamType(Enum):
    """DeepSpeed's kinds of parameters; here all of a model at stage 3 are PARTITIONED."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """What `param.ds_status` says: AVAILABLE within GatheredParameters, else NOT_AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _OwnPart:
    """`param.ds_tensor` of a parameter that an engine has at stage 3, where ranks have parts of unequal sizes.

    A copy of this rank's part, flat, in the parameter's dtype, each time it is read. Writing to it is an error, as to
    every tensor of torch.inference_mode(). Parameters that zero.Init divides have their own in its place.
    """

    def __get__(self, parameter: torch.nn.Parameter | None, kind: type) -> Any:
        if parameter is None:
            return self
        engine = engine_of(parameter) if "ds_status" in parameter.__dict__ else None
        if engine is None or engine.options.effective()["zero_optimization.stage"] != "3":
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'ds_tensor'")
        with torch.inference_mode():
            part = engine.own_parameter_state(parameter)[1].to(parameter.dtype, copy=True)
            part.__dict__["ds_numel"] = part.numel()
            return part


def mark(parameters: Iterable[torch.Tensor]) -> None:
    """[local] Gives parameters the attributes that programs know stage 3's by.

    ds_id, ds_shape, ds_numel, ds_status, ds_tensor, convert_to_zero_parameters(); ds_persist, which is False, and
    ds_active_sub_modules, which stays empty.
    """
    torch.nn.Parameter.ds_tensor = _OwnPart()  # type: ignore[attr-defined]
    for p in parameters:
        if torch.nn.parameter.is_lazy(p):
            continue
        identify(p)
        if "ds_status" not in p.__dict__:
            still = {"ds_persist": False, "ds_active_sub_modules": set()}
            p.__dict__.update(still, ds_status=ZeroParamStatus.NOT_AVAILABLE, convert_to_zero_parameters=_convert)


def _convert(param_list: Iterable[torch.nn.Parameter]) -> None:
    """[collective] Divides parameters over the ranks, by rank 0's values."""
    mark(param_list)
    divide_free(param_list)


def divide_free(parameters: Iterable[torch.nn.Parameter]) -> None:
    """[collective] Divides those that are whole, by rank 0's values. An engine refers to the memory of those it has."""
    for p in parameters:
        if not is_divided(p):
            divide(p)


def mark_rounded(parameter: torch.Tensor, dtype: torch.dtype | None) -> None:
    """[local] Notes that a parameter is about to be cast to a narrower dtype."""
    if dtype is not None and dtype.itemsize < parameter.dtype.itemsize:
        parameter.__dict__["_zero_rounded"] = True


def was_rounded(parameter: torch.Tensor) -> bool:
    """[local] Whether mark_rounded() noted so."""
    return parameter.__dict__.get("_zero_rounded", False) is True


def sequence_degree(mpu: Any) -> int:
    """[local] The ranks over which an mpu divides the tokens of a sample; 1 if it says nothing of them."""
    return int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)())


def require_no_model_parallel(mpu: Any, what: str) -> None:
    """[local] NotImplementedError that begins with `what` for an mpu whose ranks divide the model.

    Of runtime.sequence_parallel.parallel_state_sp the model-parallel ranks are the sequence-parallel ones.
    """
    kinds = ["model", "tensor_model", "pipeline_model", "pipe"]
    for kind in kinds[hasattr(mpu, "initialize_sequence_parallel") :]:
        name = f"get_{kind}_parallel_world_size"
        degree = getattr(mpu, name, lambda: 1)()
        if degree > 1:
            raise NotImplementedError(
                f"{what}: mpu.{name}() is {degree}, expected 1. Hint: tensor_parallel.autotp_size of the configuration."
            )
