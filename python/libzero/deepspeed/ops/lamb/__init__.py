"""deepspeed.ops.lamb: LAMB (You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962)."""

from __future__ import annotations

import math
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops import EngineOptimizer, Params

__all__ = ["FusedLamb"]


class FusedLamb(EngineOptimizer):
    """[local] On any device. In an engine each parameter is updated whole, by one rank (docs/optimizers.md).

    The step of a parameter is that of Adam with weight_decay, times ||parameter|| / ||step|| within min_coeff and
    max_coeff; 1 where one of the norms is 0. The bias correction of Adam is a factor of the rate. amsgrad, and
    max_grad_norm above 0, for which there is gradient_clipping, are refused.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLamb has no amsgrad.")
        self.refuse_unless(max_grad_norm == 0, "max_grad_norm", "gradient_clipping of the configuration clips")
        numbers = {"lr": lr, "bias_correction": bias_correction, "betas": tuple(betas), "eps": eps}
        numbers.update(weight_decay=weight_decay, max_grad_norm=0.0, max_coeff=max_coeff, min_coeff=min_coeff)
        super().__init__(params, numbers)
        self.eps_mode = 0 if eps_inside_sqrt else 1

    def _update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        super()._update(group, p, state)
        state["lamb_coeff"] = vars(self).pop("_last")  # of a parameter, not of the optimizer

    def _rule(self, group: dict[str, Any], step: int, grad: torch.Tensor, *held: torch.Tensor) -> None:
        p, mean, square = held
        beta1, beta2 = group["betas"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = square.sqrt().add_(group["eps"]) if self.eps_mode == 1 else (square + group["eps"]).sqrt_()
        change = mean / root + group["weight_decay"] * p
        of_p, of_change = float(p.norm()), float(change.norm())
        coefficient = min(max(of_p / of_change, group["min_coeff"]), group["max_coeff"]) if of_p * of_change else 1.0
        corrected = math.sqrt(1 - beta2**step) / (1 - beta1**step) if group["bias_correction"] else 1.0
        p.add_(change, alpha=-float(group["lr"]) * corrected * coefficient)
        self._last = coefficient

    def get_lamb_coeffs(self) -> list[float]:
        """[local] The factors of the last step(), by parameter. Without an engine, which has the states."""
        states = (self.state.get(p, {}) for group in self.param_groups for p in group["params"])
        return [state["lamb_coeff"] for state in states if "lamb_coeff" in state]


__getattr__ = module_getattr("deepspeed.ops.lamb")
