// See model_family.h. A family is a few lines around a model of models/; what is common is in Family.
#include "apps/finetune/model_family.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <variant>

#include <zero/activation_checkpoint.h>
#include <zero/errors.h>

#include "apps/data/records.h"
#include "config/document.h"
#include "config/settings.h"
#include "interchange/names.h"
#include "models/bert.h"
#include "models/generation.h"
#include "models/gpt.h"
#include "models/hf_config.h"
#include "models/llama.h"
#include "models/t5.h"

namespace zero::cli {
namespace {

namespace fs = std::filesystem;

at::Tensor checkpointed(const std::function<at::Tensor(const at::Tensor&)>& part, const at::Tensor& x) {
  return activation_checkpoint(part, x);
}

models::Sampling sampling_of(const GenerateOptions& options) {
  models::Sampling sampling;
  sampling.temperature = options.how.temperature;
  sampling.top_k = options.how.top_k;
  sampling.top_p = options.how.top_p;
  sampling.seed = options.seed;
  sampling.eos_tokens = options.ends;
  if (options.all_forwards) sampling.stop = [](bool /*ended*/) { return false; };
  return sampling;
}

// Prompts as rows of equal length, and the mask of what is padding: in front of them, or after.
struct Rows {
  at::Tensor tokens, mask;
  std::int64_t longest = 1;
};
Rows rows_of(const Prompts& prompts, bool in_front, c10::Device device) {
  Rows rows;
  for (const auto& prompt : prompts) rows.longest = std::max(rows.longest, static_cast<std::int64_t>(prompt.size()));
  rows.tokens = torch::zeros({static_cast<std::int64_t>(prompts.size()), rows.longest}, torch::kLong);
  rows.mask = torch::zeros_like(rows.tokens);
  auto* token = rows.tokens.mutable_data_ptr<std::int64_t>();
  auto* mask = rows.mask.mutable_data_ptr<std::int64_t>();
  for (const auto& prompt : prompts) {
    const auto begin = in_front ? rows.longest - static_cast<std::int64_t>(prompt.size()) : 0;
    std::copy(prompt.begin(), prompt.end(), token + begin);
    std::fill_n(mask + begin, prompt.size(), 1);
    token += rows.longest;
    mask += rows.longest;
  }
  rows.tokens = rows.tokens.to(device);
  rows.mask = rows.mask.to(device);
  return rows;
}

// The tokens from a column on.
Prompts columns_from(const at::Tensor& tokens, std::int64_t first) {
  Prompts rows;
  const at::Tensor part = tokens.narrow(1, first, tokens.size(1) - first).cpu().contiguous();
  const auto* value = part.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < part.size(0); ++i, value += part.size(1)) rows.emplace_back(value, value + part.size(1));
  return rows;
}

// Of models that continue their prompts.
template <class Model>
Prompts generated(Model& model, const Prompts& prompts, const GenerateOptions& options) {
  const auto rows = rows_of(prompts, /*in_front=*/true, model->parameters().front().device());
  const std::int64_t room = std::max<std::int64_t>(0, model->config().sequence - rows.longest);
  const bool padded = std::any_of(prompts.begin(), prompts.end(), [&](const auto& prompt) {
    return static_cast<std::int64_t>(prompt.size()) < rows.longest;
  });
  return columns_from(model->generate(rows.tokens, std::min(options.count, room), sampling_of(options),
                                      padded ? rows.mask : at::Tensor()),
                      rows.longest);
}

// transformers' names of classes that nobody named are none.
std::vector<std::string> named_classes(const models::HfConfig& hf) {
  for (std::size_t i = 0; i < hf.labels.size(); ++i)
    if (hf.labels[i] != "LABEL_" + std::to_string(i)) return hf.labels;
  return {};
}

// What all families share: the configuration as Hugging Face has it.
template <class Config>
class Family : public ModelFamily {
 public:
  Family(models::HfConfig hf, bool named) : hf_(std::move(hf)), named_(named) {}

