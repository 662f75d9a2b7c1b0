"""deepspeed.moe.sharded_moe: which experts take which tokens, as functions of the gate's logits [tokens, experts].

They return the auxiliary loss; weights and mask [tokens, experts, capacity], where each token's place in an expert's
buffer is; and how many tokens chose each expert. With sparse_routes, in place of these two: the capacity, the number of
experts, and for each of a token's k routes the expert (-1: dropped), the place and the weight, [k, tokens].
The layer deepspeed.moe.layer.MoE has its own gate, with the same results.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn import functional

from libzero.deepspeed._refuse import module_getattr

__all__ = ["TopKGate", "gumbel_rsample", "multiplicative_jitter", "top1gating", "top2gating", "topkgating"]

Gating: TypeAlias = tuple[Any, ...]


def multiplicative_jitter(x: torch.Tensor, device: torch.device, epsilon: float = 1e-2) -> torch.Tensor:
    """[local] x times numbers drawn from 1 - epsilon to 1 + epsilon."""
    if epsilon == 0:
        return x
    ends = (torch.tensor(1.0 - epsilon, device=device), torch.tensor(1.0 + epsilon, device=device))
    noise: torch.Tensor = torch.distributions.Uniform(*ends).rsample(x.shape)
    return x * noise


def gumbel_rsample(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """[local] Draws of Gumbel's distribution."""
    zero, one = torch.tensor(0.0, device=device), torch.tensor(1.0, device=device)
    return torch.distributions.Gumbel(zero, one).rsample(shape)


def _capacity(gates: torch.Tensor, factor: float, least: int) -> int:
    tokens, experts = gates.shape
    return max(int(torch.ceil(torch.tensor(factor) * (tokens / experts)).item()), least)


def _capacity_for_all(counts: torch.Tensor, ep_group: Any) -> int:
    """[collective over the group] That of the fullest expert of all its ranks."""
    most = counts.max()
    if ep_group is not None and dist.get_world_size(ep_group) > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ep_group)
    return int(most)


def _balance(gates: torch.Tensor, mask: torch.Tensor, k: int) -> torch.Tensor:
    """The auxiliary loss: least where experts are used equally."""
    return (gates.mean(0) * mask.float().mean(0)).sum() * gates.shape[1] / k


