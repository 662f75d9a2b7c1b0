"""Sequence parallelism over attention heads: DeepSpeed-Ulysses (arXiv:2309.14509).

Each "sp" rank of a mesh has a stretch of the tokens of every sample, mesh.tokens(length). Everything but attention is
computed per token, without communication. For attention, one all-to-all gives each rank all tokens of some of the
heads, and another takes the result back.

All calls are [collective] over mesh.group("sp"), in forward and in backward, and release the GIL while they wait.
Tensors are [batch, tokens, heads, width], of any dtype and strides. tokens: of the whole sequence; 0: all ranks have as
many as this one. Rank i of u has the heads [floor(i * a / u), floor((i + 1) * a / u)) of a. With one rank they return
what they are given. ConfigError for other shapes, for tokens that are not this rank's stretch, and for fewer heads than
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch

from libzero import _native
from libzero.mesh import Mesh

__all__ = ["attention_over_heads", "heads_to_sequence", "sequence_to_heads"]


@overload
def sequence_to_heads(x: torch.Tensor, /, *, mesh: Mesh, tokens: int = 0) -> torch.Tensor: ...
@overload
def sequence_to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /, *, mesh: Mesh, tokens: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
def sequence_to_heads(
    x: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    /,
    *,
    mesh: Mesh,
    tokens: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[batch, tokens of this rank, all heads, width] -> [batch, all tokens, heads of this rank, width].

    One tensor, or q, k and v by one all-to-all. k and v may have fewer heads than q, a divisor of them (grouped-query
    attention); a head of theirs is sent to every rank that has a head of its group. Where the query heads of a rank's
    groups differ in number, its keys and values are repeated: one head for each query head.
    """
    if k is None or v is None:
        return _native.sequence_to_heads(x, mesh._native, tokens)
    return _native.attention_to_heads(x, k, v, mesh._native, tokens)


def heads_to_sequence(x: torch.Tensor, *, mesh: Mesh, tokens: int = 0, heads: int = 0) -> torch.Tensor:
    """The reverse. heads: of the whole; 0: all ranks have as many as this one."""
    return _native.heads_to_sequence(x, mesh._native, tokens, heads)


def attention_over_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    local: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    mesh: Mesh,
    tokens: int = 0,
) -> torch.Tensor:
    """Attention of a sequence whose tokens are divided over the "sp" ranks; returns q's shape.

    local(q, k, v): attention of all tokens with this rank's heads, for example scaled_dot_product_attention of the
    transposed tensors; returns [batch, tokens, heads, width].
    """
    of_heads = sequence_to_heads(q, k, v, mesh=mesh, tokens=tokens)
    return heads_to_sequence(local(*of_heads), mesh=mesh, tokens=tokens, heads=q.size(2))
