// Builds Options in code instead of JSON:
//   zero::Options options = zero::Options::build().stage(3).bf16().adamw({.lr = 1e-3}).train_micro_batch_size(8);
// Each call sets keys of docs/configuration.md, with the checks and meaning of the JSON file. Arguments that are not
// given keep their defaults. All calls are local; options() performs the checks.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>
#include <zero/memory_report.h>
#include <zero/options.h>

namespace zero {

struct AdamParams {  // optimizer.params of Adam and AdamW
  std::optional<double> lr{}, weight_decay{};
  std::optional<std::array<double, 2>> betas{};
  std::optional<double> eps{};
  std::optional<bool> bias_correction{}, adam_w_mode{};
};
struct SgdParams {
  std::optional<double> lr{}, weight_decay{}, momentum{}, dampening{};
  std::optional<bool> nesterov{};
};
struct LionParams {
  std::optional<double> lr{}, weight_decay{};
  std::optional<std::array<double, 2>> betas{};
};
struct AdagradParams {
  std::optional<double> lr{}, weight_decay{}, eps{}, lr_decay{}, initial_accumulator_value{};
};
struct Fp16Params {
  std::optional<double> loss_scale{};  // static; 0 or not set: dynamic
  std::optional<std::int64_t> initial_scale_power{}, loss_scale_window{}, hysteresis{}, min_loss_scale{};
};
struct WarmupParams {  // scheduler.params of WarmupLR and WarmupDecayLR; steps are updates
  std::optional<double> warmup_min_lr{}, warmup_max_lr{};
  std::optional<std::int64_t> warmup_num_steps{},
      total_num_steps{};                     // total: required by WarmupDecayLR, not used by WarmupLR
  std::optional<std::string> warmup_type{};  // "log", "linear"
};

// Which weights tensor parallelism cuts (docs/parallelism.md): the fields of tensor_parallel.partition_config.
struct TpLayerSpec {
  std::vector<std::string> patterns;      // regular expressions, anchored at the start of parameter names
  std::string partition_type = "column";  // "column", "row" or "skip"
  std::vector<std::int64_t> pieces{};     // lengths of the pieces of a fused weight, each cut separately
  std::optional<bool> gather_output{};    // column: outputs are all-gathered
  bool grad_allreduce = false;            // skip: gradients are summed over the tensor-parallel ranks
  bool scatter_input = false;             // row: the input is whole
  std::int64_t multiple = 1;              // of elements, at which weights are divided: the head width
};
struct TpPlan {
  std::string preset_model{};  // "gpt", "llama", ...; entries of layer_specs come before its own
  std::vector<TpLayerSpec> layer_specs{};
  bool vocab_parallel_lm_head = false;
};

class ZERO_API OptionsBuilder {
 public:
  OptionsBuilder& stage(int stage);  // 0 to 3
  // Dtype of parameters and compute; master parameters are fp32. bf16() and fp16() exclude each other.
  OptionsBuilder& fp32();
  OptionsBuilder& bf16();
  OptionsBuilder& fp16(const Fp16Params& params = {});
  // The optimizer; the last call wins.
  OptionsBuilder& adam(const AdamParams& params = {});
  OptionsBuilder& adamw(const AdamParams& params = {});
  OptionsBuilder& sgd(const SgdParams& params = {});
  OptionsBuilder& lion(const LionParams& params = {});
  OptionsBuilder& adagrad(const AdagradParams& params = {});
  // The learning rate schedule; the last call wins.
  OptionsBuilder& warmup_lr(const WarmupParams& params = {});
  OptionsBuilder& warmup_decay_lr(const WarmupParams& params);
  // In samples: per step over all ranks; per forward of one rank.
  OptionsBuilder& train_batch_size(std::int64_t samples);
  OptionsBuilder& train_micro_batch_size(std::int64_t samples);
  OptionsBuilder& gradient_accumulation_steps(std::int64_t steps);
  OptionsBuilder& gradient_clipping(double norm);  // 0: none
  // The tier of master parameters and optimizer states, and of parameters at stage 3: Device (none), Host (cpu) or File
  // (nvme, which requires nvme_path).
  OptionsBuilder& offload_optimizer(Tier tier, const std::string& nvme_path = {});
  OptionsBuilder& offload_parameters(Tier tier, const std::string& nvme_path = {});
  OptionsBuilder& overlap_comm(bool overlap);
  // Ranks that share one copy of the model's cut weights; ranks that share the tokens of each sample (zero/mesh.h).
  OptionsBuilder& tensor_parallel(int ranks, const TpPlan& plan);
  OptionsBuilder& sequence_parallel(int ranks);
  // Sets any key by its dotted path. The value is JSON text or a plain word.
  OptionsBuilder& set(std::string_view key, std::string_view json);

  // Throws ConfigError that lists all faults, each with the call that caused it ("Options::adamw") and the key.
  Options options() const;
  operator Options() const { return options(); }  // NOLINT: a finished chain converts to Options

 private:
  class Block;
  OptionsBuilder& put(const char* call, std::string_view key, std::string value);
  OptionsBuilder& offload(const char* call, const std::string& block, Tier tier, const std::string& nvme_path);
  OptionsBuilder& adam_like(const char* call, const char* type, const AdamParams& params);
  OptionsBuilder& warmup(const char* call, const char* type, const WarmupParams& params);
  void drop(std::string_view prefix);
  std::vector<Setting> settings_;
};

}  // namespace zero
