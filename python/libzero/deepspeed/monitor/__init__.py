"""deepspeed.monitor: metrics of a run."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.monitor import monitor

__all__ = ["monitor"]

__getattr__ = module_getattr("deepspeed.monitor")
