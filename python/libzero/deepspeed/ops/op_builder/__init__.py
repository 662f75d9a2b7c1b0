"""deepspeed.ops.op_builder: which of DeepSpeed's operators there are. The engine's are compiled with it."""

from __future__ import annotations

from typing import Any, NoReturn

from libzero.deepspeed._refuse import module_getattr

_BUILT = {
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLionBuilder": "fused_lion",
}
_NOT_BUILT = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedLambBuilder": "fused_lamb",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "NotImplementedBuilder": "deepspeed_not_implemented",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
_MODULES = {
    "ops.adagrad": "cpu_adagrad",
    "ops.adam": "cpu_adam fused_adam",
    "ops.aio": "async_io",
    "ops.comm": "deepspeed_ccl_comm deepspeed_not_implemented deepspeed_shm_comm",
    "ops.fp_quantizer": "fp_quantizer",
    "ops.gds": "gds",
    "ops.lamb": "fused_lamb",
    "ops.lion": "cpu_lion fused_lion",
    "ops.pin_memory": "pin_memory",
    "ops.quantizer": "quantizer",
    "ops.spatial": "spatial_inference",
    "ops.transformer": "stochastic_transformer transformer",
    "ops.transformer.inference": "transformer_inference",
}
"""Where DeepSpeed compiles an operator to; the others: "ops"."""


class OpBuilder:
    """An operator of DeepSpeed. `load()` is refused: nothing is compiled while a program runs."""

    NAME = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = self.NAME if name is None else name

    def absolute_name(self) -> str:
        """The module that DeepSpeed compiles the operator to."""
        module = next((module for module, names in _MODULES.items() if self.name in names.split()), "ops")
        return f"deepspeed.{module}.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `deepspeed.ops` has an optimizer that does it."""
        return self.name in _BUILT.values()

    def load(self, verbose: bool = False) -> NoReturn:
        """NotImplementedError that says what to use."""
        use = "deepspeed.ops has the optimizer" if self.is_compatible() else "the operators of torch"
        raise NotImplementedError(
            f"{type(self).__name__}.load() is not built: nothing is compiled while a program runs. Hint: {use}."
        )

    jit_load = load


_BUILDERS: dict[str, Any] = {
    name: type(name, (OpBuilder,), {"NAME": operator, "__module__": "deepspeed.ops.op_builder"})
    for name, operator in (_BUILT | _NOT_BUILT).items()
}
globals().update(_BUILDERS)
CUDAOpBuilder = OpBuilder
ALL_OPS = {builder.NAME: builder() for builder in _BUILDERS.values()}

__all__ = ["ALL_OPS", "CUDAOpBuilder", "OpBuilder", *_BUILDERS]


def compatible() -> dict[str, bool]:
    """[local] By the operator's name, whether there is one."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


__getattr__ = module_getattr("deepspeed.ops.op_builder")
