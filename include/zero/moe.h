// A layer with a mixture of experts (GShard, arXiv:2006.16668; Switch Transformer, arXiv:2101.03961), with the words
// and defaults of DeepSpeed's MoE (arXiv:2201.05596). Not part of zero.h: it needs torch's modules.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <zero/communicator.h>
#include <zero/export.h>

namespace zero {

struct ZERO_API MoeOptions {
  std::int64_t hidden_size = 0;  // width of tokens, [.., hidden_size]
  std::int64_t num_experts = 1;
  int ep_size = 1;  // expert-parallel ranks: each has num_experts / ep_size of the experts
  int k = 1;        // experts of a token
  // An expert takes at most max(ceil(tokens / num_experts * factor * k), min_capacity) of a rank's tokens.
  double capacity_factor = 1.0, eval_capacity_factor = 1.0;
  std::int64_t min_capacity = 4;
  bool use_residual = false;      // adds a dense expert: softmax(coefficient(x)) weighs the two (PR-MoE)
  std::string noisy_gate_policy;  // "" or "None"; "Jitter": noise on the gate's inputs; "RSample" (k = 1): on logits
  bool drop_tokens = true;        // false: every expert takes all its tokens
  bool use_rts = true;            // k = 1: random tokens are dropped in training, not the last ones
  bool top2_2nd_expert_sampling = true;  // k = 2: the second expert is drawn
  std::string drop_policy = "probs";     // k > 2: an expert keeps its likeliest tokens; "position": the first ones
  bool merged_batches = false;           // one call of an expert for the tokens of all ranks, see MoEImpl::forward()

  // ConfigError that lists all invalid options.
  void check() const;
};

// The rule of a layer, for modules that are no MoE. gate: [num_experts, hidden_size]. options: valid ones (check()).
// group: of ep_size ranks; null: one. run(c, rows): the output of expert c, one of this rank's, for rows [rows,
// hidden_size]; called for each of them in order, ep_size times, or once with merged_batches. x, used_token and the
// first three results: as MoEImpl::forward().
struct MoeOutput {
  at::Tensor output, l_aux, exp_counts;
  std::int64_t kept = 0;  // rows: choices that were not dropped
};
ZERO_API MoeOutput mix_experts(const at::Tensor& x, const at::Tensor& gate, const MoeOptions& options, bool training,
                               const std::shared_ptr<Communicator>& group,
                               const std::function<at::Tensor(std::int64_t c, const at::Tensor& rows)>& run,
                               const at::Tensor& used_token = {});
// Of use_residual: the outputs of the experts and of the dense one, [.., hidden_size], weighed by the softmax of
// coefficients [.., 2].
ZERO_API at::Tensor mix_residual(const at::Tensor& experts, const at::Tensor& dense, const at::Tensor& coefficients);

// What an Engine needs to know of a layer whose experts are divided over ranks. The parameters of expert c are those of
// the child module "experts.C", under the same name on every rank.
struct ZERO_API ExpertLayer {
  virtual ~ExpertLayer() = default;
  virtual std::int64_t num_experts() const = 0;
  virtual int ep_size() const = 0;
  // [local] The ranks that share the experts, by place; null: no longer. Rank p has the experts
  // [p * num_experts / ep_size, (p + 1) * num_experts / ep_size).
  virtual void bind(std::shared_ptr<Communicator> expert_group) = 0;
};

// Layers in a row as an expert, with the names that they have in `layers`, whose modules it shares.
// torch::nn::AnyModule itself takes no torch::nn::Sequential.
ZERO_API torch::nn::AnyModule expert_of(const torch::nn::Sequential& layers);

// An expert is a module with forward(Tensor [rows, hidden_size]) -> Tensor of the same shape, which computes every row
// for itself and takes 0 rows. Parameters: gate.wg.weight [num_experts, hidden_size]; experts.C.* with C from 0 to
// num_experts - 1; with use_residual mlp.*, a further expert, and coefficient.{weight [2, hidden_size], bias [2]}.
//
// All experts are registered on every rank. With ep_size > 1 an Engine keeps those of this rank, and releases the
// others: reading one of them throws ConfigError that names the ranks that have it. Without an Engine, and with
// ep_size 1, this is a plain module.
class ZERO_API MoEImpl : public torch::nn::Module, public ExpertLayer {
 public:
  // num_experts copies of `expert`, with equal initial values as in DeepSpeed. `expert` itself is no part of the layer,
  // and may be the original of several. ConfigError that lists all invalid options. Copying reads the expert's values;
  // under zero::build, where they would have to be allocated, use the second form.
  MoEImpl(MoeOptions options, torch::nn::AnyModule expert);
  MoEImpl(MoeOptions options, const torch::nn::Sequential& expert) : MoEImpl(std::move(options), expert_of(expert)) {}
  // make(c) makes expert c, with initial values of its own; make(num_experts) the dense one of use_residual.
  MoEImpl(MoeOptions options, const std::function<torch::nn::AnyModule(std::int64_t)>& make);

  // x: [.., hidden_size], fp32, bf16 or fp16. used_token: of x's shape without the last dimension, or [tokens]; 0 for
  // tokens that take no part (padding). Returns
  // - the output, of x's shape and dtype: for each token the sum of its experts' outputs, weighed by the gate. 0 for a
  //   token that every expert dropped.
  // - the auxiliary loss, a scalar in fp32, which is smallest when experts are used equally. Add a multiple of it
  //   (0.01) to the loss.
  // - how many tokens chose each expert, before any were dropped: int64 [num_experts].
  // The gate computes in fp32. Draws, in training only, come from torch's default generator. With ep_size 1
  // gradients can be differentiated again (create_graph).
  //
  // With ep_size > 1, [collective] over the expert-parallel ranks, in forward and in backward: two all-to-alls each,
  // which move only the rows of tokens that were kept, and in forward one of their numbers. The ranks may have
  // different numbers of tokens, and none. ConfigError before an Engine has taken the module.
  //
  // Output, auxiliary loss, counts, and gradients of x and of the gate have the same bits for every ep_size: an expert
  // runs once for the tokens of each rank. merged_batches runs it once for all, which is faster if there are few of
  // them.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& used_token = {});

  std::int64_t num_experts() const override { return options.num_experts; }
  int ep_size() const override { return options.ep_size; }
  void bind(std::shared_ptr<Communicator> expert_group) override { group_ = std::move(expert_group); }
  // [local] Of the last forward: tokens that chose each expert, as returned, and how many of them were kept.
  const at::Tensor& last_counts() const { return last_counts_; }
  std::int64_t last_kept() const { return last_kept_; }

  const MoeOptions options;

 private:
  void add_gate();
  void add_expert(std::int64_t c, torch::nn::AnyModule expert);
  void add_residual(torch::nn::AnyModule expert);

  at::Tensor gate_weight_;
  std::vector<torch::nn::AnyModule> experts_;
  std::shared_ptr<torch::nn::Module> experts_module_;
  torch::nn::AnyModule mlp_;
  torch::nn::Linear coefficient_{nullptr};
  std::shared_ptr<Communicator> group_;
  at::Tensor last_counts_;
  std::int64_t last_kept_ = 0;
};
TORCH_MODULE(MoE);

}  // namespace zero
