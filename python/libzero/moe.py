"""Layers with a mixture of experts (GShard, arXiv:2006.16668), with the words and defaults of DeepSpeed's MoE."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch._compile import _disable_dynamo

from libzero import _native
from libzero._divided import is_divided
from libzero._log import logger
from libzero.errors import CommError, ConfigError, InternalError, IoError

__all__ = ["MoE"]

Expert: TypeAlias = torch.nn.Module | Callable[[int], torch.nn.Module]


class MoE(torch.nn.Module):
    """A gate sends each token to k of num_experts modules; the output is the sum of theirs, weighed by the gate.

    hidden_size: width of tokens, [..., hidden_size].
    expert: a module, of which every expert is a deep copy, with equal initial values as in DeepSpeed; or a function of
        the expert's number that makes it, with initial values of its own. Its forward takes rows [rows, hidden_size],
        0 rows too, computes each row for itself, and returns their shape; of a tuple the first value is taken. Under
        libzero.build() give a function: a module is allocated at once, with a warning.
    num_experts, ep_size: ep_size ranks share the experts; each has num_experts / ep_size of them.
    k: experts of a token.
    capacity_factor, eval_capacity_factor, min_capacity: an expert takes at most
        max(ceil(tokens / num_experts * factor * k), min_capacity) of a rank's tokens, in training and evaluation.
    use_residual: adds a dense expert, `expert` itself or that of number num_experts; a softmax of a linear layer weighs
        the two (PR-MoE).
    noisy_gate_policy: None or "None"; "Jitter": noise on the gate's inputs; "RSample" (k = 1): on its logits.
    drop_tokens: False: an expert takes all its tokens.
    use_rts: k = 1: random tokens are dropped in training, not the last ones.
    top2_2nd_expert_sampling: k = 2: the second expert is drawn, in training.
    drop_policy: k > 2: an expert keeps its likeliest tokens ("probs") or the first ones ("position").
    merged_batches: one call of an expert for the tokens of all ranks, instead of one for each rank: faster where they
        are few; gradients of experts then differ in rounding.

    ConfigError that lists all invalid words. Parameters: gate.wg.weight [num_experts, hidden_size]; experts.C.* with C
    from 0 to num_experts - 1; with use_residual mlp.* and coefficient.{weight [2, hidden_size], bias [2]}.

    All experts are registered on every rank. With ep_size above 1 an Engine keeps those of this rank and releases the
    others: reading one of them is an error that names the ranks that have it. Without an Engine, and with ep_size 1,
    this is a plain module. include/zero/moe.h has the same.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: Expert,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        *,
        top2_2nd_expert_sampling: bool = True,
        drop_policy: str = "probs",
        merged_batches: bool = False,
    ) -> None:
        super().__init__()
        self._words: dict[str, Any] = {
            "hidden_size": hidden_size,
            "num_experts": num_experts,
            "ep_size": ep_size,
            "k": k,
            "capacity_factor": capacity_factor,
            "eval_capacity_factor": eval_capacity_factor,
            "min_capacity": min_capacity,
            "use_residual": use_residual,
            "noisy_gate_policy": noisy_gate_policy or "",
            "drop_tokens": drop_tokens,
            "use_rts": use_rts,
            "top2_2nd_expert_sampling": top2_2nd_expert_sampling,
            "drop_policy": drop_policy,
            "merged_batches": merged_batches,
        }
        self._layer = _native.MoeLayer(**self._words)
        if not callable(expert):
            raise ConfigError(f"[MoE] expert: got {type(expert).__name__}, expected a torch.nn.Module or a function.")
        if isinstance(expert, torch.nn.Module) and any(_is_deferred(p) for p in expert.parameters()):
            logger.warning(
                "[MoE] copies of an expert need its values, which libzero.build would have deferred: they are "
                "allocated now. Hint: give a function that makes expert c."
            )
        self.hidden_size, self.num_experts, self.ep_size, self.k = hidden_size, num_experts, ep_size, k
        self.use_residual = use_residual
        self.last_counts: torch.Tensor | None = None
        """[local] Of the last forward: tokens that chose each expert, as returned.

        A second call in the same step overwrites it, and so does recomputation.
        """
        self.last_kept = 0
        """[local] Of the last forward, in the same way: choices that were not dropped."""
        wg = torch.nn.Linear(hidden_size, num_experts, bias=False)
        self.gate = torch.nn.ModuleDict({"wg": wg})
        # Not a ModuleList, whose entries an Engine would take for units.
        self.experts = torch.nn.ModuleDict({str(c): _made(expert, c) for c in range(num_experts)})
        if use_residual:
            self.mlp = expert if isinstance(expert, torch.nn.Module) else _made(expert, num_experts)
            self.coefficient = torch.nn.Linear(hidden_size, 2)

    @_disable_dynamo
    def forward(
        self, x: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [..., hidden_size], fp32, bf16 or fp16; without an Engine fp64 too, of which the gate computes in fp32.

        used_token: of x's shape without the last dimension, or flat; 0 for tokens that take no part (padding). Returns

        - the output, of x's shape and dtype, also where torch.autocast gives the experts another; 0 for a token that
          every expert dropped
        - the auxiliary loss, a scalar in fp32, smallest when experts are used equally: add 0.01 of it to the loss
        - how many tokens chose each expert, before any were dropped: int64 [num_experts]

        The gate computes in fp32. Draws, in training only, come from torch's default generator: of the same numbers as
        in DeepSpeed. With ep_size above 1 [collective] over the ranks that share the experts, in forward and backward;
        they may have different numbers of tokens, and none. ConfigError before an Engine has taken the module, for
        experts that return other shapes, and for one that cannot compute 0 rows. After an exception of one rank's
        expert the other ranks wait until it is known that this rank has failed.

        torch.compile compiles what is around a layer, not the layer. torch.utils.checkpoint runs its gate again, with
        the same draws (preserve_rng_state).
        """
        output, l_aux, counts, self.last_kept = self._layer.mix_experts(
            x, cast(torch.Tensor, self.gate["wg"].weight), self.training, self._run, used_token
        )
        if self.use_residual:
            coefficients = self.coefficient(x)
            output = _native.mix_residual(output, _tensor_of(self.mlp(x), "mlp"), coefficients)
        self.last_counts = counts
        return output, l_aux, counts

    def _run(self, c: int, rows: torch.Tensor) -> torch.Tensor:
        try:
            result = self.experts[str(c)](rows)
        except (CommError, IoError, InternalError):
            raise
        except Exception as fault:
            if len(rows) > 0:
                raise
            # Chance decides which ranks see it: the expert's own words would not tell what is wrong.
            raise ConfigError(
                f"[MoE] expert {c} was called with 0 rows, which experts must accept: {type(fault).__name__}: {fault}"
            ) from fault
        return _tensor_of(result, f"expert {c}")

    def extra_repr(self) -> str:
        """The words that are not the module's children."""
        return ", ".join(f"{word}={value!r}" for word, value in self._words.items() if value != "")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_layer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._layer = _native.MoeLayer(**self._words)


def _made(expert: Expert, c: int) -> torch.nn.Module:
    made = copy.deepcopy(expert) if isinstance(expert, torch.nn.Module) else expert(c)
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"[MoE] expert({c}): got {type(made).__name__}, expected a torch.nn.Module.")
    return made


def _is_deferred(parameter: torch.nn.Parameter) -> bool:
    """It is one of libzero.build() that has no memory yet."""
    # Fake tensors have a type of their own, and refuse to be asked.
    real = type(parameter) is torch.nn.Parameter and not parameter.is_meta
    if not real or is_divided(parameter) or parameter.numel() == 0:
        return False
    try:
        return parameter.data_ptr() == 0
    except RuntimeError:  # libzero.build() has not allocated it
        return True


def _tensor_of(result: Any, what: str) -> torch.Tensor:
    result = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(result, torch.Tensor):
        got = type(result).__name__
        raise ConfigError(f"[MoE] {what} returned {got}, expected a tensor, or a tuple that begins with one.")
    return result
