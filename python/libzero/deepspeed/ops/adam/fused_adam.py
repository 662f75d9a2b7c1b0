"""deepspeed.ops.adam.fused_adam"""

from libzero.deepspeed.ops.adam import FusedAdam

__all__ = ["FusedAdam"]
