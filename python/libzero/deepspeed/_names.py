"""Names of DeepSpeed that are not built, with the reason, and those that are another name of ours.

docs/deepspeed-compatibility.md is written from the table; _refuse.py makes what a program gets for such a name.
"""

from __future__ import annotations

VERSION = "0.19.8"
"""The version of DeepSpeed whose names and behaviour this package follows."""

REFUSED, MEANINGLESS = "not built", "not meaningful here"

_PIPELINE = "there is no pipeline parallelism. Hint: a plain torch.nn.Module, sharded by zero_optimization.stage."
_INFERENCE = "there is no inference engine. Hint: model.eval(), or stage 3 without an optimizer."
_TENSOR = "tensor parallelism is the configuration's. Hint: tensor_parallel.autotp_size and partition_config."
_MOE = "it is a part of DeepSpeed's layer. Hint: deepspeed.moe.layer.MoE, whose gate and experts are libzero's."
_COMPILE = "DeepCompile's passes are not built. Hint: engine.compile() compiles the units with torch.compile."
_TRANSFORMER = "there are no layers of its own. Hint: the model's layers as they are."
_DATA = "the engine does not choose or change data. Hint: a sampler of the program."
_SPARSE = "gradients are reduced dense. Hint: leave sparse_gradients out; the sums are the same."
_MUON = "libzero has its own Muon. Hint: optimizer.type Muon, or libzero.muon."
_FLOPS = "there is no count of operations. Hint: torch.profiler, or `zero bench`."
_TUNE = "there is no autotuner. Hint: `zero plan`, `zero bench`."
_ZENFLOW = "ZenFlow is not built. Hint: zero_optimization.offload_optimizer."
_INSIDE = "it is a part of DeepSpeed's implementation; the engine has no such part."
_IMPORTED = "it is a module or type that DeepSpeed imports. Hint: import it from where it is."
_CONSTANT = "it names a key of DeepSpeed's configuration reader. Hint: docs/configuration.md lists the keys."
_COMM = "the engine's traffic has no such backend. Hint: torch.distributed."
_LOG = "it is a part of DeepSpeed's log. Hint: deepspeed.comm.log_summary(), engine.start_trace() of libzero."
_BUFFERS = "activations are not split or packed. Hint: deepspeed.checkpointing.checkpoint()."
_ONE_FORMAT = "there is one checkpoint format, which loads at every stage. Hint: docs/checkpoints.md."
_GROUPS = "groups are no process groups of torch. Hint: libzero.Mesh.of(config).group('tp')."
_KEY = "no value of the engine depends on it. Hint: engine.config has what the program wrote."

_LINEAR = "it replaces torch's linear. Hint: torch.nn.Linear; the engine frees its weight after use."
_MARKS = "marks change nothing. Hint: set_z3_leaf_modules() by class is accepted."
_LAUNCHERS = "docs/cli.md lists the launchers whose variables are read. Hint: `zero run`, torchrun."

