"""deepspeed.ops.adagrad: Adagrad as the engine computes it."""

from __future__ import annotations

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.ops import EngineOptimizer, Params

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(EngineOptimizer):
    """[local]"""

    kind = "Adagrad"

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
        self.refuse_unless(fp32_optimizer_states, "fp32_optimizer_states=False", "sums are fp32")
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})


__getattr__ = module_getattr("deepspeed.ops.adagrad")
