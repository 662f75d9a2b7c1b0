"""deepspeed.module_inject"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.module_inject import layers
from libzero.deepspeed.module_inject.layers import set_autotp_mode

__all__ = ["layers", "set_autotp_mode"]

__getattr__ = module_getattr("deepspeed.module_inject")
