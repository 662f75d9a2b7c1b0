"""Differentiable functions over the ranks of a tensor-parallel group, for example engine.mesh.group("tp").

The mappings of Megatron-LM (arXiv:1909.08053) and of its sequence regions (arXiv:2205.05198); include/zero/tp.h has the
same. All are [collective] over `group`, in forward or in backward or in both: every rank calls them, and runs backward,
in the same order. They return when they are complete, and release the GIL. With one rank they return x.

x: fp32, bf16 or fp16, of any strides. Sums are taken in fp32 in rank order and rounded once to x's dtype.
dim: may be negative. lengths: of each rank's part along dim; without them, n elements are divided as
[floor(j * n / t), floor((j + 1) * n / t)) for rank j of t.
ConfigError for a dimension or lengths that x does not have, and for backward with create_graph; CommError where a peer
fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from libzero import _native
from libzero.communicator import Communicator

__all__ = [
    "copy",
    "cross_entropy",
    "gather",
    "gather_split",
    "reduce",
    "reduce_scatter",
    "scatter",
    "vocab_parallel_embedding",
]


def copy(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """x; the gradient is summed over the ranks (Megatron's f). x: equal on all ranks."""
    return _native.tp_copy(x, group)


def reduce(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """The sum of x over the ranks; the gradient is passed as it is (Megatron's g)."""
    return _native.tp_reduce(x, group)


def scatter(x: torch.Tensor, group: Communicator, dim: int, lengths: Sequence[int] = ()) -> torch.Tensor:
    """This rank's part of x along dim; the gradient is all-gathered. x: equal on all ranks."""
    return _native.tp_scatter(x, group, dim, lengths)


def gather(x: torch.Tensor, group: Communicator, dim: int, lengths: Sequence[int] = ()) -> torch.Tensor:
    """The parts of all ranks along dim; the gradient is this rank's part of it.

    What follows is the same on all ranks. Without lengths, the parts have equal sizes.
    """
    return _native.tp_gather(x, group, dim, lengths)


def gather_split(x: torch.Tensor, group: Communicator, dim: int, lengths: Sequence[int] = ()) -> torch.Tensor:
    """The same; the gradient is reduce-scattered. What follows is divided over the ranks."""
    return _native.tp_gather_split(x, group, dim, lengths)


def reduce_scatter(x: torch.Tensor, group: Communicator, dim: int, lengths: Sequence[int] = ()) -> torch.Tensor:
    """This rank's part along dim of the sum of x over the ranks; the gradient is all-gathered."""
    return _native.tp_reduce_scatter(x, group, dim, lengths)


def vocab_parallel_embedding(
    weight: torch.Tensor,
    ids: torch.Tensor,
    group: Communicator,
    *,
    begin: int,
    vocabulary: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    """Rows `ids` of an embedding of `vocabulary` rows, of which `weight` has [begin, begin + weight.size(0)).

    ids: int64 or int32, equal on all ranks. Returns [*ids.shape, weight.size(1)], the same on all ranks. The gradient
    of weight is local. padding_idx: a row of the whole embedding that gets no gradient, or negative. IndexError on all
    ranks for an id outside of [0, vocabulary). Megatron-LM's VocabParallelEmbedding.
    """
    return _native.tp_vocab_parallel_embedding(weight, ids, group, begin, vocabulary, padding_idx)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Communicator,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocabulary: int = 0,
) -> torch.Tensor:
    """Mean cross entropy in nats, a scalar in fp32, of logits that are divided over the vocabulary.

    logits: [n, columns of this rank], any floating dtype; rank j of t has the columns
    [floor(j * V / t), floor((j + 1) * V / t)). targets: int64 [n], equal on all ranks; ignore_index does not count.
    vocabulary: V; 0: every rank has as many columns as this one. label_smoothing: Megatron-LM's, a target has
    1 - label_smoothing and every other class label_smoothing / (V - 1); torch's is this one times V / (V - 1).
    If no row counts, NaN with a gradient of 0, as torch's. IndexError on all ranks for a target outside of the
    vocabulary.

    One all-gather of 3 fp32 numbers a row (4 with label smoothing); backward is [local]. Megatron-LM's
    vocab_parallel_cross_entropy. With tensor_parallel.vocab_parallel_lm_head, a model's logits are so divided.
    """
    return _native.tp_cross_entropy(logits, targets, group, ignore_index, label_smoothing, vocabulary)
