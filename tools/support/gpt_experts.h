// The built-in GPT with experts (zero/moe.h), by the block libzero.model.experts of a configuration.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <zero/moe.h>

#include "config/settings.h"
#include "models/gpt.h"
#include "tools/report/page/expert_load.h"

namespace zero::cli {

// Puts experts in place of the MLP of every expert_interval-th layer. No effect without experts. Throws ConfigError if
// the model has no such layer.
void add_experts(models::GptConfig& model, const config::ExpertSettings& experts);

// Counts the tokens that chose each expert, in this rank's forwards.
class ExpertCounter {
 public:
  explicit ExpertCounter(const models::Gpt& model);
  bool any() const { return !layers_.empty(); }
  // Adds the last forward.
  void note();
  // The counts since the last call, as numbers that ranks can sum: by layer those of its experts, then the kept ones.
  std::vector<std::int64_t> take();
  // Such numbers, of one step.
  report::ExpertLoad load_of(const std::vector<std::int64_t>& numbers, std::int64_t step) const;

 private:
  struct Layer {
    std::int64_t block;
    std::shared_ptr<MoEImpl> experts;
  };
  std::vector<Layer> layers_;
  std::vector<std::int64_t> sums_;
};

}  // namespace zero::cli