  std::string name() const override { return models::model_type(hf_.config); }
  std::string name_map() const override { return name(); }
  std::int64_t vocabulary() const override { return config().vocabulary; }
  void set_tokenizer(const data::Tokenizer& tokenizer) override {
    if (!named_) return;
    const auto& special = tokenizer.special();
    config().vocabulary = tokenizer.vocabulary();
    hf_.bos_token = special.begin.value_or(-1);
    hf_.eos_tokens.clear();
    if (special.end || special.separator) hf_.eos_tokens = {data::end_token(tokenizer)};
    if (!special.padding) return;
    hf_.pad_token = *special.padding;
    if constexpr (requires { config().pad_token; }) config().pad_token = *special.padding;
  }
  std::vector<std::int64_t> ends() const override { return named_ ? std::vector<std::int64_t>() : hf_.eos_tokens; }
  std::vector<std::string> unknown() const override { return hf_.unknown; }
  std::string config_json() const override {
    auto hf = hf_;
    hf.architecture = architecture();
    return models::hf_config_text(hf);
  }
  std::vector<std::pair<std::string, std::string>> rows() const override {
    return {{"layers", std::to_string(layers())},
            {"hidden", std::to_string(config().hidden)},
            {"heads", std::to_string(config().heads)},
            {"vocabulary", std::to_string(config().vocabulary)}};
  }

 protected:
  virtual std::string architecture() const = 0;
  const Config& config() const { return std::get<Config>(hf_.config); }
  Config& config() { return std::get<Config>(hf_.config); }
  models::HfConfig hf_;
  bool named_;
};

class GptFamily final : public Family<models::GptConfig> {
 public:
  using Family::Family;
  std::string task_type() const override { return "CAUSAL_LM"; }
  std::vector<std::string> lora_targets() const override { return {"c_attn"}; }
  bool transposed() const override { return true; }
  std::int64_t sequence() const override { return config().sequence; }
  std::int64_t layers() const override { return config().layers; }
  std::shared_ptr<torch::nn::Module> make() override {
    model_ = models::Gpt(config());
    return model_.ptr();
  }
  void run_layers_by(std::int64_t segments) override {
    model_->run_layers_by(segments, [](const models::GptImpl::Part& part, const at::Tensor& x) {
      return activation_checkpoint(part, x);
    });
  }
  at::Tensor loss(const Batch& batch) override { return model_->forward(batch.ids, batch.labels); }
  bool generates() const override { return true; }
  Prompts generate(const Prompts& prompts, const GenerateOptions& how) override {
    return generated(model_, prompts, how);
  }

 private:
  std::string architecture() const override { return "GPT2LMHeadModel"; }
  models::Gpt model_{nullptr};
};

class LlamaFamily final : public Family<models::LlamaConfig> {
 public:
  using Family::Family;
  std::string task_type() const override { return "CAUSAL_LM"; }
  std::vector<std::string> lora_targets() const override { return {"q_proj", "v_proj"}; }
  std::int64_t sequence() const override { return config().sequence; }
  std::int64_t layers() const override { return config().layers; }
  std::shared_ptr<torch::nn::Module> make() override {
    model_ = models::Llama(config());
    return model_.ptr();
  }
  void run_layers_by(std::int64_t segments) override { model_->run_layers_by(segments, checkpointed); }
  // Padding follows all tokens, so causal attention does not see it.
  at::Tensor loss(const Batch& batch) override { return model_->loss(batch.ids, batch.labels); }
  bool generates() const override { return true; }
  Prompts generate(const Prompts& prompts, const GenerateOptions& how) override {
    return generated(model_, prompts, how);
  }

 private:
  std::string architecture() const override { return "LlamaForCausalLM"; }
  models::Llama model_{nullptr};
};

// The encoder with the head of the task.
template <class Model>
class BertFamily : public Family<models::BertConfig> {
 public:
  using Family::Family;
  std::vector<std::string> lora_targets() const override { return {"query", "value"}; }
  std::int64_t sequence() const override { return config().sequence; }
  std::int64_t layers() const override { return config().layers; }
  std::shared_ptr<torch::nn::Module> make() override {
    model_ = Model(config());
    return model_.ptr();
  }
  void run_layers_by(std::int64_t segments) override { model_->bert->run_layers_by(segments, checkpointed); }

 protected:
  static models::BertInput input(const Batch& batch) { return {batch.ids, batch.mask, batch.types}; }
  Model model_{nullptr};
};

class BertMaskedLm final : public BertFamily<models::BertForMaskedLM> {
 public:
  using BertFamily::BertFamily;
  std::string task_type() const override { return ""; }
  std::vector<std::string> heads() const override { return {}; }
  std::vector<std::string> unused() const override { return {"bert.pooler.*", "cls.seq_relationship.*"}; }
  at::Tensor loss(const Batch& batch) override { return model_->loss(input(batch), batch.labels); }

