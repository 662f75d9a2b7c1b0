"""deepspeed.runtime.tensor_parallel: what tensor_parallel.autotp_size cuts of a model without a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.utils.logging import log_dist

__all__ = ["automatic_plan"]

_COLUMN, _ROW, _SKIP = "column", "row", "skip"
_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": _COLUMN},
    "colwise_gather_output": {"partition_type": _COLUMN, "gather_output": True},
    "embedding_rowwise": {"partition_type": _COLUMN},  # of the vocabulary
    "rowwise": {"partition_type": _ROW},
    "rowwise_split_input": {"partition_type": _ROW, "scatter_input": True},
    "replicated_with_grad_allreduce": {"partition_type": _SKIP, "grad_allreduce": True},
    "replicate": {"partition_type": _SKIP},
}
"""The styles of transformers' plans, in the words of tensor_parallel.partition_config."""


def automatic_plan(model: torch.nn.Module, degree: int) -> dict[str, Any]:
    """[local] The partition_config of a model: that of its class in transformers, or of its linear layers.

    transformers: `_tp_plan`, with which configurations come (base_model_tp_plan). Layers of a module of which the plan
    has one that cannot be cut stay whole. Other models: the weight of each torch.nn.Linear by rows, each output
    all-gathered, so that what follows sees what it sees without tensor parallelism.
    """
    styles = getattr(model, "_tp_plan", None)
    specs = list(_of_styles(model, styles, degree)) if isinstance(styles, Mapping) and styles else []
    source = "the model's _tp_plan"
    if not any(spec["partition_type"] != _SKIP for spec in specs):
        specs, source = list(_of_linear_layers(model)), "its torch.nn.Linear, each output all-gathered"
    log_dist(f"tensor_parallel: the plan is made of {source}. Hint: partition_config is one of your own.", ranks=[0])
    return {"use_default_specs": False, "layer_specs": specs}


def _name(pattern: str) -> str:
    """A regular expression of the weights of modules like this: "model.layers.*.mlp.up_proj"."""
    return r"(?:.*\.)?" + r"[^.]+".join(re.escape(part) for part in pattern.split("*")) + r"\.weight$"


def _of_linear_layers(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    shared: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            shared[id(p)] = shared.get(id(p), 0) + 1
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and shared[id(module.weight)] == 1:  # an embedding's is its table
            yield {"patterns": [re.escape(name) + r"\.weight$"], **_STYLES["colwise_gather_output"]}


def _of_styles(model: torch.nn.Module, styles: Mapping[str, str], degree: int) -> Iterator[dict[str, Any]]:
    modules = [(f"{name}.weight", module) for name, module in model.named_modules() if name]
    whole: set[str] = set()  # modules of which a layer cannot be cut
    found: dict[str, list[tuple[str, torch.nn.Module]]] = {}
    for pattern, style in styles.items():
        expression = re.compile(_name(pattern))
        found[pattern] = [(name, module) for name, module in modules if expression.fullmatch(name)]
        if not found[pattern] and not _is_parameter(model, pattern):
            continue
        if style not in _STYLES or not all(_can_be_cut(style, module) for _, module in found[pattern]):
            whole.add(pattern.rpartition(".")[0])
        if any(_groups(model, name, module, style, degree) < degree for name, module in found[pattern]):
            whole.add(pattern.rpartition(".")[0])
    for pattern, style in styles.items():
        parent = pattern.rpartition(".")[0]
        if not found[pattern] or parent in whole:
            continue
        specs: dict[int, dict[str, Any]] = {}  # by the multiple
        for name, module in found[pattern]:
            multiple = _multiple(model, name, module, style)
            spec = specs.setdefault(multiple, {"patterns": [], **_STYLES[style], "multiple": multiple})
            spec["patterns"].append(re.escape(name) + "$")
        if len(specs) == 1:
            (spec,) = specs.values()
            spec["patterns"] = [_name(pattern)]
        yield from specs.values()


def _is_parameter(model: torch.nn.Module, pattern: str) -> bool:
    expression = re.compile(_name(pattern).removesuffix(r"\.weight$"))
    return any(expression.fullmatch(name) for name, _ in model.named_parameters())


def _can_be_cut(style: str, module: torch.nn.Module) -> bool:
    if _STYLES[style]["partition_type"] == _SKIP:
        return True
    if isinstance(module, torch.nn.Embedding):
        plain = module.padding_idx is None and module.max_norm is None and not module.scale_grad_by_freq
        return plain and not module.sparse
    return type(module) is torch.nn.Linear


def _size(module: torch.nn.Module, style: str) -> int:
    """Of the dimension that is cut; 0: of no layer whose outputs or inputs stay divided."""
    if not isinstance(module, torch.nn.Linear):
        return 0
    return {"colwise": module.out_features, "rowwise": module.in_features}.get(style, 0)


def _groups(model: torch.nn.Module, name: str, module: torch.nn.Module, style: str, otherwise: int) -> int:
    """The groups of heads that share keys and values, which are not cut. otherwise: of layers that are no attention."""
    size = _size(module, style)
    parent = model.get_submodule(name.removesuffix(".weight").rpartition(".")[0])
    if size == 0 or not (hasattr(parent, "head_dim") or "attention" in type(parent).__name__.lower()):
        return otherwise
    config = getattr(parent, "config", None) or getattr(model, "config", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) and size % heads == 0 else otherwise


def _multiple(model: torch.nn.Module, name: str, module: torch.nn.Module, style: str) -> int:
    """The elements of one group of heads, which one rank computes."""
    groups = _groups(model, name, module, style, 0)
    return _size(module, style) // groups if groups else 1


__getattr__ = module_getattr("deepspeed.runtime.tensor_parallel")
