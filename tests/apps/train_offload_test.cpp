// A model whose states do not fit into the memory that the kernel grants (RLIMIT_DATA: private memory that can be
// written) trains from files under that limit, ends without them, and gives the same numbers as with all the memory.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/process.h"

namespace zero::test::train_offload_test {
namespace {

using nlohmann::json;

// 38 M parameters: 16 bytes each in bf16 without offload. libtorch and a rank's threads need about 200 MiB in addition.
constexpr int kLimitMib = 480;

struct Outcome {
  int code;
  json result;
  std::string text;
};

Outcome train(const std::string& folder, const std::string& name, bool offload, bool limited, int ranks = 1) {
  const auto out = folder + "/" + name, config = out + ".json";
  json document = {{"train_micro_batch_size_per_gpu", 1},
                   {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}}}}},
                   {"bf16", {{"enabled", true}}},
                   {"zero_optimization", {{"stage", 3}}},
                   {"libzero",
                    {{"model", {{"size", "gpt-1m"}, {"layers", 12}, {"hidden", 512}, {"heads", 8}, {"seq_length", 32}}},
                     {"data", {{"eval_batches", 1}}}}}};
  if (offload) {
    document["zero_optimization"]["offload_optimizer"] = {{"device", "nvme"}, {"nvme_path", folder}};
    document["zero_optimization"]["offload_param"] = {{"device", "nvme"}, {"nvme_path", folder}, {"max_in_cpu", 0}};
  }
  std::ofstream(config) << document.dump();
  const std::string zero = ZERO_BINARY_DIR "/bin/zero";
  const std::string limit = limited ? "ulimit -d " + std::to_string(kLimitMib * 1024) + "; " : "";
  const std::string launch = ranks > 1 ? zero + " run -n " + std::to_string(ranks) + " " : "";
  Process process(
      Process::Settings{{"/bin/bash", "-c",
                         limit + "exec " + launch + zero + " train " + config + " --steps 3 --sample 0 --quiet --out " +
                             out + " --checkpoint-dir " + out + "-checkpoint"},
                        {"OMP_NUM_THREADS=1"},
                        "",
                        -1});
  Outcome outcome{process.wait(240), {}, process.err};
  std::ifstream in(out + "/result.json");
  outcome.result = json::parse(in, nullptr, false);
  return outcome;
}

TEST(TrainOffload, AModelLargerThanItsMemoryTrainsFromFiles) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers map more memory than any limit";
#endif
  const auto folder = temporary_folder();
  const auto free = train(folder, "free", false, false);
  ASSERT_EQ(free.code, 0) << free.text;
  const auto refused = train(folder, "refused", false, true);
  EXPECT_NE(refused.code, 0) << "the limit is too wide to show anything";
  const auto offloaded = train(folder, "offloaded", true, true);
  ASSERT_EQ(offloaded.code, 0) << offloaded.text;
  EXPECT_EQ(offloaded.result["curve"], free.result["curve"]);
  EXPECT_EQ(offloaded.result["heldout_nats_per_byte"], free.result["heldout_nats_per_byte"]);
  EXPECT_GT(offloaded.result["memory"]["after_step"]["file_bytes"], std::uint64_t{14} * 37'900'000);
  EXPECT_EQ(offloaded.result["memory"]["after_step"]["master_and_optimizer_states_bytes"], 0);
}

}  // namespace
}  // namespace zero::test::train_offload_test
