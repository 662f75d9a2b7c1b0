"""The modules of DeepSpeed 0.19.8, and the public names of each: defined there, or `< MODULE:` of another one.

NAME=VALUE is a constant. Written by script/deepspeed-compatibility --names.
"""

TEXT = r"""
.
    DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable MUON_OPTIMIZER add_config_arguments checkpointing
        default_inference_config git_branch git_hash init_inference initialize resolve_per_head_muon_after_sharding
        set_optimizer_flags tp_model_init version zero
    < runtime.config: DeepSpeedConfig DeepSpeedConfigError
    < runtime.dataloader: DeepSpeedDataLoader
    < runtime.engine: DeepSpeedEngine
    < runtime.hybrid_engine: DeepSpeedHybridEngine
    < inference.config: DeepSpeedInferenceConfig
    < runtime.base_optimizer: DeepSpeedOptimizer
    < ops.transformer: DeepSpeedTransformerConfig DeepSpeedTransformerLayer
    < runtime.pipe.dualpipev: DualPipeVEngine DualPipeVModule
    < inference.engine: InferenceEngine
    < utils: OnDevice log_dist logger
    < runtime.pipe.engine: PipelineEngine
    < pipe: PipelineModule
    < constants: TORCH_DISTRIBUTED_DEFAULT_PORT
    < accelerator: get_accelerator
    < comm.comm: init_distributed
    < runtime.tensor_parallel.init_utils: load_ds_config merge_tp_model_init_into_config record_tp_model_init_args
    < module_inject: replace_transformer_layer set_autotp_mode
accelerator
    < accelerator.abstract_accelerator: DeepSpeedAccelerator
    < accelerator.real_accelerator: get_accelerator is_current_accelerator_supported set_accelerator
accelerator.abstract_accelerator
    DeepSpeedAccelerator
accelerator.cpu_accelerator
    CPU_Accelerator
accelerator.cuda_accelerator
    CUDA_Accelerator
accelerator.hpu_accelerator
    HPU_Accelerator
accelerator.klxpu_accelerator
    KLXPU_Accelerator
accelerator.mlu_accelerator
    MLU_Accelerator
accelerator.mps_accelerator
    MPS_Accelerator
accelerator.npu_accelerator
    ACL_HOST_REG_MAPPED=2 ACL_SUCCESS=0 NPU_Accelerator
accelerator.real_accelerator
    get_accelerator is_current_accelerator_supported set_accelerator
accelerator.sdaa_accelerator
    SDAA_Accelerator
accelerator.supa_accelerator
    SUPA_Accelerator
accelerator.xpu_accelerator
    XPU_Accelerator
autotuning
    Autotuner
checkpoint
    < checkpoint.constants: *
    < checkpoint.deepspeed_checkpoint: DeepSpeedCheckpoint
    < checkpoint.universal_checkpoint: SubparamShape enable_universal_checkpoint
    < checkpoint.zero_checkpoint: ZeROCheckpoint
    < checkpoint.utils: get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank
    < checkpoint.reshape_3d_utils: get_model_3d_descriptor model_3d_desc
    < checkpoint.reshape_utils: merge_state
    < checkpoint.reshape_meg_2d: reshape_meg_2d_parallel
checkpoint.affine
    AFFINE_MAP_FORMAT_VERSION=1 AffinePiece ParamAffineMap block_gather_map contiguous_split_map replicated_map
        segmented_map sub_param_map
checkpoint.affine_transfer
    AffineTransferError InvalidMapError InvalidReplicaPolicyError LogicalBox PlanBudget PlanStatistics
        ReplicaCandidate ReplicaSelectionRequest TransferPlan TransferSegment UnsupportedLayoutError plan_transfer
checkpoint.constants
    AFFINE_MAP='affine_map' AFFINE_MAP_PARAMS='params' AFFINE_MAP_VERSION='version' AUTOEP_AFFINE_MAPS='affine_maps'
        AUTOEP_EP_SIZE='ep_size' AUTOEP_EXPERT_KEY_PREFIX='expert_key_prefix'
        AUTOEP_EXPERT_PLACEMENT='expert_placement' AUTOEP_LAYERS_KEY='ds_autoep_layers'
        AUTOEP_LAYERS_KEY_LEGACY='autoep_layers' AUTOEP_NUM_EXPERTS='num_experts'
        AUTOEP_NUM_LOCAL_EXPERTS='num_local_experts' AUTOEP_PARAM_EP_RANK='ep_rank'
        AUTOEP_PARAM_LOCAL_EXPERTS='local_experts' AUTOEP_PARAM_LOGICAL_SHAPE='logical_shape'
        AUTOEP_PLACEMENT_EP_SIZE='ep_size' AUTOEP_PLACEMENT_EXPERTS='experts'
        AUTOEP_PLACEMENT_NUM_EXPERTS='num_experts' AUTOEP_PLACEMENT_RANK='rank' AUTOEP_PLACEMENT_RANKS='ranks'
        AUTOEP_PLACEMENT_VERSION=1 AUTOEP_PLACEMENT_VERSION_KEY='version'
        AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY='checkpoint_format' AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION=1
        AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY='checkpoint_format_version'
        AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT='zero3_partitioned'
        AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS='autotp_unsupported_parameter_patterns'
        BASE_OPTIMIZER_STATE='base_optimizer_state' BASE_OPTIMIZER_STATE_STEP='base_optimizer_state_step'
        BUFFER_NAMES='buffer_names' CAT_DIM='cat_dim' CHECKPOINT_PARALLEL_DIMS='checkpoint_parallel_dimensions'
        CHECKPOINT_PP_DEGREE='pp_degree' CHECKPOINT_TP_DEGREE='tp_degree' CLIP_GRAD='clip_grad'
        DS_AUTOEP_UC_META='ds_autoep_uc_meta' DS_AUTOTP_UC_META='ds_autotp_universal_checkpoint_meta'
        DS_VERSION='ds_version' EP_IS_EXPERT_PARAM='is_expert_param' EP_NUM_EXPERTS='ep_num_experts'
        EXPERT_PARAMETER_PATTERNS='expert_parameter_patterns' FOLDING_DISPATCH_STRATEGY='dispatch_strategy'
        FOLDING_EP_RANK='ep_rank' FOLDING_EP_SIZE='ep_size' FOLDING_ETP_RANK='etp_rank' FOLDING_ETP_SIZE='etp_size'
        FOLDING_FAMILY='family' FOLDING_METADATA_KEY='folding' FOLDING_METADATA_VERSION=1
        FOLDING_PARAM_FAMILIES='param_families' FOLDING_SHARED_EXPERT_PLACEMENT='shared_expert_placement'
        FOLDING_TP_RANK='tp_rank' FOLDING_TP_SIZE='tp_size' FOLDING_ZERO_PARTITION_COUNT='zero_partition_count'
        FOLDING_ZERO_PARTITION_GROUP='zero_partition_group' FOLDING_ZERO_PARTITION_RANK='zero_partition_rank'
        FP32_FLAT_GROUPS='fp32_flat_groups' FP32_GROUPS='fp32_groups' FP32_WEIGHT_KEY='fp32'
        FROZEN_PARAM_FRAGMENTS='frozen_param_fragments' FROZEN_PARAM_SHAPES='frozen_param_shapes'
        GROUP_PADDINGS='group_paddings' LAYER_FILE_PREFIX='layer_' LOSS_SCALER='loss_scaler'
        MODEL_FILE_PREFIX='mp_rank_' MODEL_FILE_SUFFIX='_model_states.pt'
        OPTIMIZER_STATE_DICT='optimizer_state_dict' OPTIM_FILE_SUFFIX='_optim_states.pt'
        ORIGINAL_VOCAB_SIZE='original_vocab_size' PADDED_VOCAB_SIZE='padded_vocab_size' PARAM='param'
        PARAMETER_TO_AVERAGE_PATTERNS='parameter_to_average_patterns'
        PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0='parameter_with_2_sub_params_cat_dim_0'
        PARAMETER_WITH_ROW_PARALLELISM_PATTERNS='parameter_with_row_parallelism_patterns'
        PARAMETER_WITH_SUB_PARAMS='parameter_with_sub_params' PARAM_ALIGNMENT_PADDINGS='param_alignment_paddings'
        PARAM_GROUPS='param_groups' PARAM_N_SUB_PARAMS='param_n_sub_params' PARAM_SHAPES='param_shapes'
        PARAM_SLICE_MAPPINGS='param_slice_mappings' PARTITION_COUNT='partition_count'
        PIPELINE_REPLICATED_PARAMETER_PATTERNS='pipeline_replicated_parameter_patterns'
        SINGLE_PARTITION_OF_FP32_GROUPS='single_partition_of_fp32_groups' SUB_PARAMS_SHAPE='sub_params_shape'
        SUB_PARAM_SHAPE='sub_param_shape' SUB_PARAM_SHARD_WIDTHS='sub_param_shard_widths'
        TP_REPLICATED_PARAMETER_PATTERNS='tp_replicated_parameter_patterns'
        UNIVERSAL_CHECKPOINT_INFO='universal_checkpoint_info'
        UNIVERSAL_CHECKPOINT_VERSION_KEY='universal_checkpoint_version' UNIVERSAL_CHECKPOINT_VERSION_VALUE=0.4
        VOCABULARY_PARAMETER_PATTERNS='vocabulary_parameter_patterns' VOCAB_TENSOR='vocab_tensor'
        ZERO_FILE_PREFIX='zero_pp_rank_' ZERO_STAGE='zero_stage'
checkpoint.deepspeed_checkpoint
    ARGS_KEY='args' CHECKPOINT_INFO_KEY='checkpoint_info' DeepSpeedCheckpoint EMBEDDING_LAYER_INDEX=0
        FINAL_LAYER_NORM_INDEX=-1 ITERATION_KEY='iteration' LAYER_FILE_PREFIX_PATTERN='layer_(\\d+)-model_.*'
        USE_DATA_BEFORE_EXPERT_PARALLELISM='use_data_before_expert_parallelism'
    < checkpoint.constants: *
checkpoint.ds_to_universal
    atoi dp_index_to_str dump_param_fragment extract_zero_shards extract_zero_shards_stage3 main merge_tp_slices
        merge_zero3_slices natural_keys parse_arguments
checkpoint.reshape_3d_utils
    DP_DIM='DP' PP_DIM='PP' TP_DIM='TP' flatten_dp_dimension get_model_3d_descriptor
        get_model_3d_descriptor_from_metadata model_3d_desc unflatten_dp_dimension
checkpoint.reshape_meg_2d
    get_mpu_ranks meg_2d_parallel_map reshape reshape_meg_2d_parallel
checkpoint.reshape_utils
    basic_folder_validation get_files get_files_with_prefix get_zero_files merge_state merge_state_dict
        merge_state_list partition_data sort_zero_files validate_files
checkpoint.universal_checkpoint
    SubparamShape enable_universal_checkpoint load_hp_checkpoint_state
checkpoint.utils
    clone_tensors_for_torch_save get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank
        get_zero_ckpt_name_for_rank
checkpoint.zero_checkpoint
    GROUP_STATE_KEY='state' ZeROCheckpoint
comm
    < comm.comm: *
    < comm.utils: *
comm.backend
    Backend
comm.ccl
    CCLBackend CCLHandler build_ccl_op
comm.comm
    P2POp ProcessGroup all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
        all_reduce_coalesced all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv broadcast
        broadcast_object_list configure destroy_process_group enable_symm_mem_for_group gather
        get_all_ranks_from_group get_comm_operation_count get_global_rank get_local_rank get_logged_comm_ops
        get_rank get_world_group get_world_size has_all_gather_into_tensor has_all_reduce_coalesced
        has_coalescing_manager has_comm_data has_reduce_scatter_tensor in_aml in_aws_sm in_dlts inference_all_reduce
        init_deepspeed_backend init_distributed initialize_mesh_device irecv is_available is_initialized isend
        log_summary monitored_barrier mpi_discovery new_group patch_aml_env_for_torch_nccl_backend
        patch_aws_sm_env_for_torch_nccl_backend recv reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor
        reset_log scatter send set_backend timed_op
    < comm.constants: *
    < comm.reduce_op: *
    < comm.utils: *
comm.config
    CommsLoggerConfig DeepSpeedCommsConfig
    < comm.constants: *
comm.constants
    CCL_BACKEND='ccl' COMMS_LOGGER='comms_logger' COMMS_LOGGER_DEBUG='debug' COMMS_LOGGER_DEBUG_DEFAULT=False
        COMMS_LOGGER_ENABLED='enabled' COMMS_LOGGER_ENABLED_DEFAULT=False COMMS_LOGGER_PROF_ALL='prof_all'
        COMMS_LOGGER_PROF_ALL_DEFAULT=True COMMS_LOGGER_PROF_OPS='prof_ops' COMMS_LOGGER_VERBOSE='verbose'
        COMMS_LOGGER_VERBOSE_DEFAULT=False DEFAULT_AML_MASTER_PORT='54965'
        DEFAULT_AML_NCCL_SOCKET_IFNAME='^docker0,lo' GLOO_BACKEND='gloo' HCCL_BACKEND='hccl' MPI_BACKEND='mpi'
        NCCL_BACKEND='nccl' SCCL_BACKEND='sccl'
comm.mori
    allgather_into_tensor init is_enabled supports
comm.pg_utils
    is_parallel
comm.reduce_op
    ReduceOp
comm.torch
    DS_COMM_ALL_GATHER_OFF=False DS_COMM_ALL_REDUCE_OFF=False DS_COMM_BROADCAST_OFF=False DS_COMM_REDUCE_OFF=False
        DS_COMM_REDUCE_SCATTER_OFF=False Noop StagedWork TorchBackend all_gather_comm_off all_reduce_comm_off
        backward_comm_off broadcast_comm_off build_shm_op disable_compiler_collective get_coalescing_manager
        has_all_reduce_coalesced has_coalescing_manager known_world_size reduce_comm_off reduce_scatter_comm_off
        stage_on_cpu
    < comm.backend: *
    < comm.comm: *
    < comm.utils: *
comm.utils
    get_debug_log_name get_default_args get_local_rank_from_launcher get_msg_size_from_args get_tensor_kwarg
        get_tensor_position get_world_rank_from_launcher get_world_size_from_launcher
compat
    get_annotations get_annotations_from_namespace
compile
    pad_tensors
compression
constants
    CROSS_RANK='CROSS_RANK' CROSS_SIZE='CROSS_SIZE' INFERENCE_GENERIC_MODE='generic'
        INFERENCE_SPECIALIZED_MODE='specialized' LOCAL_RANK='LOCAL_RANK' TORCH_DISTRIBUTED_DEFAULT_PORT=29500
datastates
datastates.config
    DATASTATES_CHECKPOINTING='datastates_ckpt' DATASTATES_CHECKPOINTING_ENABLED=False DeepSpeedDataStatesConfig
env_report
    END='\x1b[0m' GREEN='\x1b[92m' INFO='[INFO]' RED='\x1b[91m' YELLOW='\x1b[93m' cli_main debug_report get_shm_size
        human_readable_size installed_cann_path installed_cann_version main nvcc_version op_report parse_arguments
git_version_info
inference
inference.config
    ActivationQuantConfig BaseQuantConfig DeepSpeedInferenceConfig DeepSpeedMoEConfig DeepSpeedTPConfig DtypeEnum
        InferenceCheckpointConfig MoETypeEnum QKVQuantConfig QuantTypeEnum QuantizationConfig WeightQuantConfig
inference.engine
    DS_INFERENCE_ENABLED=False INFERENCE_MODEL_TIMER='model-forward-inference' InferenceEngine
inference.quantization
inference.quantization.layers
    QuantizedEmbedding QuantizedLinear get_quantize_weight_fn get_quantized_weight_wrapper
inference.quantization.quantization
inference.quantization.quantization_context
    QuantizationContext
inference.quantization.utils
    DeQuantizer Quantizer concat_to_compat_param get_AsyncPartitionedParameterSwapper get_quantizer_module
        recursive_setattr tensor_clamp tensor_round wrap_load_from_state_dict wrap_quantized_functional
io
    < io.fast_file_writer: FastFileWriter FastFileWriterConfig
    < io.mock_file_writer: MockFileWriter
    < io.py_file_writer: PyFileWriter
io.base_file_writer
    BaseFileWriter
    < io.constants: *
io.base_io_buffer
    Base_IO_Buffer
io.constants
    AIO_FILL_BUFFER_COUNT_KEY='fill_buffer_count' AIO_FILL_BUFFER_SEC_KEY='fill_buffer_secs'
        AIO_FILL_BUFFER_SPEED_KEY='fill_buffer_GB/s' AIO_SPEED_KEY='aio_GB/s' AIO_WRITE_BYTES_KEY='aio_bytes'
        AIO_WRITE_SEC_KEY='aio_write_secs' CLOSE_COUNT_KEY='close' FILENO_COUNT_KEY='fileno' FILE_PATH_KEY='path'
        FLUSH_COUNT_KEY='flush' INVALID_FD=-1 RANK_KEY='rank' SAVE_STORAGE_BYTES_KEY='save_storage_bytes'
        SAVE_STORAGE_KEY='save_storage' SAVE_STORAGE_SEC_KEY='save_storage_secs' SLOW_WRITE_BYTES_KEY='slow_bytes'
        SLOW_WRITE_SEC_KEY='slow_write_secs' STORAGE_OBJ_SIZE=8 WRITE_BYTES_KEY='bytes' WRITE_COUNT_KEY='write'
        WRITE_SEC_KEY='write_secs' WRITE_SPEED_KEY='write_GB/s'
io.double_io_buffer
    Double_IO_Buffer INVALID_BUFFER_INDEX=-1 NUM_BUFFERS=2
io.fast_file_writer
    FastFileWriter FastFileWriterConfig
    < io.constants: *
io.mock_file_writer
    MockFileWriter
    < io.constants: *
io.py_file_writer
    PyFileWriter
    < io.constants: *
io.single_io_buffer
    Single_IO_Buffer
io.utils
    bytes_to_tensor obj_serialization_details required_minimum_torch_version serialize_details tensor_to_bytes
launcher
launcher.constants
    IMPI_LAUNCHER='impi' MPICH_LAUNCHER='mpich' MVAPICH_LAUNCHER='mvapich'
        MVAPICH_TMP_HOSTFILE='/tmp/deepspeed_mvapich_hostfile' OPENMPI_LAUNCHER='openmpi' PDSH_LAUNCHER='pdsh'
        PDSH_MAX_FAN_OUT=1024 SLURM_LAUNCHER='slurm'
launcher.launch
    PID_FILE_BASEPATH='/tmp' main parse_args terminate_process_tree
launcher.launcher_helper
    env_mapping main parse_args
launcher.multinode_runner
    IMPIRunner MPICHRunner MVAPICHRunner MultiNodeRunner OpenMPIRunner PDSHRunner SlurmRunner
launcher.runner
    DLTS_HOSTFILE='/job/hostfile' PDSH_MAX_FAN_OUT=1024 apply_num_nodes_and_gpus encode_world_info fetch_hostfile
        main parse_args parse_inclusion_exclusion parse_node_config parse_node_config_list parse_resource_filter
        run_autotuning
linear
    < linear.context_manager: Init init_lora
    < linear.config: LoRAConfig QuantizationConfig
    < linear.optimized_linear: OptimizedLinear
linear.config
    LoRAConfig QuantizationConfig
linear.context_manager
    Init init_lora
linear.optimized_linear
    LoRAOptimizedLinear OptimizedLinear
linear.quantization
    QuantizedLinear QuantizedParameter
module_inject
    HFBertLayerPolicy ReplaceWithTensorSlicing
    < module_inject.autotp_config: AutoTPConfig AutoTPPresets PartitionType TPLayerSpec merge_autotp_configs
    < module_inject.policy: DSPolicy
    < module_inject.layers: EmbeddingLayer LinearAllreduce LinearLayer Normalize SubParamLinearAllreduce
        SubParamLinearLayer set_autotp_mode
    < module_inject.replace_module: GroupQuantizer generic_injection replace_transformer_layer
        revert_transformer_layer
    < module_inject.module_quantize: quantize_transformer_layer
module_inject.auto_tp
    AutoTP Loading ReplaceWithTensorSlicing move
    < module_inject.layers: *
module_inject.auto_tp_model_utils
    build_bloom_alibi_tensor build_mpt_alibi_tensor build_mpt_atten_bias_tensor get_alibi_mask get_head_shard_sizes
        install_head_sharded_helper
module_inject.autotp_config
    AutoTPConfig AutoTPPresets PartitionType TPLayerSpec merge_autotp_configs
module_inject.fusedqkv_utils
    codegen_block_layout fused_qkv_subparam_sizes get_fused_qkv_type prepare_tp_fused_qkvw require_tp_fused_qkvw
        set_fused_qkv_shard_state shard_value_with_share_qk shared_qk_value_head_ids split_by_qkvlist_and_refuse
module_inject.inject
    module_inject test_hi
module_inject.layers
    AsyncColumnParallel ColumnParallel Conv_LinearALlreduce DS_IS_REPLACED_MODULE='ds_is_replaced_module'
        DS_TENSOR_MODEL_PARALLEL='tensor_model_parallel' EmbeddingLayer FusedModuleWrapper GateUpPack_LinearLayer
        GatherFromTensorParallelRegion GatherReplacedLayerParams HiddenParallelEmbedding LinearAllreduce
        LinearAllreduceWithReplicatedInput LinearLayer LmHeadLinearAllreduce Normalize OPTEmbedding RMSNormalize
        RowParallel ScatterToTensorParallelRegion SubParamColumnParallel SubParamLinearAllreduce SubParamLinearLayer
        TensorParallelConv2d TensorParallelIcShardConv2d TensorParallelOcShardConv2d TensorParallel_Layer
        VocabParallelEmbedding VocabParallelLinear Yuan_LinearAllreduce Yuan_LinearLayer add_bias
        collect_autotp_universal_checkpoint_info configure_tensor_parallel_runtime conv_LinearLayer
        fused_LinearLayer get_auto_tp_mode is_autotp_training_mode set_autotp_mode
module_inject.load_checkpoint
    load_model_with_checkpoint
module_inject.module_quantize
    quantize_module quantize_transformer_layer
module_inject.policy
    DSPolicy TransformerPolicy maybe_copy maybe_copy_geglu maybe_copy_qkv maybe_get_lora pack_lora_weights
module_inject.replace_module
    GroupQuantizer generic_injection get_transformer_name replace_module replace_transformer_layer
        revert_transformer_layer skip_level_0_prefix
module_inject.replace_policy
module_inject.tp_plan_converter
    TPPlanConverter
module_inject.tp_shard
    AutoTPMeta get_shard_size get_shard_size_list
module_inject.utils
    policy_to_ds_container transpose
moe
moe.experts
    Experts
moe.fused_expert_layout
    FusedExpertLayout classify_fused_gate_up_layout
moe.layer
    MoE
moe.mappings
    drop_tokens gather_tokens
moe.sharded_moe
    FIRST_ALLTOALL_TIMER='1st_a2a' MOELayer MOE_TIMER='moe' SECOND_ALLTOALL_TIMER='2nd_a2a'
        TOPK_GATE_TIMER='topk_gate' TUTEL_INSTALLED=False TopKGate USE_EINSUM=True einsum gumbel_rsample
        multiplicative_jitter top1gating top2gating topkgating
moe.utils
    configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group
        split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer
        split_params_into_shared_and_expert_params
monitor
monitor.comet
    CometMonitor EventsLogScheduler
monitor.config
    CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config
monitor.csv_monitor
    csvMonitor
monitor.monitor
    Monitor MonitorMaster
monitor.tensorboard
    TensorBoardMonitor
monitor.utils
    check_comet_availability check_tb_availability check_wandb_availability
monitor.wandb
    WandbMonitor
ops
    < ops.transformer: DeepSpeedTransformerConfig DeepSpeedTransformerLayer
ops.adagrad
    < ops.adagrad.cpu_adagrad: DeepSpeedCPUAdagrad
ops.adagrad.cpu_adagrad
    DeepSpeedCPUAdagrad
ops.adam
    < ops.adam.cpu_adam: DeepSpeedCPUAdam
    < ops.adam.fused_adam: FusedAdam
    < ops.adam.zenflow_cpu_adam: ZenFlowCPUAdam
    < ops.adam.zenflow_torch_adam: ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3
ops.adam.cpu_adam
    DeepSpeedCPUAdam
ops.adam.fused_adam
    FusedAdam
ops.adam.multi_tensor_apply
    MultiTensorApply
ops.adam.zenflow_cpu_adam
    ZenFlowCPUAdam
ops.adam.zenflow_torch_adam
    ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3 adamw
ops.aio
    AsyncIOBuilder
ops.deepspeed4science
    < ops.deepspeed4science.evoformer_attn: DS4Sci_EvoformerAttention EvoformerFusedAttention
ops.deepspeed4science.evoformer_attn
    DS4Sci_EvoformerAttention EvoformerFusedAttention attention_bwd
ops.fp_quantizer
    < ops.fp_quantizer.quantize: FP_Quantize Quantizer
    < ops.fp_quantizer.fp8_gemm: matmul_fp8
ops.fp_quantizer.fp8_gemm
    matmul_fp8 matmul_fp8_fallback
ops.fp_quantizer.fp8_gemm_triton
    matmul_fp8_triton matmul_kernel_fp8_bf16 matmul_kernel_fp8_fp16
ops.fp_quantizer.quantize
    FP_Quantize Quantizer
ops.gds
    GDSBuilder
ops.lamb
    < ops.lamb.fused_lamb: FusedLamb
ops.lamb.fused_lamb
    FusedLamb
ops.lion
    < ops.lion.cpu_lion: DeepSpeedCPULion
    < ops.lion.fused_lion: FusedLion
ops.lion.cpu_lion
    DeepSpeedCPULion
ops.lion.fused_lion
    FusedLion
ops.lion.multi_tensor_apply
    MultiTensorApply
ops.op_builder
    builder_closure
    < ops.op_builder.builder: OpBuilder get_default_compute_capabilities
ops.op_builder.all_ops
ops.op_builder.builder
    CUDAMismatchException CUDAOpBuilder DEFAULT_COMPUTE_CAPABILITIES='6.0;6.1;7.0'
        DEFAULT_TORCH_EXTENSION_PATH='/tmp/torch_extensions' END='\x1b[0m' MissingCUDAException OpBuilder
        YELLOW='\x1b[93m' assert_no_cuda_mismatch get_default_compute_capabilities installed_cuda_version
        probe_is_compatible
ops.pin_memory
    PinMemoryBuilder
ops.quantizer
ops.random_ltd
    < ops.random_ltd.dropping_utils: GatherTokens ScatterTokens bert_sample_tokens gpt_sample_tokens
ops.random_ltd.dropping_utils
    GatherTokens ScatterTokens bert_sample_tokens gpt_sample_tokens
ops.transformer
    DeepSpeedInferenceConfig DeepSpeedMoEInference DeepSpeedMoEInferenceConfig DeepSpeedTransformerConfig
        DeepSpeedTransformerInference DeepSpeedTransformerLayer
pipe
    < runtime.pipe.dualpipev: DualPipeVModule
    < runtime.pipe: LayerSpec PipelineModule TiedLayerSpec
profiling
profiling.config
    DeepSpeedFlopsProfilerConfig
    < profiling.constants: *
profiling.constants
    FLOPS_PROFILER='flops_profiler' FLOPS_PROFILER_DETAILED='detailed' FLOPS_PROFILER_DETAILED_DEFAULT=True
        FLOPS_PROFILER_ENABLED='enabled' FLOPS_PROFILER_ENABLED_DEFAULT=False
        FLOPS_PROFILER_MODULE_DEPTH='module_depth' FLOPS_PROFILER_MODULE_DEPTH_DEFAULT=-1
        FLOPS_PROFILER_OUTPUT_FILE='output_file' FLOPS_PROFILER_OUTPUT_FILE_DEFAULT=None
        FLOPS_PROFILER_PROFILE_STEP='profile_step' FLOPS_PROFILER_PROFILE_STEP_DEFAULT=1
        FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR='recompute_fwd_factor' FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR_DEFAULT=0.0
        FLOPS_PROFILER_TOP_MODULES='top_modules' FLOPS_PROFILER_TOP_MODULES_DEFAULT=1
profiling.flops_profiler
    < profiling.flops_profiler.profiler: *
profiling.flops_profiler.profiler
    DEFAULT_PRECISION=2 FlopsProfiler bytes_to_string duration_to_string flops_to_string get_model_profile
        get_module_duration get_module_flops get_module_macs macs_to_string number_to_string params_to_string
        wrapFunc
runtime
runtime.activation_checkpointing
runtime.activation_checkpointing.checkpointing
    CONTIGUOUS_CHECKPOINTING=False CPU_CHECKPOINT=False CheckpointFunction CudaRNGStatesTracker
        PARTITION_ACTIVATIONS=False PROFILE_TIME=False SYNCHRONIZE=False checkpoint configure detach_variable
        extract_tensors gather_partitioned_activations get_cpu_activations_for_backward get_cuda_rng_tracker
        get_offloaded_activations_for_backward get_partition_size get_partition_start
        get_partitioned_activations_for_backward is_activation_to_checkpoint is_configured merge_tensors
        model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed non_reentrant_checkpoint
        partition_activations partition_activations_in_checkpoint reset restore_offloaded_activations set_num_layers
runtime.activation_checkpointing.config
    ACT_CHKPT='activation_checkpointing' ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION='contiguous_memory_optimization'
        ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT=False ACT_CHKPT_CPU_CHECKPOINTING='cpu_checkpointing'
        ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT=False ACT_CHKPT_NUMBER_CHECKPOINTS='number_checkpoints'
        ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT=None ACT_CHKPT_PARTITION_ACTIVATIONS='partition_activations'
        ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT=False ACT_CHKPT_PROFILE='profile' ACT_CHKPT_PROFILE_DEFAULT=False
        ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY='synchronize_checkpoint_boundary'
        ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT=False DeepSpeedActivationCheckpointingConfig
runtime.activation_checkpointing.offload_activations
    CheckpointActivationOffloadStats CheckpointHiddenStatesOffload
        get_checkpoint_hidden_states_offloading_ctx_manager patch_gradient_checkpointing_layer_marker
runtime.base_optimizer
    BackwardHookStateManager DeepSpeedOptimizer ZeROOptimizer
runtime.bf16_optimizer
    BF16_Optimizer print_rank_0
runtime.checkpoint_engine
    < runtime.checkpoint_engine.checkpoint_engine: CheckpointCommitInfo
    < runtime.checkpoint_engine.datastates_checkpoint_engine: DataStatesCheckpointEngine
    < runtime.checkpoint_engine.decoupled_checkpoint_engine: DecoupledCheckpointEngine
    < runtime.checkpoint_engine.fast_checkpoint_engine: FastCheckpointEngine
    < runtime.checkpoint_engine.torch_checkpoint_engine: TorchCheckpointEngine
    < runtime.checkpoint_engine.utils: create_checkpoint_engine
runtime.checkpoint_engine.checkpoint_engine
    CheckpointCommitInfo CheckpointEngine
runtime.checkpoint_engine.datastates_checkpoint_engine
    DataStatesCheckpointEngine ENGINE_NAME='DataStatesCheckpointEngine'
runtime.checkpoint_engine.decoupled_checkpoint_engine
    CheckpointSize DEFAULT_CHECKPOINT_TIMEOUT_SECONDS=300 DecoupledCheckpointEngine DecoupledEvent
        ENGINE_NAME='DecoupledCheckpointEngine' PROCESS_HEALTH_CHECK_INTERVAL_SECONDS=10 init_decoupled_checkpoint
runtime.checkpoint_engine.fast_checkpoint_engine
    FastCheckpointEngine
runtime.checkpoint_engine.torch_checkpoint_engine
    ENGINE_NAME='TorchCheckpointEngine' TorchCheckpointEngine
runtime.checkpoint_engine.utils
    create_checkpoint_engine
    < runtime.model_checkpointing.constants: *
runtime.chunked_cross_entropy
    ChunkedCausalLMLoss chunked_cross_entropy install_chunked_causal_lm_loss triton_backend_available
runtime.comm
runtime.comm.coalesced_collectives
    all_to_all_quant_reduce reduce_scatter_coalesced
runtime.compiler
    compile compile_autoep_non_moe_regions compiled_autograd disable dummy_decorator enable is_compile_supported
        is_compiling lazy_disable
runtime.config
    ADAGRAD_OPTIMIZER='adagrad' ADAMW_OPTIMIZER='adamw' ADAM_OPTIMIZER='adam' ADAM_W_MODE='adam_w_mode'
        ADAM_W_MODE_DEFAULT=True DeepSpeedConfig DeepSpeedConfigError DeepSpeedConfigWriter DtypeEnum
        EXPERT_PARALLEL='expert_parallel' HybridEngineConfig LAMB_OPTIMIZER='lamb' LION_OPTIMIZER='lion'
        MUADAMW_OPTIMIZER='muadamw' MUADAM_OPTIMIZER='muadam' MUON_OPTIMIZER='muon' MUSGD_OPTIMIZER='musgd'
        TENSOR_CORE_ALIGN_SIZE=8 TORCH_ADAM_PARAM='torch_adam' get_checkpoint_parallel_write_pipeline
        get_checkpoint_params get_checkpoint_tag_validation_mode get_communication_data_type get_data_types_params
        get_dataloader_drop_last get_disable_allgather get_disable_python_gc get_dump_state
        get_expert_data_topo_config get_expert_parallel_config get_gradient_accumulation_steps
        get_gradient_allreduce_op get_gradient_clipping get_gradient_predivide_factor get_hybrid_engine_config
        get_log_level get_lower_precision_safe_modules get_managed_gradient_accumulation get_memory_breakdown
        get_optimizer_gradient_clipping get_optimizer_legacy_fusion get_optimizer_name get_optimizer_params
        get_pipeline_config get_prescale_gradients get_scheduler_name get_scheduler_params get_steps_per_print
        get_torch_autocast_dtype get_torch_autocast_enabled get_train_batch_size get_train_micro_batch_size_per_gpu
        get_wall_clock_breakdown get_zero_allow_untested_optimizer get_zero_force_ds_cpu_optimizer
    < runtime.constants: *
    < runtime.data_pipeline.constants: *
runtime.config_utils
    DeepSpeedConfigModel DeepSpeedConfigObject ScientificNotationEncoder dict_raise_error_on_duplicate_keys
        get_config_default get_dict_param get_list_param get_scalar_param pp_int
runtime.constants
    BFLOAT16='bf16' BFLOAT16_CHECK_OVERFLOW_DEFAULT=False BFLOAT16_ENABLED='enabled' BFLOAT16_ENABLED_DEFAULT=False
        BFLOAT16_IMMEDIATE_GRAD_UPDATE='immediate_grad_update' BFLOAT16_IMMEDIATE_GRAD_UPDATE_DEFAULT=True
        BFLOAT16_MASTER_WEIGHTS_AND_GRADS='bf16_master_weights_and_grads'
        BFLOAT16_MASTER_WEIGHTS_AND_GRADS_DEFAULT=False BFLOAT16_OLD='bfloat16'
        BFLOAT16_OPTIMIZER_STATES='bf16_optimizer_states' BFLOAT16_OPTIMIZER_STATES_DEFAULT=False
        BUFFER_DTYPE='buffer_dtype' BUFFER_DTYPE_DEFAULT=None CHECKPOINT='checkpoint'
        CHECKPOINT_PARALLEL_WRITE='parallel_write' CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE='pipeline_stage'
        CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT=False CHECKPOINT_TAG_VALIDATION='tag_validation'
        CHECK_OVERFLOW='check_overflow' COMMUNICATION_DATA_TYPE='communication_data_type'
        COMMUNICATION_DATA_TYPE_DEFAULT=None DATALOADER_DROP_LAST='dataloader_drop_last'
        DATALOADER_DROP_LAST_DEFAULT=False DATA_PARALLEL_GROUP='data_parallel_group' DATA_TYPES='data_types'
        DDP_BFLOAT16='ddp_bf16' DISABLE_ALLGATHER='disable_allgather' DISABLE_ALLGATHER_DEFAULT=False
        DISABLE_PYTHON_GC='disable_python_gc' DISABLE_PYTHON_GC_DEFAULT=False DUMP_STATE='dump_state'
        DUMP_STATE_DEFAULT=False FP16='fp16' FP16_AUTO_CAST='auto_cast' FP16_AUTO_CAST_DEFAULT=False
        FP16_CONSECUTIVE_HYSTERESIS='consecutive_hysteresis' FP16_CONSECUTIVE_HYSTERESIS_DEFAULT=False
        FP16_ENABLED='enabled' FP16_ENABLED_DEFAULT=False FP16_HYSTERESIS='hysteresis' FP16_HYSTERESIS_DEFAULT=2
        FP16_INITIAL_SCALE_POWER='initial_scale_power' FP16_INITIAL_SCALE_POWER_DEFAULT=16
        FP16_LOSS_SCALE='loss_scale' FP16_LOSS_SCALE_DEFAULT=0 FP16_LOSS_SCALE_WINDOW='loss_scale_window'
        FP16_LOSS_SCALE_WINDOW_DEFAULT=1000 FP16_MASTER_WEIGHTS_AND_GRADS='fp16_master_weights_and_grads'
        FP16_MASTER_WEIGHTS_AND_GRADS_DEFAULT=False FP16_MIN_LOSS_SCALE='min_loss_scale'
        FP16_MIN_LOSS_SCALE_DEFAULT=1 GLOBAL_RANK='global_rank'
        GRADIENT_ACCUMULATION_STEPS='gradient_accumulation_steps' GRADIENT_ACCUMULATION_STEPS_DEFAULT=None
        GRADIENT_ALLREDUCE_OP='gradient_allreduce_op' GRADIENT_ALLREDUCE_OP_MEAN='mean'
        GRADIENT_ALLREDUCE_OP_SUM='sum' GRADIENT_CLIPPING='gradient_clipping' GRADIENT_CLIPPING_DEFAULT=1.0
        GRADIENT_PREDIVIDE_FACTOR='gradient_predivide_factor' GRADIENT_PREDIVIDE_FACTOR_DEFAULT=1.0
        GRAD_ACCUM_DTYPE='grad_accum_dtype' GRAD_ACCUM_DTYPE_DEFAULT=None
        KEEP_IN_FP32_MODULES='keep_in_fp32_modules' KEEP_IN_FP32_MODULES_DEFAULT='auto'
        LEGACY_FUSION='legacy_fusion' LEGACY_FUSION_DEFAULT=False LOAD_UNIVERSAL_CHECKPOINT='load_universal'
        LOAD_UNIVERSAL_CHECKPOINT_DEFAULT=False LOG_LEVEL='log_level' LOG_LEVEL_DEFAULT=None
        MANAGED_GRADIENT_ACCUMULATION='managed_gradient_accumulation' MANAGED_GRADIENT_ACCUMULATION_DEFAULT=True
        MAX_GRAD_NORM='max_grad_norm' MEMORY_BREAKDOWN='memory_breakdown' MEMORY_BREAKDOWN_DEFAULT=False
        OPTIMIZER='optimizer' OPTIMIZER_PARAMS='params' OPTIMIZER_TYPE_DEFAULT=None PARAM_DTYPE='param_dtype'
        PARAM_DTYPE_DEFAULT=None PIPE_REPLICATED='ds_pipe_replicated' PRESCALE_GRADIENTS='prescale_gradients'
        PRESCALE_GRADIENTS_DEFAULT=False ROUTE_ENCODE='encode' ROUTE_EVAL='eval' ROUTE_PREDICT='predict'
        ROUTE_TRAIN='train' SCHEDULER='scheduler' SCHEDULER_PARAMS='params' SCHEDULER_TYPE_DEFAULT=None
        SEQ_PARALLEL_COMMUNICATION_DATA_TYPE='seq_parallel_communication_data_type'
        SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT='fp32' STEPS_PER_PRINT='steps_per_print'
        STEPS_PER_PRINT_DEFAULT=None TORCH_AUTOCAST='torch_autocast' TORCH_AUTOCAST_DTYPE='dtype'
        TORCH_AUTOCAST_ENABLED='enabled' TORCH_AUTOCAST_ENABLED_DEFAULT=False
        TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES='lower_precision_safe_modules'
        TRAIN_BATCH_SIZE='train_batch_size' TRAIN_BATCH_SIZE_DEFAULT=None
        TRAIN_MICRO_BATCH_SIZE_PER_GPU='train_micro_batch_size_per_gpu' TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT=None
        TYPE='type' USE_DATA_BEFORE_EXPERT_PARALLEL='use_data_before_expert_parallelism'
        USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT=False USE_NODE_LOCAL_STORAGE_CHECKPOINT='use_node_local_storage'
        USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT=False VOCABULARY_SIZE='vocabulary_size'
        VOCABULARY_SIZE_DEFAULT=None ValidationMode WALL_CLOCK_BREAKDOWN='wall_clock_breakdown'
        WALL_CLOCK_BREAKDOWN_DEFAULT=False ZERO_ALLOW_UNTESTED_OPTIMIZER='zero_allow_untested_optimizer'
        ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT=False ZERO_FORCE_DS_CPU_OPTIMIZER='zero_force_ds_cpu_optimizer'
        ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT=True
runtime.data_pipeline
runtime.data_pipeline.config
    get_curriculum_learning get_curriculum_learning_enabled get_curriculum_learning_params
        get_data_efficiency_config get_data_efficiency_enabled get_data_efficiency_seed get_data_routing
        get_data_routing_enabled get_data_sampling get_data_sampling_enabled get_data_sampling_num_epochs
        get_data_sampling_num_workers get_data_sampling_pin_memory get_dynamic_batching get_random_ltd
        get_random_ltd_enabled get_random_ltd_params
    < runtime.data_pipeline.constants: *
runtime.data_pipeline.constants
    CURRICULUM_LEARNING='curriculum_learning' CURRICULUM_LEARNING_BATCH='batch'
        CURRICULUM_LEARNING_CLUSTERING_TYPE='clustering_type' CURRICULUM_LEARNING_CLUSTER_PATH='data_cluster_path'
        CURRICULUM_LEARNING_CLUSTER_PREFIX='cluster' CURRICULUM_LEARNING_CONSUMED_SAMPLES='consumed_samples'
        CURRICULUM_LEARNING_CURRENT_DIFFICULTIES='current_difficulties'
        CURRICULUM_LEARNING_CURRENT_DIFFICULTY='current_difficulty'
        CURRICULUM_LEARNING_DATA_CLUSTER_CURRENT_POSITION='data_cluster_current_position'
        CURRICULUM_LEARNING_DATA_CLUSTER_PATHS='data_cluster_paths'
        CURRICULUM_LEARNING_DIFFICULTY_TYPE='difficulty_type' CURRICULUM_LEARNING_ENABLED='enabled'
        CURRICULUM_LEARNING_ENABLED_DEFAULT=False CURRICULUM_LEARNING_MAX_DIFFICULTY='max_difficulty'
        CURRICULUM_LEARNING_METRICS='curriculum_metrics' CURRICULUM_LEARNING_METRIC_PATH='index_to_metric_path'
        CURRICULUM_LEARNING_MIN_DIFFICULTY='min_difficulty' CURRICULUM_LEARNING_NP_RNG_STATE='np_rng_state'
        CURRICULUM_LEARNING_PERCENTILE_BASED='percentile' CURRICULUM_LEARNING_SAMPLE_PATH='index_to_sample_path'
        CURRICULUM_LEARNING_SCHEDULE_CONFIG='schedule_config' CURRICULUM_LEARNING_SCHEDULE_CUSTOM='custom'
        CURRICULUM_LEARNING_SCHEDULE_DIFFICULTY='difficulty'
        CURRICULUM_LEARNING_SCHEDULE_DIFFICULTY_STEP='difficulty_step'
        CURRICULUM_LEARNING_SCHEDULE_FIXED_DISCRETE='fixed_discrete'
        CURRICULUM_LEARNING_SCHEDULE_FIXED_LINEAR='fixed_linear'
        CURRICULUM_LEARNING_SCHEDULE_FIXED_ROOT='fixed_root' CURRICULUM_LEARNING_SCHEDULE_MAX_STEP='max_step'
        CURRICULUM_LEARNING_SCHEDULE_ROOT_DEGREE='root_degree'
        CURRICULUM_LEARNING_SCHEDULE_TOTAL_STEP='total_curriculum_step'
        CURRICULUM_LEARNING_SCHEDULE_TYPE='schedule_type' CURRICULUM_LEARNING_SINGLE_CLUSTER='single_cluster'
        CURRICULUM_LEARNING_STEP='curriculum_step' CURRICULUM_LEARNING_VALUE_BASED='value'
        DATA_EFFICIENCY='data_efficiency' DATA_EFFICIENCY_ENABLED='enabled' DATA_EFFICIENCY_ENABLED_DEFAULT=False
        DATA_EFFICIENCY_SEED='seed' DATA_EFFICIENCY_SEED_DEFAULT=1234 DATA_ROUTING='data_routing'
        DATA_ROUTING_ENABLED='enabled' DATA_ROUTING_ENABLED_DEFAULT=False DATA_SAMPLING='data_sampling'
        DATA_SAMPLING_ENABLED='enabled' DATA_SAMPLING_ENABLED_DEFAULT=False DATA_SAMPLING_NUM_EPOCHS='num_epochs'
        DATA_SAMPLING_NUM_EPOCHS_DEFAULT=1000 DATA_SAMPLING_NUM_WORKERS='num_workers'
        DATA_SAMPLING_NUM_WORKERS_DEFAULT=0 DATA_SAMPLING_PIN_MEMORY='pin_memory'
        DATA_SAMPLING_PIN_MEMORY_DEFAULT=False DYNAMIC_BATCHING='dynamic_batching'
        DYNAMIC_BATCHING_ENABLED='enabled' DYNAMIC_BATCHING_ENABLED_DEFAULT=False
        DYNAMIC_BATCHING_LR_SCALING_METHOD='lr_scaling_method' DYNAMIC_BATCHING_LR_SCALING_METHOD_DEFAULT='linear'
        DYNAMIC_BATCHING_MAX_BATCH_SIZE='max_batch_size' DYNAMIC_BATCHING_MAX_BATCH_SIZE_DEFAULT=None
        DYNAMIC_BATCHING_MAX_TOKENS='max_tokens' DYNAMIC_BATCHING_METRICS_PATH='metrics_path'
        DYNAMIC_BATCHING_MIN_BATCH_SIZE='min_batch_size' DYNAMIC_BATCHING_MIN_BATCH_SIZE_DEFAULT=1
        DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER='sequence_picking_order'
        DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER_DEFAULT='dataloader' DYNAMIC_BATCHING_VERBOSE='verbose'
        RANDOM_LTD='random_ltd' RANDOM_LTD_ATTENTION_MASK='attention_mask'
        RANDOM_LTD_CONSUMED_LAYER_TOKENS='consumed_layer_tokens' RANDOM_LTD_CURRENT_VALUE='current_value'
        RANDOM_LTD_CURR_STEP='current_steps' RANDOM_LTD_ENABLED='enabled' RANDOM_LTD_ENABLED_DEFAULT=False
        RANDOM_LTD_GLOBAL_BATCH_SIZE='global_batch_size' RANDOM_LTD_HIDDEN_STATE_ORDER='hidden_state_order'
        RANDOM_LTD_INCREASE_STEP='seq_per_step' RANDOM_LTD_LAYER_ID='random_ltd_layer_id'
        RANDOM_LTD_LAYER_NUM='random_ltd_layer_num' RANDOM_LTD_LAYER_TOKEN_LR_ENABLED='enabled'
        RANDOM_LTD_LAYER_TOKEN_LR_ENABLED_DEFAULT=False RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE='layer_token_lr_schedule'
        RANDOM_LTD_MAX_VALUE='max_value' RANDOM_LTD_MICRO_BATCH_SIZE='micro_batch_size'
        RANDOM_LTD_MIN_VALUE='min_value' RANDOM_LTD_MODEL_MASK_NAME='model_mask_name'
        RANDOM_LTD_MODEL_TYPE='model_type' RANDOM_LTD_REQUIRE_STEP='require_steps'
        RANDOM_LTD_SAMPLE_INDEX='sample_idx' RANDOM_LTD_SCHEDULER='random_ltd_schedule'
        RANDOM_LTD_SCHEDULER_TYPE='schedule_type' RANDOM_LTD_SCHEDULE_CONFIG='schedule_config'
        RANDOM_LTD_TOTAL_LAYER_NUM='total_layer_num' RANDOM_LTD_TOTAL_LAYER_TOKENS='total_layer_tokens'
        RANDOM_LTD_WARMUP_LAYER_TOKENS='warmup_layer_tokens' RANDOM_LTD_WARMUP_TYPE='warmup_type'
runtime.data_pipeline.curriculum_scheduler
    CurriculumScheduler
    < runtime.data_pipeline.constants: *
runtime.data_pipeline.data_routing
runtime.data_pipeline.data_routing.basic_layer
    RandomLayerTokenDrop
    < runtime.data_pipeline.constants: *
runtime.data_pipeline.data_routing.helper
    convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd
runtime.data_pipeline.data_routing.scheduler
    BaseScheduler RandomLTDScheduler
    < runtime.data_pipeline.constants: *
runtime.data_pipeline.data_routing.utils
    bsh_decoder_gather bsh_decoder_scatter
runtime.data_pipeline.data_sampling
runtime.data_pipeline.data_sampling.data_analyzer
    DataAnalyzer Dist DistributedDataAnalyzer TestDataset test_compare_both_data_analyzers
runtime.data_pipeline.data_sampling.data_sampler
    DeepSpeedDataSampler
    < runtime.data_pipeline.constants: *
runtime.data_pipeline.data_sampling.indexed_dataset
    IndexedCachedDataset IndexedDataset IndexedDatasetBuilder MMapIndexedDataset MMapIndexedDatasetBuilder code
        create_doc_idx data_file_path dataset_exists exscan_from_cumsum_ get_available_dataset_impl
        get_pointers_with_total index_file_path infer_dataset_impl make_builder make_dataset read_longs write_longs
runtime.data_pipeline.data_sampling.utils
    close_mmap_dataset_builder create_mmap_dataset_builder find_fit_int_dtype split_dataset split_index
runtime.data_pipeline.data_sampling.variable_batch_size_and_lr
    VariableBatchSizeLR batch_by_seqlens dataloader_for_variable_batch_size
        get_dataloader_and_lr_scheduler_for_variable_batch_size
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed lr_scheduler_for_variable_batch_size
        scale_lr
    < runtime.data_pipeline.constants: *
runtime.dataloader
    DeepSpeedDataLoader RepeatingLoader
runtime.domino
runtime.domino.async_linear
    DominoAsyncColumnParallelLinear DominoAsyncColumnParallelLinearImpl RowParallelLinearNoComm
runtime.domino.transformer
    AttnMaskType AttnType CoreAttention DominoModule DominoTransformer DominoTransformerLayer DominoUtil LayerType
        ModelType NoOper ShardedAttention bias_dropout_add
runtime.engine
    APEX_INSTALLED=False DeepSpeedEngine EngineTimers MEMORY_OPT_ALLREDUCE_SIZE=500000000
        split_half_float_double_sparse
runtime.fp16
runtime.fp16.fused_optimizer
    BASIC_STEP_TIMER='basic_step' COMPUTE_NORM_TIMER='compute_norm' FP16_Optimizer
        OVERFLOW_CHECK_TIMER='overflow_check' UNSCALE_AND_CLIP_TIMER='unscale_and_clip'
        UPDATE_FP16_TIMER='update_fp16'
runtime.fp16.loss_scaler
    CONSECUTIVE_HYSTERESIS='consecutive_hysteresis' CreateLossScaler DELAYED_SHIFT='delayed_shift' DynamicLossScaler
        INITIAL_LOSS_SCALE='init_scale' LossScaleConfig LossScaleProfile LossScaleProfileDefaults LossScaler
        LossScalerBase MIN_LOSS_SCALE='min_scale' SCALE_WINDOW='scale_window' to_python_float
runtime.fp16.unfused_optimizer
    FP16_UnfusedOptimizer
runtime.hybrid_engine
    DeepSpeedHybridEngine
runtime.hybrid_engine_graph
    DecodeGraphCache decode_steps_from_generate_kwargs validate_cuda_graph_support
runtime.keep_in_fp32
    KEEP_IN_FP32_AUTO='auto' buffers_to_keep_in_fp32 keep_buffers_in_fp32 keep_in_fp32_pattern
runtime.lr_schedules
    COS_MIN_RATIO='cos_min_ratio' CYCLE_FIRST_STAIR_COUNT='cycle_first_stair_count'
        CYCLE_FIRST_STEP_SIZE='cycle_first_step_size' CYCLE_MAX_LR='cycle_max_lr' CYCLE_MAX_MOM='cycle_max_mom'
        CYCLE_MIN_LR='cycle_min_lr' CYCLE_MIN_MOM='cycle_min_mom'
        CYCLE_SECOND_STAIR_COUNT='cycle_second_stair_count' CYCLE_SECOND_STEP_SIZE='cycle_second_step_size'
        DECAY_LR_RATE='decay_lr_rate' DECAY_MOM_RATE='decay_mom_rate' DECAY_STEP_SIZE='decay_step_size'
        EDGE_VALUE='edge_value' LRRangeTest LR_RANGE_TEST='LRRangeTest' LR_RANGE_TEST_MIN_LR='lr_range_test_min_lr'
        LR_RANGE_TEST_STAIRCASE='lr_range_test_staircase' LR_RANGE_TEST_STEP_RATE='lr_range_test_step_rate'
        LR_RANGE_TEST_STEP_SIZE='lr_range_test_step_size' LR_SCHEDULE='lr_schedule' MID_VALUE='mid_value'
        ONE_CYCLE='OneCycle' OneCycle TOTAL_NUM_STEPS='total_num_steps' WARMUP_COSINE_LR='WarmupCosineLR'
        WARMUP_DECAY_LR='WarmupDecayLR' WARMUP_LINEAR_RATE='linear' WARMUP_LOG_RATE='log' WARMUP_LR='WarmupLR'
        WARMUP_MAX_LR='warmup_max_lr' WARMUP_MIN_LR='warmup_min_lr' WARMUP_MIN_RATIO='warmup_min_ratio'
        WARMUP_NUM_STEPS='warmup_num_steps' WARMUP_TYPE='warmup_type' WarmupCosineLR WarmupDecayLR WarmupLR
        add_tuning_arguments get_config_from_args get_lr_from_config get_torch_optimizer override_1cycle_params
        override_lr_range_test_params override_params override_warmupCosineLR_params override_warmupLR_params
        parse_arguments update_lr
runtime.model_checkpointing
    < runtime.model_checkpointing.constants: *
    < runtime.model_checkpointing.writer_factory: CheckpointWriterFactory
runtime.model_checkpointing.config
    get_checkpoint_config get_checkpoint_writer_config
    < runtime.model_checkpointing.constants: *
runtime.model_checkpointing.constants
    CHECKPOINT='checkpoint' CHECKPOINT_DATA_PARALLEL='data_parallel' CHECKPOINT_DATA_PARALLEL_DEFAULT=None
        CHECKPOINT_IO_BUFFER_DOUBLE='io_buffer_double' CHECKPOINT_IO_BUFFER_DOUBLE_DEFAULT=True
        CHECKPOINT_IO_BUFFER_SIZE='io_buffer_size' CHECKPOINT_IO_MULTIPLIER='io_multiplier'
        CHECKPOINT_IO_MULTIPLIER_DEFAULT=1 CHECKPOINT_IO_STATISTICS='show_statistics'
        CHECKPOINT_IO_STATISTICS_DEFAULT=False CHECKPOINT_SERIALIZATION='checkpoint_serialization'
        CHECKPOINT_SERIALIZATION_DEFAULT=True CHECKPOINT_TAG_VALIDATION='tag_validation' CHECKPOINT_WRITER='writer'
        CHECKPOINT_WRITER_DECOUPLED='decoupled' CHECKPOINT_WRITER_DECOUPLED_DEFAULT=False
        CHECKPOINT_WRITER_DEFAULT=None CHECKPOINT_WRITER_TYPE='type' CheckpointDataParallel CheckpointWriterType
        ValidationMode
runtime.model_checkpointing.data_parallel_writer_factory
    DataParallelWriterConfig DataParallelWriterFactory
    < runtime.model_checkpointing.constants: *
runtime.model_checkpointing.utils
    ExpertParallelInfo MPUInfo SOCKETS_PER_MACHINE=2 UniversalParallelInfo create_data_parallel_writer_config
        create_universal_parallel_info
runtime.model_checkpointing.writer_factory
    CheckpointWriterFactory
    < runtime.model_checkpointing.constants: *
    < runtime.swap_tensor.constants: *
runtime.pipe
    < runtime.pipe.module: LayerSpec PipelineModule TiedLayerSpec
    < runtime.pipe.topology: ProcessTopology
runtime.pipe.dualpipev
    DualPipeVEngine DualPipeVModule
runtime.pipe.engine
    BATCH_INPUT_TIMER='batch_input' DATA_PARALLEL_ID=-2 LOG_STAGE=-2 PIPE_RECV_GRAD_TIMER='pipe_recv_grad'
        PIPE_RECV_INPUT_TIMER='pipe_recv_input' PIPE_SEND_GRAD_TIMER='pipe_send_grad'
        PIPE_SEND_OUTPUT_TIMER='pipe_send_output' PipelineEngine TARGET_ID=-2 TENSOR_META_SIZE=256
        TRAIN_BATCH_TIMER='train_batch' is_even
runtime.pipe.module
    LayerSpec PipelineError PipelineModule TiedLayerSpec
runtime.pipe.p2p
    can_send_recv init_process_groups recv recv_obj send send_obj wait
runtime.pipe.schedule
    BackwardPass BufferOpInstruction CommitP2P DataParallelSchedule DualPipeVSchedule ForwardPass InferenceSchedule
        LoadMicroBatch OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads
        ReduceTiedGrads SendActivation SendGrad TrainSchedule
runtime.pipe.topology
    PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology
runtime.precision_config
    BFLOAT16='bf16' BFLOAT16_OLD='bfloat16' DeepSpeedBF16Config DeepSpeedFP16Config FP16='fp16' get_bfloat16_config
        get_float16_config
runtime.python_gc
    PythonGCManager
runtime.rollout
    build_rollout
    < runtime.rollout.hybrid_engine_rollout: HybridEngineRollout
    < runtime.rollout.opsd: JSDLossOutput ResponseTokenBatch generalized_jsd_loss
    < runtime.rollout.base: RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig
runtime.rollout.base
    RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig
runtime.rollout.continuous_batching
    ContinuousBatchRequest ContinuousBatchScheduler ContinuousBatchUpdate
runtime.rollout.hybrid_engine_rollout
    HybridEngineRollout HybridEngineRolloutConfig
runtime.rollout.opsd
    JSDLossOutput ResponseTokenBatch generalized_jsd_loss
runtime.sequence_parallel
runtime.sequence_parallel.parallel_state_sp
    get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size
        get_sequence_parallel_group get_sequence_parallel_rank get_sequence_parallel_world_size
        initialize_sequence_parallel
runtime.sequence_parallel.ulysses_sp
    AutogradComputeMLP SequenceTiledCompute TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF
        UlyssesSPDataLoaderAdapter sequence_tiled_compute
runtime.sparse_tensor
    SparseTensor
runtime.state_dict_factory
    AUTO_MODULE_KEY='auto' MegatronSDLoader SDLoaderBase SDLoaderFactory
runtime.superoffload
runtime.superoffload.superoffload_stage3
    OPTIMIZER_STEP_TIMER='optimizer_step' SuperOffloadOptimizer_Stage3
runtime.superoffload.superoffload_utils
    EventTypes ResultKeys SuperOffloadCPUOptimizer TaskKeys superoffload_optimizer_worker
runtime.swap_tensor
    MIN_SWAPPABLE_BYTES
runtime.swap_tensor.aio_config
    get_aio_config
    < runtime.swap_tensor.constants: *
runtime.swap_tensor.async_swapper
    ASYNC_SWAPPER_WAIT_TIMER='async_swap_gradient_wait' AsyncTensorSwapper INVALID_BUFFER_INDEX=-1
runtime.swap_tensor.constants
    AIO='aio' AIO_BLOCK_SIZE='block_size' AIO_BLOCK_SIZE_DEFAULT=1048576
        AIO_INTRA_OP_PARALLELISM='intra_op_parallelism' AIO_INTRA_OP_PARALLELISM_DEFAULT=1
        AIO_OVERLAP_EVENTS='overlap_events' AIO_OVERLAP_EVENTS_DEFAULT=True AIO_QUEUE_DEPTH='queue_depth'
        AIO_QUEUE_DEPTH_DEFAULT=8 AIO_SINGLE_SUBMIT='single_submit' AIO_SINGLE_SUBMIT_DEFAULT=False
        AIO_USE_GDS='use_gds' AIO_USE_GDS_DEFAULT=False
runtime.swap_tensor.optimizer_utils
    FlattenedTensorSwapInfo OptimizerStateSwapInfo OptimizerSwapper SWAPPER_DEBUG_MODE=False
        SWAP_OUT_GRADIENT_TIMER='swap_out_gradient' SwapTensorContext
    < runtime.swap_tensor.constants: *
runtime.swap_tensor.partitioned_optimizer_swapper
    DEBUG_MODE=False PartitionedOptimizerSwapper SWAP_IN_GRADIENT_TIMER='swap_in_gradient'
        SWAP_IN_PARAM_TIMER='swap_in_param' SWAP_OUT_PARAM_TIMER='swap_out_param'
    < runtime.swap_tensor.constants: *
runtime.swap_tensor.partitioned_param_swapper
    AsyncPartitionedParameterSwapper PartitionedParamStatus print_rank_0
    < runtime.swap_tensor.constants: *
runtime.swap_tensor.pipelined_optimizer_swapper
    ASYNC_SWAP_IN='async_swap_in' ASYNC_SWAP_IN_STATE_TIMER='async_swap_in_state' ASYNC_SWAP_OUT='async_swap_out'
        ASYNC_SWAP_OUT_STATE_TIMER='async_swap_out_state' OptimizerSwapOp PipelinedOptimizerSwapper
        SWAP_IN_STATE_TIMER='swap_in_state' SWAP_OUT_GRADIENT_TIMER='swap_out_gradient'
        SWAP_OUT_STATE_TIMER='swap_out_state' SYNC_SWAP_IN='sync_swap_in' SYNC_SWAP_OUT='sync_swap_out'
    < runtime.swap_tensor.constants: *
runtime.swap_tensor.utils
    AIO_ALIGNED_BYTES=1024 SwapBuffer SwapBufferManager SwapBufferPool get_sized_buffer get_sized_buffers
        print_object swap_in_tensors swap_out_tensors
runtime.tensor_parallel
    < runtime.tensor_parallel.config: AUTOTP_MODE get_tensor_parallel_config
    < runtime.tensor_parallel.tp_manager: TpTrainingManager
runtime.tensor_parallel.config
    AUTOTP_MODE TPConfig TPTrainingConfig get_tensor_parallel_config
runtime.tensor_parallel.init_utils
    infer_config_dtype load_ds_config merge_tp_model_init_into_config record_tp_model_init_args tp_group_world_size
runtime.tensor_parallel.tp_manager
    TpTrainingManager
runtime.torch_autocast
    PARAM_COMM_DTYPE_ATTR_NAME='comm_dtype' TORCH_AUTOCAST_DTYPE=None TORCH_AUTOCAST_INITIALIZED=False
        autocast_if_enabled get_all_comm_dtypes get_autocast_dtype get_comm_dtype
        get_default_autocast_lower_precision_modules has_comm_dtype init_autocast_params is_autocast_initialized
        sort_dtypes
runtime.utils
    CheckOverflow DummyOptim OutputBackwardHookManager PartitionedTensor TLinear align_dense_tensors
        all_gather_dp_groups all_gather_into_tensor_dp_groups call_to_str
        check_internal_apis_for_count_used_parameters clip_grad_norm_ clip_tensors_by_global_norm
        combine_grad_norm_groups compare_tensors_in_structures copy_to_device count_used_parameters_in_backward
        empty_cache ensure_directory_exists filter_empty_parameters get_checkpoint_folder_size
        get_flattened_grad_norm get_global_norm get_global_norm_of_tensors get_grad_zeros get_inactive_params
        get_ma_status get_norm_with_moe_layers get_norm_with_moe_layers_fast get_only_unique_item get_tensor_bytes
        get_weight_norm has_inf_or_nan is_invalid_grad_norm is_model_parallel_parameter is_optimized_parameter
        is_transformers_cache mask_nan_or_inf_with_val_inplace maybe_loss_for_backward memory_status move_to_device
        noop_context noop_decorator offload_adam_states partition_balanced partition_uniform prefix_sum_inc
        register_output_backward_hooks reload_adam_states see_memory_usage set_random_seed
runtime.weight_quantizer
    WeightQuantization
runtime.zenflow
runtime.zenflow.engine
    configure_zenflow is_zenflow_update_boundary sync_zenflow_optimizer_lr zenflow_step
runtime.zenflow.engine_stage3
    INIT_OPTIMIZER_TIMER='init_optimizer_state' OPTIMIZER_STEP_TIMER='optimizer_step'
        OPTIMIZER_SWAP_IN_STATE_TIMER='optimizer_swap_in_state'
        OPTIMIZER_SWAP_OUT_STATE_TIMER='optimizer_swap_out_state' configure_zenflow get_overlap_step_state
        initialize_optimizer_states is_zenflow_select_boundary log_selective_optimizer_timers partition_grads
        selective_optimizer_step step sync_fp32_param_from_gpu unscale_and_clip_grads update_selected_channels
        wait_last_update_and_copy zenflow_backward_epilogue zenflow_backward_prologue
        zenflow_cpu_optimizer_overlap_step zenflow_cpu_optimizer_step
    < runtime.zero.partition_parameters: *
runtime.zenflow.zenflow_config
    ZenFlowConfig
runtime.zenflow.zenflow_stage_1_and_2
    INITIAL_MICRO_STEP_ID=-1 OPTIMIZER_ALLGATHER_TIMER='optimizer_allgather'
        OPTIMIZER_CALC_TIMER='optimizer_calc_time' OPTIMIZER_GRADIENTS_TIMER='optimizer_gradients'
        OPTIMIZER_RECV_PARAMS_TIMER='optimizer_receive_params_time' OPTIMIZER_STEP_TIMER='optimizer_step'
        OPTIMIZER_TRANSMIT_TIMER='optimizer_transmit_time'
        OPTIMIZER_UPDATE_MODEL_TIMER='optimizer_update_model_time'
        SELECTIVE_OPTIMIZER_PROCESS_TIMER='selective_optimizer_process'
        SELECTIVE_OPTIMIZER_STEP_TIMER='selective_optimizer_step'
        SELECTIVE_OPTIMIZER_SYNC_TIMER='selective_optimizer_sync'
        SELECTIVE_OPTIMIZER_UPDATE_TIMER='selective_optimizer_update' ZenFlowZeroOptimizer
        ZenFlowZeroOptimizerParallel ZenFlowZeroOptimizerSequential
runtime.zenflow.zenflow_utils
    ZENFLOW_OPTIMIZER_WAIT_POLL_SECONDS=60 all_tensors_equal disable_accelerator start_optimizer_process
        zenflow_optimizer_process
runtime.zero
    < runtime.zero.partition_parameters: DeepSpeedTensorOverride GatheredParameters Init ZeroParamStatus
        ZeroParamType register_external_parameter
    < runtime.zero.parameter_offload: DeepSpeedZeRoOffload
    < runtime.zero.tiling: TiledLinear TiledLinearReturnBias
    < runtime.zero.stage3: unwrap_model_for_generation
runtime.zero.config
    DeepSpeedZeroConfig ZERO_OPTIMIZATION='zero_optimization' ZeroStageEnum get_zero_config
        read_zero_config_deprecated
runtime.zero.contiguous_memory_allocator
    ContiguousMemoryAllocator print_rank_0
runtime.zero.leaf_module_config
    DeepSpeedZeroLeafModuleConfig
runtime.zero.linear
    LinearFunctionForZeroStage3 LinearModuleForZeroStage3 print_rank_0 zero3_linear_wrap
runtime.zero.muon
runtime.zero.muon.muon_optimizer
    MuonWithAuxAdam
runtime.zero.muon.original_muon
    Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam adam_update muon_update ns_compute_dtype
        zeropower_via_gram_newtonschulz zeropower_via_newtonschulz5
runtime.zero.offload_config
    DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum OffloadStateTypeEnum
runtime.zero.offload_states
    get_state_devices offload_adam_states offload_optimizer_states reload_adam_states reload_optimizer_states
        unpin_offloaded_optimizer_states
runtime.zero.parameter_offload
    DeepSpeedZeRoOffload ZeROOrderedDict ensure_zero_ordered_dict
    < runtime.zero.partition_parameters: *
runtime.zero.partition_parameters
    AllGatherCoalescedHandle AllGatherHandle AllReduceCoalescedHandle CUDAQuantizer
        DS_Z3_EAGER_FALLBACK_OWNER_ATTR='_ds_z3_eager_fallback_owner'
        DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR='_ds_z3_gathered_param_context_depth' DeepSpeedTensorOverride
        GatheredParameters Init InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles
        NoGatherCoalescedHandle NoGatherHandle QuantizationInfo ZeroParamStatus ZeroParamType debug_rank0 free_param
        get_all_subclasses get_allgather_dtype get_new_tensor_fn_for_dtype print_rank_0 register_external_parameter
        restore_init_context shutdown_init_context unregister_external_parameter
        zero_wrapper_for_fp_tensor_constructor
runtime.zero.partitioned_param_coordinator
    ENABLE_PROFILER=False InflightParamRegistry PartitionedParameterCoordinator ZeRoTraceMode debug_rank0
        get_all_parameters iter_params update_recompute_parameters
    < runtime.zero.partition_parameters: *
runtime.zero.partitioned_param_profiler
    PartitionedParameterProfiler
runtime.zero.stage3
    DeepSpeedZeroOptimizer_Stage3 INITIAL_MICRO_STEP_ID=-1 INIT_OPTIMIZER_TIMER='init_optimizer_state' IPGBucketZ3
        OPTIMIZER_STEP_TIMER='optimizer_step' OPTIMIZER_SWAP_IN_STATE_TIMER='optimizer_swap_in_state'
        OPTIMIZER_SWAP_OUT_STATE_TIMER='optimizer_swap_out_state' estimate_zero3_model_states_mem_needs
        estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live input isclose
        lcm model_to_params move_to_cpu print_rank_0 unwrap_model_for_generation
    < runtime.zero.partition_parameters: *
runtime.zero.stage_1_and_2
    DeepSpeedZeroOptimizer GradPartitionBufferGroup INITIAL_MICRO_STEP_ID=-1 IPGBucket
        OPTIMIZER_ALLGATHER_TIMER='optimizer_allgather' OPTIMIZER_GRADIENTS_TIMER='optimizer_gradients'
        OPTIMIZER_STEP_TIMER='optimizer_step' estimate_zero2_model_states_mem_needs
        estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live
        get_alignment_padding input isclose lcm model_to_params print_rank_msg split_half_float_double
runtime.zero.tiling
    TiledLinear TiledLinearReturnBias split_tensor_along_last_dim
runtime.zero.utils
    ZeRORuntimeException apply_to_tensors_only assert_ints_same_as_other_ranks assert_lst_len_same_as_other_ranks
        defragment get_lst_from_rank0 get_mapping_to_flat_buffer get_norm_dtype is_builtin_type is_zero_param
        is_zero_supported_optimizer isinstance_namedtuple
sequence
    < sequence.autosp_fusion: InternVLFusionAdapter LlavaFusionAdapter ModalityFusionSPAdapter Qwen2VLFusionAdapter
    < sequence.autosp_detector: SPModelInfo detect_model_sp_info
    < sequence.autosp_vit: UlyssesSPViTAttention
    < sequence.cross_entropy: VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss configure_vocab_parallel_loss
        vocab_parallel_cross_entropy
    < sequence.auto_sp: auto_wrap_model_for_sp
sequence.auto_sp
    auto_wrap_model_for_sp
sequence.autosp_detector
    SPModelInfo detect_model_sp_info
sequence.autosp_fusion
    InternVLFusionAdapter LlavaFusionAdapter ModalityFusionSPAdapter Qwen2VLFusionAdapter
sequence.autosp_vit
    UlyssesSPViTAttention
sequence.cross_entropy
    VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss configure_vocab_parallel_loss
        validate_vocab_parallel_loss vocab_parallel_cross_entropy vocab_sequence_parallel_cross_entropy
sequence.fpdt_layer
    FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss SequenceChunk apply_rotary_pos_emb_backward
        bias_gelu bias_gelu_back update_out_and_lse
sequence.layer
    DistributedAttention apply_rotary_pos_emb post_all2all pre_all2all_fun register_all_to_all_group
        single_all_to_all uneven_heads_all2all
sequence.linear_cross_entropy
    vocab_parallel_linear_cross_entropy
sequence.vocab_parallel_ops
    vocab_parallel_entropy vocab_parallel_kl_div vocab_parallel_logprobs
utils
    logger
    < utils.groups: *
    < utils.init_on_device: OnDevice
    < runtime.dataloader: RepeatingLoader
    < utils.tensor_fragment: fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping
        map_to_flat_opt_states safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
        safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param
        safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
        safe_set_local_optimizer_state safe_update_full_grad_vectorized set_full_hp_grad set_full_hp_param
    < utils.comms_logging: get_caller_func
    < utils.numa: get_numactl_cmd
    < utils.z3_leaf_module: get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
        set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_parameter
    < utils.nvtx: instrument_w_nvtx
    < utils.mixed_precision_linkage: lazy_init_hp_params_optimizer_state link_hp_params
    < utils.logging: log_dist log_dist_once set_log_level_from_string
    < utils.module_utils: recursive_getattr recursive_setattr
utils.bwc
    bwc_pipeline_parallel_group bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_group
        bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size
utils.comms_logging
    CommsLogger calc_bw_log convert_size get_caller_func print_rank_0
utils.config
    DeepSpeedThroughputTimerConfig TIMERS='timers' TIMERS_THROUGHPUT='throughput' get_timers_config
utils.debug
    WeakIdNameMap debug_clear_module_and_param_names debug_extract_module_and_param_names debug_module2name
        debug_module2name_class debug_module2name_id debug_param2name debug_param2name_id debug_param2name_id_numel
        debug_param2name_id_shape debug_param2name_id_shape_device debug_param2name_id_shape_status ds_id ds_shape
        log_rank_file print_backward_tensors print_rank print_rank0 printflock
utils.exceptions
    DeprecatedException
utils.groups
    get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group
        get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group
        get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size
        initialize set_tensor_model_parallel_rank set_tensor_model_parallel_world_size
utils.init_on_device
    OnDevice
utils.logging
    LoggerFactory get_current_level get_dist_msg get_log_level_from_string log_dist log_dist_once
        print_configuration print_dist print_json_dist set_log_level_from_string should_log_le warning_once
utils.mixed_precision_linkage
    lazy_init_hp_params_optimizer_state link_hp_params
utils.module_utils
    recursive_getattr recursive_setattr
utils.numa
    check_for_numactl_pkg get_numa_cores get_numactl_cmd parse_range parse_range_list
utils.nvtx
    DEEPSPEED_NVTX_DOMAIN='DeepSpeed' instrument_w_nvtx
utils.pin_memory
    NativePinnedMemory get_active_native_pinned_memory get_native_pinned_memory
utils.pin_memory_tracker
    pinned_memory_summary track_pinned_memory
utils.static_cache
    DeepSpeedStaticCache DeepSpeedStaticLayer
utils.tensor_fragment
    fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping map_to_flat_opt_states
        safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param
        safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad
        safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
        safe_update_full_grad_vectorized set_full_hp_grad set_full_hp_param tensor_fragment
utils.timer
    BACKWARD_GLOBAL_TIMER='bwd' BACKWARD_INNER_GLOBAL_TIMER='bwd_inner'
        BACKWARD_INNER_MICRO_TIMER='bwd_inner_microstep' BACKWARD_MICRO_TIMER='bwd_microstep'
        BACKWARD_REDUCE_GLOBAL_TIMER='bwd_allreduce' BACKWARD_REDUCE_MICRO_TIMER='bwd_allreduce_microstep'
        CudaEventTimer FORWARD_GLOBAL_TIMER='fwd' FORWARD_MICRO_TIMER='fwd_microstep' NoopTimer
        PSUTILS_INSTALLED=False STEP_GLOBAL_TIMER='step' STEP_MICRO_TIMER='step_microstep'
        SynchronizedWallClockTimer TIME_EPSILON=1e-06 ThroughputTimer trim_mean
utils.torch
    is_functorch_transforming jit_script_compat register_grad_hook required_torch_version
utils.types
    ActivationFuncType NormType
utils.z3_leaf_module
    apply_zero_leaf_module_config get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules
        set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module
        z3_leaf_parameter
utils.zero_to_fp32
    GatheredTensor atoi convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict
        get_checkpoint_files get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_model_state_files
        get_optim_files load_state_dict_from_zero_checkpoint natural_keys parse_model_states parse_optim_states
        to_torch_tensor zero3_partitioned_param_info zero_model_state
utils.zero_to_torch
    main
"""
