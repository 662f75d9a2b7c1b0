"""libzero: sharded data-parallel training (ZeRO stages 0 to 3) for PyTorch.

    engine = libzero.Engine(model, "ds_config.json")   # an ordinary torch.nn.Module
    loss = engine(batch)
    engine.backward(loss)
    result = engine.step()                             # result.updated, .grad_norm, .lr, .loss_scale

Names marked [collective] are called by every rank, in the same order; those marked [local] wait for no other rank.
"""

import sysconfig as _sysconfig
from importlib.util import find_spec as _find_spec

from libzero._build import SOABI as _SOABI
from libzero._build import TESTED_TORCH as _TESTED_TORCH
from libzero._build import TORCH as _TORCH

if not _find_spec("libzero._native"):
    raise ImportError(
        f"[libzero] got a Python of {_sysconfig.get_config_var('SOABI')}, expected {_SOABI}, "
        "which this libzero was built for. Hint: install libzero with this interpreter's pip."
    )

import torch as _torch

_version = _torch.__version__.split("+")[0]
if _version.split(".")[:2] != _TORCH.split(".")[:2]:
    raise ImportError(
        f"[libzero] got torch {_torch.__version__}, expected {_TORCH}, which this libzero was built for. "
        f"Hint: pip install torch=={_TORCH}, or build libzero again with this torch (pip install . in its clone)."
    )

from libzero._native import check_torch

if _version not in _TESTED_TORCH and (_faults := {name: fault for name, fault in check_torch() if fault}):
    raise ImportError(
        f"[libzero] got torch {_torch.__version__}, with which results may be wrong: {_faults}. "
        f"Hint: libzero was tested with torch {', '.join(_TESTED_TORCH)}."
    )

from libzero import (
    _cache,
    _log,  # noqa: F401
    tp,
)
from libzero._native import Options, Work
from libzero._native import version as __version__
from libzero.communicator import Communicator, default_communicator, run_ranks
from libzero.compiled import compile
from libzero.engine import Engine, ExportReport, ImportReport, StepResult, TraceSummary, build
from libzero.errors import CommError, ConfigError, InternalError, IoError, end_with_documented_codes
from libzero.memory import Memory, MemoryRow
from libzero.mesh import ExpertGroups, Mesh
from libzero.moe import MoE
from libzero.optimizer import Optimizer
from libzero.planner import Machine, Plan, plan, plan_all
from libzero.sequence import attention_over_heads, heads_to_sequence, sequence_to_heads
from libzero.tiling import TiledLinear

__all__ = [
    "CommError",
    "Communicator",
    "ConfigError",
    "Engine",
    "ExpertGroups",
    "ExportReport",
    "ImportReport",
    "InternalError",
    "IoError",
    "Machine",
    "Memory",
    "MemoryRow",
    "Mesh",
    "MoE",
    "Optimizer",
    "Options",
    "Plan",
    "StepResult",
    "TiledLinear",
    "TraceSummary",
    "Work",
    "__version__",
    "attention_over_heads",
    "build",
    "check_torch",
    "compile",
    "default_communicator",
    "heads_to_sequence",
    "plan",
    "plan_all",
    "run_ranks",
    "sequence_to_heads",
    "tp",
]

_cache.prepare()
end_with_documented_codes()
