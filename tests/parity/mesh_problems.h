// Small models that know nothing of ranks, how tensor parallelism cuts them, and training on a mesh compared with a
// plain loop.
#pragma once
#include <torch/nn/module.h>
#include <torch/types.h>
#include <zero/library.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "models/gpt_config.h"
#include "soundness/ranks.h"

namespace models {
struct GptImpl;
}

namespace zero::test::mesh {

at::Tensor draw(std::vector<std::int64_t> sizes, std::uint64_t seed);
// Fills all parameters with values that depend on the position of the parameter only.
void fill(torch::nn::Module& module);

struct Model {
  const char* name;
  const char* plan;  // layer_specs; null: the preset gpt
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<at::Tensor(torch::nn::Module&, std::uint64_t seed)> loss;
};
// An MLP on 2-dimensional inputs, a gated MLP, grouped-query attention, and the built-in GPT with a vocabulary that
// divides unevenly.
const std::vector<Model>& models();
const Model& gpt_model();
models::GptConfig gpt_config();
std::shared_ptr<torch::nn::Module> make_model(const Model& model);

inline constexpr std::int64_t kTokens = 5;  // of a sample

struct Case {
  const Model* model;
  int t = 2, u = 1, stage = 0, accumulation = 1;
  std::string recipe = "fp32", extra{}, zero{};  // zero: further keys of zero_optimization, with a comma
  std::string recipe_keys{};                     // further keys of bf16 or fp16, with a comma
  double clip = 0.05;
  int steps = 5, late_from = -1;  // late_from: the first step of a delayed update, which `zero` asks for
  bool with_gradients = false;    // Result::gradients

  Options options() const;
};

struct Result {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> masters;
  std::vector<std::map<std::string, at::Tensor>> gradients;  // of each step, before clipping
  std::set<int> skipped;                                     // steps, because of an overflow
  std::string hash;
};

inline std::uint64_t seed_of(int step, int micro, int data_rank) {
  return static_cast<std::uint64_t>(1000 + 100 * step + 10 * micro + data_rank);
}
// For sequence parallelism: attention exchanges tokens for heads, and forward() gets this rank's stretch of `tokens`.
void divide_sequence(::models::GptImpl& gpt, const Mesh& mesh, std::int64_t tokens);
// The backward of one micro-batch. Returns its loss; with sequence parallelism (u > 1, the GPT only, divided at
// kTokens), that of all tokens.
double backward(Engine& engine, torch::nn::Module& module, const Case& c, std::uint64_t seed);
// losses: those of backward().
Result train(const Case& c, const std::shared_ptr<Communicator>& comm);
// The reference, of one process: AdamW in fp64 on gradients of a whole module in fp32. losses: those of data rank
// `own`. skipped: steps that do not update.
Result train_by_hand(const Case& c, int data_ranks, int own, const std::set<int>& skipped = {});
// Losses, norms and, on rank 0, what training changed of each parameter. Throws, naming the case.
void compare(const Result& got, const Result& wanted, const Case& c, const Communicator& comm);

// The largest relative difference.
double apart(const std::vector<double>& a, const std::vector<double>& b);
// Runs `body` on the ranks of `place`, in child processes.
void expect_passed(const Place& place, const Body& body);

}  // namespace zero::test::mesh
