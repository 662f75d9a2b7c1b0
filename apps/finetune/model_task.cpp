// See model_task.h. Evaluation and samples are in model_scores.cpp.
#include "apps/finetune/model_task.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <utility>

#include "apps/finetune/lora_files.h"
#include "base/printable.h"
#include "config/document.h"
#include "config/settings.h"
#include "interchange/names.h"
#include "models/hf_config.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_segments.h"

namespace zero::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kUsualSequence = 512;  // of models that take more, unless it is given
constexpr const char* kBytes = "bytes";       // --tokenizer
constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "vocab.txt",
                                           "spiece.model",
                                           "tokenizer.model",
                                           "chat_template.jinja"};

constexpr const char* kWeightFiles[] = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                                        "pytorch_model.bin.index.json"};

bool has_weights(const std::string& folder) {
  std::error_code error;
  return std::any_of(std::begin(kWeightFiles), std::end(kWeightFiles),
                     [&](const char* name) { return fs::exists(fs::path(folder) / name, error); });
}

std::string joined(const std::vector<std::string>& words, const char* between = ", ") {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

bool names_layer(const std::string& target, const std::string& layer) {
  return layer == target || layer.ends_with("." + target);
}

}  // namespace

ModelTask::ModelTask(TrainPlan& plan) : plan_(plan), model_plan_(*plan.model_plan), lora_plan_(model_plan_.lora) {
  const auto& mesh = plan.options.settings().mesh;
  if (mesh.tensor > 1 || mesh.sequence > 1 || plan.options.settings().model.experts.num_experts > 0)
    throw ConfigError(
        "[--model] got tensor or sequence parallelism or experts, expected none: they are cut for the built-in GPT "
        "alone. Hint: choose a ZeRO stage, which shards every model.");
  if (std::error_code error;
      fs::exists(fs::path(model_plan_.model) / kAdapterConfig, error) && !has_weights(model_plan_.model))
    throw ConfigError("[--model] got adapters (" + model_plan_.model + "/" + kAdapterConfig +
                      "), expected a whole model. Hint: --model with their base, and --lora-from " + model_plan_.model +
                      ".");
  family_ = ModelFamily::find(model_plan_, plan.options);
  if (model_plan_.generate && !family_->generates())
    throw ConfigError("[--generate] got a value, but " + family_->name() +
                      " does not generate text. Hint: leave it out, or choose a gpt2, llama or t5.");
  read_tokenizer();
  read_data();
  read_weights(plan);
  read_adapters();
  read_prompts();
  if (!model_plan_.predictions.empty()) require_ids();
  segments_ = segments_of(plan.options, family_->layers());
}

void ModelTask::read_tokenizer() {
  if (model_plan_.tokenizer != kBytes) tokenizer_folder_ = model_plan_.tokenizer;
  if (model_plan_.tokenizer.empty() && models::is_hf_path(model_plan_.model)) {
    std::error_code error;
    tokenizer_folder_ = model_plan_.model;
    if (std::none_of(std::begin(kTokenizerFiles), std::end(kTokenizerFiles),
                     [&](const char* name) { return fs::exists(fs::path(model_plan_.model) / name, error); }))
      throw ConfigError(
          "[--model] got " + model_plan_.model +
          " without a tokenizer's files, expected tokenizer.json, vocab.json with merges.txt, vocab.txt or "
          "spiece.model in it. Hint: --tokenizer DIR with the tokenizer that the model was made for, or "
          "--tokenizer bytes if its tokens are bytes.");
  }
  try {
    tokenizer_ = tokenizer_folder_.empty() ? data::byte_tokenizer() : data::load_tokenizer(tokenizer_folder_);
  } catch (const std::exception& fault) {
    throw ConfigError("[--tokenizer] " + std::string(fault.what()));
  }
  const auto ends = family_->ends();
  const auto& special = tokenizer_->special();
  if (!tokenizer_folder_.empty() && !ends.empty() && (special.end || special.separator))
    if (const auto end = data::end_token(*tokenizer_); std::find(ends.begin(), ends.end(), end) == ends.end())
      warnings_.push_back("texts end with the tokenizer's token " + std::to_string(end) + ", but " + model_plan_.model +
                          "/config.json has eos_token_id " + std::to_string(ends.front()) + ", which exports keep");
  family_->set_tokenizer(*tokenizer_);
  if (family_->vocabulary() < tokenizer_->vocabulary())
    throw ConfigError("[--tokenizer] got " + std::to_string(tokenizer_->vocabulary()) + " tokens (" +
                      tokenizer_->description() + "), expected at most the " + std::to_string(family_->vocabulary()) +
                      " of the model's vocabulary (" + model_plan_.model +
                      "). Hint: --tokenizer DIR with the tokenizer that the model was made for.");
}

