"""deepspeed.runtime.bf16_optimizer: the class of the engine's optimizer for bf16 at stage 1 with fp32 gradients."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.base_optimizer import BF16_Optimizer

__all__ = ["BF16_Optimizer"]

__getattr__ = module_getattr("deepspeed.runtime.bf16_optimizer")