_TABLE: dict[str, dict[tuple[str, str], str]] = {
    "deepspeed": {
        (REFUSED, _PIPELINE): "DualPipeVEngine DualPipeVModule PipelineEngine PipelineModule pipe",
        (REFUSED, _INFERENCE): "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine "
        "default_inference_config inference init_inference model_implementations",
        (REFUSED, _TENSOR): "load_ds_config",
        (REFUSED, _TRANSFORMER): "DeepSpeedTransformerConfig DeepSpeedTransformerLayer replace_transformer_layer",
        (REFUSED, _MUON): "KV MLA_KV MLA_Q NOT_HEAD_BLOCKED QUERY "
        "resolve_per_head_muon_after_sharding",
        (REFUSED, _COMPILE): "compile",
        (REFUSED, _TUNE): "autotuning",
        (REFUSED, _FLOPS): "profiling",
        (REFUSED, "checkpoints go to folders. Hint: engine.save_checkpoint()."): "datastates io",
        (MEANINGLESS, "it says how DeepSpeed was built."): "git_version_info_installed",
    },
    "deepspeed.zero": {
        (MEANINGLESS, _INSIDE): "DeepSpeedTensorOverride DeepSpeedZeRoOffload parameter_offload "
        "partitioned_param_coordinator partitioned_param_profiler offload_states utils",
    },
    "deepspeed.utils": {
        (REFUSED, _MARKS): "z3_leaf_parameter",
        (REFUSED, _GROUPS): "bwc bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_world_size "
        "expert_tensor_parallel_world_size get_model_parallel_group get_tensor_model_parallel_group "
        "get_tensor_model_parallel_src_rank initialize mesh_device mpu set_tensor_model_parallel_rank "
        "set_tensor_model_parallel_world_size",
        (MEANINGLESS, _INSIDE): "DeprecatedException exceptions fragment_address get_full_hp_grad get_full_hp_param "
        "get_hp_fragment_mapping lazy_init_hp_params_optimizer_state link_hp_params map_to_flat_opt_states "
        "mixed_precision_linkage module_utils pin_memory_tracker recursive_getattr recursive_setattr "
        "set_full_hp_grad set_full_hp_param types",
        (REFUSED, "`zero run --bind-cores-to-rank` pins ranks."): "get_numactl_cmd numa",
    },
    "deepspeed.checkpointing": {
        (MEANINGLESS, _INSIDE): "CheckpointFunction Timers bwc_tensor_model_parallel_rank contiguous_data_buffers "
        "contiguous_size_buffers copy_to_device data_offsets deepspeed_checkpointing_enabled detach_variable "
        "extract_tensors is_activation_to_checkpoint merge_tensors move_to_device num_layers set_num_layers "
        "size_offsets timers FORWARD_GLOBAL_TIMER",
        (MEANINGLESS, _IMPORTED): "compiler",
        (REFUSED, _BUFFERS): "gather_partitioned_activations get_cpu_activations_for_backward "
        "get_offloaded_activations_for_backward get_partition_size get_partition_start "
        "get_partitioned_activations_for_backward partition_activations partition_activations_in_checkpoint "
        "restore_offloaded_activations",
        (REFUSED, _TENSOR): "mp_group mp_rank mp_size mpu",
    },
    "deepspeed.moe.layer": {
        (REFUSED, _MOE): "Experts MOELayer",
    },
    "deepspeed.comm": {
        (REFUSED, _LOG): "get_debug_log_name get_default_args get_msg_size_from_args get_tensor_kwarg "
        "get_tensor_position timer timer_summary timers",
        (MEANINGLESS, _CONSTANT): "COMMS_LOGGER_FORMAT COMMS_LOGGER_PROF_OPS_DEFAULT",
        (REFUSED, _COMM): "CCLBackend TorchBackend all_gather_coalesced all_reduce_coalesced backend ccl ccl_backend "
        "cdb hccl_backend mpi_backend "
        "nccl_backend init_deepspeed_backend set_backend has_all_reduce_coalesced has_coalescing_manager "
        "enable_symm_mem_for_group",
        (REFUSED, _LAUNCHERS): "get_local_rank_from_launcher get_world_rank_from_launcher "
        "get_world_size_from_launcher in_aml in_aws_sm in_dlts mpi_discovery patch_aml_env_for_torch_nccl_backend "
        "patch_aws_sm_env_for_torch_nccl_backend",
        (MEANINGLESS, _IMPORTED): "GradBucket TYPE_CHECKING pg_utils reduce_op",
    },
    "deepspeed.ops.adam": {
        (REFUSED, _ZENFLOW): "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3 zenflow_cpu_adam "
        "zenflow_torch_adam",
        (MEANINGLESS, _INSIDE): "multi_tensor_apply",
    },
    "DeepSpeedEngine": {
        (MEANINGLESS, _INSIDE): "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients "
        "allreduce_no_retain buffered_allreduce_fallback clip_fp32_gradients collect_python_gc "
        "get_wall_clock_timers is_first_weights_partition_group is_iterable_style_dataset is_map_style_dataset "
        "print_forward_breakdown get_type",
        (REFUSED, _SPARSE): "sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain",
        (REFUSED, _TUNE): "autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path "
        "autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step",
        (REFUSED, _FLOPS): "flops_profiler flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth "
        "flops_profiler_output_file flops_profiler_profile_step flops_profiler_recompute_fwd_factor "
        "flops_profiler_top_modules",
        (REFUSED, _TENSOR): "tensor_parallel_config uses_parallelization_pass_only",
        (REFUSED, _COMPILE): "compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend "
        "get_autotp_backend get_compile_time get_deepcompile_backend get_deepspeed_compile_backend "
        "is_deepcompile_active is_deepcompile_enabled register_compile_pass",
        (REFUSED, _DATA): "curriculum_learning_config curriculum_learning_enabled data_efficiency_config "
        "data_efficiency_enabled data_sampling_config data_sampling_enabled random_ltd_config random_ltd_enabled "
        "random_ltd_initialize set_custom_curriculum_learning_schedule set_data_post_process_func",
        (REFUSED, _ONE_FORMAT): "load_moe_state_dict",
        (REFUSED, _ZENFLOW): "zenflow_config",
        (MEANINGLESS, _KEY): "aio_config checkpoint_serialization_enabled checkpoint_tag_validation_enabled "
        "checkpoint_tag_validation_fail checkpoint_writer_enabled cpuadam_cores_perc dynamic_loss_scale_args "
        "get_optimizer_configuration is_sanity_checks_enabled optimizer_legacy_fusion super_offload "
        "swap_tensor_config use_node_local_storage zero_allgather_partitions zero_allgather_sequential "
        "zero_allow_untested_optimizer zero_compute_grad_norm zero_contiguous_gradients zero_elastic_checkpoint "
        "zero_force_ds_cpu_optimizer zero_legacy_stage1 zero_load_from_fp32_weights "
        "zero_module_granularity_threshold zero_multi_rank_bucket_allreduce zero_offload_optimizer zero_offload_param "
        "zero_parameter_alignment zero_partial_offload zero_reduce_scatter zero_round_robin_gradients "
        "zero_save_muon_momentum_buffer_in_memory zero_use_cpu_optimizer",
    },
}
_TABLE["deepspeed.moe"] = {
    (REFUSED, _MOE): "ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch experts "
    "fused_expert_layout mappings"
}
_TABLE["deepspeed.utils.groups"] = {
    (REFUSED, "groups are no process groups of torch. Hint: libzero's engine.mesh.experts(ep_size)."): "initialize "
    "_create_expert_and_data_parallel _create_expert_data_and_model_parallel _get_expert_data_parallel_group "
    "_get_expert_data_parallel_group_dict _get_expert_parallel_group _get_expert_parallel_group_dict "
    "_get_expert_broadcast_src_rank _get_expert_data_parallel_group_ranks _get_expert_parallel_group_ranks "
    "_get_expert_parallel_ranks _get_expert_parallel_src_rank _get_max_expert_parallel_group"
}
_TABLE["deepspeed.runtime"] = {(REFUSED, "docs/deepspeed-compatibility.md lists its modules."): "hybrid_engine"}

