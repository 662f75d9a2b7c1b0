"""libzero.TiledLinear: equal to torch.nn.Linear, and to an Engine every tile is a unit."""

import math
from typing import Any

import pytest
import torch

import libzero
from libzero import deepspeed


class Net(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.Module], **words: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(layer(24, 24, **words), torch.nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 2), (5, 7), (24, 1)])
def test_gradients_are_those_of_a_linear(in_splits: int, out_splits: int) -> None:
    torch.manual_seed(3)
    whole = torch.nn.Linear(24, 24)
    tiled = libzero.TiledLinear(24, 24, in_splits=in_splits, out_splits=out_splits, init_linear=whole)
    x = torch.randn(2, 5, 24)
    results = []
    for layer in (whole, tiled):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        results.append((y.detach(), given.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]  # type: ignore[union-attr]
    torch.testing.assert_close(torch.cat(rows), whole.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.cat([row[-1].bias.grad for row in tiled.linears]),  # type: ignore[union-attr,index]
        whole.bias.grad,
        rtol=1e-5,
        atol=1e-6,
    )
    assert sum(p.numel() for p in tiled.parameters()) == 24 * 25


@pytest.mark.parametrize("layer", [libzero.TiledLinear, deepspeed.zero.TiledLinear])
def test_every_tile_is_a_unit(layer: type[torch.nn.Module]) -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}

    def of_rank(_: libzero.Communicator) -> Any:
        engine = libzero.Engine(Net(layer, in_splits=2, out_splits=3), config)
        engine.backward(engine.module(torch.ones(3, 24)))
        engine.step()
        return engine.units()

    for units in libzero.run_ranks(2, of_rank):
        names = [unit[0] for unit in units]
        assert names == [f"blocks.{b}.0.linears.{r}.{c}" for b in range(2) for r in range(3) for c in range(2)]


def test_initial_values_have_the_bound_of_the_whole_layer() -> None:
    tiled = libzero.TiledLinear(64, 32, in_splits=16)
    highest = max(float(p.detach().abs().max()) for p in tiled.parameters())
    assert 0.9 / math.sqrt(64) < highest <= 1 / math.sqrt(64)
