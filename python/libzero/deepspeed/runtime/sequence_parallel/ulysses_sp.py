"""Ulysses for models of transformers (ALST, arXiv:2506.13996): attention over heads, and batches cut over ranks.

The functions that compute in tiles are in _tiled.py.
"""

from __future__ import annotations

import importlib
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from libzero.deepspeed import comm
from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.sequence_parallel import parallel_state_sp
from libzero.deepspeed.runtime.sequence_parallel._tiled import (
    AutogradComputeMLP,
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from libzero.deepspeed.runtime.sequence_parallel._whole import AskedMask, UnsuitedError, Whole, WholeSequences
from libzero.deepspeed.utils import groups
from libzero.deepspeed.utils.logging import logger
from libzero.sequence import attention_over_heads

__all__ = [
    "AutogradComputeMLP",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]


class UlyssesSPAttentionHF(torch.nn.Module):
    """Attention of transformers' models whose tokens are divided over the ranks of process_group, in order.

    attn: a function of transformers' ALL_ATTENTION_FUNCTIONS. Each rank calls it with all tokens and its part of the
    heads. Masks are causal, with windows, padding (a 2D attention_mask) and packed documents as the model has them.
    Heads may divide unevenly; keys and values may have fewer heads than there are ranks.

    global_seq_length, with seq_length_is_variable=False: another length is an error. disable_in_eval: in evaluation
    every rank has whole samples. The other words are accepted: sizes are those of the tensors.
    ValueError for fewer heads than ranks and for global_seq_length that the ranks do not divide.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: ProcessGroup,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn, self._group = attn, groups.HeldGroup(process_group)
        self.world_size, self.sp_rank = comm.get_world_size(process_group), comm.get_rank(process_group)
        self.batch_size = batch_size
        self.attn_head_count, self.attn_head_size = attn_head_count, attn_head_size
        self.global_kv_head_count, self.num_hidden_layers = kv_head_count, num_hidden_layers
        self.seq_length_is_variable, self.disable_in_eval = seq_length_is_variable, disable_in_eval
        self.local_seq_length, self.global_seq_length = local_seq_length, global_seq_length
        self.core_attn_implementation: str | None = None
        self.calls = 0
        """Of forward(), since the model's forward began."""
        self._looked_at: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._sequences = WholeSequences()
        if attn_head_count < self.world_size:
            raise ValueError(
                f"attn_head_count: got {attn_head_count} heads for {self.world_size} sequence-parallel ranks, expected "
                f"at least {self.world_size}. Hint: fewer sequence-parallel ranks."
            )
        if not seq_length_is_variable and (global_seq_length is None or global_seq_length % self.world_size != 0):
            raise ValueError(
                f"global_seq_length: got {global_seq_length}, expected a multiple of {self.world_size} ranks. "
                "Hint: seq_length_is_variable=True."
            )

    @property
    def process_group(self) -> ProcessGroup:
        """[local] The ranks that share the tokens."""
        return self._group()

    def forward(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """[collective] As attn: of [batch, heads, tokens, width], returns [batch, tokens, heads, width] and weights.

        position_ids: [batch or 1, tokens of this rank], in kwargs. UnsuitedError, an AssertionError, where the result
        would not be that of the whole sequence.
        """
        self.calls += 1
        if self.disable_in_eval and not module.training:
            own = attention_mask.own() if isinstance(attention_mask, AskedMask) else attention_mask
            result: tuple[torch.Tensor, Any] = self.attn(module, query, key, value, own, *args, **kwargs)
            return result
        tokens = query.shape[2]
        if key.shape[2] != tokens:
            raise UnsuitedError(
                f"cannot divide a sequence: got {tokens} queries and {key.shape[2]} keys on a rank, expected equally "
                "many. Hint: use_cache=False; no attention over other tokens than the model's own."
            )
        if not self.seq_length_is_variable and tokens * self.world_size != self.global_seq_length:
            raise UnsuitedError(
                f"got {tokens} tokens on a rank, expected {self.global_seq_length} over {self.world_size} ranks. "
                "Hint: seq_length_is_variable=True."
            )
        mesh = groups.mesh_of(self.process_group)
        whole = self._sequences.of(kwargs.get("position_ids"), tokens, mesh)
        mask = self._mask(attention_mask, whole, getattr(module, "is_causal", True))
        words = {**kwargs, "position_ids": whole.positions}
        weights: list[Any] = []

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with _own_draws(kwargs.get("dropout", 0.0), self.sp_rank, q.device), _groups_of(module, q, k):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                found: tuple[torch.Tensor, Any] = self.attn(module, q, k, v, mask, *args, **words)
            weights.append(found[1])
            return found[0].reshape(q.shape[0], q.shape[2], q.shape[1], -1)

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attention_over_heads(q, k, v, local, mesh=mesh), weights[0]

    def expect_suited(self, model: torch.nn.Module) -> None:
        """[local] NotImplementedError for a model whose tokens meet in other layers as well. It is looked at once."""
        if model not in self._looked_at:
            _expect_no_neighbours(model)
            self._looked_at.add(model)

    def _mask(self, asked: Any, whole: Whole, is_causal: bool) -> torch.Tensor | None:
        pairs = self.core_attn_implementation in (None, "sdpa")
        if isinstance(asked, AskedMask):
            return asked.whole(whole, pairs)
        if asked is not None:
            raise UnsuitedError(
                f"cannot divide a sequence: got a mask of {list(asked.shape)} of the program or of the model's own, "
                "expected None or an attention_mask of [batch, tokens]. Hint: position_ids tell packed documents apart."
            )
        return whole.causal(whole.documents, None) if pairs and is_causal and whole.documents is not None else None

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """[collective] From now on transformers' implementation of this name is Ulysses, in all models of the process.

        Returns the mpu for deepspeed.initialize(); None for one sequence-parallel rank, and then nothing changes.
        model_name_or_path: a model, or what AutoConfig.from_pretrained() takes. core_attn_implementation: "sdpa" or a
        flash attention. max_length: the older name of seq_length.
        ValueError for "eager", for an unknown name, for another one than the model has, and for a fixed length that is
        not given. NotImplementedError for flex_attention, for models with an encoder, with layers that mix tokens
        without attention, and with rotary positions that depend on the length.
        """
        if sequence_parallel_size == 1:
            return None
        if max_length is not None:
            logger.warning("register_with_transformers: max_length is the older name of seq_length")
        seq_length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and seq_length is None:
            raise ValueError("seq_length: got None, expected a number of tokens. Hint: or seq_length_is_variable=True.")
        core = _core_attention(core_attn_implementation)
        config = _config_of(model_name_or_path, core_attn_implementation)
        if not parallel_state_sp._initialized():
            parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size)
        group = parallel_state_sp.get_sequence_parallel_group()
        ranks = comm.get_world_size(group)
        if ranks != sequence_parallel_size:
            raise ValueError(
                f"sequence_parallel_size: got {sequence_parallel_size}, expected {ranks} as before in this run"
            )
        heads = config.num_attention_heads
        attention = cls(
            core,
            micro_batch_size,
            heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            getattr(config, "num_key_value_heads", None) or heads,
            config.num_hidden_layers,
            group,
            seq_length_is_variable,
            None if seq_length_is_variable or seq_length is None else seq_length // ranks,
            None if seq_length_is_variable else seq_length,
            disable_in_eval,
        )
        attention.core_attn_implementation = core_attn_implementation
        if isinstance(model_name_or_path, torch.nn.Module):
            attention.expect_suited(model_name_or_path)
        _take_over(core_attn_implementation, attention)
        return parallel_state_sp


def _config_of(model: Any, implementation: str) -> Any:
    """The configuration of the text model. ValueError where a model has another implementation."""
    from transformers import AutoConfig

    config = getattr(model, "config", None)
    if config is None:
        config = AutoConfig.from_pretrained(model)
    else:
        own = getattr(config, "_attn_implementation", None)
        if own is not None and own != implementation:
            raise ValueError(
                f"core_attn_implementation: got {implementation}, expected {own}, which the model has. "
                f'Hint: make the model with attn_implementation="{implementation}".'
            )
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(
            "cannot divide sequences of a model with an encoder: its decoder looks at the encoder's tokens. "
            "Hint: a decoder-only model."
        )
    text = config.get_text_config()
    _expect_attention_alone(text)
    return text


def _expect_attention_alone(config: Any) -> None:
    """NotImplementedError for layers, and for positions, that depend on other tokens than those of the rank."""
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or []}
    others = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if others:
        raise NotImplementedError(
            f"cannot divide sequences of a model with layers of {', '.join(others)}: they carry a state over all "
            "tokens. Hint: a model whose layers all have attention."
        )
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    blocks = [rotary, *(block for block in rotary.values() if isinstance(block, Mapping))]
    moving = sorted({str(block.get("rope_type")) for block in blocks} & {"dynamic", "longrope"})
    if moving:
        raise NotImplementedError(
            f"cannot divide sequences of a model with rotary positions of {moving[0]}: they depend on the longest "
            'position that a rank has. Hint: the rope_type "default", "linear", "yarn" or "llama3".'
        )


