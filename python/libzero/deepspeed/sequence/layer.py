"""deepspeed.sequence.layer: Ulysses around a model's own attention, over libzero's exchange of tokens for heads.

Tensors are [batch, tokens, heads, width] where batch_dim_idx is 0, and [tokens, batch, heads, width] where it is 1. All
ranks of the group have equally many tokens. Calls are [collective] over it, in forward and in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils import groups
from libzero.sequence import attention_over_heads, heads_to_sequence, sequence_to_heads

__all__ = ["DistributedAttention", "apply_rotary_pos_emb", "single_all_to_all"]


def _batch_first(x: torch.Tensor, batch_dim_idx: int) -> torch.Tensor:
    """The same as [batch, tokens, heads, width]; of that, what the program has."""
    return x.transpose(0, 1) if batch_dim_idx == 1 else x


def _expect_layout(x: torch.Tensor, batch_dim_idx: int) -> None:
    if x.dim() != 4 or batch_dim_idx not in (0, 1):
        raise ValueError(
            f"got a tensor of {list(x.shape)} and batch_dim_idx {batch_dim_idx}, expected "
            "[batch, tokens, heads, width] and 0, or [tokens, batch, heads, width] and 1"
        )


class DistributedAttention(torch.nn.Module):
    """local_attention(q, k, v, ...) of all tokens, each rank with its part of the heads.

    scatter_idx, gather_idx: the dimensions of heads and of tokens. num_kv_heads and sp_stream have no effect: heads are
    those of the tensors, and keys that a rank lacks for its queries are sent to it. Heads may divide unevenly.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"DistributedAttention: got scatter_idx {scatter_idx} and gather_idx {gather_idx}, expected 2, the "
                "heads, and 0 or 1, the tokens"
            )
        self.local_attn, self._group = local_attention, groups.HeldGroup(sequence_process_group)
        self.num_kv_heads, self.scatter_idx, self.gather_idx = num_kv_heads, scatter_idx, gather_idx

    @property
    def spg(self) -> ProcessGroup:
        """[local] The ranks that share the tokens."""
        return self._group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns [.., heads, width] in the layout of query. rotary_pos_emb: the cosines and sines of all tokens.

        local_attention may return [.., heads * width] as well, and then so does this.
        """
        for each in (query, key, value):
            _expect_layout(each, batch_dim_idx)
        flat: list[bool] = []

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (_batch_first(x, batch_dim_idx) for x in (q, k, v))
            if rotary_pos_emb is not None:
                cosines, sines = (x.permute(1, 0, 2, 3) for x in rotary_pos_emb[:2])
                q, k = apply_rotary_pos_emb(q, cosines, sines), apply_rotary_pos_emb(k, cosines, sines)
            output = self.local_attn(q, k, v, *args, **kwargs)
            flat.append(output.dim() == 3)
            return _batch_first(output.reshape(*q.shape[:3], -1), batch_dim_idx)

        q, k, v = (_batch_first(x, batch_dim_idx) for x in (query, key, value))
        output = _batch_first(attention_over_heads(q, k, v, local, mesh=groups.mesh_of(self.spg)), batch_dim_idx)
        return output.flatten(2) if flat[0] else output


def single_all_to_all(
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: ProcessGroup,
    async_op: bool = False,
    handle: Any = None,
    type: Any = None,
    num_kv_heads: int | None = None,
) -> torch.Tensor:
    """All tokens of this rank's heads where scatter_idx is 2; the reverse where it is 0 or 1. Differentiable.

    NotImplementedError for async_op, and for heads that the ranks do not divide.
    """
    if async_op:
        raise NotImplementedError("single_all_to_all: async_op is not built. Hint: async_op=False.")
    _expect_layout(input, batch_dim_idx)
    mesh, x = groups.mesh_of(group), _batch_first(input, batch_dim_idx)
    whole = x.shape[2] if scatter_idx == 2 else num_kv_heads or 0
    if whole % mesh.size("sp") != 0:
        raise NotImplementedError(
            f"single_all_to_all: got {whole} heads for {mesh.size('sp')} ranks, expected a multiple. "
            "Hint: DistributedAttention divides heads unevenly."
        )
    exchange = sequence_to_heads if scatter_idx == 2 else heads_to_sequence
    return _batch_first(exchange(x, mesh=mesh), batch_dim_idx)


def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """t with its first features turned: of the halves x and y of them, x cos - y sin and y cos + x sin.

    freqs_cos, freqs_sin: as many last elements as there are such features, and shapes that broadcast with t.
    """
    width = freqs_cos.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    x, y = turned.chunk(2, dim=-1)
    return torch.cat((turned * freqs_cos + torch.cat((-y, x), dim=-1) * freqs_sin, rest), dim=-1)


__getattr__ = module_getattr("deepspeed.sequence.layer")
