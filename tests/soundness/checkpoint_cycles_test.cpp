// Engines that are made, train, save, load and end, again and again: descriptors, threads, shared memory and memory
// stay what they were. ZERO_CYCLES sets how often.
#include <gtest/gtest.h>

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "parity/training.h"
#include "support/descriptors.h"
#include "support/folder.h"
#include "support/on_ranks.h"

namespace zero::test::checkpoint_cycles_test {
namespace {
namespace fs = std::filesystem;

struct Usage {
  std::int64_t descriptors = 0, threads = 0, shared = 0, kib = 0;
};

std::int64_t threads() { return std::distance(fs::directory_iterator("/proc/self/task"), {}); }

// Mappings of memory that processes share.
std::int64_t shared_mappings() {
  std::ifstream in("/proc/self/maps");
  std::int64_t count = 0;
  for (std::string line; std::getline(in, line);)
    count += line.find("/dev/shm/") != std::string::npos || line.find("/memfd:") != std::string::npos;
  return count;
}

// Memory without files, in KiB.
std::int64_t resident_kib() {
  std::ifstream in("/proc/self/smaps_rollup");
  std::int64_t kib = 0;
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:")) kib += std::atoll(line.c_str() + 10);
  return kib;
}

Usage usage() {
  ::malloc_trim(0);
  return {open_descriptors(), threads(), shared_mappings(), resident_kib()};
}

void one_cycle(int number, const fs::path& folder) {
  Training setup;
  setup.problem = "mlp";
  setup.stage = number % 4;
  setup.recipe = number % 3 == 0 ? "fp32" : "bf16";
  if (setup.stage > 0 && number % 5 == 0)
    setup.zero = R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + (folder / "swap").string() + "\"}";
  setup.extra = R"(, "checkpoint": {"writer": {"decoupled": )" + std::string(number % 2 ? "true" : "false") + "}}";
  on_ranks(2, [&](const auto& comm) {
    auto module = make_module(problem(setup.problem));
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    if (number > 0) engine.load_checkpoint(folder / "ck");
    for (int step = 0; step < 2; ++step) {
      engine.backward(loss_of(problem(setup.problem), *module, comm->rank(), 2 * number + step, dtype_of(setup)));
      engine.step();
    }
    engine.save_checkpoint(folder / "ck", "one");
    engine.finish_checkpoint();
    engine.load_checkpoint(folder / "ck");
    EXPECT_EQ(engine.global_step(), 2 * number + 2);
  });
}

TEST(CheckpointCycles, LeaveNoDescriptorThreadOrMemoryBehind) {
  const char* text = std::getenv("ZERO_CYCLES");
  const int cycles = text == nullptr ? 100 : std::max(20, std::atoi(text));
  ::mallopt(M_ARENA_MAX, 1);  // which arena a new thread takes is chance, and each keeps some memory
  const TempFolder folder(TempFolder::On::Memory);
  fs::create_directories(folder.path() / "swap");
  // By tenth of the run: the largest use of memory at the end of a cycle.
  std::vector<std::int64_t> kib(10, 0);
  Usage first;
  for (int i = 0; i < cycles; ++i) {
    one_cycle(i, folder.path());
    const auto now = usage();
    auto& most = kib[static_cast<std::size_t>(i * 10 / cycles)];
    most = std::max(most, now.kib);
    if (i + 1 == cycles / 5) first = now;
    if (i + 1 <= cycles / 5) continue;
    ASSERT_EQ(now.descriptors, first.descriptors) << "cycle " << i;
    ASSERT_EQ(now.threads, first.threads) << "cycle " << i;
    ASSERT_EQ(now.shared, first.shared) << "cycle " << i;
  }
  const double growth = static_cast<double>(kib[9] - kib[1]) / static_cast<double>(kib[1]);
  std::cout << cycles << " cycles: 0 descriptors, threads or shared mappings more; memory " << kib[1]
            << " KiB in the second tenth, " << kib[9] << " KiB in the last\n";
  EXPECT_LE(growth, 0.04);
}

}  // namespace
}  // namespace zero::test::checkpoint_cycles_test
