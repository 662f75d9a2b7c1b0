"""deepspeed.launcher: the command line of DeepSpeed's launcher, which `zero run --deepspeed` takes over."""

from libzero.deepspeed._refuse import module_getattr

__getattr__ = module_getattr("deepspeed.launcher")
