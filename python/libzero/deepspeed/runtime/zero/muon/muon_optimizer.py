"""deepspeed.runtime.zero.muon.muon_optimizer: Muon for matrices, and AdamW's rule for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from libzero.deepspeed._refuse import module_getattr
from libzero.errors import ConfigError
from libzero.muon import Muon, muon_groups

__all__ = ["MuonWithAuxAdam"]

_MATRICES = ("lr", "momentum", "weight_decay", "ns_method", "nesterov", "ns_steps", "adjust_lr_fn")
_OTHERS = ("lr", "betas", "eps", "weight_decay")
_RATES = ("muon_lr", "adam_lr")


class MuonWithAuxAdam(Muon):
    """Groups with "use_muon"; see libzero.muon.Muon. The auxiliary Adam is AdamW, on every device.

    ns_method "gram", the default, multiplies in fp32 in place of DeepSpeed's fp16.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        adam_optimizer: Any = None,
        adam_optimizer_kwargs: Any = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
    ) -> None:
        if not adam_w_mode:
            raise ConfigError("[MuonWithAuxAdam] got adam_w_mode False, expected True: its Adam is AdamW.")
        super().__init__(param_groups, ns_method="gram")


def is_muon(block: Any) -> bool:
    """[local] Whether a block "optimizer" has Muon's type, in upper or lower case."""
    return isinstance(block, Mapping) and str(block.get("type")).lower() == "muon"


def configured_muon(block: Mapping[str, Any], given: Iterable[Any] | None, model: torch.nn.Module) -> MuonWithAuxAdam:
    """[local] The optimizer of a block "optimizer" with type Muon, over parameters or groups of the program.

    A group's own numbers come first, then muon_lr and adam_lr, then the block's. ConfigError lists unknown keys.
    """
    params = dict(block.get("params") or {})
    decoupled, per_head = params.pop("adam_w_mode", True), params.pop("per_head_muon", False)
    params.pop("torch_adam", None)
    faults = [f"optimizer.params.{key}: unknown key for type Muon" for key in params
              if key not in (*_MATRICES, *_OTHERS, *_RATES)]  # fmt: skip
    if per_head:
        faults.append("optimizer.params.per_head_muon: got true, expected false: whole matrices are orthogonalized")
    if faults:
        raise ConfigError("[deepspeed] " + "\n".join(faults))
    numbers = {}
    for kind, keys, rate in ((True, _MATRICES, "muon_lr"), (False, _OTHERS, "adam_lr")):
        numbers[kind] = {key: params[key] for key in keys if key in params}
        if rate in params:
            numbers[kind]["lr"] = params[rate]
    kinds = {id(parameter): group["use_muon"] for group in muon_groups(model) for parameter in group["params"]}
    items = list(model.parameters()) if given is None else list(given)
    loose = [item for item in items if not isinstance(item, dict)]
    groups = [item for item in items if isinstance(item, dict)] + ([{"params": loose}] if loose else [])
    made: list[dict[str, Any]] = []
    for group in groups:
        own = {key: value for key, value in group.items() if key != "params"}
        for kind, keys in ((True, _MATRICES), (False, _OTHERS)):
            half = [p for p in group["params"] if p.requires_grad and kinds.get(id(p), p.dim() >= 2) is kind]
            mine = {key: value for key, value in own.items() if key in (*keys, "name")}
            if half:
                made.append({"params": half, "use_muon": kind, **numbers[kind], **mine})
    return MuonWithAuxAdam(made, adam_w_mode=bool(decoupled))


__getattr__ = module_getattr("deepspeed.runtime.zero.muon.muon_optimizer")
