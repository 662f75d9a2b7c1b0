"""Tensors of one dtype on one device."""

from __future__ import annotations

import torch

from libzero.deepspeed._refuse import module_getattr

__all__ = ["OnDevice"]


class OnDevice:
    """[local] `with OnDevice(dtype=torch.bfloat16, device="meta"):` tensors made within have this dtype and device.

    enabled: False for nothing. A model on "meta" has no values: load them before initialize(), or use libzero.build().
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._enabled = dtype, enabled
        self._device = torch.device(device)

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *words: object) -> None:
        if self._enabled:
            self._device.__exit__(*words)
            torch.set_default_dtype(self._before)


__getattr__ = module_getattr("deepspeed.utils.init_on_device")
