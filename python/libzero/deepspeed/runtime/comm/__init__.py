"""deepspeed.runtime.comm"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.comm import coalesced_collectives

__all__ = ["coalesced_collectives"]

__getattr__ = module_getattr("deepspeed.runtime.comm")