 private:
  std::string architecture() const override { return "BertForMaskedLM"; }
};

class BertClassifier final : public BertFamily<models::BertForSequenceClassification> {
 public:
  using BertFamily::BertFamily;
  std::string task_type() const override { return "SEQ_CLS"; }
  std::vector<std::string> heads() const override { return {"classifier"}; }
  std::vector<std::string> unused() const override { return {"cls.*", "qa_outputs.*", "bert.pooler.*"}; }
  std::vector<std::string> labels() const override { return named_classes(hf_); }
  void set_labels(const std::vector<std::string>& labels) override {
    config().labels = std::max<std::int64_t>(1, static_cast<std::int64_t>(labels.size()));
    hf_.labels = labels;
  }
  at::Tensor loss(const Batch& batch) override { return model_->loss(input(batch), batch.label); }
  Evaluated evaluate(const Batch& batch) override {
    const at::Tensor logits = model_->forward(input(batch));
    return {model_->loss_of(logits, batch.label), logits};
  }

 private:
  std::string architecture() const override { return "BertForSequenceClassification"; }
};

class BertSpans final : public BertFamily<models::BertForQuestionAnswering> {
 public:
  using BertFamily::BertFamily;
  std::string task_type() const override { return "QUESTION_ANS"; }
  std::vector<std::string> heads() const override { return {"qa_outputs"}; }
  std::vector<std::string> unused() const override { return {"cls.*", "classifier.*", "bert.pooler.*"}; }
  at::Tensor loss(const Batch& batch) override { return model_->loss(input(batch), batch.start, batch.end); }
  Evaluated evaluate(const Batch& batch) override {
    const auto logits = model_->forward(input(batch));
    return {model_->loss_of(logits, batch.start, batch.end), torch::stack({logits.first, logits.second}, 1)};
  }

 private:
  std::string architecture() const override { return "BertForQuestionAnswering"; }
};

class T5Family final : public Family<models::T5Config> {
 public:
  using Family::Family;
  std::string task_type() const override { return "SEQ_2_SEQ_LM"; }
  std::vector<std::string> lora_targets() const override { return {"q", "v"}; }
  std::int64_t sequence() const override { return 0; }
  std::int64_t layers() const override { return config().encoder_layers; }
  std::optional<std::int32_t> decoder_start() const override { return static_cast<std::int32_t>(config().start_token); }
  std::shared_ptr<torch::nn::Module> make() override {
    model_ = models::T5ForConditionalGeneration(config());
    return model_.ptr();
  }
  void run_layers_by(std::int64_t segments) override { model_->run_layers_by(segments, checkpointed); }
  at::Tensor loss(const Batch& batch) override { return model_->loss(batch.ids, batch.labels, batch.mask); }
  bool generates() const override { return true; }
  Prompts generate(const Prompts& prompts, const GenerateOptions& how) override {
    const auto rows = rows_of(prompts, /*in_front=*/false, model_->parameters().front().device());
    return columns_from(model_->generate(rows.tokens, how.count, sampling_of(how), rows.mask), 1);
  }

