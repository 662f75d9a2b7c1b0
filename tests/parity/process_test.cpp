// The same bits over every transport: ranks as processes over shared memory and TCP against ranks
// as threads; the same program under torchrun's variables only.
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "parity/problems.h"
#include "parity/training.h"
#include "support/nightly.h"
#include "support/spawn.h"

namespace zero::test::process_test {
namespace {

const std::string kProgram = std::string(ZERO_BINARY_DIR) + "/tests/parity_rank_program";

// A transport's name in SpawnOptions; "hosts": two simulated hosts of two ranks each, with shared memory inside and TCP
// between them.
void connect(SpawnOptions& options, const std::string& transport) {
  options.transport = transport == "hosts" ? "auto" : transport;
  if (transport != "hosts") return;
  options.world = 4;
  options.ranks_per_host = 2;
  options.environment["CUDA_VISIBLE_DEVICES"] = "";
}

// Of a rank's training number `run`.
std::string hash_in(const ProcessResult& result, int run = 0) {
  auto at = result.out.find("hash ");
  for (; run > 0 && at != std::string::npos; --run) at = result.out.find("hash ", at + 1);
  return at == std::string::npos ? "none: " + result.err : result.out.substr(at + 5, 32);
}

TEST(Transports, SameBitsAsThreads) {
  const struct {
    int world;
    const char* recipe;
    const char* clip;
  } cases[] = {{2, "fp32", "0.1"}, {2, "bf16", "0"}, {2, "fp16", "0.1"}, {3, "fp32", "0"},
               {3, "bf16", "0.1"}, {4, "fp16", "0"}, {4, "bf16", "0.1"}};
  OneIn part(7);
  for (const auto& c : cases) {
    if (!part.take()) continue;
    Training training;
    training.world = c.world;
    training.recipe = c.recipe;
    training.clip = std::stod(c.clip);
    training.stage = 0;
    const auto expected = train_threads(training).hash;
    for (const char* transport : {"shm", "gloo", "hosts"}) {
      if (c.world != 4 && transport == std::string("hosts")) continue;
      SpawnOptions options;
      options.world = c.world;
      connect(options, transport);
      const std::vector<std::string> runs{"stage=0", "stage=1", "stage=2", "stage=3", "prefetch=0"};
      std::vector<std::string> arguments{std::string("recipe=") + c.recipe, std::string("clip=") + c.clip};
      for (const auto& run : runs) arguments.insert(arguments.end(), {"--", run});
      for (const auto& result : spawn_ranks(options, kProgram, arguments)) {
        EXPECT_EQ(result.exit_code, 0) << transport << ": " << result.err;
        for (std::size_t i = 0; i < runs.size(); ++i)
          EXPECT_EQ(hash_in(result, static_cast<int>(i)), expected)
              << transport << " " << runs[i] << " world " << c.world << " " << c.recipe;
      }
    }
  }
}

// Shared memory reads parameters and gradients in place, TCP copies them: every kind of module has the same bits over
// both, and at all stages of a family.
TEST(Transports, EveryKindOfModule) {
  std::string expected;
  for (const char* transport : {"gloo", "shm"}) {
    SpawnOptions options;
    options.transport = transport;
    options.limit = std::chrono::seconds(200);
    const auto results = spawn_ranks(options, kProgram, {"kinds=1"});
    for (const auto& result : results) ASSERT_EQ(result.exit_code, 0) << transport << ": " << result.err;
    std::istringstream lines(results[0].out);
    std::string line, family;
    int count = 0;
    while (std::getline(lines, line)) {
      const bool alone =
          line.find("stage 0") != std::string::npos ||
          (line.find("accumulation 2") != std::string::npos && line.find("stage 2") != std::string::npos);
      const auto hash = line.substr(line.rfind(' '));
      if (alone) family = hash;
      EXPECT_EQ(hash, family) << transport << ": " << line;
      ++count;
    }
    EXPECT_EQ(count, static_cast<int>(problems().size()) * 8);
    if (expected.empty()) expected = results[0].out;
    EXPECT_EQ(results[0].out, expected) << transport;
  }
}

// Gradients that are divided in place before they are summed.
TEST(Transports, EveryKindOfModuleDividedAhead) {
  std::string expected;
  for (const char* transport : {"gloo", "shm"}) {
    SpawnOptions options;
    options.transport = transport;
    options.limit = std::chrono::seconds(200);
    const auto results =
        spawn_ranks(options, kProgram, {"kinds=1", "first=2", R"(extra=, "gradient_predivide_factor": 3.0)"});
    for (const auto& result : results) ASSERT_EQ(result.exit_code, 0) << transport << ": " << result.err;
    if (expected.empty()) expected = results[0].out;
    EXPECT_EQ(results[0].out, expected) << transport;
  }
}

TEST(Transports, AccumulationFamilies) {
  for (const char* transport : {"shm", "gloo", "hosts"}) {
    SpawnOptions options;
    connect(options, transport);
    Training training;
    training.world = options.world;
    training.accumulation = 3;
    training.recipe = "bf16";
    std::vector<std::string> expected;
    for (const int stage : {0, 2}) {
      training.stage = stage;
      expected.push_back(train_threads(training).hash);
    }
    for (const auto& result : spawn_ranks(
             options, kProgram,
             {"recipe=bf16", "accumulation=3", "--", "stage=0", "--", "stage=1", "--", "stage=2", "--", "stage=3"}))
      for (int stage = 0; stage <= 3; ++stage)
        EXPECT_EQ(hash_in(result, stage), expected[stage < 2 ? 0 : 1]) << transport << " stage " << stage;
  }
}

// Bytes on TCP: 2 S and 2 S, (k+1) S, 3 k S a step, times (N-1)/N, where S are the parameters' bytes.
// Where ranks read each other's gradients in place and sums land in host memory; with updates at once and one step
// late.
TEST(Transports, OffloadedStatesHaveTheBitsOfThreads) {
  const auto folder = std::filesystem::temp_directory_path().string();
  const auto on = [&](const std::string& block, const std::string& device) {
    return ", \"" + block + "\": {\"device\": \"" + device + "\", \"nvme_path\": \"" + folder + "\"" +
           (block == "offload_param" ? ", \"max_in_cpu\": 0" : "") + "}";
  };
  const std::string late = R"(, "delayed_update": {"enabled": true, "start_step": 2})";
  const struct {
    std::string zero;
    int least_stage;
  } cases[] = {{on("offload_optimizer", "cpu"), 1},
               {on("offload_optimizer", "cpu") + late, 1},
               {on("offload_optimizer", "nvme") + late, 1},
               {on("offload_optimizer", "cpu") + on("offload_param", "cpu") + late, 3},
               {on("offload_optimizer", "nvme") + on("offload_param", "nvme"), 3},
               {on("offload_optimizer", "nvme") + on("offload_param", "nvme") + late, 3}};
  OneIn part(11);
  for (const auto& [world, recipe] : {std::pair{2, "bf16"}, std::pair{3, "fp32"}}) {
    for (const auto& c : cases) {
      if (!part.take()) continue;
      Training training;
      training.world = world;
      training.recipe = recipe;
      training.clip = 0.1;
      training.zero = c.zero;
      training.stage = c.least_stage;
      training.steps = 8;
      const auto expected = train_threads(training).hash;
      for (const char* transport : {"shm", "gloo"}) {
        SpawnOptions options;
        options.world = world;
        connect(options, transport);
        std::vector<std::string> arguments{std::string("recipe=") + recipe, "clip=0.1", "steps=8", "zero=" + c.zero};
        for (int stage = c.least_stage; stage <= 3; ++stage)
          arguments.insert(arguments.end(), {"--", "stage=" + std::to_string(stage)});
        for (const auto& result : spawn_ranks(options, kProgram, arguments)) {
          EXPECT_EQ(result.exit_code, 0) << transport << ": " << result.err;
          for (int stage = c.least_stage; stage <= 3; ++stage)
            EXPECT_EQ(hash_in(result, stage - c.least_stage), expected)
                << transport << " stage " << stage << " world " << world << " " << recipe << c.zero;
        }
      }
    }
  }
}

TEST(Transports, BytesSentOverGlooFollowTheFormulas) {
  OneIn part(3);
  for (const int world : {2, 3, 4}) {
    if (!part.take()) continue;
    SpawnOptions options;
    options.transport = "gloo";
    options.world = world;
    std::vector<std::string> arguments{"problem=padded_free_gpt", "recipe=bf16", "steps=3"};
    for (const char* k : {"1", "3"})
      for (const char* stage : {"0", "1", "2", "3"})
        arguments.insert(arguments.end(), {"--", std::string("stage=") + stage, std::string("accumulation=") + k});
    for (const auto& result : spawn_ranks(options, kProgram, arguments)) {
      std::size_t line = std::string::npos;
      for (const int k : {1, 3}) {
        for (int stage = 0; stage <= 3; ++stage) {
          unsigned long long sent = 0;
          long long numel = 0;
          std::size_t groups = 0;
          line = result.out.find("sent ", line + 1);
          ASSERT_NE(line, std::string::npos) << result.out << result.err;
          ASSERT_EQ(std::sscanf(result.out.c_str() + line, "sent %llu numel %lld groups %zu", &sent, &numel, &groups),
                    3);
          const auto N = static_cast<unsigned long long>(world), K = static_cast<unsigned long long>(k);
          const unsigned long long volume = stage <= 1 ? 2 : stage == 2 ? K + 1 : 3 * K;
          const auto exact = [&](unsigned long long elements) { return volume * 2 * elements * (N - 1) / N; };
          // Three does not divide the model: a group is padded by less than one part of 64 bytes a rank.
          const auto padding = world == 3 ? groups * N * 32 : 0;
          const auto least = exact(static_cast<unsigned long long>(numel)),
                     most = exact(static_cast<unsigned long long>(numel) + padding);
          EXPECT_GE(sent, least) << "world " << world << " accumulation " << k << " stage " << stage;
          EXPECT_LE(sent, most) << "world " << world << " accumulation " << k << " stage " << stage;
        }
      }
    }
  }
}

// Of these, what crosses from two ranks of a host to two of another: an all-gather of S bytes sends (H-1)/N S a rank,
// a reduce-scatter (H-1)/H S.
TEST(Transports, BytesBetweenHostsFollowTheFormulas) {
  for (const int k : {1, 3}) {
    for (int stage = 0; stage <= 3; ++stage) {
      SpawnOptions options;
      connect(options, "hosts");
      const auto results = spawn_ranks(options, kProgram,
                                       {"problem=padded_free_gpt", "recipe=bf16", "steps=3",
                                        "stage=" + std::to_string(stage), "accumulation=" + std::to_string(k)});
      for (const auto& result : results) {
        unsigned long long sent = 0, across = 0;
        long long numel = 0;
        std::size_t groups = 0;
        const auto line = result.out.find("sent ");
        ASSERT_NE(line, std::string::npos) << result.out << result.err;
        ASSERT_EQ(std::sscanf(result.out.c_str() + line, "sent %llu numel %lld groups %zu across %llu", &sent, &numel,
                              &groups, &across),
                  4);
        const auto bytes = 2 * static_cast<unsigned long long>(numel), K = static_cast<unsigned long long>(k);
        const auto gathers = stage == 3 ? 2 * K : 1, reductions = stage >= 2 ? K : 1;
        EXPECT_EQ(across, gathers * bytes / 4 + reductions * bytes / 2) << "accumulation " << k << " stage " << stage;
        EXPECT_EQ(sent, (gathers + reductions) * bytes * 3 / 4) << "accumulation " << k << " stage " << stage;
      }
    }
  }
}

struct Ranks {
  std::vector<ProcessResult> results;
  unsigned long long across = 0, numel = 0;  // bytes of a rank's last step to other hosts; elements of all units
  double loss = 0;
};

// A GPT whose units divide by four ranks, over two hosts of two.
Ranks over_hosts(const std::string& zero, const std::string& steps = "20", const std::string& accumulation = "1",
                 const std::string& extra = "") {
  SpawnOptions options;
  connect(options, "hosts");
  Ranks ranks;
  ranks.results = spawn_ranks(options, kProgram,
                              {"problem=padded_free_gpt", "recipe=bf16", "stage=3", "clip=0.1", "steps=" + steps,
                               "accumulation=" + accumulation, "zero=" + zero, "extra=" + extra});
  for (const auto& result : ranks.results) {
    EXPECT_EQ(result.exit_code, 0) << zero << ": " << result.err;
    EXPECT_EQ(hash_in(result), hash_in(ranks.results[0])) << zero;
    const auto line = result.out.find("sent "), loss = result.out.find("loss ");
    if (line == std::string::npos || loss == std::string::npos) return ranks;
    unsigned long long sent = 0, across = 0;
    std::size_t groups = 0;
    std::sscanf(result.out.c_str() + line, "sent %llu numel %llu groups %zu across %llu", &sent, &ranks.numel, &groups,
                &across);
    EXPECT_TRUE(ranks.across == 0 || ranks.across == across) << "ranks send different amounts";
    ranks.across = across;
    if (&result == &ranks.results[0]) ranks.loss = std::stod(result.out.substr(loss + 5));
  }
  return ranks;
}

// hpZ: parameters cross once between two updates, the bits are the same.
TEST(SlowLinks, SecondShardsHaveTheSameBitsAndSendParametersOnce) {
  OneIn part(2);
  for (const auto& [accumulation, k] : {std::pair("3", 3ull), std::pair("1", 1ull)}) {
    if (!part.take()) continue;
    const char* const steps = nightly() ? "6" : "3";
    const auto exact = over_hosts("", steps, accumulation);
    for (const char* ranks : {"2", "1"}) {
      if (!nightly() && *ranks == '1') continue;
      const auto second = over_hosts(std::string(", \"zero_hpz_partition_size\": ") + ranks, steps, accumulation);
      EXPECT_EQ(hash_in(second.results[0]), hash_in(exact.results[0]));
      const auto gathers = *ranks == '1' ? 2 * k : 1, bytes = 2 * exact.numel;
      EXPECT_EQ(second.across, gathers * bytes / 4 + k * bytes / 2) << ranks << " ranks, accumulation " << accumulation;
    }
  }
}

// qwZ and qgZ, alone and with hpZ: bytes by the formulas, the same on every rank and in every run, and the loss of the
// exact run within a bound. Units of this model have whole blocks of 256 elements a shard.
TEST(SlowLinks, IntegersCutTheBytesAsTheFormulasSay) {
  const std::string hpz = R"(, "zero_hpz_partition_size": 2)", qwz = R"(, "zero_quantized_weights": true)",
                    qgz = R"(, "zero_quantized_gradients": true)";
  const char* const steps = nightly() ? "8" : "4";
  const auto exact = over_hosts("", steps);
  const auto P = exact.numel;
  const auto gathers = [&](unsigned long long times) { return times * 2 * P / 4; };
  const auto integers = [&](unsigned long long times) { return times * (P + P / 64) / 4; };
  const auto sums = 2 * P / 2, integer_sums = (P / 2 + P / 64) / 4;
  const struct {
    std::string zero;
    unsigned long long bytes;
  } cases[] = {{qwz + hpz + qgz, integers(1) + integer_sums},
               {qwz, integers(2) + sums},
               {qgz, gathers(2) + integer_sums},
               {qwz + hpz, integers(1) + sums}};
  OneIn part(4);
  for (const auto& c : cases) {
    if (!part.take()) continue;
    const auto lossy = over_hosts(c.zero, steps);
    EXPECT_NEAR(static_cast<double>(lossy.across), static_cast<double>(c.bytes), static_cast<double>(c.bytes) * 0.02)
        << c.zero;
    EXPECT_NE(hash_in(lossy.results[0]), hash_in(exact.results[0])) << c.zero << " quantised nothing";
    EXPECT_NEAR(lossy.loss, exact.loss, 0.05 * exact.loss) << c.zero;
    EXPECT_EQ(hash_in(over_hosts(c.zero, steps).results[0]), hash_in(lossy.results[0])) << c.zero << ": another run";
  }
}

// Parameters that stay fp32 are not sent as integers, neither are their gradients: where all of them stay so, the bits
// are those of the exact run.
TEST(SlowLinks, WhatStaysFp32IsNotQuantized) {
  const std::string integers = R"(, "zero_quantized_weights": true, "zero_quantized_gradients": true)",
                    hpz = R"(, "zero_hpz_partition_size": 2)";
  const auto kept = [](const std::string& pattern) { return R"(, "libzero": {"keep_fp32": ")" + pattern + "\"}"; };
  const auto exact = over_hosts("", "4", "1", kept("*"));
  const auto all = over_hosts(integers + hpz, "4", "1", kept("*"));
  EXPECT_EQ(hash_in(all.results[0]), hash_in(exact.results[0]));
  const auto bytes = 4 * exact.numel;
  EXPECT_EQ(exact.across, 2 * bytes / 4 + bytes / 2);
  EXPECT_EQ(all.across, bytes / 4 + bytes / 2);

