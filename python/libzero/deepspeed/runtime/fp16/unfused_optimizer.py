"""deepspeed.runtime.fp16.unfused_optimizer: the engine's optimizer at stage 0 with a recipe."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.base_optimizer import FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]

__getattr__ = module_getattr("deepspeed.runtime.fp16.unfused_optimizer")
