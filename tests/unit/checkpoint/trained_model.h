// A small model on an Engine whose saves run in the background, for tests of what they hold.
#pragma once
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/state.h"

namespace zero::test {

// About 1.3 million parameters: 15 MB of states, in several tiles.
struct Model : torch::nn::Module {
  torch::nn::Linear in{nullptr}, middle{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  explicit Model(std::int64_t hidden) {
    in = register_module("in", torch::nn::Linear(16, hidden));
    middle = register_module("middle", torch::nn::Linear(hidden, hidden));
    norm = register_module("norm", torch::nn::BatchNorm1d(hidden));
    out = register_module("out", torch::nn::Linear(hidden, 3));
    out->bias.set_requires_grad(false);
    at::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(torch::linspace(-0.02, 0.02, p.numel()).view(p.sizes()));
  }
};

inline constexpr std::int64_t kLeastPool = 8 << 20;  // of libzero.checkpoint_memory: two tiles of 4 MiB

struct Trained {
  std::shared_ptr<Model> module;
  engine::State state;
  // pool: libzero.checkpoint_memory, in bytes. more: further keys of libzero, each with a leading comma.
  Trained(const std::shared_ptr<Communicator>& comm, const std::string& zero, std::int64_t hidden = 1100,
          const std::string& more = "", std::int64_t pool = kLeastPool)
      : module(std::make_shared<Model>(hidden)),
        state(module,
              Options::from_json(
                  R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
                  "checkpoint": {"writer": {"decoupled": true, "show_statistics": true}},
                  "libzero": {"checkpoint_memory": )" +
                  std::to_string(pool) + more + "}, \"zero_optimization\": " + zero + "}"),
              comm) {}
  void step(int number) {
    const auto inputs = at::arange(64, at::kFloat).view({4, 16}).sin() + number + state.job.comm->rank();
    const auto x = inputs.to(module->in->weight.scalar_type());
    state.backward.run(module->out(at::relu(module->norm(module->middle(module->in(x))))).pow(2).mean(), {});
    state.stepper.step();
  }
};

// Of a read or write of SlowFiles.
inline constexpr std::chrono::milliseconds kSlow{30};

inline const std::vector<std::string> kPlaces{
    R"({"stage": 0})",
    R"({"stage": 1})",
    R"({"stage": 3})",
    R"({"stage": 2, "offload_optimizer": {"device": "cpu"}})",
    R"({"stage": 2, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true}})",
    R"({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "pipeline_read": true}})"};

}  // namespace zero::test