def _expect_no_neighbours(model: torch.nn.Module) -> None:
    """NotImplementedError for a module of torch that mixes neighbouring tokens."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.RNNBase):
            raise NotImplementedError(
                f"cannot divide sequences of a model with {name}, a {type(module).__name__}: it would not see the "
                "tokens of the other ranks. Hint: a model whose tokens meet in attention alone."
            )


def _interfaces() -> tuple[Any, Any, Any]:
    """transformers' functions of attention and of masks by name, and the function of a causal mask."""
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    return modeling.ALL_ATTENTION_FUNCTIONS, masking.ALL_MASK_ATTENTION_FUNCTIONS, masking.causal_mask_function


def _core_attention(implementation: str) -> Any:
    """transformers' function of this name; errors as register_with_transformers()."""
    if implementation in ("eager", "paged|eager"):
        raise ValueError(
            f"core_attn_implementation: got {implementation}, which needs a mask of all pairs of tokens, expected sdpa "
            'or a flash attention. Hint: make the model with attn_implementation="sdpa".'
        )
    if implementation == "flex_attention":
        raise NotImplementedError(
            "core_attn_implementation: flex_attention is not built over sequence-parallel ranks. "
            'Hint: make the model with attn_implementation="sdpa" or a flash attention.'
        )
    if re.fullmatch(r"[^/:]+/[^/:]+(@[^/:]+)?(:[^/:]+)?", implementation):  # a kernel of the hub
        flash = importlib.import_module("transformers.modeling_flash_attention_utils")
        flash.lazy_import_flash_attention(implementation)
    functions, masks, _ = _interfaces()
    if implementation not in functions or implementation not in masks:
        known = ", ".join(sorted(key for key in functions if key in masks and key != "flex_attention"))
        raise ValueError(f"core_attn_implementation: got {implementation}, expected one of {known}")
    function = functions[implementation]
    return getattr(function, "core", function)


