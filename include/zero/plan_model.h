// A model as the planner sees it: its shape, and what one forward and backward of it allocates and reads. Plans are in
// zero/plan.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {

// The micro-batch of one forward and backward.
struct PlanBatch {
  std::int64_t samples = 1;   // of PlanModel::sequence tokens
  std::int64_t segments = 0;  // checkpointed segments of layers; 0: no activation checkpointing
  std::int64_t element = 4;   // bytes of an activation
  bool gpu = true;
  // On a mesh, of what this rank computes: tokens of a sample, and the fractions of attention heads, of the MLP's inner
  // width and of the vocabulary. gathered_logits: it still has whole logits.
  std::int64_t tokens = 0;  // 0: all
  double heads = 1, inner = 1, vocabulary = 1;
  bool gathered_logits = true;
  std::vector<bool> fp32{};  // of each parameter: it stays fp32 (libzero.keep_fp32); empty: none does
};

// Receives the events of one forward and backward in their order: what a model allocates, releases and reads. Tensors
// are numbered from 0 on, a new number for each; parameters are numbered in the order of registration. All functions
// throw ConfigError for an invalid number.
class PlanPass {
 public:
  virtual ~PlanPass() = default;
  virtual void allocate(std::int64_t tensor, std::int64_t bytes) = 0;
  virtual void release(std::int64_t tensor) = 0;
  // An operator reads the parameters first .. first + count - 1.
  virtual void use(std::size_t first, std::size_t count) = 0;
  // The first run of a checkpointed segment. Its input is kept for the second run, on the tier that the configuration
  // chooses.
  virtual void begin_segment(std::int64_t input) = 0;
  virtual void end_segment() = 0;
  // The second run of the last remaining segment begins; its input is back, as that tensor.
  virtual void rerun_segment(std::int64_t input) = 0;
  virtual void begin_backward() = 0;
  // Autograd has accumulated a parameter's gradient.
  virtual void gradient(std::size_t parameter, std::int64_t tensor) = 0;
  virtual void end_backward() = 0;
};

// Experts (zero/moe.h) in place of the MLP of every interval-th layer of a GPT.
struct PlanExperts {
  std::int64_t count = 0;  // of a layer; 0: none
  std::int64_t interval = 2, k = 1;
  int ep_size = 1;  // ranks that share the experts of a layer
  double capacity_factor = 1;
  std::int64_t min_capacity = 4;
  bool drop_tokens = true, residual = false;
};

// The shape of a model. Parameter counts are exact for named models and for shapes, with biases and norms.
struct ZERO_API PlanModel {
  // Gpt: GPT-2's block with learned positions. Count: a number of parameters only; units and activations are those of a
  // GPT of about that size.
  enum class Kind { Gpt, Bert, T5, Llama, Count };
  Kind kind = Kind::Gpt;
  std::string name;  // may be empty
  std::int64_t layers = 0, hidden = 0, heads = 0, sequence = 1024, vocabulary = 50257;
  bool tied = true;             // the output layer shares the token embedding
  std::int64_t kv_heads = 0;    // Llama: number of key and value heads
  std::int64_t inner = 0;       // width of the MLP; 0: 4 * hidden
  std::int64_t head_width = 0;  // T5: 0: hidden / heads
  std::int64_t count = 0;       // Kind::Count: number of parameters
  PlanExperts experts = {};     // Gpt
  // Describes the model's forward and backward, as models/gpt_pass.h does for the GPT of `zero train`. Without it,
  // units run one after the other and activations are estimated (docs/planner.md).
  std::function<void(const PlanModel&, const PlanBatch&, PlanPass&)> pass = nullptr;

  // "gpt2", "gpt2-medium", ..., "gpt3-175b", "bert-base", "t5-11b", "llama-3-70b", ...; ignores case, '_' and ' '.
  // Throws ConfigError with the most similar name.
  static PlanModel named(std::string_view name);
  static std::vector<std::string> names();
  // 1e5 to 1e15 parameters. Throws ConfigError.
  static PlanModel of_count(double parameters);
  // The block `model` of a configuration, read as by `zero train`; the default is gpt-1m. Throws ConfigError.
  static PlanModel of_options(const Options& options);

  std::int64_t num_parameters() const;
  // Those that one token is computed with: `experts.k` experts of a layer.
  std::int64_t num_active_parameters() const;
  std::int64_t mlp_width() const { return inner > 0 ? inner : 4 * hidden; }
  // Throws ConfigError that names the invalid field.
  void validate() const;
};

}  // namespace zero
