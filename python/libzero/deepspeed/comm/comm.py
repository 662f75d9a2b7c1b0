"""deepspeed.comm.comm: the same calls as deepspeed.comm."""

from libzero.deepspeed.comm import *  # noqa: F403
from libzero.deepspeed._refuse import module_getattr

__getattr__ = module_getattr("deepspeed.comm.comm")
