"""deepspeed.utils"""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.accelerator import get_accelerator
from libzero.deepspeed.runtime.dataloader import RepeatingLoader
from libzero.deepspeed.utils import (
    comms_logging,
    debug,
    groups,
    init_on_device,
    logging,
    nvtx,
    tensor_fragment,
    timer,
    z3_leaf_module as _leaf,
    zero_to_fp32,
)
from libzero.deepspeed.utils.comms_logging import get_caller_func
from libzero.deepspeed.utils.groups import *
from libzero.deepspeed.utils.init_on_device import OnDevice
from libzero.deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
from libzero.deepspeed.utils.nvtx import instrument_w_nvtx
from libzero.deepspeed.utils.tensor_fragment import *
from libzero.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)

z3_leaf_module = _leaf.z3_leaf_module

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "comms_logging",
    "debug",
    "get_accelerator",
    "get_caller_func",
    "get_z3_leaf_modules",
    "groups",
    "init_on_device",
    "instrument_w_nvtx",
    "log_dist",
    "log_dist_once",
    "logger",
    "logging",
    "nvtx",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "tensor_fragment",
    "timer",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]
__all__ += groups.__all__
__all__ += tensor_fragment.__all__

__getattr__ = module_getattr("deepspeed.utils")