_registered: UlyssesSPAttentionHF | None = None


def _take_over(implementation: str, attention: UlyssesSPAttentionHF) -> None:
    """[local] Puts Ulysses, and masks that are made later, in the place of transformers' functions of this name."""
    global _registered
    functions, masks, plain = _interfaces()
    make = getattr(masks[implementation], "core", masks[implementation])

    @_disable_dynamo
    def attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        result: tuple[torch.Tensor, Any] = attention(module, *args, **kwargs)
        return result

    def ask(**words: Any) -> AskedMask:
        return AskedMask(make, words, plain)

    attend.core = attention.attn  # type: ignore[attr-defined]
    ask.core = make  # type: ignore[attr-defined]
    functions[implementation], masks[implementation] = attend, ask
    _registered = attention


@contextmanager
def _groups_of(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor) -> Iterator[None]:
    """[local] Within it, the module knows how many query heads of this rank share keys."""
    name = "num_key_value_groups"
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    setattr(module, name, q.shape[2] // k.shape[2])
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _own_draws(dropout: float, rank: int, device: torch.device) -> Iterator[None]:
    """[local] Within it, ranks draw different numbers, for their heads; after it, each as if it had drawn one."""
    with nullcontext() if dropout == 0 else torch.random.fork_rng(_cuda(device)):
        if dropout != 0:
            seed = int(torch.randint(2**62, (1,)))
            torch.manual_seed(seed + rank)
        yield


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


@contextmanager
def watched(mpu: Any, module: torch.nn.Module, words: Mapping[str, Any]) -> Iterator[None]:
    """[local] Around the forward of a model that register_with_transformers() is to take over.

    words: what the program passes to the model. UnsuitedError for labels that the model would shift within a rank's
    tokens, and, after it, for a model with layers whose attention was not taken over.
    """
    attention = _registered if mpu is parallel_state_sp else None
    if attention is None or (attention.disable_in_eval and not module.training):
        yield
        return
    if words.get("labels") is not None and words.get("shift_labels") is None:
        raise UnsuitedError(
            "got labels and no shift_labels of a part of a sequence: the model would shift them within the part. "
            "Hint: shift_labels of the whole sequence, cut as input_ids are (UlyssesSPDataLoaderAdapter does)."
        )
    attention.expect_suited(module)
    attention.calls = 0
    yield
    if attention.calls < attention.num_hidden_layers:
        raise UnsuitedError(
            f"got {attention.calls} calls of the attention {attention.core_attn_implementation} in a forward, expected "
            f"those of {attention.num_hidden_layers} layers: the others looked at this rank's tokens only. Hint: a "
            f'model of attention in all layers, with attn_implementation="{attention.core_attn_implementation}".'
        )


class UlyssesSPDataLoaderAdapter:
    """Batches of a loader, each cut over the sequence-parallel ranks.

    The ranks' loaders have different batches. Of each in turn every rank gets its part: so many times the batches, each
    1 / sp_world_size as long. A batch is a dict; its tensors are [batch, tokens, ...], with input_ids, position_ids and
    labels, which become shift_labels: those of the next token, -100 at the end. Other values are passed on. device: on
    which the ranks exchange; the parts are in host memory.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: ProcessGroup, sp_world_size: int, device: Any) -> None:
        self.dl, self.device = dl, device
        self.sp_rank, self._group, self.sp_world_size = sp_rank, groups.HeldGroup(sp_group), sp_world_size
        self.iter = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    @property
    def sp_group(self) -> ProcessGroup:
        """[local] The ranks that exchange."""
        return self._group()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """[collective] at every sp_world_size-th call."""
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """[collective] Exchanges the next batch of each rank. StopIteration at the end, after which it begins again.

        ValueError, on all ranks, for a batch that cannot be cut, and for loaders of different lengths.
        """
        batch = next(self.iter, None)
        if batch is None:
            self.iter = iter(self.dl)
        tensors, others, fault = self._prepared(batch)
        mine = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
        heads: list[Any] = [None] * self.sp_world_size
        comm.all_gather_object(heads, (batch is None, fault, mine, others), group=self.sp_group)
        ended = [rank for rank, head in enumerate(heads) if head[0]]
        if len(ended) == self.sp_world_size:
            raise StopIteration
        if ended:
            raise ValueError(
                f"the loaders of sequence-parallel ranks {ended} ended, expected equally many batches on all of "
                f"{self.sp_world_size} ranks. Hint: drop_last, or a sampler that gives every rank as many."
            )
        faults = [head[1] for head in heads if head[1]]
        if faults:
            raise ValueError(faults[0])
        names = {frozenset(head[2]) for head in heads}
        if len(names) > 1:
            raise ValueError(f"got batches with tensors {sorted(map(sorted, names))}, expected the same on all ranks")
        parts = [dict(head[3]) for head in heads]
        for name, x in tensors.items():
            for part, piece in zip(parts, self._exchanged(x, [head[2][name] for head in heads]), strict=True):
                part[name] = piece
        self.micro_batches.extend(parts)

    def _prepared(self, batch: Mapping[str, Any] | None) -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
        """The tensors of a batch with shift_labels, its other values, and what is wrong with it."""
        if batch is None:
            return {}, {}, ""
        lacking = [name for name in ("input_ids", "position_ids", "labels") if name not in batch]
        if lacking:
            return {}, {}, (
                f"got a batch without {', '.join(lacking)}, expected these. Hint: the collate function gives labels, "
                "and position_ids: each token's place in its document, torch.arange(tokens) for one."
            )  # fmt: skip
        tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        others = {name: value for name, value in batch.items() if name not in tensors}
        tokens = batch["input_ids"].shape[1]
        for name, value in tensors.items():
            if value.dim() < 2 or value.shape[1] != tokens:
                shape = list(batch["input_ids"].shape)
                return {}, {}, f"{name}: got {list(value.shape)}, expected as many tokens as input_ids, {shape}"
        if tokens % self.sp_world_size != 0:
            return {}, {}, (
                f"got {tokens} tokens, expected a multiple of {self.sp_world_size} sequence-parallel ranks. "
                "Hint: pad_to_multiple_of of the collate function."
            )
        tensors["shift_labels"] = torch.nn.functional.pad(tensors.pop("labels"), (0, 1), value=-100)[:, 1:]
        return tensors, others, ""

    def _exchanged(self, x: torch.Tensor, heads: list[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        """[collective] This rank's part of each rank's tensor. heads: their shapes and dtypes."""
        ranks = self.sp_world_size
        sent = [part.contiguous().view(-1).view(torch.uint8) for part in x.detach().to(self.device).chunk(ranks, 1)]
        shapes = [(shape[0], shape[1] // ranks, *shape[2:]) for shape, _ in heads]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, (_, dtype) in zip(shapes, heads, strict=True)]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        comm.all_to_all_single(
            received,
            torch.cat(sent),
            output_split_sizes=sizes,
            input_split_sizes=[part.numel() for part in sent],
            group=self.sp_group,
        )
        return [
            piece.clone().view(dtype).view(shape).cpu()
            for piece, shape, (_, dtype) in zip(torch.split(received, sizes), shapes, heads, strict=True)
        ]


__getattr__ = module_getattr("deepspeed.runtime.sequence_parallel.ulysses_sp")
