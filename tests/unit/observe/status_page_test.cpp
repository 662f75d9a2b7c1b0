// The status page: what a rank writes, the launcher reads, also after the rank was killed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "observe/status_page.h"

namespace zero::base::status_page_test {
namespace {

TEST(StatusPage, WritesAreReadBack) {
  observe::StatusMemory memory(3);
  observe::StatusWriter w = memory.writer(1);
  w.set_step(217, 2);
  w.set_phase(observe::StatusPhase::Backward);
  w.set_unit("layers.7");
  w.set_collective(8812, "reduce_scatter", "bf16", 1048576, observe::CollectiveState::Inside, "layers.7",
                   "engine.cpp:10");
  w.set_error("[Engine::step] got NaN", ExitCode::kNumerical);
  w.set_save("global_step200", 3ull << 32, 5ull << 32);
  w.note_commit();
  const WorldRule rule{.batch_parts = 8, .data_parallel = 1, .copy = 6, .tensor = 3, .experts = 2};
  w.set_world_rule(rule);
  const observe::StatusSnapshot s = memory.read(1);
  EXPECT_EQ(s.commits, 1u);
  EXPECT_EQ(s.world_rule, rule);
  EXPECT_EQ(s.step, 217);
  EXPECT_EQ(s.micro_batch, 2);
  EXPECT_STREQ(observe::phase_name(s.phase), "backward");
  EXPECT_EQ(s.unit, "layers.7");
  EXPECT_EQ(s.error, "[Engine::step] got NaN");
  EXPECT_EQ(s.error_code, 7);
  EXPECT_EQ(s.save, "global_step200");
  EXPECT_EQ(s.save_written, 3ull << 32);
  EXPECT_EQ(s.save_bytes, 5ull << 32);
  EXPECT_EQ(s.changes, 8u);
  EXPECT_GT(s.changed_ns, 0u);
  ASSERT_EQ(s.collectives.size(), 1u);
  EXPECT_EQ(s.collectives[0].sequence, 8812u);
  EXPECT_EQ(s.collectives[0].op, "reduce_scatter");
  EXPECT_EQ(s.collectives[0].dtype, "bf16");
  EXPECT_EQ(s.collectives[0].numel, 1048576);
  EXPECT_EQ(s.collectives[0].group, "layers.7");
  EXPECT_EQ(s.collectives[0].site, "engine.cpp:10");
  EXPECT_EQ(s.collectives[0].state, observe::CollectiveState::Inside);
  const observe::StatusSnapshot untouched = memory.read(0);
  EXPECT_EQ(untouched.pid, 0);
  EXPECT_FALSE(untouched.world_rule);
  EXPECT_EQ(untouched.step, -1);
  EXPECT_EQ(untouched.save, "");
  EXPECT_TRUE(untouched.collectives.empty());
}

TEST(StatusPage, KeepsTheLastCollectivesInOrder) {
  observe::StatusMemory memory(1);
  observe::StatusWriter w = memory.writer(0);
  for (std::uint64_t i = 0; i < 100; ++i) {
    w.set_collective(i, "all_gather", "float", static_cast<std::int64_t>(i), observe::CollectiveState::Before);
    w.set_collective(i, "all_gather", "float", static_cast<std::int64_t>(i), observe::CollectiveState::After);
  }
  w.set_collective(3, "all_gather", "float", 3, observe::CollectiveState::After);  // too late to be kept
  const observe::StatusSnapshot s = memory.read(0);
  ASSERT_EQ(s.collectives.size(), observe::kStatusRing);
  EXPECT_EQ(s.collectives.front().sequence, 68u);
  EXPECT_EQ(s.collectives.back().sequence, 99u);
  EXPECT_EQ(s.collectives.back().state, observe::CollectiveState::After);
}

// An in-place gather has the number of the next collective, until that one begins.
TEST(StatusPage, ACollectiveTakesThePlaceOfAnotherOneOfItsNumber) {
  observe::StatusMemory memory(1);
  observe::StatusWriter w = memory.writer(0);
  w.set_collective(5, "all_gather", "fp32", 4160, observe::CollectiveState::Inside);
  w.set_collective(5, "all_gather", "fp32", 4160, observe::CollectiveState::Before);
  EXPECT_EQ(memory.read(0).collectives.at(0).state, observe::CollectiveState::Before);
  w.set_collective(5, "all_gather_bytes", "byte", 0, observe::CollectiveState::Inside);
  const observe::StatusSnapshot s = memory.read(0);
  ASSERT_EQ(s.collectives.size(), 1u);
  EXPECT_EQ(s.collectives[0].op, "all_gather_bytes");
  EXPECT_EQ(s.collectives[0].numel, 0);
  EXPECT_EQ(s.collectives[0].state, observe::CollectiveState::Inside);
}

TEST(StatusPage, UsesAreChangesNowAndThen) {
  observe::StatusMemory memory(1);
  observe::StatusWriter w = memory.writer(0);
  w.set_step(1);
  const auto before = memory.read(0).changes;
  // By the clock of the page: a change takes a while after the last one, however many uses there are.
  auto last = memory.read(0);
  std::uint64_t uses = 0;
  while (memory.read(0).changes < before + 3) {
    w.note_use(), ++uses;
    const auto now = memory.read(0);
    if (now.changes == last.changes) continue;
    EXPECT_EQ(now.changes, last.changes + 1);
    EXPECT_GT(now.changed_ns - last.changed_ns, 100'000'000) << "a change for every use";
    last = now;
  }
  EXPECT_GE(uses, 3u);
}

TEST(StatusPage, LongTextsAreCut) {
  observe::StatusMemory memory(2);
  observe::StatusWriter w = memory.writer(0);
  const std::string longer(5000, 'x');
  w.set_unit(longer);
  w.set_error(longer);
  w.set_collective(0, longer, longer, 1, observe::CollectiveState::Before, longer, longer);
  const observe::StatusSnapshot s = memory.read(0);
  EXPECT_EQ(s.unit, std::string(91, 'x'));
  EXPECT_EQ(s.error, std::string(379, 'x'));
  EXPECT_EQ(s.collectives[0].op, std::string(23, 'x'));
  EXPECT_EQ(s.collectives[0].site, std::string(23, 'x'));
  EXPECT_EQ(memory.read(1).changes, 0u);
}

TEST(StatusPage, WithoutAPageNothingHappens) {
  observe::StatusWriter none;
  none.set_step(1);
  none.set_unit("x");
  none.set_error("x");
  none.note_use();
  none.beat();
  EXPECT_FALSE(none.active());
  EXPECT_EQ(none.failed_rank(), -1);
  observe::Heartbeat beat(none);
}

TEST(StatusPage, FirstFailedRankWins) {
  observe::StatusMemory memory(2);
  EXPECT_EQ(memory.writer(1).failed_rank(), -1);
  memory.set_failed_rank(0);
  memory.set_failed_rank(1);
  EXPECT_EQ(memory.writer(0).failed_rank(), 0);
  EXPECT_EQ(memory.writer(1).failed_rank(), 0);
  memory.clear();
  EXPECT_EQ(memory.writer(1).failed_rank(), -1);
}

TEST(StatusPage, HeartbeatIsNotProgress) {
  observe::StatusMemory memory(1);
  observe::StatusWriter w = memory.writer(0);
  w.set_step(1);
  const observe::StatusSnapshot before = memory.read(0);
  {
    observe::Heartbeat beat(w);
    for (int i = 0; i < 500 && memory.read(0).heartbeat_ns == before.heartbeat_ns; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const observe::StatusSnapshot after = memory.read(0);
  EXPECT_GT(after.heartbeat_ns, before.heartbeat_ns);
  EXPECT_EQ(after.changes, before.changes);
  EXPECT_EQ(after.changed_ns, before.changed_ns);
}

// A reader never sees a mixture of two texts, and repeatedly sees a complete one.
TEST(StatusPage, TextsAreWhole) {
  observe::StatusMemory memory(1);
  observe::StatusWriter w = memory.writer(0);
  w.set_unit(std::string(80, 'a'));
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int i = 0; !stop; ++i) w.set_unit(std::string(80, static_cast<char>('a' + i % 20)));
  });
  int mixed = 0, changed = 0;
  for (std::string last; changed < 1000;) {
    const std::string unit = memory.read(0).unit;
    if (unit.empty()) continue;
    if (unit.size() != 80 || unit.find_first_not_of(unit[0]) != std::string::npos) ++mixed;
    changed += unit != last;
    last = unit;
  }
  stop = true;
  writer.join();
  EXPECT_EQ(mixed, 0);
  EXPECT_EQ(memory.read(0).unit.size(), 80u) << "nobody writes";
}

// Runs `body` in a child that sees the page as a rank does; returns its wait status.
template <class Body>
int in_rank(int fd, const char* local_rank, Body body) {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("ZERO_STATUS_FD", std::to_string(fd).c_str(), 1);
    setenv("LOCAL_RANK", local_rank, 1);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

TEST(StatusPage, OutlivesAKilledRank) {
  observe::StatusMemory memory(2);
  const int status = in_rank(memory.fd(), "1", [] {
    if (!observe::status_page().active()) _exit(9);
    observe::status_page().set_step(41);
    kill(getpid(), SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(memory.read(1).step, 41);
  EXPECT_GT(memory.read(1).pid, 0);
  EXPECT_EQ(memory.read(1).phase, observe::StatusPhase::Startup);
  EXPECT_EQ(memory.read(0).pid, 0);
}

TEST(StatusPage, StaleDescriptorIsNotBelieved) {
  observe::StatusMemory memory(1);
  const int null = open("/dev/null", O_RDWR);
  auto inactive = [] { _exit(observe::status_page().active() ? 1 : 0); };
  EXPECT_EQ(in_rank(null, "0", inactive), 0);
  EXPECT_EQ(in_rank(memory.fd(), "1", inactive), 0) << "a rank beyond the memory";
  EXPECT_EQ(in_rank(memory.fd(), "x", inactive), 0);
  EXPECT_EQ(in_rank(9999, "0", inactive), 0);
  close(null);
}

}  // namespace
}  // namespace zero::base::status_page_test
