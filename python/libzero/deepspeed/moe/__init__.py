"""deepspeed.moe"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]

__getattr__ = module_getattr("deepspeed.moe")
