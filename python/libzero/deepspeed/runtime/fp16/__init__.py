"""deepspeed.runtime.fp16: classes of the engine's optimizer and of its loss scale."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.fp16 import fused_optimizer, loss_scaler, unfused_optimizer

__all__ = ["fused_optimizer", "loss_scaler", "unfused_optimizer"]

__getattr__ = module_getattr("deepspeed.runtime.fp16")