  const auto norms = over_hosts("", "4", "1", kept("*norm*")), some = over_hosts(integers, "4", "1", kept("*norm*"));
  EXPECT_LT(some.across, norms.across);
  EXPECT_NE(hash_in(some.results[0]), hash_in(norms.results[0]));
  EXPECT_NEAR(some.loss, norms.loss, 0.05 * norms.loss);
}

// Kinds of modules, evaluations between steps, and scopes that write.
TEST(SlowLinks, SecondShardsForEveryKindOfModule) {
  std::vector<std::string> outs;
  for (const char* zero : {"", ", \"zero_hpz_partition_size\": 2"}) {
    SpawnOptions options;
    connect(options, "hosts");
    options.limit = std::chrono::seconds(200);
    const auto results = spawn_ranks(options, kProgram, {"kinds=1", "first=3", std::string("zero=") + zero});
    for (const auto& result : results) ASSERT_EQ(result.exit_code, 0) << zero << ": " << result.err;
    outs.push_back(results[0].out);
  }
  EXPECT_EQ(outs[0], outs[1]);
  EXPECT_NE(outs[0].find("kind "), std::string::npos);
}

// Quantization applies only to computation: a program reads and writes the exact values.
TEST(SlowLinks, AScopeThatWritesNothingChangesNothing) {
  OneIn part(2);
  for (const char* recipe : {"bf16", "fp32"}) {
    if (!part.take()) continue;
    SpawnOptions options;
    connect(options, "hosts");
    for (const auto& result :
         spawn_ranks(options, kProgram,
                     {"scope=1", "steps=3", std::string("recipe=") + recipe,
                      "zero=, \"zero_quantized_weights\": true, \"zero_hpz_partition_size\": 2"})) {
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_NE(result.out.find("scope kept"), std::string::npos) << result.out;
    }
  }
}

// Ranks wait in two groups, the world and the neighbours; a failure in one ends the waits in the other.
TEST(SlowLinks, ADeathAmongNeighboursIsNamedEverywhere) {
  OneIn part(3);
  for (const char* at : {"forward", "backward", "reduce", "step"}) {
    for (const int victim : {0, 3}) {
      if (!part.take()) continue;
      SpawnOptions options;
      connect(options, "hosts");
      options.timeout_s = 60;
      const auto results =
          spawn_ranks(options, kProgram,
                      {"fault=kill", std::string("at=") + at, "step=2", "rank=" + std::to_string(victim), "clip=0.1",
                       "zero=, \"zero_hpz_partition_size\": 2"});
      for (int r = 0; r < 4; ++r) {
        const auto& result = results[static_cast<std::size_t>(r)];
        if (r == victim) continue;
        EXPECT_EQ(result.exit_code, 6) << at << ": " << result.err;
        EXPECT_NE(result.err.find("rank " + std::to_string(victim)), std::string::npos) << at << ": " << result.err;
        EXPECT_LT(result.ended, std::chrono::seconds(30)) << at;
      }
    }
  }
}

TEST(SlowLinks, ASecondShardThatDoesNotFitAHostIsAnError) {
  SpawnOptions options;
  connect(options, "hosts");
  for (const auto& result : spawn_ranks(options, kProgram, {"zero=, \"zero_hpz_partition_size\": 3"})) {
    // A rank that has not reached the call gets it as a failure of the rank that reported it first.
    EXPECT_TRUE(result.exit_code == 2 || result.exit_code == 6) << result.exit_code << result.err;
    EXPECT_NE(result.err.find("zero_hpz_partition_size: got 3, expected a divisor of the 2 ranks of a host"),
              std::string::npos)
        << result.err;
  }
}

// Real memory: the kernel's count for all ranks together, compared with the ledger.
TEST(Transports, RealMemoryAgreesWithTheLedger) {
  for (const char* transport : {"shm", "gloo"}) {
    for (const int stage : {0, 1, 2, 3}) {
      SpawnOptions options;
      options.transport = transport;
      const auto results =
          spawn_ranks(options, kProgram,
                      {"measure=pss", "recipe=bf16", "stage=" + std::to_string(stage), "width=1024", "layers=12"});
      double ledger = 0, pss = 0;
      for (const auto& result : results) {
        unsigned long long a = 0, b = 0;
        ASSERT_EQ(std::sscanf(result.out.c_str(), "ledger %llu pss %llu", &a, &b), 2) << result.out << result.err;
        ledger += static_cast<double>(a);
        pss += static_cast<double>(b);
      }
      EXPECT_GT(ledger, 8e8);
      EXPECT_NEAR(pss / ledger, 1.0, 0.05)
          << transport << " stage " << stage << ": " << pss / 1e6 << " MB against " << ledger / 1e6;
    }
  }
}

}  // namespace
}  // namespace zero::test::process_test
