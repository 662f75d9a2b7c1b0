// Shared by tests of unusual programs: small models and error texts.
#pragma once
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "support/require.h"

namespace zero::test {

// `zero` and `extra`: further keys of zero_optimization and of the top level, each with a leading comma.
inline Options small_options(int stage, const std::string& zero = "", const std::string& extra = "") {
  return Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},)"
      R"( "gradient_clipping": 0, "zero_optimization": {"stage": )" +
      std::to_string(stage) + zero + "}" + extra + "}");
}

// With this, parameters are stored sharded even in a world of one.
inline const char* const kOffloadedParameters = R"(, "offload_param": {"device": "cpu"})";

// Values that depend only on the names.
inline void fill(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    auto& p = item.value();
    const auto shift = static_cast<double>(std::hash<std::string>()(item.key()) % 97);
    p.copy_(((torch::arange(p.numel(), torch::kFloat) * 0.37 + shift).sin() * 0.2).view(p.sizes()));
  }
}

inline std::shared_ptr<torch::nn::SequentialImpl> small_model(int layers = 3, int width = 8) {
  auto model = std::make_shared<torch::nn::SequentialImpl>();
  for (int i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(width, width));
  fill(*model);
  return model;
}

inline at::Tensor small_input(int seed, int width = 8) {
  return ((torch::arange(2 * width, torch::kFloat) + seed) * 0.61).cos().view({2, width});
}

// The errors with which the ranks (threads) end.
inline std::vector<std::string> errors_of_ranks(int world,
                                                const std::function<void(std::shared_ptr<Communicator>)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(world));
  std::mutex mutex;
  ThreadFaults faults;
  faults.timeout = std::chrono::seconds(20);
  try {
    run_ranks(world, faults, [&](std::shared_ptr<Communicator> comm) {
      try {
        body(comm);
      } catch (const std::exception& e) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          errors[static_cast<std::size_t>(comm->rank())] = e.what();
        }
        throw;
      }
    });
  } catch (const std::exception&) {
    // Each rank's text is kept.
  }
  return errors;
}

}  // namespace zero::test
