"""deepspeed.ops.adam: Adam and AdamW as the engine computes them, wherever the states live."""

from __future__ import annotations

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops import EngineOptimizer, Params

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "cpu_adam", "fused_adam"]


class _Adam(EngineOptimizer):
    kind = "Adam"

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


class DeepSpeedCPUAdam(_Adam):
    """[local] adamw_mode: decoupled decay (AdamW), else decay is part of the gradient."""

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
        self.refuse_unless(fp32_optimizer_states, "fp32_optimizer_states=False", "moments are fp32")
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


class FusedAdam(_Adam):
    """[local] adam_w_mode: decoupled decay (AdamW), else decay is part of the gradient. set_grad_none has no effect."""

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
