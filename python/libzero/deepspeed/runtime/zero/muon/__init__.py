"""deepspeed.runtime.zero.muon: Muon as libzero computes it (libzero.muon)."""

from libzero.deepspeed._refuse import module_getattr

__getattr__ = module_getattr("deepspeed.runtime.zero.muon")
