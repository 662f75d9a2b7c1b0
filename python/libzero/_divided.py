"""Parameters that the ranks hold in parts before an Engine takes them, as deepspeed.zero.Init makes them.

Attributes of such a parameter, by DeepSpeed's names: ds_tensor, this rank's part, flat, of the same size on every rank;
ds_shape and ds_numel of the whole; ds_id. Itself has no elements, and as many dimensions as the whole, of size 0:
programs group parameters by their number. What reads or writes it is an error.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from libzero import _native

_ids = itertools.count()
_DIVIDED = "_zero_divided"
"""The attribute of a parameter that has no values here."""
_KEPT = "_zero_kept"
"""The attribute of one that divide() leaves whole."""
_shared: set[int] = set()
"""The memories that divided parameters have."""
_OWN_REFERENCES = 2
"""To the memory of one parameter: its own, and that of the Python object that asks."""


def identify(parameter: torch.Tensor) -> None:
    """[local] Gives a parameter its number, which is the same on every rank, and the attributes of its shape."""
    if "ds_id" not in parameter.__dict__:
        parameter.__dict__.update(ds_id=next(_ids), ds_shape=parameter.shape, ds_numel=parameter.numel())


def is_divided(parameter: torch.Tensor) -> bool:
    """[local] Whether this rank has a part of its values only."""
    return _DIVIDED in parameter.__dict__


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _buffer(values: torch.Tensor) -> torch.Tensor:
    """[local] A copy where the process group can send it. Gloo's thread holds what it is given for some time after a
    call, which would be seen as a use of the parameter's memory."""
    return values.detach().to("cuda" if dist.get_backend() == "nccl" else "cpu", copy=True).contiguous()


def send(values: torch.Tensor, rank: int) -> None:
    """[collective] That rank's values, to all."""
    if _world() > 1 and values.numel() > 0:
        sent = _buffer(values)
        dist.broadcast(sent, rank)
        if dist.get_rank() != rank:
            values.detach().copy_(sent)


def any_rank(mine: bool) -> bool:
    """[collective] Whether it is true on some rank."""
    if _world() == 1:
        return mine
    flag = _buffer(torch.tensor([int(mine)]))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _is_alone(parameter: torch.Tensor) -> bool:
    """[local] Nothing else refers to its memory, such as a view, or another parameter."""
    storage = parameter.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count <= _OWN_REFERENCES and storage.resizable()  # others' memory, such as of numpy, is not


def _has_values(parameter: torch.Tensor) -> bool:
    plain = parameter.layout == torch.strided and not parameter.is_meta and not torch.nn.parameter.is_lazy(parameter)
    if not plain or type(parameter) is not torch.nn.Parameter or parameter.numel() == 0:
        return False
    if parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():  # expanded
        return False
    try:
        return parameter.data_ptr() != 0
    except RuntimeError:  # libzero.build() has not allocated it, or an Engine has it
        return False


