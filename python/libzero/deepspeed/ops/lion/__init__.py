"""deepspeed.ops.lion: Lion as the engine computes it, wherever the states live."""

from __future__ import annotations

from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops import EngineOptimizer, Params

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class _Lion(EngineOptimizer):
    kind = "Lion"
    state_names = ("exp_avg",)

    def _rule(self, group: dict[str, Any], step: int, grad: torch.Tensor, *held: torch.Tensor) -> None:
        p, mean = held
        beta1, beta2 = group["betas"]
        rate = float(group["lr"])
        direction = mean.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        p.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        mean.mul_(beta2).add_(grad, alpha=1 - beta2)


class DeepSpeedCPULion(_Lion):
    """[local] fp32_optimizer_states=False: moments in the dtype of the parameters, in an engine of its masters."""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class FusedLion(_Lion):
    """[local] set_grad_none has no effect. Without an engine, moments have the parameters' dtype."""

    fp32_optimizer_states = False

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
