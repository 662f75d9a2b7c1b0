// What a rank holds in addition to its states while it saves, loads, exports and imports a model that is larger than
// that: no rank holds the model, or a second copy of its part.
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>

#include "soundness/ranks.h"
#include "support/folder.h"

namespace zero::test::transfer_memory_test {
namespace {

constexpr std::int64_t kMiB = 1 << 20;
// Of transfers: two windows of 16 MiB and their lists; of others, what they may hold.
constexpr std::int64_t kMostOfLoads = 48 * kMiB, kMostOfOthers = 64 * kMiB;

// 26 million parameters, most of them in one tensor: 106 MB of weights, 318 MB of states.
struct Large : torch::nn::Module {
  torch::nn::Embedding table{nullptr};
  torch::nn::ModuleList layers;
  Large() {
    table = register_module("table", torch::nn::Embedding(49152, 512));
    register_module("layers", layers);
    for (int i = 0; i < 5; ++i) layers->push_back(torch::nn::Linear(512, 512));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = table(tokens);
    for (const auto& layer : *layers) x = at::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
};

std::int64_t status_bytes(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  throw std::runtime_error("/proc/self/status has no " + field);
}

// The highest number that the kernel keeps becomes the current one.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5" << std::flush; }

// The most bytes of this process during `work` above those before it.
std::int64_t growth(const std::function<void()>& work) {
  ::malloc_trim(0);  // what is free would hide what is taken
  reset_peak();
  const auto before = status_bytes("VmRSS");
  work();
  return status_bytes("VmHWM") - before;
}

class Rank {
 public:
  explicit Rank(const std::shared_ptr<Communicator>& comm)
      : comm_(comm),
        module_(std::make_shared<Large>()),
        engine_(module_, Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
                                       "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}})"),
                comm) {
    // All pages of the states are in use.
    engine_.backward(module_->forward(at::arange(8, at::kLong).view({1, 8})).pow(2).mean());
    engine_.step();
  }
  Engine& engine() { return engine_; }

  void expect(const std::string& what, std::int64_t most, const std::function<void()>& work) {
    const auto mine = growth(work);
    std::int64_t highest = 0;
    for (const auto& one : comm_->all_gather_bytes(std::to_string(mine)))
      highest = std::max<std::int64_t>(highest, std::stoll(one));
    if (comm_->rank() == 0) {
      std::printf("%s on %d: %lld MiB in addition to the states\n", what.c_str(), comm_->size(),
                  static_cast<long long>(highest / kMiB));
      std::fflush(stdout);
    }
    require(highest <= most, what + " on " + std::to_string(comm_->size()) + ": got " + std::to_string(highest) +
                                 " bytes in addition to the states, expected " + std::to_string(most) + " at most");
  }

 private:
  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<Large> module_;
  Engine engine_;
};

// By 8 ranks, then 1, then 8; each loads what was saved before.
TEST(TransferMemory, IsThatOfWindows) {
  (void)std::string(64 * kMiB, 'x');
  reset_peak();
  if (status_bytes("VmHWM") > status_bytes("VmRSS") + 32 * kMiB) GTEST_SKIP() << "the kernel does not reset VmHWM";
  const TempFolder folder;
  std::string from;
  int number = 0;
  for (const int world : {8, 1, 8}) {
    const auto to = folder.text() + "/" + std::to_string(number++);
    EXPECT_EQ(run_at({"shm", world},
                     [&](const auto& comm) {
                       Rank rank(comm);
                       auto& engine = rank.engine();
                       if (!from.empty())
                         rank.expect("load", kMostOfLoads, [&] { engine.load_checkpoint(from + "/run"); });
                       rank.expect("save", kMostOfOthers, [&] { engine.save_checkpoint(to + "/run", "t"); });
                       rank.expect("export", kMostOfOthers, [&] { engine.export_weights(to + "/weights"); });
                       rank.expect("import", kMostOfOthers, [&] { engine.import_weights(to + "/weights"); });
                     }),
              "");
    from = to;
  }
}

}  // namespace
}  // namespace zero::test::transfer_memory_test
