// A save of weights alone, with weights for other libraries among its files, in which a call of one rank fails: all
// ranks throw the same error, what can be resumed from is still the newest, and the engines continue. A load of weights
// alone in which a call fails leaves the engine as it was or refused.
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include "checkpoint/checkpoint.h"
#include "comm/group.h"
#include "support/on_ranks.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test::weights_only_test {
namespace {
namespace fs = std::filesystem;
using Fault = FaultyFiles::Fault;

struct Live {
  torch::nn::Sequential module{torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 2)};
  engine::State state;
  explicit Live(const std::shared_ptr<Communicator>& comm, bool background = false)
      : state(filled(module.ptr()), Options::from_json(text_of(background)), comm) {}

  static std::string text_of(bool background) {
    return std::string(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true},
        "checkpoint": {"writer": {"decoupled": )") +
           (background ? "true" : "false") + "}}}";
  }
  static std::shared_ptr<torch::nn::Module> filled(std::shared_ptr<torch::nn::Module> module) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : module->parameters()) parameter.fill_(0.1);
    return module;
  }
  void step(int number) {
    const auto x = at::linspace(-1, 1, 5, at::kBFloat16).view({1, 5}) + number + state.job.comm->rank();
    state.backward.run(module->forward(x).to(at::kFloat).pow(2).mean(), {});
    state.stepper.step();
  }
  std::string hash() { return state.exports.state_hash(); }
};

// A fault of one rank may show only when it is struck: all ranks say whether it was.
bool struck(const std::shared_ptr<Communicator>& comm, const FaultyFiles& files, int rank) {
  return comm->all_gather_bytes(files.struck() ? "1" : "0")[static_cast<std::size_t>(rank)] == "1";
}

TEST(WeightsOnly, AFaultOfOneRankIsTheErrorOfAll) {
  for (const bool background : {false, true})
    for (const int hit : {0, 1}) {
      TempFolder folder(TempFolder::On::Memory);
      const auto root = folder.text();
      int failed = 0;
      on_ranks(2, [&](const auto& comm) {
        Live live(comm, background);
        live.step(0);
        checkpoint::save(live.state, formats::system_files(), root, "all");
        checkpoint::finish_save(live.state);
        const auto resumable = live.hash();
        live.step(1);
        for (int k = 1;; ++k) {
          FaultyFiles faulty(Fault::Error, k, ENOSPC);
          auto& files = comm->rank() == hit ? static_cast<formats::FsOps&>(faulty) : formats::system_files();
          std::string text;
          const int code = code_of(
              [&] {
                checkpoint::save(live.state, files, root, "w", {.weights_only = true});
                checkpoint::finish_save(live.state);
              },
              &text);
          const auto label = "call " + std::to_string(k) + " (" + faulty.struck_call() + ") of rank " +
                             std::to_string(hit) + ": " + text;
          const auto all = comm->all_gather_bytes(std::to_string(code) + text);
          EXPECT_EQ(all[0], all[1]) << label;
          if (!struck(comm, faulty, hit)) {
            EXPECT_EQ(code, 0) << label;
            break;
          }
          EXPECT_TRUE(code == 0 || code == static_cast<int>(ExitCode::kIo)) << label;
          if (comm->rank() == 0) {
            failed += code != 0;
            // It is whole, or it is not there; the pointer has not moved.
            for (const auto& entry : list_checkpoints(root)) EXPECT_EQ(entry.fault, "") << label;
            EXPECT_EQ(formats::choose(formats::system_files(), root, "").tag, "all") << label;
            EXPECT_TRUE(code != 0 || inspect_checkpoint(root, "w", true).weights_only) << label;
          }
          if (comm->rank() == 0) fs::remove_all(folder.path() / "w");
          comm->barrier();
        }
        live.step(2);
        Live other(comm);
        EXPECT_EQ(checkpoint::load(other.state, formats::system_files(), root, ""), "all");
        EXPECT_EQ(other.hash(), resumable);
      });
      EXPECT_GT(failed, hit == 0 ? 40 : 10) << background;
    }
}

TEST(WeightsOnly, AFaultWhileLoadingLeavesTheEngineWholeOrRefused) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = folder.text();
  int unchanged = 0, refused = 0;
  on_ranks(2, [&](const auto& comm) {
    Live source(comm);
    source.step(0);
    checkpoint::save(source.state, formats::system_files(), root, "w", {.weights_only = true});
    const LoadOptions options{.weights_only = true};
    std::string wanted;
    {
      Live fresh(comm);
      checkpoint::load(fresh.state, formats::system_files(), root, "", options);
      wanted = fresh.hash();
    }
    for (int k = 1;; ++k) {
      Live live(comm);
      live.step(5);
      FaultyFiles faulty(Fault::Error, k, EIO);
      auto& files = comm->rank() == 1 ? static_cast<formats::FsOps&>(faulty) : formats::system_files();
      std::string text;
      const int code = code_of([&] { checkpoint::load(live.state, files, root, "", options); }, &text);
      if (!struck(comm, faulty, 1)) {
        EXPECT_EQ(code, 0) << text;
        EXPECT_EQ(live.hash(), wanted);
        break;
      }
      if (code == 0) continue;  // closing a file that was read
      EXPECT_EQ(code, static_cast<int>(ExitCode::kIo)) << text;
      std::string refusal;
      if (code_of([&] { live.step(6); }, &refusal) == 0) {
        Live other(comm);
        other.step(5);
        other.step(6);
        EXPECT_EQ(live.hash(), other.hash()) << text;
        if (comm->rank() == 0) ++unchanged;
        continue;
      }
      EXPECT_NE(refusal.find("failed halfway"), std::string::npos) << refusal;
      checkpoint::load(live.state, formats::system_files(), root, "w", options);
      EXPECT_EQ(live.hash(), wanted);
      if (comm->rank() == 0) ++refused;
    }
  });
  EXPECT_GT(unchanged, 8);
  EXPECT_GT(refused, 1);
}

}  // namespace
}  // namespace zero::test::weights_only_test
