// See model_plan.h.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>

#include <zero/errors.h>

#include "apps/finetune/model_plan.h"

namespace zero::cli {
namespace {

// "a=1,b=2", and words alone as keys without values. Throws for a key twice.
std::vector<std::pair<std::string, std::string>> pairs_in(const std::string& flag, const std::string& text) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (std::size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    const auto word = text.substr(begin, end - begin);
    begin = end + 1;
    const auto equals = word.find('=');
    const auto key = word.substr(0, equals);
    if (key.empty()) throw ConfigError("[" + flag + "] got \"" + text + "\", expected KEY=VALUE,KEY=VALUE");
    for (const auto& [known, value] : pairs)
      if (known == key) throw ConfigError("[" + flag + "] got " + key + " twice in \"" + text + "\", expected it once");
    pairs.emplace_back(key, equals == word.npos ? "" : word.substr(equals + 1));
  }
  return pairs;
}

double number_in(const std::string& flag, const std::string& key, const std::string& value, double least, double most,
                 bool whole) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || !(number >= least && number <= most) ||
      (whole && number != std::floor(number))) {
    char text[96];
    std::snprintf(text, sizeof text, "expected %s from %g to %g", whole ? "a whole number" : "a number", least, most);
    throw ConfigError("[" + flag + "] got " + key + " \"" + value + "\", " + text);
  }
  return number;
}

[[noreturn]] void refuse_key(const std::string& flag, const std::string& key, const std::string& known) {
  throw ConfigError("[" + flag + "] got \"" + key + "\", expected " + known);
}

// Now, and not at the first evaluation.
void check_predictions(const ModelArguments& a) {
  namespace fs = std::filesystem;
  if (a.task != "qa")
    throw ConfigError("[--predictions] got --task " + a.task + ", expected qa: other tasks have no answers");
  std::error_code error;
  const auto folder = fs::absolute(a.predictions).parent_path();
  if (fs::is_directory(a.predictions, error) || !fs::is_directory(folder, error) || ::access(folder.c_str(), W_OK) != 0)
    throw ConfigError("[--predictions] got " + a.predictions + ", expected a file in a folder that can be written");
  for (const auto* const files : {&a.data, &a.eval_data})
    for (const auto& file : *files)
      if (fs::equivalent(file, a.predictions, error))
        throw ConfigError("[--predictions] got " + a.predictions +
                          ", which is a file of --data or --eval-data, "
                          "expected another name");
}

}  // namespace

void declare_model(Command& c, ModelArguments& a) {
  c.section("A model and a task, in place of the built-in GPT on bytes");
  c.option(
      "--model", a.model, "NAME|DIR",
      "a folder with config.json, weights and tokenizer of Hugging Face, or the name of a shape with random weights");
  c.choice("--task", a.task, {"lm", "mlm", "seq2seq", "classify", "qa"}, "what the model learns");
  c.repeated("--data", a.data, "FILE", "records: .jsonl, .csv, SQuAD's .json, or plain text");
  c.repeated("--eval-data", a.eval_data, "FILE",
             "records to evaluate on (without it the last of --data: libzero.data.holdout)");
  c.choice("--data-format", a.format, {"auto", "jsonl", "csv", "squad", "lines", "document"},
           "of --data and --eval-data (auto: by their names)");
  c.option("--tokenizer", a.tokenizer, "DIR|bytes",
           "folder of the tokenizer's files, or bytes (those in --model's folder; of a NAME: bytes)");
  c.option(
      "--token-cache", a.token_cache, "DIR",
      "folder in which ranks and runs share the tokens of packed text (lm, mlm); without it each rank makes its own");
  c.option("--seq-length", a.seq_length, "N", "longest sample in tokens (libzero.model.seq_length, else the model's)",
           8, std::int64_t{1} << 24);
  c.option("--generate", a.generate, "HOW",
           "how the sample is generated: greedy, top_k=K, top_p=P, also with temperature=T (greedy)");
  c.repeated("--prompt", a.prompts, "TEXT", "a text to continue at the end (without it a held-out one)");
  c.option("--predictions", a.predictions, "FILE",
           "with --task qa: the answers of the last evaluation by id, as SQuAD's evaluation script reads them");
  c.option("--lora", a.lora, "SPEC",
           "train low-rank adapters alone: rank=8,alpha=16,targets=q_proj+v_proj,dropout=0.05");
  c.option("--lora-from", a.lora_from, "DIR", "begin with adapters in PEFT's files");
  c.flag("--merge-lora", a.merge_lora, "with --export: whole weights with the adapters in them");
}

std::vector<Setting> model_settings(const Command& c, const ModelArguments& a) {
  if (!c.given("--seq-length")) return {};
  return {{"libzero.model.seq_length", std::to_string(a.seq_length), "CLI --seq-length", false}};
}

