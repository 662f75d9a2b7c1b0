"""deepspeed.moe.layer: libzero.MoE with the words of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo

from libzero import moe
from libzero.deepspeed._refuse import module_getattr
from libzero.errors import ConfigError

__all__ = ["MoE"]


class _Part:
    """What programs read of a module that DeepSpeed's layer has and this one has not."""

    def __init__(self, owner: str, values: Mapping[str, Callable[[], Any]]) -> None:
        self.__dict__.update(_owner=owner, _values=dict(values))

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name.startswith("__") or name not in values:
            raise AttributeError(f"{self.__dict__.get('_owner')}.{name} is not built, expected one of {list(values)}")
        return values[name]()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self.__dict__['_owner']}.{name} can be read only. Hint: the words of MoE(...).")

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_values"])


class MoE(moe.MoE):
    """libzero.MoE. Its parameters have its names, gate.wg.weight and experts.C.*, with C the number among all experts.

    load_state_dict() takes DeepSpeed's names too: deepspeed_moe.gate.wg.weight and
    deepspeed_moe.experts.deepspeed_experts.N.*, with N the number among the experts of this rank.
    use_tutel: without effect. NotImplementedError for enable_expert_tensor_parallelism.
    """

    enable_expert_tensor_parallelism = False

    def __init__(
        self,
        hidden_size: int,
        expert: moe.Expert,
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
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        if enable_expert_tensor_parallelism:
            raise NotImplementedError(
                "cannot cut experts over tensor-parallel ranks: enable_expert_tensor_parallelism is not built. "
                "Hint: leave it out."
            )
        super().__init__(
            hidden_size,
            expert,
            num_experts,
            ep_size,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            use_residual,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        self._l_aux: torch.Tensor | None = None
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_local_experts = num_experts // ep_size
        for parameter in self.experts.parameters():  # is_moe_param() looks for these
            parameter.__dict__.update(allreduce=False, group_name=self.expert_group_name)

    @_disable_dynamo
    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As libzero.MoE.forward(), of which x is hidden_states: the output, the auxiliary loss and the counts."""
        output, self._l_aux, counts = super().forward(hidden_states, used_token)
        return output, self._l_aux, counts

    @property
    def deepspeed_moe(self) -> Any:
        """[local] The names by which programs know the inside of DeepSpeed's layer, to be read only.

        gate.wg: the module with the weight [num_experts, hidden_size]; gate's words (k, capacity_factor and others).
        experts.deepspeed_experts: the experts of this rank, a list; with ep_size above 1 ConfigError before
        initialize(). l_aux, exp_counts: of the last forward, l_aux with its graph; None before it. AttributeError that
        names it for another name.
        """
        words = ["k", "capacity_factor", "eval_capacity_factor", "min_capacity", "drop_tokens", "use_rts"]
        words += ["top2_2nd_expert_sampling"]
        of_gate: dict[str, Callable[[], Any]] = {word: partial(self._words.get, word) for word in words}
        of_gate["noisy_gate_policy"] = lambda: self._words["noisy_gate_policy"] or None
        gate = _Part("MoE.deepspeed_moe.gate", {"wg": lambda: self.gate["wg"], **of_gate})
        local = {"deepspeed_experts": self._local_experts, "num_local_experts": lambda: self.num_local_experts}
        experts = _Part("MoE.deepspeed_moe.experts", local)
        values: dict[str, Callable[[], Any]] = {
            "gate": lambda: gate,
            "experts": lambda: experts,
            "l_aux": lambda: self._l_aux,
            "exp_counts": lambda: self.last_counts,
            "ep_size": lambda: self.ep_size,
            "ep_group_name": lambda: self.expert_group_name,
            "num_local_experts": lambda: self.num_local_experts,
        }
        return _Part("MoE.deepspeed_moe", values)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *words: Any) -> None:
        theirs = f"{prefix}deepspeed_moe."
        for key in [key for key in state_dict if key.startswith(theirs)]:
            name = key.removeprefix(theirs)
            if name.startswith("experts.deepspeed_experts."):
                number, _, rest = name.removeprefix("experts.deepspeed_experts.").partition(".")
                name = f"experts.{self._first_expert() + int(number)}.{rest}"
            state_dict[prefix + name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *words)

    def _first_expert(self) -> int:
        """The number of this rank's first expert among all."""
        place = 0 if self.ep_size == 1 else self._layer.place
        if place is None:
            raise ConfigError(
                f"[MoE] deepspeed_experts: got a layer with ep_size {self.ep_size} before deepspeed.initialize(), "
                "which decides which experts a rank has. Hint: read them afterwards."
            )
        return place * self.num_local_experts

    def _local_experts(self) -> list[torch.nn.Module]:
        return list(self.experts.values())[self._first_expert() :][: self.num_local_experts]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_l_aux": None}  # its graph cannot be copied

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """[local] Nothing: initialize() makes the groups, by the key use_data_before_expert_parallelism."""


__getattr__ = module_getattr("deepspeed.moe.layer")