 private:
  std::string architecture() const override { return "T5ForConditionalGeneration"; }
  models::T5ForConditionalGeneration model_{nullptr};
};

// The sizes that libzero.model gives in place of a named shape's.
void replace_sizes(const Options& options, models::AnyConfig& any) {
  const auto& m = options.settings().model;
  const auto replace = [](std::int64_t& field, std::int64_t value) {
    if (value != 0) field = value;
  };
  const auto scaled = [&](std::int64_t& inner, std::int64_t hidden) {
    if (m.hidden != 0) inner = std::max<std::int64_t>(1, inner * m.hidden / hidden);
  };
  if (auto* const gpt = std::get_if<models::GptConfig>(&any)) {
    replace(gpt->layers, m.layers), replace(gpt->hidden, m.hidden), replace(gpt->heads, m.heads);
    replace(gpt->sequence, m.seq_length);
  } else if (auto* const llama = std::get_if<models::LlamaConfig>(&any)) {
    scaled(llama->inner, llama->hidden);
    if (m.heads != 0) llama->kv_heads = m.heads, llama->head_width = 0;
    if (m.hidden != 0) llama->head_width = 0;
    replace(llama->layers, m.layers), replace(llama->hidden, m.hidden), replace(llama->heads, m.heads);
    replace(llama->sequence, m.seq_length);
  } else if (auto* const bert = std::get_if<models::BertConfig>(&any)) {
    scaled(bert->inner, bert->hidden);
    replace(bert->layers, m.layers), replace(bert->hidden, m.hidden), replace(bert->heads, m.heads);
    replace(bert->sequence, m.seq_length);
  } else if (auto* const t5 = std::get_if<models::T5Config>(&any)) {
    scaled(t5->inner, t5->hidden);
    replace(t5->encoder_layers, m.layers), replace(t5->decoder_layers, m.layers), replace(t5->hidden, m.hidden);
    replace(t5->heads, m.heads);
    if (m.hidden != 0 || m.heads != 0) t5->head_width = t5->hidden / std::max<std::int64_t>(1, t5->heads);
  }
}

void replace_dropout(double dropout, models::AnyConfig& any) {
  if (auto* const gpt = std::get_if<models::GptConfig>(&any)) gpt->dropout = dropout;
  if (auto* const llama = std::get_if<models::LlamaConfig>(&any)) llama->attention_dropout = dropout;
  if (auto* const bert = std::get_if<models::BertConfig>(&any)) bert->dropout = bert->attention_dropout = dropout;
  if (auto* const t5 = std::get_if<models::T5Config>(&any)) t5->dropout = dropout;
}

// Which tasks a model serves, by its type.
const std::vector<std::pair<std::string, std::vector<std::string>>>& served() {
  static const std::vector<std::pair<std::string, std::vector<std::string>>> all{
      {"gpt2", {"lm", "qa"}}, {"llama", {"lm", "qa"}}, {"bert", {"mlm", "classify", "qa"}}, {"t5", {"seq2seq", "qa"}}};
  return all;
}

[[noreturn]] void refuse_task(const std::string& task, const std::string& type) {
  std::string own, others;
  for (const auto& [name, tasks] : served()) {
    if (name == type)
      for (const auto& one : tasks) own += (own.empty() ? "" : ", ") + one;
    if (std::find(tasks.begin(), tasks.end(), task) != tasks.end()) others += (others.empty() ? "" : ", ") + name;
  }
  throw ConfigError("[--task] got " + task + " for a model of the type " + type + ", expected " +
                    (own.empty() ? "another model: it has no task here" : own) + ". Hint: " + task + " is a task of " +
                    others + ".");
}

}  // namespace

std::unique_ptr<ModelFamily> ModelFamily::find(const ModelPlan& plan, const Options& options) {
  const bool named = !models::is_hf_path(plan.model);
  const auto refuse_setting = [&](const std::string& key, const std::string& why) {
    if (options.document().is_set(key))
      throw ConfigError("[" + key + "] got a value and --model " + plan.model + ", expected one of them: " + why);
  };
  refuse_setting("libzero.data.text", "records are those of --data");
  models::HfConfig hf;
  try {
    if (named) {
      const auto names = models::hf_preset_names();
      if (std::find(names.begin(), names.end(), plan.model) == names.end())
        throw ConfigError("[--model] got " + plan.model +
                          ", which is no folder here and no name that `zero models` lists, expected a folder with "
                          "config.json or such a name. Hint: nothing is downloaded; `huggingface-cli download` makes "
                          "such a folder.");
      hf = models::hf_preset(plan.model);
      for (const char* const key : {"size", "vocabulary", "tied"})
        refuse_setting(std::string("libzero.model.") + key,
                       key == std::string("vocabulary") ? "the vocabulary is the tokenizer's" : "the name says it");
      replace_sizes(options, hf.config);
    } else {
      if (!fs::is_directory(plan.model))
        throw ConfigError("[--model] got the file " + plan.model + ", expected a folder with config.json");
      hf = models::read_hf_config(plan.model);
      for (const char* const key : {"size", "layers", "hidden", "heads", "vocabulary", "tied"})
        refuse_setting(std::string("libzero.model.") + key, "the folder's config.json says what the model is");
    }
    if (options.document().is_set("libzero.model.dropout"))
      replace_dropout(options.settings().model.dropout, hf.config);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& fault) {
    throw ConfigError("[--model] " + std::string(fault.what()));
  }
  const std::string type = models::model_type(hf.config);
  const auto& all = served();
  const auto known = std::find_if(all.begin(), all.end(), [&](const auto& row) { return row.first == type; });
  if (known == all.end() || std::find(known->second.begin(), known->second.end(), plan.task) == known->second.end())
    refuse_task(plan.task, type);
  if (type == "gpt2") return std::make_unique<GptFamily>(std::move(hf), named);
  if (type == "llama") return std::make_unique<LlamaFamily>(std::move(hf), named);
  if (type == "t5") return std::make_unique<T5Family>(std::move(hf), named);
  if (plan.task == "mlm") return std::make_unique<BertMaskedLm>(std::move(hf), named);
  if (plan.task == "classify") return std::make_unique<BertClassifier>(std::move(hf), named);
  return std::make_unique<BertSpans>(std::move(hf), named);
}