std::optional<ModelPlan> plan_model(const Command& c, const ModelArguments& a, std::int64_t steps, bool exports) {
  for (const auto& [flag, text] : {std::pair{"--model", &a.model},
                                   {"--tokenizer", &a.tokenizer},
                                   {"--token-cache", &a.token_cache},
                                   {"--predictions", &a.predictions},
                                   {"--generate", &a.generate},
                                   {"--lora", &a.lora},
                                   {"--lora-from", &a.lora_from}})
    if (c.given(flag) && text->empty())
      throw ConfigError(std::string("[") + flag + "] got an empty text, expected a value. Hint: leave the option out.");
  if (a.model.empty()) {
    for (const char* flag : {"--task", "--data", "--eval-data", "--data-format", "--tokenizer", "--token-cache",
                             "--generate", "--prompt", "--predictions", "--lora", "--lora-from", "--merge-lora"})
      if (c.given(flag))
        throw ConfigError(std::string("[") + flag +
                          "] got no --model, expected a folder or a name. Hint: without --model the built-in GPT "
                          "learns the bytes of --text.");
    return std::nullopt;
  }
  if (c.given("--text"))
    throw ConfigError("[--text] got --model, too, expected one of them. Hint: --data FILE, with --task lm.");
  if (a.task.empty())
    throw ConfigError("[--model] got no --task, expected what the model learns: lm, mlm, seq2seq, classify or qa");
  const bool evaluates = c.given("--steps") && steps == 0 && !a.eval_data.empty();
  if (a.data.empty() && !evaluates)
    throw ConfigError(
        "[--data] got none, expected a file of records or text. Hint: with --steps 0 --eval-data FILE is enough.");
  if (a.merge_lora && a.lora.empty() && a.lora_from.empty())
    throw ConfigError("[--merge-lora] got neither --lora nor --lora-from, expected adapters to merge");
  if (!a.predictions.empty()) check_predictions(a);
  if (std::error_code error; !a.token_cache.empty() && !std::filesystem::is_directory(a.token_cache, error))
    throw ConfigError("[--token-cache] got " + a.token_cache + ", expected a folder that exists");
  if (a.merge_lora && !exports)
    throw ConfigError("[--merge-lora] got no --export, expected where the merged weights go");
  ModelPlan plan;
  plan.model = a.model;
  plan.task = a.task;
  plan.tokenizer = a.tokenizer;
  if (!a.format.empty()) plan.format = a.format;
  plan.data = a.data.empty() ? a.eval_data : a.data;
  plan.eval_data = a.eval_data;
  plan.seq_length = a.seq_length;
  plan.prompts = a.prompts;
  plan.token_cache = a.token_cache;
  plan.predictions = a.predictions;
  if (!a.generate.empty()) plan.generate = parse_generate(a.generate);
  if (!a.lora.empty() && !a.lora_from.empty())
    throw ConfigError("[--lora-from] got --lora, too, expected one of them. Hint: the files say rank and targets.");
  if (!a.lora.empty()) plan.lora = parse_lora(a.lora);
  if (!a.lora_from.empty()) {
    plan.lora.emplace();
    plan.lora->from = a.lora_from;
  }
  if (plan.lora) plan.lora->merge = a.merge_lora;
  return plan;
}

// As fine-tuning with transformers begins; every value can be replaced by an option.
const char* default_model_configuration() {
  return R"({
  "train_micro_batch_size_per_gpu": 8,
  "gradient_clipping": 1.0,
  "steps_per_print": 10,
  "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
  "zero_optimization": {"stage": 0}
})";
}

GeneratePlan parse_generate(const std::string& text) {
  const std::string flag = "--generate";
  GeneratePlan plan;
  bool greedy = false, warm = false;
  for (const auto& [key, value] : pairs_in(flag, text)) {
    if (key == "greedy" && value.empty())
      greedy = true;
    else if (key == "top_k")
      plan.top_k = static_cast<std::int64_t>(number_in(flag, key, value, 1, 1e9, true));
    else if (key == "top_p")
      plan.top_p = number_in(flag, key, value, 1e-6, 1, false);
    else if (key == "temperature") {
      plan.temperature = number_in(flag, key, value, 1e-6, 1e6, false);
      warm = true;
    } else
      refuse_key(flag, key, "greedy, top_k=K, top_p=P or temperature=T");
  }
  const bool chooses = plan.top_k > 0 || plan.top_p < 1 || warm;
  if (greedy && chooses)
    throw ConfigError("[--generate] got \"" + text + "\", expected greedy alone: it takes the most likely token");
  if (!greedy && !warm) plan.temperature = 1;
  return plan;
}

LoraPlan parse_lora(const std::string& text) {
  const std::string flag = "--lora";
  LoraPlan plan;
  bool alpha = false;
  for (const auto& [key, value] : pairs_in(flag, text)) {
    if (key == "rank") {
      plan.rank = static_cast<std::int64_t>(number_in(flag, key, value, 1, 65536, true));
    } else if (key == "alpha") {
      plan.alpha = number_in(flag, key, value, 1e-6, 1e6, false);
      alpha = true;
    } else if (key == "dropout") {
      plan.dropout = number_in(flag, key, value, 0, 0.999, false);
    } else if (key == "targets") {
      for (std::size_t begin = 0; begin <= value.size();) {
        const auto end = std::min(value.find('+', begin), value.size());
        if (end == begin) throw ConfigError("[--lora] got targets \"" + value + "\", expected NAME+NAME");
        plan.targets.push_back(value.substr(begin, end - begin));
        begin = end + 1;
      }
    } else {
      refuse_key(flag, key, "rank=R, alpha=A, targets=NAME+NAME or dropout=P");
    }
  }
  if (!alpha) plan.alpha = static_cast<double>(2 * plan.rank);
  return plan;
}

}  // namespace zero::cli
