// Training of a stack of equal layers within budgets: the smallest budget that a refusal names, and a run with it.
#pragma once
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <memory>
#include <regex>
#include <string>

#include "parity/training.h"

namespace zero::test {

inline std::string memory_keys(const std::string& keys) { return ", \"memory\": {" + keys + "}"; }

// The budget of a tier that a refusal names; 0: none.
inline std::int64_t named(const std::string& text, const std::string& tier) {
  std::smatch match;
  if (!std::regex_search(text, match, std::regex("memory\\." + tier + " = ([0-9]+)"))) return 0;
  return std::stoll(match[1]);
}

// One rank's memory after steps with eight linear layers, each a unit, all of one size.
inline MemoryReport train_stack(const Training& setup, const std::shared_ptr<Communicator>& comm) {
  at::set_num_threads(1);
  torch::nn::Sequential stack;
  for (int i = 0; i < 8; ++i) stack->push_back(torch::nn::Linear(64, 64));
  fill_parameters(*stack, 7);
  Engine engine(stack.ptr(), Options::from_json(json_of(setup)), comm);
  for (int k = 0; k < setup.steps * setup.accumulation; ++k) {
    auto loss = stack->forward(at::ones({2, 64}, dtype_of(setup))).to(at::kFloat).square().mean();
    engine.backward(loss);
    loss = at::Tensor();
    engine.step();
  }
  return engine.memory();
}

// A setup whose budget of `tier` is too small at first, then the smallest that the refusal names: it has to train.
// `join` runs its argument on all ranks with a communicator and throws what a rank threw.
template <class Join>
std::string trains_with_the_smallest_budget(Training setup, const std::string& tier, const Join& join) {
  using Tier = MemoryReport::Tier;
  std::int64_t activations = 0;
  join([&](const std::shared_ptr<Communicator>& comm) {
    const auto memory = train_stack(setup, comm);
    if (comm->rank() == 0)
      activations = static_cast<std::int64_t>(memory.peak(Tier::Device, MemoryReport::Purpose::Activations));
  });
  const auto with = [&](std::int64_t bytes) {
    return memory_keys("\"" + tier + "\": " + std::to_string(bytes) +
                       ", \"activations\": " + std::to_string(activations));
  };
  std::string text;
  setup.extra = with(1);
  try {
    join([&](const std::shared_ptr<Communicator>& comm) { train_stack(setup, comm); });
    return "a budget of one byte was not refused";
  } catch (const std::exception& error) {
    text = error.what();
  }
  const auto smallest = named(text, tier);
  if (smallest == 0) return "no budget was named: " + text;
  setup.extra = with(smallest);
  try {
    join([&](const std::shared_ptr<Communicator>& comm) { train_stack(setup, comm); });
  } catch (const std::exception& error) {
    return "refused with the smallest budget: " + std::string(error.what());
  }
  return "";
}

}  // namespace zero::test
