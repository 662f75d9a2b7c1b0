// adapter_config.json of PEFT, which is next to the weights of low-rank adapters.
#pragma once
#include <string>
#include <vector>

#include "apps/finetune/model_plan.h"

namespace zero::cli {

constexpr const char *kAdapterConfig = "adapter_config.json", *kAdapterWeights = "adapter_model.safetensors";
// What PEFT puts before the names of the model's parameters.
constexpr const char* kAdapterPrefix = "base_model.model.";

// Rank, alpha, dropout and targets of the adapters in plan.from. Throws IoError (kCheckpoint) for a file that is
// missing or damaged, ConfigError that names the key and the value of every method that is not built.
void read_adapter_config(LoraPlan& plan);

struct AdapterFacts {
  std::string base_model;                   // what the adapters belong to
  std::string task_type;                    // "CAUSAL_LM"
  std::vector<std::string> targets, whole;  // names of layers; of modules that are trained as they are
  bool transposed = false;                  // layers are Conv1D there, as GPT-2's
};
std::string adapter_config(const LoraPlan& plan, const AdapterFacts& facts);

}  // namespace zero::cli
