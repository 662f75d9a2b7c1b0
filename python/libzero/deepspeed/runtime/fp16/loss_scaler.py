"""deepspeed.runtime.fp16.loss_scaler: the loss scale of an engine, to read."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime._loss_scale import DynamicLossScaler, LossScaleConfig, LossScaler, LossScalerBase

__all__ = ["DynamicLossScaler", "LossScaleConfig", "LossScaler", "LossScalerBase"]

__getattr__ = module_getattr("deepspeed.runtime.fp16.loss_scaler")
