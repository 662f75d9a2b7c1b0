"""deepspeed.runtime.utils: functions on tensors, gradients and lists, for programs that work without an engine."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.debug import see_memory_usage

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "copy_to_device",
    "ensure_directory_exists",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_only_unique_item",
    "get_tensor_bytes",
    "has_inf_or_nan",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
    "move_to_device",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
]


class DummyOptim:
    """An optimizer's param_groups without an optimizer."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """[local] The function itself."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """[local] Makes the folder that a file is to be in."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def set_random_seed(seed: int) -> None:
    """[local] Seeds random and torch, and numpy where it is installed."""
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """[local] A call as text: `base(1, name='x')`."""
    words = [repr(each) for each in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(words)})"


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dicts with `change` of what is in them."""
    if isinstance(item, list | tuple):
        return type(item)([_mapped(each, change) for each in item])
    if isinstance(item, dict):
        return {key: _mapped(each, change) for key, each in item.items()}
    return change(item)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """[local] The same with those tensors on `device` for which the criterion is true."""
    return _mapped(item, lambda each: each.to(device) if criterion_func(each) else each)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """[local] The same with its tensors on `device`. Those for which the criterion is true stay the same objects."""

    def move(each: Any) -> Any:
        if criterion_func is None or not criterion_func(each):
            return each.to(device)
        each.data = each.data.to(device)
        return each

    return _mapped(item, move)


def get_tensor_bytes(item: Any) -> int:
    """[local] The bytes of all tensors in lists, tuples and dicts."""
    total = 0

    def count(each: Any) -> None:
        nonlocal total
        total += each.numel() * each.element_size() if isinstance(each, torch.Tensor) else 0

    _mapped(item, count)
    return total


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """[local] The one value that all have. RuntimeError for several."""
    values = set(items)
    if len(values) != 1:
        raise RuntimeError(f"get_only_unique_item: got {len(values)} different values, expected one")
    return values.pop()


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """[local] Whether the program marked it as one part of a parameter."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def prefix_sum_inc(weights: Sequence[Any]) -> list[Any]:
    """[local] The sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """[local] Where each part begins, and the end: the first parts have one more item where they cannot be equal."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    each, more = divmod(num_items, num_parts)
    return [part * each + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """[local] Where each part begins, and the end, with a small difference of the heaviest and the lightest part.

    As in DeepSpeed each prefix keeps one division: that with the least difference, and among these the last cut.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0, *accumulate(float(weight) for weight in weights)]
    # Of each prefix, by the number of parts: the heaviest, the lightest, the last cut.
    best: list[dict[int, tuple[float, float, int]]] = [{} for _ in range(count + 1)]
    best[0][0] = 0.0, math.inf, 0
    for end in range(1, count + 1):
        for parts in range(1, min(end, num_parts) + 1):
            found = None
            for cut in range(end):
                if parts - 1 in best[cut]:
                    heaviest, lightest, _ = best[cut][parts - 1]
                    weight = sums[end] - sums[cut]
                    candidate = max(heaviest, weight), min(lightest, weight), cut
                    if found is None or candidate[0] - candidate[1] <= found[0] - found[1]:
                        found = candidate
            if found is not None:
                best[end][parts] = found
    ends = [count]
    for parts in range(num_parts, 0, -1):
        ends.append(best[ends[-1]][parts][2])
    return ends[::-1]


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """[local] Whether an element is not finite, as a tensor on its device."""
    values = x._values() if x.is_sparse else x
    return ~torch.isfinite(values).all()


def is_invalid_grad_norm(norm: torch.Tensor | float) -> bool:
    """[local] Whether it is negative or not finite."""
    if isinstance(norm, torch.Tensor):
        return bool((~torch.isfinite(norm) | (norm < 0)).any())
    return not math.isfinite(float(norm)) or norm < 0


def get_global_norm(norm_list: Iterable[Any]) -> float:
    """[local] The norm of vectors with these norms; infinite if one of them is invalid."""
    norms = list(norm_list)
    if any(is_invalid_grad_norm(norm) for norm in norms):
        return math.inf
    return math.sqrt(sum(norm**2.0 for norm in norms))


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, counted: Sequence[bool], mpu: Any) -> torch.Tensor:
    """The norm of all tensors, of those that are counted with an mpu over its model-parallel ranks."""
    if norm_type == math.inf:
        total = torch.stack([each.detach().abs().max().float() for each in tensors]).max()
        if mpu is not None:
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=mpu.get_model_parallel_group())
        return total
    mine = [each.detach().float().norm(norm_type) for each, here in zip(tensors, counted, strict=True) if here]
    powers = torch.stack(mine).pow(norm_type).sum() if mine else torch.zeros((), device=tensors[0].device)
    if mpu is not None:
        dist.all_reduce(powers, group=mpu.get_model_parallel_group())
    return powers.pow(1.0 / norm_type)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """[collective] Scales gradients so that their norm, the mean of all ranks' norms, is at most max_norm. Returns it.

    parameters: those of torch, with `.grad`; the engine clips its own (gradient_clipping). mpu: its model-parallel
    ranks have parts of the parameters that are marked so, and copies of the others.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with_grad = [p for p in given if p.grad is not None]
    if not with_grad:
        return torch.zeros(())
    gradients = [p.grad for p in with_grad if p.grad is not None]
    first = mpu is None or mpu.get_model_parallel_rank() == 0
    counted = [first or is_model_parallel_parameter(p) for p in with_grad]
    total = _norm(gradients, float(norm_type), counted, mpu)
    if dist.is_initialized():
        total = total / dist.get_world_size()
        dist.all_reduce(total)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(factor.to(gradient.device))
    return total


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """[collective with mpu] The norm of tensors as one vector, fp32; -1 where it is not finite."""
    if moe_ep_group is not None:
        raise NotImplementedError("cannot use moe_ep_group: gradients of experts are the engine's to reduce")
    total = _norm(input_tensors, float(norm_type), [True] * len(input_tensors), mpu)
    return torch.where(torch.isfinite(total), total, torch.full_like(total, -1.0))


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor], max_norm: float = 1.0, global_norm: Any = None, mpu: Any = None,
    eps: float = 1e-6,
) -> Any:  # fmt: skip
    """[collective with mpu] Scales tensors so that their norm is at most max_norm. Returns the norm."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (norm + eps)
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return norm


class CheckOverflow:
    """Whether a gradient is not finite, on any rank that shares the model.

    param_groups: lists of parameters. mpu: asked for its model-parallel group; zero_reduce_scatter: all ranks.
    """

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.mpu, self.zero_reduce_scatter, self.deepspeed = mpu, zero_reduce_scatter, deepspeed
        self.params = [parameter for group in param_groups for parameter in group] if param_groups else None

    def _anywhere(self, overflow: bool, groups: Sequence[Any]) -> bool:
        found = torch.tensor([float(overflow)])
        for group in groups:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return bool(found.item())

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """[collective] Whether a norm is invalid."""
        overflow = any(is_invalid_grad_norm(norm) for norm in norm_group)
        if self.mpu is not None:
            return self._anywhere(overflow, [self.mpu.get_model_parallel_group()])
        return self._anywhere(overflow, [None] if reduce_overflow and dist.is_initialized() else [])

    def check(self, param_groups: Any = None) -> bool:
        """[collective] Whether a gradient of these groups, or of those given at the start, is not finite."""
        return self.has_overflow(self.params if param_groups is None else [p for group in param_groups for p in group])

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """[local] Whether one of this rank is not finite."""
        return any(p.grad is not None and bool(has_inf_or_nan(p.grad)) for p in params)

    def has_overflow(self, params: Any, has_moe_params: bool | None = None) -> bool:
        """[collective] The same, of all ranks that share the model."""
        groups: list[Any] = []
        if self.zero_reduce_scatter:
            groups = [None]
        elif self.mpu is not None:
            groups = [self.mpu.get_model_parallel_group()]
        return self._anywhere(self.has_overflow_serial(params), groups)


class PartitionedTensor:
    """A tensor of which each rank of a group keeps a part of partition_uniform()."""

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: torch.device | str | None = None
    ) -> PartitionedTensor:
        """[local] That of to_meta() and data()."""
        numbers = meta.tolist()
        size, rest = numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :]
        made = cls(torch.empty(math.prod(size), device="meta"), group)
        if rest[:2] != [made.num_parts, made.rank]:
            expected = f"{made.rank} of {made.num_parts}"
            raise ValueError(f"PartitionedTensor.from_meta: got part {rest[1]} of {rest[0]}, expected {expected}")
        made.orig_size, made.partition = size, rest[2:]
        made.orig_device = torch.device(device) if device is not None else local_part.device
        made.local_data = local_part.detach()
        return made

    def to_meta(self) -> torch.Tensor:
        """[local] Its shape and division as numbers."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def full(self, device: torch.device | str | None = None) -> torch.Tensor:
        """[collective over the group] The whole tensor."""
        whole = torch.empty(self.partition[-1], dtype=self.local_data.dtype, device=device or self.orig_device)
        for part in range(self.num_parts):
            here = whole[self.partition[part] : self.partition[part + 1]]
            if part == self.rank:
                here.copy_(self.local_data)
            if here.numel() > 0:
                dist.broadcast(here, group=self.group, group_src=part)
        return whole.view(self.orig_size)

    def data(self) -> torch.Tensor:
        """[local] This rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """[local] Of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """[local] Of the whole tensor."""
        return self.orig_size


__getattr__ = module_getattr("deepspeed.runtime.utils")
