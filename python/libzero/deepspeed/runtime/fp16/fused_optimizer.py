"""deepspeed.runtime.fp16.fused_optimizer: the engine's optimizer at stage 0 with a recipe and FusedAdam."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.base_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]

__getattr__ = module_getattr("deepspeed.runtime.fp16.fused_optimizer")