def _result(
    l_aux: torch.Tensor,
    routes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    counts: torch.Tensor,
    sizes: tuple[int, int],
    sparse: bool,
) -> Gating:
    """routes: for each of k the mask [tokens, experts] of what is kept, the places and the weights [tokens]."""
    experts, capacity = sizes
    if sparse:
        chosen = [torch.where(mask.any(1), mask.int().argmax(1), -1) for mask, _, _ in routes]
        places = [place * mask.any(1) for mask, place, _ in routes]
        stacked = (torch.stack(chosen).int(), torch.stack(places).int(), torch.stack([gate for *_, gate in routes]))
        return l_aux, torch.tensor(capacity), experts, *stacked, counts
    combined = torch.zeros((), device=counts.device)
    for mask, place, gate in routes:
        at = functional.one_hot(place * mask.any(1), num_classes=capacity).float()
        combined = combined + (gate[:, None] * mask.float())[:, :, None] * at[:, None, :]
    return l_aux, combined, combined.bool(), counts


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Gating:
    """[local; collective over ep_group without drop_tokens] One expert for each token.

    used_token: 0 for tokens that take no part. noisy_gate_policy "RSample": noise on the choice. use_rts: random tokens
    are dropped, not the last ones. AssertionError for fewer tokens than min_capacity.
    """
    if len(logits) < min_capacity:
        raise AssertionError(f"top1gating: got {len(logits)} tokens, expected min_capacity ({min_capacity}) or more")
    gates = functional.softmax(logits, dim=1)
    noisy = noisy_gate_policy == "RSample"
    chosen = (logits + gumbel_rsample(logits.shape, logits.device) if noisy else gates).argmax(1)
    mask = functional.one_hot(chosen, num_classes=gates.shape[1])
    if used_token is not None:
        mask = mask * (used_token[:, None] != 0)
    counts = mask.sum(0).detach()
    capacity = _capacity(gates, capacity_factor, min_capacity)
    if not drop_tokens:
        capacity = min(_capacity_for_all(counts, ep_group), len(mask))
    l_aux = _balance(gates, mask, 1)
    ranked: torch.Tensor = mask
    if use_rts:
        ends = (torch.tensor(0.0, device=logits.device), torch.tensor(1.0, device=logits.device))
        ranked = mask * torch.distributions.Uniform(*ends).rsample(mask.shape)
    kept = torch.topk(ranked, k=min(capacity, len(mask)), dim=0)[1]
    mask = mask * torch.zeros_like(mask).scatter_(0, kept, 1)
    place = ((mask.cumsum(0) - 1) * mask).sum(1)
    return _result(l_aux, [(mask, place, (gates * mask).sum(1))], counts, (gates.shape[1], capacity), sparse_routes)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gating:
    """[local; collective over ep_group without drop_tokens] Two experts for each token; the second may be drawn."""
    gates = functional.softmax(logits, dim=1)
    experts = gates.shape[1]
    first = functional.one_hot(gates.argmax(1), num_classes=experts)
    if top2_2nd_expert_sampling:
        logits = logits + gumbel_rsample(logits.shape, logits.device)
    second = functional.one_hot(logits.masked_fill(first.bool(), float("-inf")).argmax(1), num_classes=experts)
    counts = (first + second).sum(0).detach()
    l_aux = _balance(gates, first, 1)
    before = (first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0, keepdim=True))
    capacity = (
        _capacity(gates, capacity_factor * 2, min_capacity) if drop_tokens else _capacity_for_all(counts, ep_group)
    )
    masks = [mask * (place < capacity) for mask, place in zip((first, second), before, strict=True)]
    weights = [(gates * mask).sum(1) for mask in masks]
    both = (weights[0] + weights[1]).clamp(min=torch.finfo(gates.dtype).eps)
    routes = [
        (mask, (place * mask).sum(1), weight / both)
        for mask, place, weight in zip(masks, before, weights, strict=True)
    ]
    return _result(l_aux, routes, counts, (experts, capacity), sparse_routes)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Gating:
    """[local; collective over ep_group without drop_tokens] k experts for each token.

    drop_policy: an expert keeps its likeliest tokens ("probs") or the first ones ("position").
    """
    gates = functional.softmax(logits, dim=1)
    experts = gates.shape[1]
    weight, chosen = torch.topk(gates, k=k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(0).detach()
    l_aux = _balance(gates, mask, k)
    if not drop_tokens:
        capacity = _capacity_for_all(counts, ep_group)
    else:
        capacity = _capacity(gates, capacity_factor * k, min_capacity)
        if drop_policy == "probs":
            likely = torch.zeros_like(gates).scatter(1, chosen, weight)
            best = torch.topk(likely, k=min(capacity, len(gates)), dim=0, sorted=False)[1]
            mask &= torch.zeros_like(mask).scatter_(0, best, True)
        elif drop_policy == "position":
            mask = mask & (mask.cumsum(0) - 1 < capacity)
        else:
            raise ValueError(f'drop_policy: got {drop_policy!r}, expected "probs" or "position"')
    place = mask.cumsum(0) - 1
    kept = gates * mask
    kept = kept / kept.sum(1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    routes = []
    for column in chosen.T:
        own = functional.one_hot(column, num_classes=experts).bool() & mask
        routes.append((own, (place * own).sum(1), (kept * own).sum(1)))
    return _result(l_aux, routes, counts, (experts, capacity), sparse_routes)


class TopKGate(torch.nn.Module):
    """A linear layer wg over tokens [tokens, model_dim], and one of the functions above, with their words."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = torch.nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.min_capacity = k, min_capacity
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy, self.drop_tokens, self.use_rts = noisy_gate_policy, drop_tokens, use_rts
        self.ep_group, self.top2_2nd_expert_sampling = ep_group, top2_2nd_expert_sampling

    def forward(
        self, input: torch.Tensor, used_token: torch.Tensor | None = None, sparse_routes: bool = False
    ) -> Gating:
        """In fp32; noise in training only."""
        tokens = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            tokens = multiplicative_jitter(tokens, tokens.device)
        logits = functional.linear(tokens, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        if self.k == 1:
            noise = self.noisy_gate_policy if self.training else None
            return top1gating(logits, factor, self.min_capacity, used_token, noise, self.drop_tokens, self.use_rts,
                              self.ep_group, sparse_routes)  # fmt: skip
        if self.k == 2:
            return top2gating(logits, factor, self.min_capacity, self.drop_tokens, self.ep_group,
                              self.top2_2nd_expert_sampling, sparse_routes)  # fmt: skip
        return topkgating(logits, self.k, factor, self.min_capacity, self.drop_tokens, self.ep_group,
                          sparse_routes=sparse_routes)  # fmt: skip


__getattr__ = module_getattr("deepspeed.moe.sharded_moe")