void ModelTask::read_data() {
  const auto& settings = plan_.options.settings();
  const auto& document = plan_.options.document();
  data::ExampleOptions options;
  options.files = model_plan_.data;
  options.heldout_files = model_plan_.eval_data;
  options.format = data::record_format(model_plan_.format);
  options.holdout = model_plan_.eval_data.empty() ? settings.data.holdout : 0;
  options.seed = settings.seed;
  options.decoder_start = family_->decoder_start();
  options.cache = model_plan_.token_cache;
  std::int64_t wanted = settings.model.seq_length;
  const std::int64_t most = family_->sequence();
  if (wanted == 0) wanted = most > 0 ? std::min(most, kUsualSequence) : kUsualSequence;
  if (most > 0 && wanted > most)
    throw ConfigError("[--seq-length] got " + std::to_string(wanted) + " (" +
                      document.find("libzero.model.seq_length")->source + "), expected at most the " +
                      std::to_string(most) + " positions of " + model_plan_.model +
                      ". Hint: a longer text becomes several samples.");
  options.sequence = wanted;
  try {
    options.task = data_task(model_plan_, *family_);
    if (!options.cache.empty() && options.task != data::Task::Lm && options.task != data::Task::Mlm)
      throw ConfigError(
          "[--token-cache] got records that are samples of their own, expected packed text (--task lm or "
          "mlm on \"text\"). Hint: leave it out.");
    if (options.task == data::Task::Prompt)
      options.answer_tokens = std::clamp<std::int64_t>(wanted / 4, 1, options.answer_tokens);
    options.labels = family_->labels();
    if (lora_plan_ && options.task == data::Task::Classify)
      if (const auto names = class_names(lora_plan_->from); !names.empty()) options.labels = names;
    examples_ = std::make_unique<data::Examples>(options, tokenizer_);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& fault) {
    throw ConfigError("[--data] " + std::string(fault.what()));
  }
  family_->set_labels(examples_->labels());
}

// Weights of the model's folder come before the first step, unless others are asked for.
void ModelTask::read_weights(TrainPlan& plan) {
  std::error_code error;
  if (plan.init_from.empty() && fs::is_directory(model_plan_.model, error) && has_weights(model_plan_.model)) {
    plan.init_from = model_plan_.model;
    plan.init.names = family_->name_map();
    for (const auto& head : family_->heads()) plan.init.partial.push_back(head + ".*");
    for (const auto& pattern : family_->unused()) plan.init.partial.push_back(pattern);
  }
  if (lora_plan_ && !lora_plan_->merge && plan.init_from.empty() && !plan.export_to.empty())
    throw ConfigError("[--export] got adapters on the random weights of --model " + model_plan_.model +
                      ", expected weights that others have, too. Hint: --merge-lora exports whole weights; or "
                      "--init-from SRC, or a folder with weights, to begin with.");
  if (plan.init_from.empty() && plan.resume.empty() && fs::is_directory(model_plan_.model, error))
    warnings_.push_back(model_plan_.model + " has no weights (" +
                        joined({std::begin(kWeightFiles), std::end(kWeightFiles)}) +
                        "): the run begins with random ones");
  if (lora_plan_ && !lora_plan_->merge && plan.load.weights_only && !plan.export_to.empty())
    throw ConfigError(
        "[--export] got adapters on the weights of a checkpoint (--resume with --weights-only), expected weights that "
        "others can load. Hint: --merge-lora exports whole weights; or `zero checkpoint export`, and that folder as "
        "--init-from.");
  if (lora_plan_) {  // the base may have been saved or exported without adapters
    plan.added = {"*.lora_A.weight", "*.lora_B.weight"};
    plan.init.partial.insert(plan.init.partial.end(), plan.added.begin(), plan.added.end());
  }
  if (!plan.export_to.empty() && plan.exported.names.empty()) plan.exported.names = family_->name_map();
}

