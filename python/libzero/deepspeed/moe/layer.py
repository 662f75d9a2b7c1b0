"""deepspeed.moe.layer: libzero.MoE with the words of DeepSpeed's."""

from __future__ import annotations

from libzero import moe
from libzero.deepspeed._refuse import module_getattr

__all__ = ["MoE"]


class MoE(moe.MoE):
    """libzero.MoE. Its parameters have its names, gate.wg.weight and experts.C.*, with C the number among all experts.

    use_tutel: without effect. NotImplementedError for enable_expert_tensor_parallelism.
    """

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
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_local_experts = num_experts // ep_size
        for parameter in self.experts.parameters():  # is_moe_param() looks for these
            parameter.__dict__.update(allreduce=False, group_name=self.expert_group_name)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """[local] Nothing: initialize() makes the groups, by the key use_data_before_expert_parallelism."""


__getattr__ = module_getattr("deepspeed.moe.layer")
