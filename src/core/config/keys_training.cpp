// Keys of training: batch sizes, optimizer, schedule, precision, gradients, numbers of a run, model and data.
#include "config/key_rows.h"
#include "config/optimizers.h"

namespace zero::config {
namespace {

constexpr std::string_view kCliOrAbsent = "the command-line flag if given, else as if absent";
constexpr std::string_view kCliOrDefault = "the command-line flag if given, else the default";
constexpr std::string_view kFlag = "the command-line flag; without it an error";
constexpr std::string_view kPrecisionFlag = "--dtype, else false";
constexpr std::string_view kAdams = "Adam AdamW";
constexpr std::string_view kWarm = "WarmupLR WarmupDecayLR";
constexpr std::string_view kWarmAll = "WarmupLR WarmupDecayLR WarmupCosineLR";

std::vector<Word<OptimizerType>> optimizer_words() {
  std::vector<Word<OptimizerType>> all;
  for (const auto type : optimizer_types()) all.push_back({name_of(type), type});
  return all;
}

}  // namespace

void add_training_keys(std::vector<Key>& keys) {
  const Words<Precision> dtypes = {{"fp32", Precision::Fp32}, {"fp16", Precision::Fp16}, {"bf16", Precision::Bf16}};
  Block(keys, "")
      .key("train_batch_size", &Settings::train_batch_size, "samples per optimizer step over all ranks", at_least(1),
           no_default(), automatic(kCliOrAbsent), unit("samples"))
      .key("train_micro_batch_size_per_gpu", &Settings::micro_batch_size, "samples per rank and forward", at_least(1),
           no_default(), automatic(kCliOrAbsent), unit("samples"))
      .key("gradient_accumulation_steps", &Settings::accumulation_steps, "micro-batches per optimizer step",
           at_least(1), no_default(), automatic(kCliOrAbsent))
      .key("managed_gradient_accumulation", &Settings::managed_gradient_accumulation,
           "false: the program decides when to step; each step() applies the accumulated gradients", needs(When::Api))
      .key("dataloader_drop_last", &Settings::dataloader_drop_last, "drop the last incomplete batch of an epoch");
  Block(keys, "optimizer", &Settings::optimizer)
      .key("type", words(&OptimizerSettings::type, optimizer_words()), "update rule", no_default())
      .key("params.lr", &OptimizerSettings::lr,
           "base learning rate, before the schedule (Adagrad, RMSprop: 0.01; NAdam, Adamax: 0.002; Adadelta: 1; Muon: "
           "0.02, of matrices)",
           at_least(0), automatic(kCliOrDefault))
      .key("params.weight_decay", &OptimizerSettings::weight_decay, "weight decay", at_least(0),
           automatic(kCliOrDefault))
      .key("params.betas", pair(&OptimizerSettings::beta1, &OptimizerSettings::beta2),
           "decay rates of the moments (Muon: 0.9 and 0.95)", at_least(0), below(1), automatic(kCliOrDefault),
           owned_by("Adam AdamW Lion NAdam RAdam Adamax Muon"))
      .key("params.eps", &OptimizerSettings::eps, "added to the denominator (Adagrad, Muon: 1e-10; Adadelta: 1e-6)",
           above(0), automatic(kCliOrDefault), owned_by("Adam AdamW Adagrad RMSprop NAdam RAdam Adamax Adadelta Muon"))
      .key("params.bias_correction", &OptimizerSettings::bias_correction, "correct the moments' bias", owned_by(kAdams))
      .key("params.adam_w_mode", &OptimizerSettings::adam_w_mode,
           "true: decoupled weight decay, also for Adam, as in DeepSpeed", owned_by(kAdams))
      .key("params.momentum", &OptimizerSettings::momentum, "momentum (Muon: 0.95)", at_least(0), below(1),
           owned_by("SGD RMSprop Muon"))
      .key("params.dampening", &OptimizerSettings::dampening, "dampening of momentum", at_least(0), below(1),
           owned_by("SGD"))
      .key("params.nesterov", &OptimizerSettings::nesterov,
           "Nesterov momentum; needs momentum and no dampening (Muon: true)", owned_by("SGD Muon"))
      .key("params.lr_decay", &OptimizerSettings::lr_decay, "decay of the learning rate per update", at_least(0),
           owned_by("Adagrad"))
      .key("params.initial_accumulator_value", &OptimizerSettings::initial_accumulator_value,
           "initial value of the sum of squares", at_least(0), owned_by("Adagrad"))
      .key("params.amsgrad", &OptimizerSettings::amsgrad, "divide by the largest second moment so far",
           owned_by(kAdams))
      .key("params.alpha", &OptimizerSettings::alpha, "decay rate of the mean of squares", at_least(0), below(1),
           owned_by("RMSprop"))
      .key("params.centered", &OptimizerSettings::centered, "subtract the square of the mean gradient",
           owned_by("RMSprop"))
      .key("params.momentum_decay", &OptimizerSettings::momentum_decay, "how fast the first beta grows", at_least(0),
           owned_by("NAdam"))
      .key("params.decoupled_weight_decay", &OptimizerSettings::decoupled_weight_decay,
           "true: weight decay outside of the gradient, as in AdamW", owned_by("NAdam RAdam"))
      .key("params.rho", &OptimizerSettings::rho, "decay rate of both means of squares", at_least(0), below(1),
           owned_by("Adadelta"))
      .key("params.muon_lr", &OptimizerSettings::muon_lr, "rate of hidden matrices; null: lr", above(0), nullable(),
           owned_by("Muon"))
      .key("params.adam_lr", &OptimizerSettings::adam_lr,
           "rate of the parameters that are no hidden matrices; a schedule moves it in proportion. Absent: lr, if that "
           "is set",
           at_least(0), owned_by("Muon"))
      .key("params.ns_steps", &OptimizerSettings::ns_steps, "iterations of Newton and Schulz", at_least(1),
           at_most(100), owned_by("Muon"))
      .key("params.ns_method", words(&OptimizerSettings::ns_fp32, {{"standard", false}, {"gram", true}}),
           "standard: products of bf16, gram: of fp32", owned_by("Muon"))
      .key("params.adjust_lr_fn",
           words(&OptimizerSettings::ns_match_rms, {{"original", false}, {"match_rms_adamw", true}}),
           "scale of an update: max(1, rows/columns)^0.5, or 0.2 max(rows, columns)^0.5", owned_by("Muon"))
      .key("params.adam_parameters", &OptimizerSettings::adam_parameters,
           "patterns of matrices that AdamW updates, besides embeddings and output layers (* and ?)", owned_by("Muon"))
      .key("params.state_bits", &OptimizerSettings::state_bits,
           "bits of an optimizer state; 16: bf16, 8: blocks of codes (Adam, AdamW, Lion)", at_least(8), at_most(32))
      .key("params.fp32_optimizer_states", &OptimizerSettings::fp32_states,
           "false: optimizer states have the dtype of the masters", needs(When::NarrowStates));
  Block(keys, "scheduler", &Settings::schedule)
      .key("type",
           words(&ScheduleSettings::type, {{"WarmupLR", ScheduleType::WarmupLR},
                                           {"WarmupDecayLR", ScheduleType::WarmupDecayLR},
                                           {"WarmupCosineLR", ScheduleType::WarmupCosineLR},
                                           {"LRRangeTest", ScheduleType::LRRangeTest},
                                           {"OneCycle", ScheduleType::OneCycle}}),
           "learning rate schedule; absent: constant", no_default())
      .key("params.warmup_min_lr", &ScheduleSettings::warmup_min_lr, "first learning rate", at_least(0), automatic("0"),
           owned_by(kWarm))
      .key("params.warmup_max_lr", &ScheduleSettings::warmup_max_lr,
           "learning rate after warm-up; null: the optimizer's (WarmupDecayLR: 0.001)", at_least(0), nullable(),
           automatic("the optimizer's lr"), owned_by(kWarm))
      .key("params.warmup_num_steps", &ScheduleSettings::warmup_num_steps, "warm-up updates", at_least(1),
           automatic(kFlag), owned_by(kWarmAll))
      .key("params.warmup_type", words(&ScheduleSettings::warmup_log, {{"log", true}, {"linear", false}}),
           "shape of the warm-up", owned_by(kWarmAll))
      .key("params.total_num_steps", &ScheduleSettings::total_num_steps, "updates of the whole run", at_least(1),
           no_default(), automatic(kFlag), owned_by("WarmupDecayLR WarmupCosineLR"))
      .key("params.warmup_min_ratio", &ScheduleSettings::warmup_min_ratio, "first learning rate as a fraction of lr",
           at_least(0), at_most(1), owned_by("WarmupCosineLR"))
      .key("params.cos_min_ratio", &ScheduleSettings::cos_min_ratio, "last learning rate as a fraction of lr",
           at_least(0), at_most(1), owned_by("WarmupCosineLR"))
      .key("params.lr_range_test_min_lr", &ScheduleSettings::range_min_lr, "first learning rate", above(0),
           owned_by("LRRangeTest"))
      .key("params.lr_range_test_step_size", &ScheduleSettings::range_step_size, "updates per step of the staircase",
           at_least(1), owned_by("LRRangeTest"))
      .key("params.lr_range_test_step_rate", &ScheduleSettings::range_step_rate, "growth per step of the staircase",
           at_least(0), owned_by("LRRangeTest"))
      .key("params.lr_range_test_staircase", &ScheduleSettings::range_staircase, "increase in discrete steps",
           owned_by("LRRangeTest"))
      .key("params.cycle_min_lr", &ScheduleSettings::cycle_min_lr, "lowest learning rate", at_least(0), no_default(),
           owned_by("OneCycle"))
      .key("params.cycle_max_lr", &ScheduleSettings::cycle_max_lr, "highest learning rate", at_least(0), no_default(),
           owned_by("OneCycle"))
      .key("params.cycle_first_step_size", &ScheduleSettings::cycle_first_step_size, "updates of the increasing half",
           at_least(1), owned_by("OneCycle"))
      .key("params.cycle_second_step_size", &ScheduleSettings::cycle_second_step_size,
           "updates of the decreasing half; null: as many as in the increasing half", at_least(1), owned_by("OneCycle"))
      .key("params.cycle_first_stair_count", &ScheduleSettings::cycle_first_stair_count,
           "discrete steps of the increasing half; 0: continuous", at_least(0), owned_by("OneCycle"))
      .key("params.cycle_second_stair_count", &ScheduleSettings::cycle_second_stair_count,
           "discrete steps of the decreasing half; null: as many as in the increasing half", at_least(0),
           owned_by("OneCycle"))
      .key("params.decay_step_size", &ScheduleSettings::decay_step_size, "updates per decay after the cycle; 0: none",
           at_least(0), owned_by("OneCycle"))
      .key("params.decay_lr_rate", &ScheduleSettings::decay_lr_rate, "decay of the learning rate after the cycle",
           at_least(0), owned_by("OneCycle"))
      .key("params.cycle_momentum", &ScheduleSettings::cycle_momentum,
           "vary the first beta inversely to the learning rate", owned_by("OneCycle"))
      .key("params.cycle_min_mom", &ScheduleSettings::cycle_min_mom, "lowest first beta", at_least(0), below(1),
           owned_by("OneCycle"))
      .key("params.cycle_max_mom", &ScheduleSettings::cycle_max_mom, "highest first beta", at_least(0), below(1),
           owned_by("OneCycle"))
      .key("params.decay_mom_rate", &ScheduleSettings::decay_mom_rate, "growth of the first beta after the cycle",
           at_least(0), owned_by("OneCycle"))
      .key("params.last_batch_iteration", &ScheduleSettings::last_batch_iteration,
           "number of updates already made, minus one; -2 reproduces DeepSpeed's later start", at_least(-2));
  Block(keys, "").key("fp16.enabled", is(&Settings::precision, Precision::Fp16),
                      "fp16 parameters and compute, fp32 masters", automatic(kPrecisionFlag));
  Block(keys, "fp16", &Settings::scaler)
      .key("loss_scale", &ScalerSettings::static_scale, "fixed loss scale; 0: dynamic", at_least(0),
           needs(When::ScalesLoss))
      .key("initial_scale_power", &ScalerSettings::initial_scale_power, "the initial dynamic scale is 2 to this power",
           at_least(0), at_most(64), needs(When::DynamicScale))
      .key("loss_scale_window", &ScalerSettings::window, "consecutive steps without overflow before the scale doubles",
           at_least(1), needs(When::DynamicScale))
      .key("hysteresis", &ScalerSettings::hysteresis, "the scale is halved from this overflow on; 1: the first",
           at_least(1), needs(When::DynamicScale))
      .key("consecutive_hysteresis", &ScalerSettings::consecutive_hysteresis,
           "reset hysteresis after every step without overflow", needs(When::DynamicScale))
      .key("min_loss_scale", &ScalerSettings::min_scale, "minimum of the loss scale", at_least(1),
           needs(When::DynamicScale));
  Block(keys, "")
      .key("fp16.fp16_master_weights_and_grads", &Settings::fp16_masters,
           "no fp32 masters: the fp16 parameters are updated, and their gradients stored in fp16", automatic("false"),
           needs(When::Fp16))
      .key("bf16.enabled", is(&Settings::precision, Precision::Bf16),
           "bf16 parameters and compute, fp32 masters, no loss scale", automatic(kPrecisionFlag))
      .key("bf16.check_grad_overflow", &Settings::check_grad_overflow,
           "skip a step with Inf or NaN gradients, in every stage", needs(When::Bf16))
      .key("bf16.bf16_master_weights_and_grads", &Settings::bf16_masters,
           "no fp32 masters: the bf16 parameters are updated, and their gradients stored in bf16", automatic("false"),
           needs(When::Bf16))
      .key("bf16.bf16_optimizer_states", &Settings::bf16_optimizer_states,
           "optimizer states in bf16; needs bf16_master_weights_and_grads", automatic("false"), needs(When::Bf16))
      .key("data_types.grad_accum_dtype", words(&Settings::grad_accum_dtype, dtypes),
           "dtype of stored gradients; null: the parameters', or fp32 with accumulation")
      .key("data_types.param_dtype", words(&Settings::param_dtype, dtypes), "must equal the enabled precision")
      .key("data_types.buffer_dtype", words(&Settings::buffer_dtype, dtypes),
           "dtype of floating-point module buffers; null: unchanged")
      .key("gradient_clipping", &Settings::gradient_clipping, "maximum global L2 norm of the gradients; 0: off",
           at_least(0), automatic(kCliOrDefault))
      .key("gradient_allreduce_op", words(&Settings::reduce_op, {{"mean", ReduceOp::Mean}, {"sum", ReduceOp::Sum}}),
           "mean or sum over ranks")
      .key("prescale_gradients", &Settings::prescale_gradients, "divide by the number of ranks before the reduction")
      .key("gradient_predivide_factor", &Settings::predivide_factor,
           "divide by this factor before the reduction, and by ranks / factor after it", above(0),
           needs(When::Postscale))
      .key("communication_data_type", words(&Settings::communication_dtype, dtypes),
           "dtype of gradients during reduction; null: the parameters'")
      .key("seed", &Settings::seed, "initial weights: the seed; dropout: seed and rank; data order: seed and epoch",
           at_least(0))
      .key("libzero.transport", one_of(&Settings::transport, "auto nccl gloo shm shm+gloo"),
           "transport between ranks (ZERO_TRANSPORT)")
      .key("libzero.timeout_s", &Settings::timeout_s, "timeout of a collective (ZERO_TIMEOUT_S)", above(0), unit("s"))
      .key("libzero.max_skipped_steps", &Settings::max_skipped_steps,
           "skipped steps at the minimum loss scale before the run stops (exit 7)", at_least(1))
      .key("libzero.replica_check_steps", &Settings::replica_check_steps,
           "steps between comparisons of what ranks replicate; a difference ends the run (exit 7); 0: never",
           at_least(0), unit("steps"))
      .key("libzero.tier_checksums", in(&Settings::aio, &AioSettings::checksums),
           "verify checksums of offloaded states read from files, block by block", needs(When::AnyFile));
  Block(keys, "libzero.delayed_param_update", &Settings::zero, &ZeroSettings::delayed_param_update)
      .key("enabled", &DelayedUpdate::enabled, "the same as zero_optimization.delayed_update.enabled")
      .key("start_step", &DelayedUpdate::start_step,
           "the same as zero_optimization.delayed_update.start_step, for the previous key", at_least(1));
  Block(keys, "")
      .key("libzero.parameter_groups", &Settings::parameter_groups,
           "[{pattern, lr, weight_decay}]: overrides for parameters whose name matches (* and ?; \\ makes the next "
           "character literal); first match wins")
      .key("libzero.units", &Settings::units,
           "paths of the modules that are unsharded as one unit; empty: found automatically")
      .key("libzero.unit_min_numel", &Settings::unit_min_numel, "adjacent units with fewer elements are merged",
           at_least(0), unit("elements"))
      .key("libzero.keep_fp32", &Settings::keep_fp32,
           "names of parameters that stay fp32, such as a router and norms (* and ?; \\ makes the next character "
           "literal); one that matches nothing is an error",
           needs(When::SixteenBit))
      .key("libzero.loss_scaling", &Settings::loss_scaling,
           "scale the loss without fp16 too, by the keys of that block: for a forward pass under autocast to fp16",
           needs(When::NotFp16))
      .key("libzero.stochastic_rounding", &Settings::stochastic_rounding,
           "round masters and optimizer states in 16 bits to one of the two nearest values at random, so that the mean "
           "is exact; false: to the nearest, which loses small updates",
           needs(When::NarrowStates));
  Block(keys, "libzero.model", &Settings::model)
      .key("size", one_of(&ModelSettings::size, "gpt-1m gpt-10m gpt2 gpt2-medium gpt2-large gpt2-xl"),
           "built-in GPT of `zero train`")
      .key("layers", &ModelSettings::layers, "blocks; null: the size's", at_least(1), at_most(1000), nullable())
      .key("hidden", &ModelSettings::hidden, "width; null: the size's", at_least(1), at_most(1000000), nullable())
      .key("heads", &ModelSettings::heads, "attention heads, divides hidden; null: the size's", at_least(1),
           at_most(10000), nullable())
      .key("seq_length", &ModelSettings::seq_length, "tokens per sample; null: the size's", at_least(1),
           at_most(1000000), nullable(), unit("tokens"))
      .key("vocabulary", &ModelSettings::vocabulary, "vocabulary size, at least 256; null: the size's", at_least(256),
           at_most(10000000), nullable())
      .key("dropout", &ModelSettings::dropout, "dropout of residuals and attention", at_least(0), below(1))
      .key("tied", &ModelSettings::tied, "output layer shares the token embedding");
  Block(keys, "libzero.data", &Settings::data)
      .key("text", &DataSettings::text, "text file to train on (--text)")
      .key("holdout", &DataSettings::holdout, "fraction at the end of the text that is held out from training",
           above(0), below(1))
      .key("eval_batches", &DataSettings::eval_batches, "micro-batches per rank of the held-out loss", at_least(1));
}

}  // namespace zero::config