void ModelTask::read_adapters() {
  if (!lora_plan_) return;
  if (!lora_plan_->from.empty()) read_adapter_config(*lora_plan_);
  if (lora_plan_->targets.empty()) lora_plan_->targets = family_->lora_targets();
}

void ModelTask::read_prompts() {
  if (model_plan_.prompts.empty()) return;
  if (!family_->generates())
    throw ConfigError("[--prompt] got a text, but " + family_->name() +
                      " does not generate text. Hint: leave it out, or choose a gpt2, llama or t5.");
  if (plan_.sample == 0)
    throw ConfigError("[--prompt] got --sample 0, expected how many tokens follow. Hint: leave --sample out.");
  const std::int64_t most = family_->sequence();
  for (const auto& text : model_plan_.prompts) {
    const auto shown = "\"" + base::printable(text.substr(0, 40)) + (text.size() > 40 ? "...\"" : "\"");
    prompts_.push_back(examples_->prompt_of(text));
    const auto tokens = static_cast<std::int64_t>(prompts_.back().size());
    if (tokens == 0) throw ConfigError("[--prompt] got " + shown + " without a token, expected a text");
    if (most > 0 && tokens >= most)
      throw ConfigError("[--prompt] got " + std::to_string(tokens) + " tokens (" + shown +
                        "), expected fewer than the " + std::to_string(most) + " positions of " + model_plan_.model);
    if (most > 0 && tokens + plan_.sample > most)
      warnings_.push_back("--prompt " + shown + " leaves room for " + std::to_string(most - tokens) + " of the " +
                          std::to_string(plan_.sample) + " tokens of --sample: the model has " + std::to_string(most) +
                          " positions");
  }
}

// The file of answers names questions by their ids.
void ModelTask::require_ids() const {
  std::set<std::string> seen;
  for (std::int64_t i = 0; i < examples_->heldout_records(); ++i)
    if (const auto id = answer_id(i); !seen.insert(id).second)
      throw ConfigError("[--predictions] got the id " + id + " twice in the held-out part (" +
                        examples_->heldout_record(i).where + "), expected each once");
}

std::string ModelTask::answer_id(std::int64_t record) const {
  const auto entry = examples_->heldout_record(record);
  const auto* const id = entry.find("id");
  return id != nullptr ? *id : "#" + std::to_string(record);
}

Options ModelTask::fit(const Options& options, int /*world*/) { return options; }

bool ModelTask::is_target(const std::string& path) const {
  const auto theirs = layer_name(*family_, path);
  return std::any_of(lora_plan_->targets.begin(), lora_plan_->targets.end(),
                     [&](const std::string& target) { return names_layer(target, theirs); });
}

// Every target is to have a layer: a misspelt one among others would train less than was asked for.
void ModelTask::require_layers() const {
  std::vector<std::string> none;
  for (const auto& target : lora_plan_->targets)
    if (std::none_of(lora_->layers().begin(), lora_->layers().end(),
                     [&](const std::string& path) { return names_layer(target, layer_name(*family_, path)); }))
      none.push_back(target);
  if (!none.empty())
    throw ConfigError("[--lora] got targets without a linear layer: " + joined(none, "+") +
                      ", expected the ends of names of linear layers in Hugging Face's model, such as " +
                      joined(family_->lora_targets(), "+"));
}

bool ModelTask::stays_whole(const std::string& parameter) const {
  const auto heads = family_->heads();
  return std::any_of(heads.begin(), heads.end(),
                     [&](const std::string& head) { return parameter.starts_with(head + "."); });
}

