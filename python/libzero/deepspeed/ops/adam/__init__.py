"""deepspeed.ops.adam: Adam and AdamW as the engine computes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.adam import adam

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops import Params, SubgroupOptimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "cpu_adam", "fused_adam"]


class _Adam(SubgroupOptimizer):
    kind = "Adam"
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
    ) -> None:
        self.refuse_unless(not amsgrad, "amsgrad", "there is no such state layout")
        self.adam_w_mode = decoupled
        numbers = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**numbers, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.refuse_unless(not param_group.get("amsgrad", False), "amsgrad", "there is no such state layout")
        super().add_param_group(param_group)

    def _moved(self, group: dict[str, Any], step: int, mean: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """By how much an update moves a parameter, without a decoupled decay."""
        beta1, beta2 = group["betas"]
        first, second = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        spread = (square.sqrt() / math.sqrt(second)).add_(group["eps"])
        return (mean / spread).mul_(-float(group["lr"]) / first)

    def _kept(self, group: dict[str, Any]) -> float:
        """What a decoupled decay leaves of a parameter."""
        return 1 - float(group["lr"]) * group["weight_decay"] if self.adam_w_mode else 1.0

    def _with_decay(self, group: dict[str, Any], grad: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return grad if self.adam_w_mode or not group["weight_decay"] else grad.add(p, alpha=group["weight_decay"])

    def _rule(self, group: dict[str, Any], step: int, grad: torch.Tensor, *held: torch.Tensor) -> None:
        p, mean, square = held
        beta1, beta2 = group["betas"]
        dense = all(type(each) is torch.Tensor and each.is_contiguous() for each in (grad, *held))
        if dense and p.is_cpu and group["bias_correction"]:
            adam(
                [p], [grad], [mean], [square], [], [torch.tensor(step - 1.0)], fused=True, amsgrad=False,
                beta1=beta1, beta2=beta2, lr=float(group["lr"]), weight_decay=group["weight_decay"], eps=group["eps"],
                maximize=False, decoupled_weight_decay=self.adam_w_mode,
            )  # fmt: skip  # torch's kernel, several times as fast
            return
        grad = self._with_decay(group, grad, p)
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.mul_(self._kept(group)).add_(self._moved(group, step, mean, square))

    def _take_back(self, group: dict[str, Any], step: int, grad: torch.Tensor, *held: torch.Tensor) -> None:
        p, mean, square = held
        beta1, beta2 = group["betas"]
        p.sub_(self._moved(group, step, mean, square)).div_(self._kept(group))
        grad = self._with_decay(group, grad, p)
        mean.sub_(grad, alpha=1 - beta1).div_(beta1)
        square.addcmul_(grad, grad, value=beta2 - 1).div_(beta2).clamp_(min=0)


class DeepSpeedCPUAdam(_Adam):
    """[local] adamw_mode: decoupled decay (AdamW), else decay is part of the gradient.

    fp32_optimizer_states=False: moments in the parameters' dtype; in an engine in that of its masters, fp32 unless
    bf16_master_weights_and_grads is true.
    """

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


class FusedAdam(_Adam):
    """[local] adam_w_mode: decoupled decay (AdamW), else decay is part of the gradient. set_grad_none has no effect.

    Without an engine, moments have the parameters' dtype.
    """

    fp32_optimizer_states = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


from libzero.deepspeed.ops.adam import cpu_adam, fused_adam  # noqa: E402  # their names are these

__getattr__ = module_getattr("deepspeed.ops.adam")
