"""deepspeed.ops.adagrad: Adagrad as the engine computes it."""

from __future__ import annotations

from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops import EngineOptimizer, Params

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(EngineOptimizer):
    """[local] fp32_optimizer_states=False: sums in the parameters' dtype, without an engine only."""

    kind = "Adagrad"
    state_names = ("exp_avg_sq",)
    takes_sparse = True

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.refuse_unless(not amsgrad, "amsgrad", "there is no such state layout")
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _rule(self, group: dict[str, Any], step: int, grad: torch.Tensor, *held: torch.Tensor) -> None:
        p, total = held
        if group["weight_decay"]:
            grad = grad.add(p, alpha=group["weight_decay"])
        total.addcmul_(grad, grad)
        p.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-float(group["lr"]))


__getattr__ = module_getattr("deepspeed.ops.adagrad")