std::shared_ptr<torch::nn::Module> ModelTask::build(c10::Device device) {
  module_ = zero::build(
      [&] {
        auto module = family_->make();
        if (!lora_plan_) return module;
        try {
          lora_.emplace(
              *module,
              models::LoraOptions{.rank = lora_plan_->rank, .alpha = lora_plan_->alpha, .dropout = lora_plan_->dropout},
              [&](const std::string& path) { return is_target(path); },
              [&](const std::string& name) { return stays_whole(name); });
        } catch (const std::invalid_argument& fault) {
          throw ConfigError(std::string("[--lora] ") + fault.what() + ": targets=" + joined(lora_plan_->targets, "+") +
                            ". Hint: the ends of names of linear layers in Hugging Face's model, such as " +
                            joined(family_->lora_targets(), "+") + ".");
        }
        require_layers();
        return module;
      },
      device);
  std::set<const c10::TensorImpl*> counted;
  for (const auto& parameter : module_->parameters()) {
    if (!counted.insert(parameter.unsafeGetTensorImpl()).second) continue;  // tied to one before
    parameters_ += parameter.numel();
    if (parameter.requires_grad()) trained_ += parameter.numel();
  }
  if (segments_ > 0) family_->run_layers_by(segments_);
  return module_;
}

void ModelTask::begin(Engine& engine) {
  engine_ = &engine;
  device_ = module_->parameters().front().device();
  reader_.emplace(*examples_, engine.mesh().rank("dp"), engine.mesh().size("dp"));
}

// What is frozen and in no file would be in no export either.
void ModelTask::took(const ImportReport& report) {
  if (!lora_plan_ || lora_plan_->merge || plan_.export_to.empty()) return;
  std::vector<std::string> lost;
  for (const auto& name : report.missing)
    if (!models::Lora::is_factor(name) && !stays_whole(name)) lost.push_back(name);
  if (!lost.empty())
    throw ConfigError("[--export] got adapters on weights that " + plan_.init_from + " does not have: " + joined(lost) +
                      ", expected all that are not trained. Hint: --merge-lora exports whole weights.");
}

std::vector<std::string> ModelTask::take_initial_weights() {
  std::vector<std::string> lines;
  if (plan_.init_from.empty()) lines.push_back("began with random weights");
  if (!lora_plan_ || lora_plan_->from.empty()) return lines;
  ImportOptions options;
  options.names = family_->name_map();
  options.prefix = kAdapterPrefix;
  options.only = adapter_parameters();
  const auto file = (fs::path(lora_plan_->from) / kAdapterWeights).string();
  const auto report = engine_->load_weights(file, options);
  lines.push_back("began with " + std::to_string(report.taken.size()) + " tensors of adapters in " + lora_plan_->from);
  return lines;
}

TaskFacts ModelTask::facts() const {
  TaskFacts facts;
  std::string rows;
  for (const auto& [name, value] : family_->rows()) rows += (rows.empty() ? "" : ", ") + name + " " + value;
  facts.model.push_back("model " + model_plan_.model + " (" + family_->name() +
                        "): " + report::human_count(static_cast<double>(parameters_)) + " parameters, " + rows);
  if (lora_)
    facts.model.push_back("adapters of rank " + std::to_string(lora_plan_->rank) + " on " +
                          std::to_string(lora_->layers().size()) + " layers (" + joined(lora_plan_->targets) +
                          "): " + report::human_count(static_cast<double>(trained_)) + " parameters are trained");
  if (const auto unknown = family_->unknown(); !unknown.empty())
    facts.warnings.push_back(model_plan_.model +
                             "/config.json has keys that are of no effect here: " + joined(unknown));
  const auto names = models::hf_preset_names();
  if (models::is_hf_path(model_plan_.model) && std::find(names.begin(), names.end(), model_plan_.model) != names.end())
    facts.warnings.push_back("--model " + model_plan_.model +
                             " is the folder here, not the shape of that name. Hint: run elsewhere for the shape.");
  for (const auto& warning : warnings_) facts.warnings.push_back(warning);
  facts.data_name = joined(model_plan_.data);
  facts.data = "data " + facts.data_name + ", task " + model_plan_.task + ": " +
               std::to_string(examples_->training_samples()) + " samples of " +
               std::to_string(examples_->options().sequence) + " tokens, " +
               std::to_string(examples_->heldout_samples()) + " held out, " + tokenizer_->description();
  if (segments_ > 0)
    facts.memory.push_back("activation checkpointing: " + std::to_string(segments_) + " segments of " +
                           std::to_string(family_->layers()) + " layers run again in backward");
  facts.parameters = facts.own_parameters = parameters_;
  facts.tokens_per_sample = examples_->options().sequence + examples_->options().target_sequence;
  facts.rows = {{"model", model_plan_.model},
                {"task", model_plan_.task},
                {"parameters", std::to_string(parameters_)},
                {"trained parameters", std::to_string(trained_)}};
  for (const auto& row : family_->rows()) facts.rows.push_back(row);
  if (lora_) facts.rows.emplace_back("rank of adapters", std::to_string(lora_plan_->rank));
  const bool tokens = model_plan_.task != "classify" && examples_->options().task != data::Task::Qa;
  facts.loss_unit = tokens ? "nats per token" : "nats per sample";
  return facts;
}

