// The models that `zero train --model` knows: which tasks each serves, and its losses and scores on a batch.
#pragma once
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <zero/options.h>

#include "apps/data/examples.h"
#include "apps/finetune/model_plan.h"

namespace zero::cli {

// Samples as tensors on the model's device; undefined where the task has no such thing. apps/data/examples.h describes
// them.
struct Batch {
  at::Tensor ids, labels, mask, types;  // int64 [batch, time]
  at::Tensor label, start, end;         // int64 [batch]
  std::int64_t targets = 0;             // that count in the loss
};
Batch batch_of(const std::vector<data::Sample>& samples, data::Task task, c10::Device device);

struct Evaluated {
  at::Tensor loss;    // as ModelFamily::loss
  at::Tensor scores;  // classification: [batch, labels]; spans: [batch, 2, time], of the first and of the last token
};

using Prompts = std::vector<std::vector<std::int32_t>>;  // tokens, of any lengths

struct GenerateOptions {
  std::int64_t count = 0;  // most tokens of an answer
  GeneratePlan how;
  std::uint64_t seed = 1;
  std::vector<std::int64_t> ends;  // tokens of which any ends a text
  bool all_forwards = false;       // continue after all texts have ended, as ranks must that gather parameters
};

// A model's shape, and after make() the model.
class ModelFamily {
 public:
  virtual ~ModelFamily() = default;

  // Of a folder's config.json, or of a name; `options`: libzero.model, which replaces sizes of a named shape. Throws
  // ConfigError for models that are not built, and for tasks that the model does not serve.
  static std::unique_ptr<ModelFamily> find(const ModelPlan& plan, const Options& options);

  virtual std::string name() const = 0;       // "llama"
  virtual std::string name_map() const = 0;   // from and to the names of files; empty: they are the same
  virtual std::string task_type() const = 0;  // PEFT's
  virtual std::vector<std::string> lora_targets() const = 0;     // PEFT's defaults
  virtual std::vector<std::string> heads() const { return {}; }  // modules that pretrained weights lack: "classifier"
  virtual std::vector<std::string> unused() const {
    return {};
  }                                                  // patterns of tensors in files that this task leaves out
  virtual bool transposed() const { return false; }  // files store linear layers as [in, out]
  virtual std::int64_t sequence() const = 0;         // longest sample; 0: any
  virtual std::int64_t vocabulary() const = 0;
  virtual std::int64_t layers() const = 0;
  virtual std::optional<std::int32_t> decoder_start() const { return std::nullopt; }
  virtual std::vector<std::pair<std::string, std::string>> rows() const = 0;
  virtual std::string config_json() const = 0;

  // Only shapes of a name take its vocabulary and special tokens.
  virtual void set_tokenizer(const data::Tokenizer& tokenizer) = 0;
  // Tokens of a folder's configuration of which any ends a text.
  virtual std::vector<std::int64_t> ends() const = 0;
  // Keys of a folder's configuration that are not read.
  virtual std::vector<std::string> unknown() const = 0;
  // Names of classes, if the configuration has some; and those of the data.
  virtual std::vector<std::string> labels() const { return {}; }
  virtual void set_labels(const std::vector<std::string>& /*labels*/) {}

  // The model; called in zero::build.
  virtual std::shared_ptr<torch::nn::Module> make() = 0;
  // As models/layers.h.
  virtual void run_layers_by(std::int64_t segments) = 0;
  // Mean over the batch's targets, in nats; a scalar in fp32.
  virtual at::Tensor loss(const Batch& batch) = 0;
  // The loss, and of the same forward what classes and spans are chosen by; undefined for other tasks.
  virtual Evaluated evaluate(const Batch& batch) { return {loss(batch), {}}; }
  // Whether there is generate(), which returns what follows each prompt.
  virtual bool generates() const { return false; }
  virtual Prompts generate(const Prompts& /*prompts*/, const GenerateOptions& /*options*/) { return {}; }
};

// What the records are to the model. Throws ConfigError, and std::runtime_error for files that cannot be read.
data::Task data_task(const ModelPlan& plan, const ModelFamily& family);
// Names of classes in a folder's config.json; empty: none, or no such file.
std::vector<std::string> class_names(const std::string& folder);
// The name of a layer in files: "transformer.h.0.attn.c_attn" of "blocks.0.qkv".
std::string layer_name(const ModelFamily& family, const std::string& path);

}  // namespace zero::cli
