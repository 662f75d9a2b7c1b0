"""deepspeed.ops.adam.cpu_adam"""

from libzero.deepspeed.ops.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
