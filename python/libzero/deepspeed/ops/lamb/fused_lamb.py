"""deepspeed.ops.lamb.fused_lamb"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops.lamb import FusedLamb

__all__ = ["FusedLamb"]

__getattr__ = module_getattr("deepspeed.ops.lamb.fused_lamb")
