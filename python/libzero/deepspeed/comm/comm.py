"""deepspeed.comm.comm: the same calls as deepspeed.comm."""

from libzero.deepspeed.comm import *  # noqa: F403