data::Task data_task(const ModelPlan& plan, const ModelFamily& family) {
  if (plan.task == "mlm") return data::Task::Mlm;
  if (plan.task == "classify") return data::Task::Classify;
  if (plan.task == "seq2seq") return data::Task::Seq2Seq;
  if (plan.task == "qa")
    return family.name() == "bert" ? data::Task::Qa : family.name() == "t5" ? data::Task::Seq2Seq : data::Task::Prompt;
  const data::Records records({plan.data.front()}, {.format = data::record_format(plan.format), .required = {}});
  if (records.size() == 0) return data::Task::Lm;
  const auto first = records.at(0);
  return first.find("prompt") != nullptr && first.find("completion") != nullptr ? data::Task::Prompt : data::Task::Lm;
}

std::vector<std::string> class_names(const std::string& folder) {
  std::error_code error;
  if (folder.empty() || !fs::exists(fs::path(folder) / "config.json", error)) return {};
  return named_classes(models::read_hf_config(folder));
}

std::string layer_name(const ModelFamily& family, const std::string& path) {
  if (family.name_map().empty()) return path;
  const std::string weight = ".weight";
  const auto map =
      interchange::NameMap::parse(interchange::NameMap::builtin_text(family.name_map()), family.name_map());
  const auto mapped = interchange::map_names(map, interchange::Direction::ToTheirs,
                                             {{"master", path + weight, "F32", {1, 1}}}, {}, "the model");
  const auto& name = mapped.tensors.at(0).name;
  return name.ends_with(weight) ? name.substr(0, name.size() - weight.size()) : name;
}

Batch batch_of(const std::vector<data::Sample>& samples, data::Task task, c10::Device device) {
  // Padding that all samples have is left out.
  std::size_t tokens = 1, outputs = 1;
  for (const auto& sample : samples) {
    tokens = std::max(tokens, static_cast<std::size_t>(std::count(sample.mask.begin(), sample.mask.end(), 1)));
    for (std::size_t i = 0; i < sample.decoder_ids.size() && i < sample.labels.size(); ++i)
      if (sample.labels[i] != data::kIgnored) outputs = std::max(outputs, i + 1);
  }
  const auto rows = static_cast<std::int64_t>(samples.size());
  const auto matrix = [&](const auto& field, std::size_t columns) {
    at::Tensor all = torch::empty({rows, static_cast<std::int64_t>(columns)}, torch::kLong);
    auto* out = all.mutable_data_ptr<std::int64_t>();
    for (const auto& sample : samples) out = std::copy_n(field(sample).begin(), columns, out);
    return all.to(device);
  };
  const auto vector = [&](const auto& field) {
    at::Tensor all = torch::empty({rows}, torch::kLong);
    std::transform(samples.begin(), samples.end(), all.mutable_data_ptr<std::int64_t>(), field);
    return all.to(device);
  };
  using data::Sample;
  Batch batch;
  batch.ids = matrix(
      [](const Sample& s) -> auto& { return s.ids; }, tokens);
  batch.mask = matrix(
      [](const Sample& s) -> auto& { return s.mask; }, tokens);
  if (task == data::Task::Classify || task == data::Task::Qa || task == data::Task::Mlm)
    batch.types = matrix(
        [](const Sample& s) -> auto& { return s.types; }, tokens);
  if (task == data::Task::Classify) batch.label = vector([](const Sample& s) { return std::int64_t{s.label}; });
  if (task == data::Task::Qa) {
    batch.start = vector([](const Sample& s) { return std::int64_t{s.start}; });
    batch.end = vector([](const Sample& s) { return std::int64_t{s.end}; });
  }
  if (task == data::Task::Classify || task == data::Task::Qa) {
    batch.targets = rows;
    return batch;
  }
  batch.labels = matrix(
      [](const Sample& s) -> auto& { return s.labels; }, task == data::Task::Seq2Seq ? outputs : tokens);
  for (const auto& sample : samples)
    batch.targets += std::count_if(sample.labels.begin(), sample.labels.end(),
                                   [](std::int32_t label) { return label != data::kIgnored; });
  return batch;
}

}  // namespace zero::cli
