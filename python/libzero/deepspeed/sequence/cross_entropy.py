"""deepspeed.sequence.cross_entropy: losses of tokens that are divided over ranks.

An engine averages gradients over all ranks, so that of a loss which every rank computes of all tokens is the sum over
the sequence-parallel ranks, as of torch.distributed.nn's functions. Logits are of the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from libzero import tp
from libzero.deepspeed import comm
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils import groups
from libzero.deepspeed.utils.logging import log_dist_once

__all__ = ["VocabParallelCrossEntropyLoss", "vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy"]


def _gathered(losses: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """[collective] [tokens of this rank, ...] -> [all tokens, ...]; gradients are summed over the ranks."""
    return tp.gather_split(losses, groups.mesh_of(group).group("sp"), 0)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: ProcessGroup | None = None,
    sp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> torch.Tensor:
    """[collective] over sp_group, in forward and in backward, if it has more than one rank.

    vocab_parallel_logits: [tokens of this rank, ..., vocabulary]; target: the rest of that shape. Computed in fp32.
    reduction: "none", this rank's losses, or those of all with gather_sequence_loss; "sum" and "mean" of all ranks'
    tokens but those of ignore_index. backend: "torch" is what runs. ValueError for other words, shapes and targets.
    NotImplementedError for a tp_group of several ranks.
    """
    if tp_group is not None and comm.get_world_size(tp_group) > 1:
        raise NotImplementedError(
            "cannot compute the loss of a vocabulary that is divided over a process group. "
            "Hint: libzero.tp.cross_entropy(logits, targets, engine.mesh.group('tp'), vocabulary=V)."
        )
    _require(reduction in ("none", "sum", "mean"), f'reduction: got {reduction!r}, expected "none", "sum" or "mean"')
    _require(backend in ("torch", "liger"), f'backend: got {backend!r}, expected "torch" or "liger"')
    _require(not gather_sequence_loss or reduction == "none", 'gather_sequence_loss: expected reduction="none"')
    _require(not gather_sequence_loss or sp_group is not None, "gather_sequence_loss: expected sp_group")
    vocabulary, rest = vocab_parallel_logits.shape[-1], vocab_parallel_logits.shape[:-1]
    _require(rest == target.shape, f"target: got {list(target.shape)}, expected {list(rest)}")
    bounds = vocab_start_index, vocab_end_index
    _require(bounds in ((None, None), (0, vocabulary)), f"vocabulary: got {bounds}, expected 0 to {vocabulary}")
    valid = (target == ignore_index) | ((target >= 0) & (target < vocabulary))
    _require(bool(valid.all()), f"target: got numbers outside of the vocabulary of {vocabulary}")
    if backend == "liger":
        log_dist_once("vocab_parallel_cross_entropy: liger is for divided vocabularies, torch computes", ranks=(0,))
    rows, targets = vocab_parallel_logits.float().flatten(0, -2), target.flatten().long()
    losses = torch.nn.functional.cross_entropy(rows, targets, reduction="none", ignore_index=ignore_index)
    losses = losses.view(target.shape)
    if reduction == "none":
        return _gathered(losses, sp_group) if gather_sequence_loss and sp_group is not None else losses
    count = (target != ignore_index).sum()
    total = losses.sum()
    if sp_group is not None and comm.get_world_size(sp_group) > 1:
        total = _gathered(total[None], sp_group).sum()
        comm.all_reduce(count, group=sp_group)
    return total if reduction == "sum" else total / count.clamp(min=1)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    sp_group: ProcessGroup,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> torch.Tensor:
    """[collective] The losses of all tokens, [all tokens, ...]; see vocab_parallel_cross_entropy()."""
    return vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target,
        tp_group,
        sp_group,
        vocab_start_index,
        vocab_end_index,
        ignore_index=ignore_index,
        reduction=reduction,
        gather_sequence_loss=gather_sequence_loss,
        backend=backend,
    )


class VocabParallelCrossEntropyLoss(torch.nn.Module):
    """vocab_parallel_cross_entropy() with these words."""

    def __init__(
        self,
        tp_group: ProcessGroup | None = None,
        sp_group: ProcessGroup | None = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        gather_sequence_loss: bool = False,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        self._words: dict[str, Any] = {
            "tp_group": tp_group,
            "sp_group": sp_group,
            "vocab_start_index": vocab_start_index,
            "vocab_end_index": vocab_end_index,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "gather_sequence_loss": gather_sequence_loss,
            "backend": backend,
        }

    def forward(self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[collective] over sp_group."""
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, **self._words)


__getattr__ = module_getattr("deepspeed.sequence.cross_entropy")