SHORT = {"zero": "runtime.zero", "checkpointing": "runtime.activation_checkpointing.checkpointing"}
"""Attributes of the package that name modules within it."""

ALIASES = {
    "Optimizer": "torch.optim:Optimizer",
    "dist": "libzero.deepspeed.comm",
    "utils.dist": "libzero.deepspeed.comm",
    "utils.logger": "libzero.deepspeed.utils.logging:logger",
    "moe.layer.groups": "libzero.deepspeed.utils.groups",
    "runtime.zero.linear.LinearModuleForZeroStage3": "torch.nn:Linear",
    "runtime.zero.linear.zero3_linear_wrap": "torch.nn.functional:linear",
    "moe.layer.TopKGate": "libzero.deepspeed.moe.sharded_moe:TopKGate",
    "moe.layer.log_dist": "libzero.deepspeed.utils:log_dist",
    "moe.utils.defaultdict": "collections:defaultdict",
    "ops.op_builder.all_ops.ALL_OPS": "libzero.deepspeed.ops.op_builder:ALL_OPS",
    "ops.op_builder.builder.OpBuilder": "libzero.deepspeed.ops.op_builder:OpBuilder",
    "runtime.activation_checkpointing.checkpointing.DeepSpeedConfig": "libzero.deepspeed:DeepSpeedConfig",
    "runtime.activation_checkpointing.checkpointing.dist": "libzero.deepspeed.comm",
    "runtime.activation_checkpointing.checkpointing.get_accelerator": "libzero.deepspeed.accelerator:get_accelerator",
    "runtime.activation_checkpointing.checkpointing.logger": "libzero.deepspeed.utils.logging:logger",
}
"""Names that are others: within deepspeed, and MODULE:NAME or a module."""