void ModelTask::next(std::int64_t samples) {
  // Depends only on the data position, so that a resumed run draws the same numbers.
  torch::manual_seed(plan_.options.settings().seed * 1000003 + static_cast<std::uint64_t>(position()) * 1009 +
                     static_cast<std::uint64_t>(engine_->mesh().rank("dp")));
  batch_ = batch_of(reader_->next(samples), examples_->options().task, device_);
  sums_.tokens += batch_.ids.numel() + (examples_->options().task == data::Task::Seq2Seq ? batch_.labels.numel() : 0);
}

void ModelTask::forward() { loss_ = family_->loss(batch_); }

// Ranks and micro-batches differ in the number of targets: the gradient is that of the mean over all.
void ModelTask::backward() {
  const auto targets = static_cast<double>(batch_.targets);
  engine_->backward(loss_ * targets, {.tokens = batch_.targets});
  sums_.loss += loss_.item<double>() * targets;
  sums_.weight += batch_.targets;
  loss_.reset();
  batch_ = {};
}

TaskLosses ModelTask::take_losses() {
  TaskLosses sums = std::exchange(sums_, {});
  if (sums.weight > 0) sums.loss /= static_cast<double>(sums.weight);
  return sums;
}

std::vector<std::string> ModelTask::adapter_parameters() const {
  std::vector<std::string> names = lora_->parameters();
  for (const auto& item : module_->named_parameters())
    if (stays_whole(item.key()) && !models::Lora::is_factor(item.key())) names.push_back(item.key());
  return names;
}

// In fp32, of the factors' masters, also where the model computes in 16 bits.
void ModelTask::merge_adapters(ExportOptions& options) {
  const auto master = [&](const std::string& name) { return engine_->parameter_state(name).cpu().contiguous(); };
  for (const auto& path : lora_->layers())
    options.change[path + ".weight"] = [a = master(path + ".lora_A.weight"), b = master(path + ".lora_B.weight"),
                                        scale = lora_->options().scale()](std::int64_t begin, std::span<float> values) {
      models::Lora::add_change(a, b, scale, begin, values);
    };
}

ExportReport ModelTask::export_weights(const std::string& folder, const ExportOptions& given) {
  ExportOptions options = given;
  for (const char* const name : kTokenizerFiles) {
    std::ifstream in(fs::path(tokenizer_folder_) / name, std::ios::binary);
    if (!tokenizer_folder_.empty() && in)
      options.extra_files.emplace_back(name, std::string(std::istreambuf_iterator<char>(in), {}));
  }
  if (lora_ && !lora_plan_->merge) {
    AdapterFacts facts{.base_model = plan_.init_from,
                       .task_type = family_->task_type(),
                       .targets = lora_plan_->targets,
                       .whole = family_->heads(),
                       .transposed = family_->transposed()};
    options.only = adapter_parameters();
    options.prefix = kAdapterPrefix + options.prefix;
    options.stem = "adapter_model";
    options.extra_files.emplace_back(kAdapterConfig, adapter_config(*lora_plan_, facts));
    // The classes' names, which neither PEFT's files nor the base has.
    if (model_plan_.task == "classify") options.extra_files.emplace_back("config.json", family_->config_json());
    return engine_->export_weights(folder, options);
  }
  if (lora_) {
    merge_adapters(options);
    for (const auto& item : module_->named_parameters())
      if (!models::Lora::is_factor(item.key())) options.only.push_back(item.key());
    for (const auto& item : module_->named_buffers()) options.only.push_back(item.key());
  }
  options.extra_files.emplace_back("config.json", family_->config_json());
  return engine_->export_weights(folder, options);
}

}  // namespace zero::cli
