"""Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/) for matrices, with AdamW for the rest.

A class of torch: it trains a plain module too. Under an Engine each matrix is updated whole by one rank, the other
parameters by their shards (docs/optimizers.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from libzero.errors import ConfigError

__all__ = ["Muon", "muon_groups"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_OTHERS = ("embed", "wte", "wpe", "lm_head")
"""Parts of names of matrices that are tables or outputs, which AdamW updates."""
_OUTPUTS = ("output.weight", "head.weight")
"""Whole names of such outputs."""
_METHODS = {"standard": torch.bfloat16, "gram": torch.float32}
_ADJUST = ("original", "match_rms_adamw")


def _tables(model: torch.nn.Module) -> set[int]:
    """ids of the weights of embeddings."""
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }


def tables_of(model: torch.nn.Module) -> list[str]:
    """[local] Names of matrices that AdamW updates though their names do not say so: embeddings, use_muon False."""
    tables = _tables(model)
    return [
        name for name, p in model.named_parameters() if p.dim() >= 2 and not getattr(p, "use_muon", id(p) not in tables)
    ]


def muon_groups(
    model: torch.nn.Module, *, others: Iterable[str] = (), muon: Mapping[str, Any] = {}, adam: Mapping[str, Any] = {}
) -> list[dict[str, Any]]:
    """[local] The parameters of a model as groups for Muon: hidden matrices, and all others for AdamW.

    A matrix has two dimensions or more, is no weight of an Embedding, and has none of "embed", "wte", "wpe", "lm_head"
    and `others` in its name, which is not "output.weight" or "head.weight". A parameter's attribute `use_muon`, if the
    program has set it, decides instead. muon, adam: numbers of the two kinds of group, as Muon's.
    """
    tables = _tables(model)
    words = (*_OTHERS, *others)
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        lower = name.lower()
        hidden = id(parameter) not in tables and lower not in _OUTPUTS and not any(word in lower for word in words)
        groups[bool(getattr(parameter, "use_muon", parameter.dim() >= 2 and hidden))].append(parameter)
    numbers = {True: dict(muon), False: dict(adam)}
    return [{"params": found, "use_muon": kind, **numbers[kind]} for kind, found in groups.items() if found]


class Muon(torch.optim.Optimizer):
    """Groups with "use_muon" True by Muon's rule, the others by AdamW's. See muon_groups().

    Of a matrix: the mean of gradients m += (1 - momentum)(g - m); u = g + momentum (m - g) with nesterov, else m; u
    becomes nearly orthogonal by ns_steps of Newton-Schulz; w = w (1 - lr weight_decay) - lr s u, where s is
    max(1, rows / columns)^0.5 ("original") or 0.2 max(rows, columns)^0.5 ("match_rms_adamw"), as in torch.optim.Muon.
    More than two dimensions count as one row per entry of the first.

    ns_method: "standard" multiplies in bf16, as torch's and DeepSpeed's; "gram" in fp32, in place of DeepSpeed's fp16.
    A group's own numbers come first; adam_lr: of groups for AdamW without an lr. ConfigError for a matrix group with a
    parameter of fewer than two dimensions, and for an unknown ns_method or adjust_lr_fn.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_method: str = "standard",
        adjust_lr_fn: str = "original",
        adam_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        groups: list[dict[str, Any]] = [
            dict(group) if isinstance(group, dict) else {"params": [group]} for group in params
        ]
        matrices: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        matrices.update(ns_method=ns_method, adjust_lr_fn=adjust_lr_fn)
        for group in groups:
            group.setdefault("use_muon", True)
            numbers = matrices if group["use_muon"] else {"lr": adam_lr, "betas": betas, "eps": eps}
            for key, value in {**numbers, "weight_decay": weight_decay}.items():
                group.setdefault(key, value)
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("use_muon", True):
            for key, known in (("ns_method", tuple(_METHODS)), ("adjust_lr_fn", _ADJUST)):
                if param_group.get(key, known[0]) not in known:
                    raise ConfigError(f"[Muon] {key}: got {param_group[key]!r}, expected one of {', '.join(known)}.")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = _muon if group["use_muon"] else _adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(group, parameter, parameter.grad, self.state[parameter])
        return loss


def _muon(group: Mapping[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
    if parameter.dim() < 2:
        raise ConfigError(
            f"[Muon] got a parameter of shape {list(parameter.shape)} in a group for matrices, expected two dimensions "
            "or more. Hint: muon_groups(model), or use_muon False for its group."
        )
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    mean = state["momentum_buffer"]
    mean.lerp_(gradient, 1 - group["momentum"])
    moved = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
    matrix = moved.reshape(moved.size(0), -1)
    rows, columns = matrix.shape
    by_rms = group["adjust_lr_fn"] == "match_rms_adamw"
    scale = 0.2 * max(rows, columns) ** 0.5 if by_rms else max(1.0, rows / columns) ** 0.5
    direction = _orthogonal(matrix, group["ns_steps"], _METHODS[group["ns_method"]])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(direction.view_as(parameter), alpha=-group["lr"] * scale)


def _orthogonal(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Newton-Schulz towards the nearest matrix whose singular values are one; the coefficients are Muon's."""
    a, b, c = _COEFFICIENTS
    x = matrix.to(dtype)
    if tall := x.size(0) > x.size(1):
        x = x.mT
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def _adamw(group: Mapping[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
    if "step" not in state:
        state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    state["step"] += 1
    beta1, beta2 = group["betas"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1 ** state["step"]))
