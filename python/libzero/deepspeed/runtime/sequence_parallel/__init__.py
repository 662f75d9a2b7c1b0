"""deepspeed.runtime.sequence_parallel: Ulysses for models of Hugging Face, over libzero's own exchange of tokens."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp

__all__ = ["parallel_state_sp", "ulysses_sp"]

__getattr__ = module_getattr("deepspeed.runtime.sequence_parallel")
