// Options written in code instead of JSON:
//   zero::Options options = zero::Options::build().stage(3).bf16().adamw({.lr = 1e-3}).train_micro_batch_size(8);
// Each call sets keys of docs/configuration.md; the table, the checks and the meaning are those of the JSON file. What
// a call leaves out keeps its default. All is local, and nothing is checked before options().
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
  std::optional<double> loss_scale{};  // static; 0 or none: dynamic
  std::optional<std::int64_t> initial_scale_power{}, loss_scale_window{}, hysteresis{}, min_loss_scale{};
};
struct WarmupParams {  // scheduler.params of WarmupLR and WarmupDecayLR; steps are updates
  std::optional<double> warmup_min_lr{}, warmup_max_lr{};
  std::optional<std::int64_t> warmup_num_steps{},
      total_num_steps{};                     // total: WarmupDecayLR needs it, WarmupLR has none
  std::optional<std::string> warmup_type{};  // "log", "linear"
};

class ZERO_API OptionsBuilder {
 public:
  OptionsBuilder& stage(int stage);  // 0 to 3
  // Precision of parameters and compute; masters are fp32. Of bf16() and fp16() only one.
  OptionsBuilder& fp32();
  OptionsBuilder& bf16();
  OptionsBuilder& fp16(const Fp16Params& params = {});
  // One optimizer; a later call replaces the earlier one.
  OptionsBuilder& adam(const AdamParams& params = {});
  OptionsBuilder& adamw(const AdamParams& params = {});
  OptionsBuilder& sgd(const SgdParams& params = {});
  OptionsBuilder& lion(const LionParams& params = {});
  OptionsBuilder& adagrad(const AdagradParams& params = {});
  // One schedule; likewise.
  OptionsBuilder& warmup_lr(const WarmupParams& params = {});
  OptionsBuilder& warmup_decay_lr(const WarmupParams& params);
  // Samples: of a step over all ranks; of one rank's forward.
  OptionsBuilder& train_batch_size(std::int64_t samples);
  OptionsBuilder& train_micro_batch_size(std::int64_t samples);
  OptionsBuilder& gradient_accumulation_steps(std::int64_t steps);
  OptionsBuilder& gradient_clipping(double norm);  // 0: none
  // Where masters and moments, and at stage 3 parameters, rest: Device (none), Host (cpu), File (nvme, which needs a
  // folder).
  OptionsBuilder& offload_optimizer(Tier tier, const std::string& nvme_path = {});
  OptionsBuilder& offload_parameters(Tier tier, const std::string& nvme_path = {});
  OptionsBuilder& overlap_comm(bool overlap);
  // Any key by its dotted path; the value is JSON text, or a plain word.
  OptionsBuilder& set(std::string_view key, std::string_view json);

  // Throws ConfigError that lists all faults, each with the call that made it ("Options::adamw") and the key.
  Options options() const;
  operator Options() const { return options(); }  // NOLINT: where Options are expected, a finished chain is them

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
