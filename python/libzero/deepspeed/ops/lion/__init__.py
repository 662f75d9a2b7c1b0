"""deepspeed.ops.lion: Lion as the engine computes it, wherever the states live."""

from __future__ import annotations

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops import EngineOptimizer, Params

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class _Lion(EngineOptimizer):
    kind = "Lion"


class DeepSpeedCPULion(_Lion):
    """[local]"""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.refuse_unless(fp32_optimizer_states, "fp32_optimizer_states=False", "moments are fp32")
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class FusedLion(_Lion):
    """[local] set_grad_none has no effect."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


__getattr__ = module_getattr("deepspeed.ops.lion")
