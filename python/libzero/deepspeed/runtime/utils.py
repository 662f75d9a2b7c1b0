"""deepspeed.runtime.utils"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.debug import see_memory_usage

__all__ = ["see_memory_usage"]

__getattr__ = module_getattr("deepspeed.runtime.utils")
