"""deepspeed.zero"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.zero import offload_config, partition_parameters, stage3, stage_1_and_2, tiling
from libzero.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
)
from libzero.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from libzero.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "tiling",
    "unwrap_model_for_generation",
]

__getattr__ = module_getattr("deepspeed.zero")