MORE = {
    "comm.config": "libzero.deepspeed.runtime._models",
    "linear.config": "libzero.deepspeed.linear",
    "linear.context_manager": "libzero.deepspeed.linear",
    "linear.optimized_linear": "libzero.deepspeed.linear",
    "monitor.comet": "libzero.deepspeed.monitor.monitor",
    "monitor.config": "libzero.deepspeed.runtime._models",
    "monitor.csv_monitor": "libzero.deepspeed.monitor.monitor",
    "monitor.tensorboard": "libzero.deepspeed.monitor.monitor",
    "monitor.utils": "libzero.deepspeed.monitor.monitor",
    "monitor.wandb": "libzero.deepspeed.monitor.monitor",
    "runtime.config": "libzero.deepspeed.runtime._config",
    "runtime.config_utils": "libzero.deepspeed.runtime._models",
    "runtime.precision_config": "libzero.deepspeed.runtime._models",
    "runtime.zero.config": "libzero.deepspeed.runtime._models",
    "runtime.zero.leaf_module_config": "libzero.deepspeed.runtime._models",
    "runtime.zero.offload_config": "libzero.deepspeed.runtime._models",
    "utils.config": "libzero.deepspeed.runtime._models",
}
"""Modules whose names are in one of ours, which is imported when the first of them is asked for."""

_AREAS = {
    "autotuning": _TUNE,
    "checkpoint": _ONE_FORMAT,
    "comm": _COMM,
    "compile": _COMPILE,
    "compression": "layers are not compressed. Hint: quantization of torch.",
    "datastates": "checkpoints go to folders. Hint: engine.save_checkpoint().",
    "inference": _INFERENCE,
    "io": "checkpoints go to folders. Hint: engine.save_checkpoint().",
    "launcher": _LAUNCHERS,
    "linear": "quantized weights are not built. Hint: zero_optimization.zero_quantized_weights.",
    "model_implementations": _INFERENCE,
    "module_inject": _TENSOR,
    "moe": _MOE,
    "ops": "it is a kernel of DeepSpeed. Hint: the operators of torch; the engine has its own for updates.",
    "ops.transformer": _TRANSFORMER,
    "pipe": _PIPELINE,
    "profiling": _FLOPS,
    "runtime.comm": _COMM,
    "runtime.compiler": _COMPILE,
    "runtime.data_pipeline": _DATA,
    "runtime.domino": _TENSOR,
    "runtime.hybrid_engine": _INFERENCE,
    "runtime.hybrid_engine_graph": _INFERENCE,
    "runtime.pipe": _PIPELINE,
    "runtime.rollout": _INFERENCE,
    "runtime.sparse_tensor": _SPARSE,
    "runtime.superoffload": _ZENFLOW,
    "runtime.tensor_parallel": _TENSOR,
    "runtime.zenflow": _ZENFLOW,
    "runtime.zero.linear": _LINEAR,
    "runtime.zero.muon.original_muon": _MUON,
    "sequence": "it changes a model by its class. Hint: runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF, or "
    "sequence.layer.DistributedAttention around the model's attention.",
    "sequence.cross_entropy": "a vocabulary is divided by the engine's mesh. Hint: libzero.tp.cross_entropy, or "
    "vocab_parallel_cross_entropy() without a tp_group.",
    "sequence.fpdt_layer": "attention is not computed in chunks of host memory. Hint: ulysses_sp.UlyssesSPAttentionHF "
    "with TiledMLP and TiledFusedLogitsLoss, and activations in host memory (docs/activations.md).",
    "sequence.layer": "it is a step of DeepSpeed's exchange. Hint: DistributedAttention, or single_all_to_all().",
    "sequence.linear_cross_entropy": "it fuses a divided vocabulary. Hint: ulysses_sp.TiledFusedLogitsLoss.",
    "sequence.vocab_parallel_ops": "a vocabulary is divided by the engine's mesh. Hint: libzero.tp.cross_entropy.",
    "utils.numa": "`zero run --bind-cores-to-rank` pins ranks.",
}

_REASONS = {
    (owner, name): reason
    for owner, reasons in _TABLE.items()
    for reason, names in reasons.items()
    for name in names.split()
}


def reason(owner: str, name: str) -> tuple[str, str] | None:
    """REFUSED or MEANINGLESS, and why; None for a name that is built or that DeepSpeed has not."""
    return _REASONS.get((owner, name))


def area_reason(module: str) -> tuple[str, str]:
    """The same for any name of a module, by the part of DeepSpeed that it belongs to."""
    words = module.split(".")
    for count in range(len(words), 0, -1):
        if ".".join(words[:count]) in _AREAS:
            return REFUSED, _AREAS[".".join(words[:count])]
    return REFUSED, _INSIDE
