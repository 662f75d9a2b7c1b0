"""deepspeed.moe"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.moe import layer, sharded_moe, utils

__all__ = ["layer", "sharded_moe", "utils"]

__getattr__ = module_getattr("deepspeed.moe")
