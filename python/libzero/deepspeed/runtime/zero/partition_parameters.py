"""deepspeed.zero's contexts: building a model for stage 3, and reading or writing whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from libzero._divided import (
    WholeWhereUsed,
    any_rank,
    cast,
    differs,
    divide,
    is_divided,
    keep_whole,
    made_of_parts,
    make_whole,
    put_back,
    send,
)
from libzero.deepspeed import comm
from libzero.deepspeed._held import (
    ZeroParamStatus,
    ZeroParamType,
    divide_free,
    mark,
    mark_rounded,
    require_no_model_parallel,
)
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.runtime.config import KeptFp32, read_config, recipe_of
from libzero.deepspeed.utils.logging import log_dist_once
from libzero.engine import Engine, engine_of
from libzero.errors import ConfigError

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
]


_CAST = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Init:
    """Builds a model that stage 3 is going to shard; `with Init(config_dict_or_path=config): model = Net()`.

    dtype: that parameters are cast to as soon as their module is made; without it that of the configuration's recipe,
    and without one they stay as they are. Those that libzero.keep_fp32 may name are cast at the end of the `with`, by
    the names that they have then; what was cast and gets a name of keep_fp32 later is refused by initialize().
    Buffers keep the dtype that their class gives them. enabled: False for nothing. module: a model that was made
    before, whose parameters are cast now. remote_device other than the configuration's offload, and groups of some
    ranks, are refused. Starts torch.distributed ([collective]) where nobody has.

    [collective] The ranks hold each parameter in parts, of rank 0's values, from when the next module is made, or the
    `with` ends. Each rank has `ds_tensor`, its part, and no whole values: numel() is 0 then, `ds_shape` and `ds_numel`
    are of the whole, and GatheredParameters makes it whole. Within the `with` what reads or writes a parameter gets it
    whole, as a constructor that initializes its children does; all ranks must do so. A parameter stays whole where
    something else refers to its memory. The engine takes them over one at a time.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self.enabled = enabled
        given = config_dict_or_path if config_dict_or_path is not None else config
        settings = {} if given is None else read_config(given)
        self._dtype = dtype or recipe_of(settings)
        self._kept = KeptFp32(settings)
        self._made: dict[int, tuple[set[str], torch.nn.Parameter]] = {}  # with all names that they have had
        self._whole: dict[int, tuple[torch.nn.Module, torch.nn.Parameter]] = {}  # with the module that has them
        self._used = WholeWhereUsed()
        self._scope = ExitStack()
        self._hooks: list[Any] = []
        if enabled:
            comm.init_distributed()
            require_no_model_parallel(mpu, "cannot shard over some ranks in zero.Init")
            parts = {
                "data_parallel_group": data_parallel_group,
                "sequence_data_parallel_group": sequence_data_parallel_group,
                "zero_param_parallel_group": zero_param_parallel_group,
            }
            for name, group in parts.items():
                if group is not None and comm.get_world_size(group) != comm.get_world_size():
                    raise NotImplementedError(
                        f"cannot shard over some ranks in zero.Init: {name} has {comm.get_world_size(group)} of "
                        f"{comm.get_world_size()} ranks. Hint: leave it out."
                    )
            if param_swapper is not None:
                raise NotImplementedError("cannot use a param_swapper in zero.Init. Hint: offload_param.device nvme.")
            if self._dtype:
                log_dist_once(
                    f"zero.Init: parameters become {self._dtype}; libzero.keep_fp32 names those that stay fp32.",
                    ranks=(0,),
                )
            if module is not None:
                kept = self._kept.of(module)
                self._cast(p for p in module.parameters() if id(p) not in kept)
                parameters = list(module.parameters())
                mark(parameters)
                divide_free(parameters)

    def _cast(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for p in parameters:
            if self._dtype is not None and p.dtype in _CAST and p.dtype != self._dtype:
                mark_rounded(p, self._dtype)
                cast(p, self._dtype)

    def _make(self, name: str, parameter: torch.nn.Parameter) -> None:
        self._made.setdefault(id(parameter), (set(), parameter))[0].add(name)

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            if made_of_parts(parameter):
                raise RuntimeError(
                    f"[zero.Init] {type(module).__name__}.{name} was made of a parameter that the ranks hold in parts, "
                    "and has no values. Hint: torch.nn.Parameter(other.clone()), or make it in "
                    "deepspeed.zero.GatheredParameters(other)."
                )
            mark([parameter])
            self._make(name, parameter)
            # The constructor of another module runs: what is used again until then is gathered again.
            divide_free([whole for holder, whole in self._whole.values() if holder is not module])
            self._whole[id(parameter)] = (module, parameter)
            self._whole = {key: value for key, value in self._whole.items() if not is_divided(value[1])}

    def _complete(self, module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        # A module that becomes another's is made. Parameters alone are cast, not by a default dtype: that is the
        # buffers' too, and those of rotary positions have to be exact.
        if child is not None:
            self._used.settle()
            for path, p in child.named_parameters(prefix=name, remove_duplicate=False):
                self._make(path, p)
                if not self._kept.may_name(path):
                    self._cast([p])
            divide_free(child.parameters())

    def __enter__(self) -> Init:
        if self.enabled:
            hooks = torch.nn.modules.module
            self._hooks += [
                hooks.register_module_parameter_registration_hook(self._registered),
                hooks.register_module_module_registration_hook(self._complete),
            ]
            self._scope.enter_context(self._used)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._scope.close()
            self._hooks.pop().remove()
            self._hooks.pop().remove()
            if kind is None:
                self._cast(p for names, p in self._made.values() if not any(self._kept.named(name) for name in names))
                self._whole.clear()
                self._used.settle()
                divide_free(p for _, p in self._made.values())
            self._made.clear()


class GatheredParameters:
    """[collective] Within it parameters of stage 3 are whole: of their shape and the dtype that forward reads.

    params: one parameter or several, whose whole units are gathered. modifier_rank: that rank may write them in place
    under torch.no_grad(), and all ranks have its values afterwards; None: read only. enabled: False for nothing.
    With tensor or expert parallelism a parameter of which ranks have different parts is written by the first rank with
    each part: modifier_rank is 0, another one is a ConfigError.
    Below stage 3 modifier_rank does the same to parameters that an engine holds; without it nothing happens there.
    Before deepspeed.initialize() those of zero.Init are gathered, and divided again at the end: with modifier_rank's
    values; without it as they were, and RuntimeError on every rank if one of them was written.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | torch.nn.Parameter,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        each: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        writes = modifier_rank is not None  # masters have to follow, at every stage
        self.params = [p for p in each if hasattr(p, "ds_id") or (writes and engine_of(p))] if enabled else []
        self.modifier_rank = modifier_rank
        self._scopes = ExitStack()
        self._waiting: list[torch.nn.Parameter] = []
        self._divided: dict[int, int] = {}  # of these: the version when they became whole

    def __enter__(self) -> None:
        held: dict[Engine, list[torch.nn.Parameter]] = {}
        for p in self.params:
            engine = engine_of(p)
            if engine is None:
                self._waiting.append(p)
            else:
                held.setdefault(engine, []).append(p)
        for engine, mine in held.items():
            self._expect_whole(engine, mine)
        for engine, mine in held.items():
            self._scopes.enter_context(engine.gathered_parameters(mine, modify=self.modifier_rank is not None))
        for p in self._waiting:
            if is_divided(p):
                make_whole(p)
                keep_whole(p, True)
                self._divided[id(p)] = p._version
        self._say(ZeroParamStatus.AVAILABLE)

    def _expect_whole(self, engine: Engine, mine: list[torch.nn.Parameter]) -> None:
        # Every rank would get that rank's part, also those that have another one.
        if not self.modifier_rank:
            return
        parts = engine._parts_among(mine)
        if parts:
            raise ConfigError(
                f"[GatheredParameters] got modifier_rank={self.modifier_rank} for {', '.join(parts)}, of which ranks "
                "have different parts (tensor or expert parallelism), expected 0: the first rank with each part writes "
                "it. Hint: whole values are given by deepspeed.utils.safe_set_full_fp32_param()."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.modifier_rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
                waiting = {id(p) for p in self._waiting}
                for p in self.params:
                    # The engine sends rank 0's values itself.
                    if id(p) in waiting or self.modifier_rank != 0:
                        send(p, self.modifier_rank)
            self._divide_again(kind is None)
        finally:
            self._say(ZeroParamStatus.NOT_AVAILABLE)
            self._scopes.close()

    def _divide_again(self, complete: bool) -> None:
        mine = [p for p in self._waiting if id(p) in self._divided]
        writes = complete and self.modifier_rank is not None
        reads = complete and not writes
        written = [p for p in mine if p._version != self._divided[id(p)] or differs(p)] if reads else []
        for p in mine:
            keep_whole(p, False)
            if not writes or not divide(p, rank=None, shared=True):
                put_back(p)
        if mine and complete and not writes and any_rank(bool(written)):
            shapes = ", ".join(str(list(p.__dict__["ds_shape"])) for p in written) or "none on this rank"
            raise RuntimeError(
                f"[GatheredParameters] got modifier_rank=None and parameters that were written (shapes: {shapes}), "
                "expected a rank whose values all ranks get. Hint: modifier_rank=0."
            )

    def _say(self, status: ZeroParamStatus) -> None:
        for p in self.params:
            if hasattr(p, "ds_id"):
                p.ds_status = status


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """[local] Nothing: the engine notices a parameter's use anywhere. TypeError for what is not a parameter."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise TypeError(f"register_external_parameter: got {type(parameter).__name__}, expected a Parameter")


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """[local] Nothing, as register_external_parameter."""
    register_external_parameter(module, parameter)


# transformers replaces this name for the time of zero.Init; here no constructor of tensors is wrapped.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., torch.Tensor], **_: Any) -> Callable[..., torch.Tensor]:
    """[local] The constructor itself."""
    return fn


__getattr__ = module_getattr("deepspeed.runtime.zero.partition_parameters")
