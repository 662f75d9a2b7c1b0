"""deepspeed.checkpoint"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.checkpoint import utils

__all__ = ["utils"]

__getattr__ = module_getattr("deepspeed.checkpoint")
