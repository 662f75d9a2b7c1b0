// Small training problems, one per kind of module that the engine supports unmodified. Each creates
// its module, fills it with values that depend only on a seed, and computes the loss of one rank's
// batch at one step.
#pragma once
#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zero::test {

struct Problem {
  std::string name;
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  // Floating inputs come in the module's dtype. The scalar loss is fp32.
  std::function<at::Tensor(torch::nn::Module&, const at::Generator&, at::ScalarType)> loss;
};

// Every kind: linear, tied embedding, convolutions, batch norm, recurrent, attention, transformer,
// containers, reuse, frozen, sometimes unused, tiny and odd sizes, a custom autograd function.
const std::vector<Problem>& problems();
const Problem& problem(const std::string& name);

// The mean loss over the batches of all ranks, computed as one batch. Only for "joined_gpt".
at::Tensor joined_loss(const Problem& problem, torch::nn::Module& module, int world, int step);

// A new module with the problem's starting values.
std::shared_ptr<torch::nn::Module> make_module(const Problem& problem);
at::Tensor loss_of(const Problem& problem, torch::nn::Module& module, int rank, int step, at::ScalarType dtype);

// Values from a private generator, so that ranks as threads do not race for the global one.
void fill_parameters(torch::nn::Module& module, std::uint64_t seed);

}  // namespace zero::test
