"""A linear layer as tiles that stage 3 gathers one at a time."""

from __future__ import annotations

from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.tiling import TiledLinear

__all__ = ["TiledLinear", "TiledLinearReturnBias"]


class TiledLinearReturnBias(TiledLinear):
    """Over layers that return (output, bias); forward returns the two likewise."""

    def forward(self, input_: torch.Tensor | list[torch.Tensor]) -> Any:
        """Returns (output, bias); bias is None where no tile has one."""
        rows = self._rows(input_)
        sums = [self._sum([output for output, _ in parts]) for parts in rows]
        biases = [parts[-1][1] for parts in rows]
        if not self.combine_out_splits:
            return sums, biases
        return torch.cat(sums, dim=-1), torch.cat(biases, dim=-1) if biases[0] is not None else None


__getattr__ = module_getattr("deepspeed.runtime.zero.tiling")
