"""Collectives over a list of tensors of the program; the engine's gradients do not go through here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from libzero.deepspeed._refuse import module_getattr

__all__ = ["reduce_scatter_coalesced"]


@torch.no_grad()
def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """[collective over the group] This rank's part of the mean of each tensor, flat.

    Rank r has the elements from r to r + 1 times ceil(elements / ranks); the last ranks may have fewer, or none.
    """
    ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    padded = [
        torch.nn.functional.pad(tensor.reshape(-1) / ranks, (0, size * ranks - tensor.numel())).view(ranks, size)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    parts = torch.cat(padded, dim=1)
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out, parts.view(-1), group=group)
    lengths = [
        max(0, min(size, tensor.numel() - mine * size)) for tensor, size in zip(tensors, sizes, strict=True)
    ]
    return [part[:length] for part, length in zip(torch.split(out, sizes), lengths, strict=True)]


__getattr__ = module_getattr("deepspeed.runtime.comm.coalesced_collectives")
