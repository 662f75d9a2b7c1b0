// Options of `zero train --model`: a model of a folder or of a name, a task, records. As plain values, without torch.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <zero/options.h>

#include "tools/support/options.h"

namespace zero::cli {

// As given on the command line; 0 or empty: not given.
struct ModelArguments {
  std::string model, task, tokenizer, token_cache, format, generate, lora, lora_from, predictions;
  std::vector<std::string> data, eval_data, prompts;
  std::int64_t seq_length = 0;
  bool merge_lora = false;
};

struct GeneratePlan {
  double temperature = 0;  // 0: the most likely token
  std::int64_t top_k = 0;  // 0: all
  double top_p = 1;
};

// Low-rank adapters.
struct LoraPlan {
  std::int64_t rank = 8;
  double alpha = 16, dropout = 0;
  std::vector<std::string> targets;  // names of linear layers in Hugging Face's model; empty: those that PEFT takes
  std::string from;                  // folder with PEFT's files to begin with; empty: new ones
  bool merge = false;                // into the weights that are exported
};

struct ModelPlan {
  std::string model;      // folder or name
  std::string task;       // "lm", "mlm", "seq2seq", "classify", "qa"
  std::string tokenizer;  // folder, or "bytes"; empty: that of the model's folder, bytes for a name
  std::string format = "auto";
  std::vector<std::string> data, eval_data;
  std::int64_t seq_length = 0;  // 0: that of the model, at most 512
  std::optional<GeneratePlan> generate;
  std::vector<std::string> prompts;  // texts that the model continues at the end; empty: a held-out one
  std::string token_cache;           // folder in which ranks and runs share tokens; empty: each rank makes its own
  std::string predictions;           // file for the held-out answers, as SQuAD's script reads them; empty: none
  std::optional<LoraPlan> lora;
};

void declare_model(Command& command, ModelArguments& arguments);
// The settings that options for models stand for.
std::vector<Setting> model_settings(const Command& command, const ModelArguments& arguments);
// Nothing without --model. Throws ConfigError. `steps`: --steps; `exports`: whether --export is given.
std::optional<ModelPlan> plan_model(const Command& command, const ModelArguments& arguments, std::int64_t steps,
                                    bool exports);
// Of a run with --model and no CONFIG.json.
const char* default_model_configuration();

// "greedy", "top_k=40", "top_p=0.9,temperature=0.8". Throws ConfigError.
GeneratePlan parse_generate(const std::string& text);
// "rank=8,alpha=16,targets=q_proj+v_proj,dropout=0.05". Throws ConfigError.
LoraPlan parse_lora(const std::string& text);

}  // namespace zero::cli
