"""What attention of a whole sequence needs of it: positions, documents packed into it, masks.

A model computes on this rank's tokens only, so transformers makes masks of these. Here a mask is asked for, and made
when attention is called: of the whole sequence, or of the rank's tokens where these are the whole (in evaluation).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from libzero.mesh import Mesh

__all__ = ["AskedMask", "UnsuitedError", "Whole", "WholeSequences"]


class UnsuitedError(ValueError, AssertionError):
    """What a model or a program does with a sequence that is divided over ranks, and what to do instead."""


def _gathered(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """[collective] [batch, tokens of this rank] -> [batch, all tokens]."""
    out = x.new_empty((mesh.size("sp"), *x.shape))
    mesh.group("sp").all_gather(out.view(-1), x.contiguous().view(-1)).wait()
    return out.transpose(0, 1).reshape(x.shape[0], -1)


class Whole:
    """The positions of all tokens of a batch, [batch or 1, tokens], and which document each token belongs to."""

    def __init__(self, positions: torch.Tensor, mesh: Mesh) -> None:
        self.positions, self.mesh = positions, mesh
        self.tokens = positions.shape[1]
        self.own = self.tokens // mesh.size("sp")
        """The tokens of a rank."""
        steps = torch.diff(positions, prepend=positions[:, :1] - 1)
        documents = (steps != 1).cumsum(1)
        self.documents: torch.Tensor | None = documents if bool(documents.any()) else None
        """None: each sample is one document."""

    def causal(self, documents: torch.Tensor | None, window: int | None) -> torch.Tensor:
        """[1 or batch, 1, tokens, tokens]: True where a query may look at a key."""
        at = torch.arange(self.tokens, device=self.positions.device)
        seen = at[None, :] <= at[:, None]
        if window is not None:
            seen &= at[:, None] - at[None, :] < window
        seen = seen[None, None]
        return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])

    def of_this_rank(self, mask: torch.Tensor) -> torch.Tensor:
        """What a mask says of this rank's own queries and keys."""
        begin = self.mesh.rank("sp") * self.own
        return mask[..., begin : begin + self.own, begin : begin + self.own]


class WholeSequences:
    """Makes a Whole of the position_ids that a model passes to its attention, once for all layers of a forward."""

    def __init__(self) -> None:
        self._given: Callable[[], torch.Tensor | None] = lambda: None
        self._version = -1
        self._whole: Whole | None = None

    def of(self, position_ids: Any, tokens: int, mesh: Mesh) -> Whole:
        """[collective] for another tensor than the last one's, else [local]. position_ids: [batch or 1, tokens].

        tokens: of this rank. UnsuitedError, on all ranks, for ranks with different numbers of tokens, and for
        positions that begin at 0 on every rank.
        """
        if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != tokens:
            shape = list(position_ids.shape) if isinstance(position_ids, torch.Tensor) else type(position_ids).__name__
            raise UnsuitedError(
                f"cannot divide a sequence: got position_ids of {shape} for {tokens} tokens, expected [batch, tokens]. "
                "Hint: pass position_ids to the model, each token's place in its document."
            )
        if self._whole is None or self._given() is not position_ids or position_ids._version != self._version:
            self._whole = self._gather(position_ids, mesh)
            self._given, self._version = weakref.ref(position_ids), position_ids._version
        return self._whole

    @staticmethod
    def _gather(position_ids: torch.Tensor, mesh: Mesh) -> Whole:
        shapes = [each.decode() for each in mesh.group("sp").all_gather_bytes(str(list(position_ids.shape)).encode())]
        if len(set(shapes)) > 1:
            raise UnsuitedError(
                f"cannot divide a sequence: got position_ids of {', '.join(shapes)} on the sequence-parallel ranks, "
                "expected equally many tokens. Hint: pad samples to a multiple of the ranks "
                "(UlyssesSPDataLoaderAdapter divides them)."
            )
        positions = _gathered(position_ids.detach().to(torch.int64), mesh)
        own = position_ids.shape[1]
        own_places = torch.arange(own, device=positions.device).repeat(mesh.size("sp"))
        if bool((positions == own_places).all()):
            raise UnsuitedError(
                f"cannot divide a sequence: position_ids are 0 to {own - 1} on every rank, expected places in the "
                "whole sequence. Hint: pass position_ids to the model, cut as input_ids are "
                "(UlyssesSPDataLoaderAdapter does); and pack no documents that are as long as a rank's part."
            )
        return Whole(positions, mesh)


class AskedMask:
    """A mask that a model asked transformers for, in the place of the mask."""

    def __init__(self, make: Callable[..., Any], words: dict[str, Any], plain: Any) -> None:
        self._make, self._words, self._plain = make, words, plain
        self._own: tuple[Any] | None = None
        self._whole: tuple[Whole, Any] | None = None

    def own(self) -> Any:
        """[local] That of the tokens that the model has."""
        if self._own is None:
            self._own = (self._make(**self._words),)
        return self._own[0]

    def whole(self, whole: Whole, pairs: bool) -> torch.Tensor | None:
        """[collective] with padding at the first call, else [local]. That of all tokens; None: causal, of all.

        pairs: for each query and key, [batch, 1, tokens, tokens]; else for each key, [batch, tokens], where attention
        itself looks at positions. UnsuitedError for a mask that these tokens alone do not determine.
        """
        if self._whole is None or self._whole[0] is not whole:
            self._whole = whole, self._of_pairs(whole) if pairs else self._padding(whole)
        found: torch.Tensor | None = self._whole[1]
        return found

    def _padding(self, whole: Whole) -> torch.Tensor | None:
        """[collective] [batch, all tokens], True for tokens; None without padding."""
        words = self._words
        offsets = words.get("q_offset", 0), words.get("kv_offset", 0)
        if (words["q_length"], words["kv_length"], *map(int, offsets)) != (whole.own, whole.own, 0, 0):
            raise UnsuitedError(
                "cannot divide a sequence: got keys of earlier tokens, expected those of the forward's tokens alone. "
                "Hint: use_cache=False; generate() with a model that is not divided."
            )
        if words.get("attention_mask") is None:
            return None
        padding = _gathered(words["attention_mask"].to(torch.uint8), whole.mesh).bool()
        return None if bool(padding.all()) else padding

    def _of_pairs(self, whole: Whole) -> torch.Tensor | None:
        words = self._words
        padding = self._padding(whole)
        # As transformers: positions tell documents apart where the program gives no mask.
        documents = whole.documents if words.get("attention_mask") is None else None
        window = words.get("local_size")
        if words["mask_function"] is self._plain and padding is None and documents is None and window is None:
            return None
        config = words.get("config")
        if window is not None and getattr(config, "sliding_window", None) != window:
            self._refuse("attention in chunks")
        if words.get("use_vmap", False):
            self._refuse("a mask function of the model")
        mask = whole.causal(documents, window)
        if padding is not None:
            mask = mask & padding[:, None, None, :]
        own = self._make(**{**words, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        mine = whole.of_this_rank(mask)
        if own.shape[-2:] != mine.shape[-2:] or not bool((own == mine).all()):
            self._refuse("a mask that is not causal, or use_cache with packed documents")
        return mask

    @staticmethod
    def _refuse(what: str) -> None:
        raise UnsuitedError(
            f"cannot divide a sequence: got {what}, expected causal attention, with a window, padding or packed "
            "documents at most. Hint: a model of such attention, use_cache=False, or no sequence parallelism."
        )
