"""A computation per token in tiles of the tokens, so that activations of one tile exist at a time.

A tile's forward runs without a graph, and again in backward, where it draws the same random numbers. Gradients of
parameters are summed over the tiles and arrive once, as those of one call do, so that an engine reduces them once at
any stage.

fn may read its arguments and parameters. Gradients go to every tensor of its arguments that has one, and to all
parameters that fn uses: compute_params, which DeepSpeed needs, may be None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

__all__ = [
    "AutogradComputeMLP",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "sequence_tiled_compute",
]

Tile = Callable[[int, Sequence[torch.Tensor]], torch.Tensor]
"""The output of a tile, of its number and the inputs that have gradients."""


def _parameters_of(output: torch.Tensor, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of autograd that an output depends on, but for the inputs."""
    known, seen, found = set(map(id, inputs)), set(), []
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            known.add(id(leaf))
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found


def _leaves(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in inputs]


class _Draws:
    """The generators before a tile's forward."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._host = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)

    @contextmanager
    def again(self) -> Iterator[None]:
        """[local] Within it they draw the same numbers; after it they continue."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._host)
            set_device_states(self._devices, self._states)
            yield


class _Sums:
    """Gradients of parameters, added up over the tiles."""

    def __init__(self, count: int) -> None:
        self.values: list[torch.Tensor | None] = [None] * count

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for i, gradient in enumerate(gradients):
            before = self.values[i]
            if gradient is not None:
                self.values[i] = gradient.clone() if before is None else before.add_(gradient)


