"""deepspeed.sequence: attention and losses of models that divide the tokens of a sample themselves."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.sequence import cross_entropy, layer

__all__ = ["cross_entropy", "layer"]

__getattr__ = module_getattr("deepspeed.sequence")