def divide(parameter: torch.nn.Parameter, rank: int | None = 0, *, shared: bool = False) -> bool:
    """[collective] Keeps this rank's part of its values, of which those of `rank` are sent to all. Returns whether.

    Not where they cannot be taken away on some rank: what has no memory there, or unless `shared` shares it, and what
    keep_whole() holds. rank: None if all ranks have the same values.
    """
    if _KEPT in parameter.__dict__:
        return False
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if any_rank(not _has_values(parameter) or not (shared or _is_alone(parameter))):
            return False
        identify(parameter)
        if rank is not None:
            send(parameter.data, rank)
        world = _world()
        size = -(-parameter.numel() // world)
        begin = min(size * (dist.get_rank() if world > 1 else 0), parameter.numel())
        mine = parameter.detach().reshape(-1)[begin : begin + size]
        part = parameter.__dict__.get("ds_tensor")
        if part is None or part.numel() != size or part.dtype != mine.dtype or part.device != mine.device:
            part = torch.zeros(size, dtype=mine.dtype, device=mine.device)
        part[: mine.numel()] = mine
        parameter.__dict__.update(ds_tensor=part, ds_shape=parameter.shape, ds_numel=parameter.numel())
        put_back(parameter)
    return True


def _copied(parameter: torch.Tensor, memo: dict[int, Any]) -> torch.nn.Parameter:
    """[local] copy.deepcopy() of one that is divided: another that is."""
    made = torch.nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    identify(made)
    attributes = {name: value for name, value in parameter.__dict__.items() if name.startswith("ds_")}
    made.__dict__.update(copy.deepcopy(attributes), ds_id=made.__dict__["ds_id"])
    put_back(made)
    memo[id(parameter)] = made
    return made


def put_back(parameter: torch.Tensor) -> None:
    """[local] Drops the whole values. The parts stay as they were."""
    with torch._C.DisableTorchFunction():
        parameter.data = _native.divided_parameter(parameter, [0] * max(1, len(parameter.__dict__["ds_shape"])))
        _shared.add(parameter.untyped_storage()._cdata)
        parameter.__dict__.update({_DIVIDED: True, "__deepcopy__": partial(_copied, parameter)})


def cast(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """[local] parameter.data = parameter.data.to(dtype), of a divided one too."""
    with torch._C.DisableTorchFunction():
        if is_divided(parameter):
            parameter.__dict__["ds_tensor"] = parameter.__dict__["ds_tensor"].to(dtype)
            parameter.data = torch.empty(0, dtype=dtype, device=parameter.device)
            put_back(parameter)
        else:
            parameter.data = parameter.data.to(dtype)


def _gather(part: torch.Tensor, into: torch.Tensor) -> None:
    """[collective] The whole values of which this is the rank's part."""
    flat = into.view(-1)
    part = part.to(into.dtype)
    if _world() == 1:
        flat.copy_(part[: flat.numel()])
        return
    part = _buffer(part)
    whole = part.new_empty(part.numel() * _world())
    dist.all_gather_into_tensor(whole, part)
    flat.copy_(whole[: flat.numel()])


def made_of_parts(parameter: torch.Tensor) -> bool:
    """[local] Whether it is torch.nn.Parameter(other) of a divided one, and so has no values and no parts."""
    with torch._C.DisableTorchFunction():
        lazy = torch.nn.parameter.is_lazy(parameter) or parameter.is_meta or parameter.layout != torch.strided
        if lazy or is_divided(parameter) or parameter.numel() > 0:
            return False
        return parameter.untyped_storage()._cdata in _shared


def keep_whole(parameter: torch.Tensor, keep: bool) -> None:
    """[local] From now on divide() does not divide it, or does again."""
    if keep:
        parameter.__dict__[_KEPT] = True
    else:
        parameter.__dict__.pop(_KEPT, None)


def differs(parameter: torch.Tensor) -> bool:
    """[local] Whether the values of one that was made whole are not those that the ranks hold."""
    part: torch.Tensor = parameter.__dict__["ds_tensor"]
    begin = len(part) * (dist.get_rank() if _world() > 1 else 0)
    mine = parameter.detach().reshape(-1)[begin : begin + len(part)]
    held = part[: len(mine)].to(mine)  # of the dtype that the module has been given since
    return not torch.equal(mine.view(torch.uint8), held.view(torch.uint8))  # NaN are equal here


def make_whole(parameter: torch.Tensor) -> None:
    """[collective] Gives a divided parameter its values."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        whole = torch.empty(parameter.__dict__["ds_shape"], dtype=parameter.dtype, device=parameter.device)
        _gather(parameter.__dict__["ds_tensor"], whole)
        parameter.data = whole
        _forget(parameter)


def _forget(parameter: torch.Tensor) -> None:
    del parameter.__dict__[_DIVIDED], parameter.__dict__["__deepcopy__"]


def hand_over(module: torch.nn.Module) -> None:
    """[local] Prepares a module for an Engine, which gathers each divided parameter as it takes it ([collective])."""
    for parameter in module.parameters():
        if is_divided(parameter):
            shape, place = list(parameter.__dict__["ds_shape"]), parameter.__dict__["ds_id"]
            with torch._C.DisableTorchFunction():
                parameter.data = _native.deferred_values(parameter, shape, place, _giving(parameter))
        else:
            parameter.__dict__.pop("ds_tensor", None)


def _giving(parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    held = weakref.ref(parameter)  # its memory holds this function

    def give(values: torch.Tensor) -> None:
        of = held()
        if of is None:
            raise RuntimeError("a parameter that the ranks hold in parts was dropped before the Engine had its values")
        _gather(of.__dict__["ds_tensor"], values)
        del of.__dict__["ds_tensor"]
        _forget(of)

    return give


_READS_NO_VALUE = frozenset(
    "is_meta is_leaf requires_grad requires_grad_ grad grad_fn dtype device layout is_sparse is_cpu is_cuda "
    "is_quantized is_floating_point is_complex _version _base names __hash__ __dict__".split()
)
_READS_SHAPE = frozenset("shape ndim size dim ndimension numel nelement stride __len__ is_contiguous".split())


class WholeWhereUsed(TorchFunctionMode):
    """While a model is built: an operation on a divided parameter sees its whole values, and changes them on all ranks
    to rank 0's. They are divided again when the next one is used, where nothing else refers to their memory by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[int, torch.nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        words = kwargs or {}
        given = list(_parameters_among([*args, *words.values()]))
        found = [parameter for parameter in given if is_divided(parameter)]
        if found:
            name = func.__name__
            if name in ("__get__", "__set__"):  # of a property
                name = func.__self__.__name__
            if name in _READS_SHAPE and args and args[0] is found[0]:
                return func(torch.empty(found[0].ds_shape, dtype=found[0].dtype, device="meta"), *args[1:], **words)
            if name not in _READS_NO_VALUE:
                self.settle(given)
                for parameter in found:
                    make_whole(parameter)
                    self._used[id(parameter)] = parameter
        return func(*args, **words)

    def settle(self, needed: Iterable[Any] = ()) -> None:
        """[collective] Divides what was used, but for what is needed now."""
        keys = {id(parameter) for parameter in needed}
        for key, parameter in list(self._used.items()):
            if key not in keys and divide(parameter):
                del self._used[key]


def _parameters_among(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, torch.nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parameters_among(value)
        elif isinstance(value, dict):
            yield from _parameters_among(value.values())