class _Tiles(torch.autograd.Function):
    """The outputs of all tiles, joined. Inputs are cut and gradients joined by `cuts`, one of each input."""

    @staticmethod
    def forward(ctx: Any, work: _Work, first: torch.Tensor, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.work, ctx.parameters = work, tensors[count:]  # themselves: what checkpointing keeps of them has no gradient
        ctx.save_for_backward(*tensors[:count])
        return work.join([first, *(work.draw(i, work.cut(tensors[:count], i)) for i in range(1, work.tiles))])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        work, inputs, parameters = ctx.work, ctx.saved_tensors, ctx.parameters
        count, parts = len(inputs), []
        sums = _Sums(len(parameters))
        for i, gradient in enumerate(work.gradients(gradients[0])):
            with torch.enable_grad(), work.draws[i].again():
                pieces = _leaves(work.cut(inputs, i))
                output = work.run(i, pieces)
            found = torch.autograd.grad(output, [*pieces, *parameters], gradient, allow_unused=True)
            parts.append(found[:count])
            sums.add(found[count:])
        return (None, None, None, *work.joined_gradients(inputs, parts), *sums.values)


class _Work:
    """A computation of `tiles` tiles: how its inputs are cut, run and joined.

    dims: of each input, the dimension that is cut, in pieces of `step`; None: every tile takes all of it. dim: along
    which outputs are joined; 0: they are numbers. reduction: "mean" or "sum" of the joined output, or None.
    """

    def __init__(
        self, run: Tile, tiles: int, step: int, dims: Sequence[int | None], dim: int, reduction: str | None
    ) -> None:
        self.run, self.tiles, self.step = run, tiles, step
        self.dims, self.dim, self.reduction = dims, dim, reduction
        self._lengths: list[int] = []
        self.draws: dict[int, _Draws] = {}

    def draw(self, i: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """run(), which backward can repeat with the same random numbers."""
        self.draws[i] = _Draws(pieces)
        return self.run(i, pieces)

    def cut(self, inputs: Sequence[torch.Tensor], i: int) -> list[torch.Tensor]:
        """The pieces of tile i."""
        return [x if dim is None else _piece(x, dim, i, self.step) for x, dim in zip(inputs, self.dims, strict=True)]

    def join(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Of all tiles: one after another, or, where these are numbers, one number each; then reduced."""
        numbers = outputs[0].dim() == 0 or self.dim == 0
        self._lengths = [1 if numbers else x.shape[self.dim] for x in outputs]
        whole = torch.stack(outputs) if numbers else torch.cat(outputs, self.dim)
        self._shape, self._numbers = whole.shape, numbers
        return whole if self.reduction is None else whole.mean() if self.reduction == "mean" else whole.sum()

    def gradients(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Of the tiles' outputs, by that of the result."""
        if self.reduction is not None:
            count = math.prod(self._shape) if self.reduction == "mean" else 1
            gradient = (gradient / count).expand(self._shape)
        if self._numbers:
            return list(gradient.unbind(0))
        return list(torch.split(gradient, self._lengths, self.dim))

    def joined_gradients(
        self, inputs: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """Of the inputs: pieces one after another, sums of those that every tile takes."""
        found: list[torch.Tensor | None] = []
        for j, (x, dim) in enumerate(zip(inputs, self.dims, strict=True)):
            of_tiles = [part[j] for part in parts]
            if dim is None:
                sums = _Sums(1)
                for each in of_tiles:
                    sums.add([each])
                found += sums.values
            else:
                whole = torch.zeros_like(x, memory_format=torch.contiguous_format)
                for i, each in enumerate(of_tiles):
                    if each is not None:
                        _piece(whole, dim, i, self.step).copy_(each)
                found.append(whole)
        return found

    def apply(self, inputs: Sequence[torch.Tensor], compute_params: Iterable[torch.Tensor] | None) -> torch.Tensor:
        """The result, whose gradient goes to the inputs and to parameters. compute_params: see first()."""
        if not torch.is_grad_enabled():
            return self.join([self.run(i, self.cut(inputs, i)) for i in range(self.tiles)])
        parameters, first = self.first(inputs, compute_params)
        tensors = [*inputs, *parameters]
        apply: Any = _Tiles.apply  # without types before torch 2.15
        result: torch.Tensor = apply(self, first, len(inputs), *tensors)
        return result

    def first(
        self, inputs: Sequence[torch.Tensor], compute_params: Iterable[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The parameters that fn uses, and the output of the first tile without its graph.

        ValueError where compute_params are given and fn uses another leaf of autograd: a tensor that it got otherwise.
        """
        pieces = _leaves(self.cut(inputs, 0))
        output = self.draw(0, pieces)
        found = _parameters_of(output, pieces)
        listed = None if compute_params is None else set(map(id, compute_params))
        others = [] if not listed else [x for x in found if id(x) not in listed]
        if others:
            raise ValueError(
                f"compute_params: got {len(listed or ())} tensors, and fn also uses one of shape "
                f"{list(others[0].shape)}, expected all that it uses. Hint: add it, or pass compute_params=None."
            )
        return found, output.detach()


def _piece(x: torch.Tensor, dim: int, i: int, step: int) -> torch.Tensor:
    begin = min(i * step, x.shape[dim])
    return x.narrow(dim, begin, min(step, x.shape[dim] - begin))


def _with_gradients(tensors: Iterable[Any]) -> list[torch.Tensor]:
    return [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]


def _require_tiles(shards: Any) -> int:
    if not isinstance(shards, int) or shards < 1:
        raise ValueError(f"shards: got {shards!r}, expected a number of tiles, 1 or more")
    return shards


class SequenceTiledCompute(torch.autograd.Function):
    """fn by tiles of the tokens; sequence_tiled_compute() calls it with words."""

    @classmethod
    def apply(
        cls,
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """See sequence_tiled_compute(); args: the values of keys_to_shard, then those of keys_to_pass."""
        if output_reduction not in (None, "mean", "sum"):
            raise ValueError(f'output_reduction: got {output_reduction!r}, expected None, "mean" or "sum"')
        keys = [*keys_to_shard, *keys_to_pass]
        if grad_requiring_tensor_key not in keys:
            raise ValueError(f"grad_requiring_tensor_key: got {grad_requiring_tensor_key!r}, expected one of {keys}")
        step = -(-seqlen // _require_tiles(shards))
        values = dict(zip(keys, args, strict=True))
        for key in keys_to_shard:
            if values[key].shape[1] != seqlen:
                raise ValueError(f"{key}: got {list(values[key].shape)}, expected [batch, {seqlen}, ...]")
        trained = [key for key in keys if isinstance(values[key], torch.Tensor) and values[key].requires_grad]
        if output_unshard_dimension != 0:
            shards = max(1, -(-seqlen // step)) if step else 1  # no tile without tokens

        def run(i: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
            words = {key: _piece(values[key].detach(), 1, i, step) for key in keys_to_shard if key not in trained}
            words.update({key: values[key] for key in keys_to_pass if key not in trained})
            return fn(**words, **dict(zip(trained, pieces, strict=True)))

        dims = [1 if key in keys_to_shard else None for key in trained]
        work = _Work(run, shards, step, dims, output_unshard_dimension, output_reduction)
        return work.apply([values[key] for key in trained], compute_params)


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, Any],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """fn(**pieces, **kwargs_to_pass) by tiles, joined along output_unshard_dimension, then reduced.

    kwargs_to_shard: [batch, seqlen, ...], cut along dimension 1. output_unshard_dimension 0: a tile's output is a
    number. output_reduction: "mean" and "sum" of all elements; None: the joined output. ValueError for other words.
    """
    return SequenceTiledCompute.apply(
        fn,
        seqlen,
        shards,
        list(kwargs_to_shard),
        list(kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
        *kwargs_to_shard.values(),
        *kwargs_to_pass.values(),
    )


class TiledMLP(torch.autograd.Function):
    """fn(self, x) by tiles of x along its dimension before the last. fn computes each token for itself."""

    @classmethod
    def apply(
        cls,
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None,
    ) -> torch.Tensor:
        """x: [batch, tokens, width] or [tokens, width]; returns fn's output of it. shards: at most so many tiles."""
        tokens, trained = x.shape[-2], x.requires_grad
        step = max(1, -(-tokens // _require_tiles(shards)))
        tiles = max(1, -(-tokens // step))

        def run(i: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
            return fn(self, pieces[0] if trained else _piece(x, x.dim() - 2, i, step))

        work = _Work(run, tiles, step, [x.dim() - 2] * trained, -2, None)
        return work.apply(_with_gradients([x]), compute_params)


class AutogradComputeMLP(torch.autograd.Function):
    """fn(self, x) in one tile: computed again in backward."""

    @classmethod
    def apply(cls, fn: Callable[[Any, torch.Tensor], torch.Tensor], self: Any, x: torch.Tensor) -> torch.Tensor:
        """As TiledMLP of one tile."""
        return TiledMLP.apply(fn, self, x, 1, None)


class _FusedLoss(torch.autograd.Function):
    """A loss whose gradients are known: backward multiplies them by that of the loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: Sequence[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = [None if each is None else (each * gradients[0]).to(each.dtype) for each in ctx.gradients]
        return (None, None, *found)


class TiledFusedLogitsLoss(torch.autograd.Function):
    """fn(self, x, y) or fn(self, x, y, mask), a loss, by tiles of the tokens: the logits of one tile exist at a time.

    The gradients are computed in forward, so that logits are computed once.
    """

    @classmethod
    def apply(
        cls,
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None,
        output_reduction: str,
    ) -> torch.Tensor:
        """x: [batch, tokens, ...]; y: the same tokens; mask: [batch, tokens] or None. fn gets [tokens of a tile, ...].

        output_reduction: "sum" or "mean" of the tiles' losses. A mean over tokens that the tiles do not have equally
        many of is "sum" of fn's sums, divided by the program. ValueError for other words and shapes.
        """
        if output_reduction not in ("mean", "sum"):
            raise ValueError(f'output_reduction: got {output_reduction!r}, expected "mean" or "sum"')
        for name, given in {"x": x, "y": y, "mask": mask}.items():
            if given is not None and (given.dim() < 2 or given.shape[:2] != x.shape[:2]):
                raise ValueError(f"{name}: got {list(given.shape)}, expected {list(x.shape[:2])} first, as x")
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"mask: got {list(mask.shape)}, expected [batch, tokens]")
        others = [given.flatten(0, 1) for given in (y, mask) if given is not None]
        rows, trained = x.detach().flatten(0, 1), x.requires_grad and torch.is_grad_enabled()
        step = max(1, -(-rows.shape[0] // _require_tiles(shards)))
        tiles = max(1, -(-rows.shape[0] // step))

        def run(i: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
            tile = pieces[0] if trained else _piece(rows, 0, i, step)
            return fn(self, tile, *(_piece(each, 0, i, step) for each in others))

        work = _Work(run, tiles, step, [0] * trained, 0, output_reduction)
        if not torch.is_grad_enabled():
            return work.apply([], None)
        inputs = [rows] * trained
        parameters, _ = work.first(inputs, compute_params)
        sums, parts, losses = _Sums(len(parameters)), [], []
        share = 1 / tiles if output_reduction == "mean" else 1
        for i in range(tiles):
            pieces = _leaves(work.cut(inputs, i))
            loss = run(i, pieces)
            losses.append(loss.detach())
            found = torch.autograd.grad(loss * share, [*pieces, *parameters], allow_unused=True)
            parts.append(found[: len(inputs)])
            sums.add(found[len(inputs) :])
        joined = [each.view_as(x) for each in work.joined_gradients(inputs, parts) if each is not None]
        gradients = [*joined, *sums.values]
        tensors = [*([x] * trained), *parameters]
        apply: Any = _FusedLoss.apply  # without types before torch 2.15
        result: torch.Tensor = apply(work.join(losses), gradients, *tensors)
        return result
