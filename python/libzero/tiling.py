"""A linear layer as tiles that stage 3 unshards one at a time (ZeRO-Infinity, arXiv:2104.07857, section 5.1.3)."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch

__all__ = ["TiledLinear"]


def _parts(total: int, count: int) -> list[int]:
    """Sizes of `count` parts; earlier ones are larger by one where it does not divide."""
    return [total // count + (i < total % count) for i in range(count)]


class TiledLinear(torch.nn.Module):
    """torch.nn.Linear as out_splits x in_splits layers of class linear_cls (with **kwargs).

    To an Engine every tile is a unit, also below a module that is one, and with libzero.units. Outputs and gradients
    are those of the whole layer up to rounding. Parameters: linears.R.C.weight, and linears.R.C.bias of the last C.

    input_is_already_split: forward takes a list of in_splits tensors. combine_out_splits: False returns a list of
    out_splits tensors. init_linear: its values are taken over. RuntimeError for more splits than features.
    include/zero/tiled_linear.h has the same.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[torch.nn.Module] = torch.nn.Linear,
        init_linear: torch.nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}_splits: got {splits}, expected 1 to {features}")
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.use_bias = bias
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_sizes, self.out_sizes = _parts(in_features, in_splits), _parts(out_features, out_splits)
        self.linears = torch.nn.ModuleList(
            torch.nn.ModuleList(
                linear_cls(width, height, bias=bias and i == in_splits - 1, **kwargs)  # one tile of a row has the bias
                for i, width in enumerate(self.in_sizes)
            )
            for height in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)
        elif linear_cls is torch.nn.Linear and in_splits > 1:
            # The bound of torch.nn.Linear, which follows the features of the whole layer, not of a tile.
            for parameter in self.parameters():
                torch.nn.init.uniform_(parameter, -1 / math.sqrt(in_features), 1 / math.sqrt(in_features))

    @property
    def in_parts(self) -> list[int]:
        """Where each part of the input begins, and the end."""
        return [0, *accumulate(self.in_sizes)]

    @property
    def out_parts(self) -> list[int]:
        """The same, of the output."""
        return [0, *accumulate(self.out_sizes)]

    def forward(self, input_: torch.Tensor | list[torch.Tensor]) -> Any:
        """input_: (..., in_features), or the list. Returns (..., out_features), or the list."""
        rows = self._rows(input_)
        sums = [self._sum(parts) for parts in rows]
        return torch.cat(sums, dim=-1) if self.combine_out_splits else sums

    def _rows(self, input_: torch.Tensor | list[torch.Tensor]) -> list[list[Any]]:
        """What each tile returns, by part of the output."""
        inputs = list(torch.split(input_, self.in_sizes, dim=-1)) if isinstance(input_, torch.Tensor) else input_
        if len(inputs) != self.in_splits:
            raise RuntimeError(f"TiledLinear: got {len(inputs)} parts of the input, expected {self.in_splits}")
        return [[tile(part) for tile, part in zip(row, inputs, strict=True)] for row in self._tiles()]

    def _tiles(self) -> list[list[torch.nn.Module]]:
        return [list(row.children()) for row in self.linears]

    @staticmethod
    def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    @torch.no_grad()
    def copy_params_from(self, other: torch.nn.Linear) -> None:
        """Takes over the values of a layer of the same size."""
        if (other.in_features, other.out_features) != (self.in_features, self.out_features):
            raise RuntimeError(
                f"TiledLinear.copy_params_from: got {other.in_features} x {other.out_features}, expected "
                f"{self.in_features} x {self.out_features}"
            )
        for row, weights in zip(self._tiles(), torch.split(other.weight, self.out_sizes), strict=True):
            for tile, weight in zip(row, torch.split(weights, self.in_sizes, dim=1), strict=True):
                tile.get_parameter("weight").copy_(weight)
        if self.use_bias:
            for row, bias in zip(self._tiles(), torch.split(other.bias, self.out_sizes), strict=True):
                row[-1].get_parameter("bias").copy_(bias)
