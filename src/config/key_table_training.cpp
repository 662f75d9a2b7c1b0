// Rows: batch sizes, optimizer, schedule, precision, gradients, run, model and data.
#include "config/key_table.h"

namespace zero::config {
namespace {

constexpr std::string_view kCliOrAbsent = "the command-line flag if given, else as if absent";
constexpr std::string_view kCliOrDefault = "the command-line flag if given, else the default";
constexpr std::string_view kDefault = "the default";
constexpr std::string_view kFlag = "the command-line flag; without it an error";
constexpr std::string_view kWarm = "WarmupLR WarmupDecayLR";
constexpr std::string_view kWarmAll = "WarmupLR WarmupDecayLR WarmupCosineLR";
constexpr std::string_view kOne = "one implementation of every optimizer";

const Key kRows[] = {
    {.path = "train_batch_size", .type = Type::Int, .fallback = "", .text = "samples per optimizer step over all ranks", .low = 1, .automatic = kCliOrAbsent, .unit = "samples"},
    {.path = "train_micro_batch_size_per_gpu", .type = Type::Int, .fallback = "", .text = "samples per rank and forward", .low = 1, .automatic = kCliOrAbsent, .unit = "samples"},
    {.path = "gradient_accumulation_steps", .type = Type::Int, .fallback = "", .text = "micro-batches per optimizer step", .low = 1, .automatic = kCliOrAbsent},
    {.path = "managed_gradient_accumulation", .type = Type::Bool, .fallback = "true", .text = "false: the program decides the boundary; each step() applies what was accumulated", .needs = "api"},
    {.path = "dataloader_drop_last", .type = Type::Bool, .fallback = "false", .text = "drop the last incomplete batch of an epoch"},

    {.path = "optimizer.type", .type = Type::Enum, .fallback = "", .text = "update rule", .choices = "Adam AdamW SGD Adagrad Lion"},
    {.path = "optimizer.params.lr", .type = Type::Num, .fallback = "0.001", .text = "base rate, before the schedule (Adagrad: 0.01)", .low = 0, .automatic = kCliOrDefault},
    {.path = "optimizer.params.weight_decay", .type = Type::Num, .fallback = "0", .text = "decay of weights", .low = 0, .automatic = kCliOrDefault},
    {.path = "optimizer.params.betas", .type = Type::NumPair, .fallback = "[0.9, 0.999]", .text = "decay rates of the moments", .low = 0, .high = 1, .below_high = true, .automatic = kCliOrDefault, .owners = "Adam AdamW Lion"},
    {.path = "optimizer.params.eps", .type = Type::Num, .fallback = "1e-08", .text = "added to the root (Adagrad: 1e-10)", .low = 0, .above_low = true, .automatic = kCliOrDefault, .owners = "Adam AdamW Adagrad"},
    {.path = "optimizer.params.bias_correction", .type = Type::Bool, .fallback = "true", .text = "correct the moments' bias", .owners = "Adam AdamW"},
    {.path = "optimizer.params.adam_w_mode", .type = Type::Bool, .fallback = "true", .text = "true: decay decoupled from the gradient, also for Adam, as in DeepSpeed", .owners = "Adam AdamW"},
    {.path = "optimizer.params.momentum", .type = Type::Num, .fallback = "0", .text = "momentum", .low = 0, .high = 1, .below_high = true, .owners = "SGD"},
    {.path = "optimizer.params.dampening", .type = Type::Num, .fallback = "0", .text = "dampening of momentum", .low = 0, .high = 1, .below_high = true, .owners = "SGD"},
    {.path = "optimizer.params.nesterov", .type = Type::Bool, .fallback = "false", .text = "Nesterov momentum; needs momentum and no dampening", .owners = "SGD"},
    {.path = "optimizer.params.lr_decay", .type = Type::Num, .fallback = "0", .text = "decay of the rate per update", .low = 0, .owners = "Adagrad"},
    {.path = "optimizer.params.initial_accumulator_value", .type = Type::Num, .fallback = "0", .text = "first value of the square sum", .low = 0, .owners = "Adagrad"},
    {.path = "optimizer.params.amsgrad", .type = Type::Bool, .fallback = "false", .text = "AMSGrad", .effect = Effect::Refused, .reason = "there is no such state layout; leave it out"},
    {.path = "optimizer.params.fp32_optimizer_states", .type = Type::Bool, .fallback = "true", .text = "fp32 moments", .effect = Effect::Refused, .reason = "there is no such state layout; moments are fp32"},
    {.path = "optimizer.params.torch_adam", .type = Type::Bool, .fallback = "false", .text = "DeepSpeed: torch's Adam", .effect = Effect::NoEffect, .reason = kOne},
    {.path = "optimizer.params.set_grad_none", .type = Type::Bool, .fallback = "true", .text = "DeepSpeed: drop gradients by None", .effect = Effect::NoEffect, .reason = kOne},
    {.path = "optimizer.legacy_fusion", .type = Type::Bool, .fallback = "false", .text = "DeepSpeed: old fused kernels", .effect = Effect::NoEffect, .reason = kOne},
    {.path = "zero_allow_untested_optimizer", .type = Type::Bool, .fallback = "false", .text = "let an optimizer class of the program's own run", .effect = Effect::NoEffect, .reason = "no optimizer class of the program's own"},

    {.path = "scheduler.type", .type = Type::Enum, .fallback = "", .text = "schedule of the rate; absent: constant", .choices = "WarmupLR WarmupDecayLR WarmupCosineLR LRRangeTest OneCycle"},
    {.path = "scheduler.params.warmup_min_lr", .type = Type::NumOrList, .fallback = "0", .text = "first rate", .low = 0, .automatic = "0", .owners = kWarm},
    {.path = "scheduler.params.warmup_max_lr", .type = Type::NumOrList, .fallback = "null", .text = "rate after the warm-up; null: the optimizer's (WarmupDecayLR: 0.001)", .low = 0, .nullable = true, .automatic = "the optimizer's lr", .owners = kWarm},
    {.path = "scheduler.params.warmup_num_steps", .type = Type::Int, .fallback = "1000", .text = "updates of the warm-up", .low = 1, .automatic = kFlag, .owners = kWarmAll},
    {.path = "scheduler.params.warmup_type", .type = Type::Enum, .fallback = "\"log\"", .text = "shape of the warm-up", .choices = "log linear", .owners = kWarmAll},
    {.path = "scheduler.params.total_num_steps", .type = Type::Int, .fallback = "", .text = "updates of the whole run", .low = 1, .automatic = kFlag, .owners = "WarmupDecayLR WarmupCosineLR"},
    {.path = "scheduler.params.warmup_min_ratio", .type = Type::Num, .fallback = "0", .text = "first rate as a part of lr", .low = 0, .high = 1, .owners = "WarmupCosineLR"},
    {.path = "scheduler.params.cos_min_ratio", .type = Type::Num, .fallback = "0.0001", .text = "last rate as a part of lr", .low = 0, .high = 1, .owners = "WarmupCosineLR"},
    {.path = "scheduler.params.lr_range_test_min_lr", .type = Type::NumOrList, .fallback = "0.001", .text = "first rate", .low = 0, .above_low = true, .owners = "LRRangeTest"},
    {.path = "scheduler.params.lr_range_test_step_size", .type = Type::Int, .fallback = "2000", .text = "updates per stair", .low = 1, .owners = "LRRangeTest"},
    {.path = "scheduler.params.lr_range_test_step_rate", .type = Type::Num, .fallback = "1", .text = "growth per stair", .low = 0, .owners = "LRRangeTest"},
    {.path = "scheduler.params.lr_range_test_staircase", .type = Type::Bool, .fallback = "false", .text = "grow in stairs", .owners = "LRRangeTest"},
    {.path = "scheduler.params.cycle_min_lr", .type = Type::NumOrList, .fallback = "", .text = "lowest rate", .low = 0, .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_max_lr", .type = Type::NumOrList, .fallback = "", .text = "highest rate", .low = 0, .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_first_step_size", .type = Type::Int, .fallback = "2000", .text = "updates up", .low = 1, .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_second_step_size", .type = Type::Int, .fallback = "null", .text = "updates down; null: as many as up", .low = 1, .nullable = true, .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_first_stair_count", .type = Type::Int, .fallback = "0", .text = "stairs up; 0: smooth", .low = 0, .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_second_stair_count", .type = Type::Int, .fallback = "null", .text = "stairs down; null: as many as up", .low = 0, .nullable = true, .owners = "OneCycle"},
    {.path = "scheduler.params.decay_step_size", .type = Type::Int, .fallback = "0", .text = "updates per decay after the cycle; 0: none", .low = 0, .owners = "OneCycle"},
    {.path = "scheduler.params.decay_lr_rate", .type = Type::Num, .fallback = "0", .text = "decay of the rate after the cycle", .low = 0, .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_momentum", .type = Type::Bool, .fallback = "true", .text = "move the first beta against the rate", .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_min_mom", .type = Type::NumOrList, .fallback = "0.8", .text = "lowest first beta", .low = 0, .high = 1, .below_high = true, .owners = "OneCycle"},
    {.path = "scheduler.params.cycle_max_mom", .type = Type::NumOrList, .fallback = "0.9", .text = "highest first beta", .low = 0, .high = 1, .below_high = true, .owners = "OneCycle"},
    {.path = "scheduler.params.decay_mom_rate", .type = Type::Num, .fallback = "0", .text = "growth of the first beta after the cycle", .low = 0, .owners = "OneCycle"},
    {.path = "scheduler.params.last_batch_iteration", .type = Type::Int, .fallback = "-1", .text = "updates before the first, less one; -2 repeats DeepSpeed's late start", .low = -2},

    {.path = "fp16.enabled", .type = Type::Bool, .fallback = "false", .text = "fp16 parameters and compute, fp32 masters", .automatic = "--dtype, else false"},
    {.path = "fp16.auto_cast", .type = Type::Bool, .fallback = "false", .text = "cast floating inputs of the top module", .automatic = kDefault, .effect = Effect::NotBuilt, .reason = "cast inputs in the program: x.to(torch::kHalf)"},
    {.path = "fp16.loss_scale", .type = Type::Num, .fallback = "0", .text = "fixed loss scale; 0: dynamic", .low = 0, .automatic = kDefault, .needs = "fp16"},
    {.path = "fp16.initial_scale_power", .type = Type::Int, .fallback = "16", .text = "first dynamic scale is 2 to this power", .low = 0, .high = 64, .automatic = kDefault, .needs = "dynamic"},
    {.path = "fp16.loss_scale_window", .type = Type::Int, .fallback = "1000", .text = "clean steps before the scale doubles", .low = 1, .automatic = kDefault, .needs = "dynamic"},
    {.path = "fp16.hysteresis", .type = Type::Int, .fallback = "2", .text = "this overflow is the first that halves", .low = 1, .automatic = kDefault, .needs = "dynamic"},
    {.path = "fp16.consecutive_hysteresis", .type = Type::Bool, .fallback = "false", .text = "refill hysteresis on every clean step", .automatic = kDefault, .needs = "dynamic"},
    {.path = "fp16.min_loss_scale", .type = Type::Int, .fallback = "1", .text = "the scale's floor", .low = 1, .automatic = kDefault, .needs = "dynamic"},
    {.path = "fp16.fp16_master_weights_and_grads", .type = Type::Bool, .fallback = "false", .text = "masters in fp16", .automatic = kDefault, .effect = Effect::NotBuilt, .reason = "masters are fp32"},
    {.path = "bf16.enabled", .type = Type::Bool, .fallback = "false", .text = "bf16 parameters and compute, fp32 masters, no loss scale", .automatic = "--dtype, else false"},
    {.path = "bf16.check_grad_overflow", .type = Type::Bool, .fallback = "true", .text = "skip a step with Inf or NaN gradients, in every stage", .automatic = kDefault, .needs = "bf16"},
    {.path = "bf16.immediate_grad_update", .type = Type::Bool, .fallback = "false", .text = "add each gradient to the accumulator at once", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "every gradient is added as soon as it is produced"},
    {.path = "bf16.bf16_master_weights_and_grads", .type = Type::Bool, .fallback = "false", .text = "no fp32 master", .automatic = kDefault, .effect = Effect::NotBuilt, .reason = "masters are fp32"},
    {.path = "bf16.bf16_optimizer_states", .type = Type::Bool, .fallback = "false", .text = "moments in bf16", .automatic = kDefault, .effect = Effect::NotBuilt, .reason = "moments are fp32"},
    {.path = "data_types.grad_accum_dtype", .type = Type::Enum, .fallback = "null", .text = "type of the kept gradient; null: the model's, or fp32 with accumulation", .choices = "fp32 fp16 bf16", .nullable = true},
    {.path = "data_types.param_dtype", .type = Type::Enum, .fallback = "null", .text = "must equal the precision that is enabled", .choices = "fp32 fp16 bf16", .nullable = true},
    {.path = "data_types.buffer_dtype", .type = Type::Enum, .fallback = "null", .text = "type of floating module buffers; null: as they are", .choices = "fp32 fp16 bf16", .nullable = true},

    {.path = "gradient_clipping", .type = Type::Num, .fallback = "1", .text = "largest global L2 norm of the gradients; 0: off", .low = 0, .automatic = kCliOrDefault},
    {.path = "gradient_allreduce_op", .type = Type::Enum, .fallback = "\"mean\"", .text = "mean or sum over ranks", .choices = "mean sum"},
    {.path = "prescale_gradients", .type = Type::Bool, .fallback = "false", .text = "divide by the number of ranks before the reduction"},
    {.path = "gradient_predivide_factor", .type = Type::Num, .fallback = "1", .text = "divide by this before the reduction, and by the rest behind it", .low = 0, .above_low = true, .needs = "postscale"},
    {.path = "communication_data_type", .type = Type::Enum, .fallback = "null", .text = "type on the wire of gradients; null: the model's", .choices = "fp32 fp16 bf16", .nullable = true},

    {.path = "seed", .type = Type::Int, .fallback = "1234", .text = "initial weights: the seed; dropout: seed and rank; data order: seed and epoch", .low = 0},
    {.path = "libzero.transport", .type = Type::Enum, .fallback = "\"auto\"", .text = "how ranks talk (ZERO_TRANSPORT)", .choices = "auto nccl gloo shm shm+gloo"},
    {.path = "libzero.timeout_s", .type = Type::Num, .fallback = "1800", .text = "longest wait in one collective (ZERO_TIMEOUT_S)", .low = 0, .above_low = true, .unit = "s"},
    {.path = "libzero.deterministic", .type = Type::Bool, .fallback = "false", .text = "deterministic device kernels, fixed order of sums", .effect = Effect::NoEffect, .reason = "on CPUs sums already have a fixed order"},
    {.path = "libzero.max_skipped_steps", .type = Type::Int, .fallback = "10", .text = "skipped steps at the scale's floor before the run stops (exit 7)", .low = 1},
    {.path = "libzero.tier_checksums", .type = Type::Bool, .fallback = "true", .text = "compare what is read from files of offloaded states with what was written, block by block", .needs = "nvme"},
    {.path = "libzero.delayed_param_update.enabled", .type = Type::Bool, .fallback = "false", .text = "the same as zero_optimization.delayed_update.enabled"},
    {.path = "libzero.delayed_param_update.start_step", .type = Type::Int, .fallback = "40", .text = "the same as zero_optimization.delayed_update.start_step, for the key before", .low = 1},
    {.path = "libzero.parameter_groups", .type = Type::Groups, .fallback = "[]", .text = "[{pattern, lr, weight_decay}]: overrides for parameters whose name matches (* and ?); first match wins"},
    {.path = "libzero.units", .type = Type::TextList, .fallback = "[]", .text = "paths of the modules that are gathered as one unit; empty: found automatically"},
    {.path = "libzero.unit_min_numel", .type = Type::Int, .fallback = "0", .text = "neighbouring units of fewer elements merge", .low = 0, .unit = "elements"},

    {.path = "libzero.model.size", .type = Type::Enum, .fallback = "\"gpt-1m\"", .text = "built-in GPT of `zero train`", .choices = "gpt-1m gpt-10m gpt2 gpt2-medium gpt2-large gpt2-xl"},
    {.path = "libzero.model.layers", .type = Type::Int, .fallback = "null", .text = "blocks; null: the size's", .low = 1, .high = 1000, .nullable = true},
    {.path = "libzero.model.hidden", .type = Type::Int, .fallback = "null", .text = "width; null: the size's", .low = 1, .high = 1000000, .nullable = true},
    {.path = "libzero.model.heads", .type = Type::Int, .fallback = "null", .text = "attention heads, divides hidden; null: the size's", .low = 1, .high = 10000, .nullable = true},
    {.path = "libzero.model.seq_length", .type = Type::Int, .fallback = "null", .text = "tokens per sample; null: the size's", .low = 1, .high = 1000000, .nullable = true, .unit = "tokens"},
    {.path = "libzero.model.vocabulary", .type = Type::Int, .fallback = "null", .text = "token values, at least 256; null: the size's", .low = 256, .high = 10000000, .nullable = true},
    {.path = "libzero.model.dropout", .type = Type::Num, .fallback = "0", .text = "dropout of residuals and attention", .low = 0, .high = 1, .below_high = true},
    {.path = "libzero.model.tied", .type = Type::Bool, .fallback = "true", .text = "output layer shares the token embedding"},
    {.path = "libzero.data.text", .type = Type::Text, .fallback = "\"\"", .text = "text file to train on (--text)"},
    {.path = "libzero.data.holdout", .type = Type::Num, .fallback = "0.05", .text = "last part of the text, never trained on", .low = 0, .high = 1, .above_low = true, .below_high = true},
    {.path = "libzero.data.eval_batches", .type = Type::Int, .fallback = "32", .text = "micro-batches per rank of the held-out loss", .low = 1},
};

}  // namespace

std::span<const Key> training_keys() { return kRows; }

}  // namespace zero::config
