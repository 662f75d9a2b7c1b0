// The recorder of observe/trace.h without an engine: the file is strict JSON, slices of a track nest, threads and
// overlapping operations have separate tracks, a disabled trace writes nothing, and no failure reaches the program.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include <zero/errors.h>
#include <zero/log.h>

#include "observe/trace.h"
#include "support/file_text.h"
#include "support/folder.h"
#include "unit/observe/trace_file.h"

namespace zero::base::trace_test {
namespace {

using zero::test::file_text;

namespace fs = std::filesystem;
using nlohmann::json;
using test::read_trace;
using test::slices;
using test::TempFolder;

observe::Trace::Setup setup_of(const TempFolder& folder, int rank = 0, int ranks = 1) {
  return {folder.file("trace.json"), rank, ranks, observe::trace_now(), "run \"1\""};
}

void pause_us(int us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

TEST(Trace, NestedSpansOfOneThreadNestInTheFile) {
  const TempFolder folder;
  observe::Trace trace;
  trace.start(setup_of(folder));
  trace.record(true);
  for (int i = 0; i < 3; ++i) {
    observe::TraceSpan outer(trace, observe::TraceKind::Step, "step", i);
    observe::TraceSpan inner(trace, observe::TraceKind::Forward, "forward");
    for (int k = 0; k < 2; ++k) {
      observe::TraceSpan unit(trace, observe::TraceKind::ForwardUnit, "layers.0 \"odd\\\n\x80");
      pause_us(50);
    }
  }
  trace.counter("activations", 5);
  trace.counter("activations", -7);
  EXPECT_GE(trace.total(observe::TraceKind::ForwardUnit), 6 * 50'000);
  EXPECT_GE(trace.total(observe::TraceKind::Step), trace.total(observe::TraceKind::ForwardUnit));
  EXPECT_TRUE(trace.stop());
  const json events = read_trace(observe::Trace::part_name(folder.file("trace.json"), 0));
  EXPECT_EQ(test::nesting_fault(events), "");
  EXPECT_EQ(slices(events, "compute", "step").size(), 3u);
  EXPECT_EQ(slices(events, "compute", "phase").size(), 3u);
  const auto units = slices(events, "compute", "forward");
  ASSERT_EQ(units.size(), 6u);
  EXPECT_EQ(units[0].name, "layers.0 \"odd\\??");
  EXPECT_EQ(slices(events, "compute", "step")[2].value, 2);
  for (const auto& unit : units) {
    EXPECT_GE(unit.end - unit.begin, 50'000);
    EXPECT_GE(unit.begin, 0);
  }
  std::vector<std::int64_t> counted;
  for (const auto& event : events)
    if (event["ph"] == "C") {
      EXPECT_EQ(event["name"], "bytes of activations");
      counted.push_back(event["args"]["bytes"]);
    }
  EXPECT_EQ(counted, (std::vector<std::int64_t>{5, -7}));
}

TEST(Trace, CountsWithoutAFile) {
  const TempFolder folder;
  observe::Trace trace;
  trace.count_always();
  EXPECT_TRUE(trace.on());
  EXPECT_FALSE(trace.recording());
  observe::TraceOperation operation;
  operation.begin(trace, observe::TraceKind::Gather);
  {
    observe::TraceSpan span(trace, observe::TraceKind::ReduceWait, "group");
    pause_us(50);
  }
  operation.end("group", 1);
  trace.counter("activations", 5);
  const auto waited = trace.total(observe::TraceKind::ReduceWait), gathered = trace.total(observe::TraceKind::Gather);
  EXPECT_GE(waited, 50'000);
  EXPECT_GE(gathered, 50'000);
  EXPECT_FALSE(trace.stop()) << "nothing was started";
  // A partial trace at the same time: all slices are counted, only recorded ones are written.
  trace.start(setup_of(folder));
  EXPECT_FALSE(trace.recording());
  { observe::TraceSpan unseen(trace, observe::TraceKind::ReduceWait, "unseen"); }
  trace.record(true);
  { observe::TraceSpan seen(trace, observe::TraceKind::ReduceWait, "seen"); }
  trace.record(false);
  EXPECT_TRUE(trace.on());
  { observe::TraceSpan unseen(trace, observe::TraceKind::ReduceWait, "unseen"); }
  EXPECT_TRUE(trace.stop());
  EXPECT_TRUE(trace.on());
  EXPECT_GT(trace.total(observe::TraceKind::ReduceWait), waited);
  const auto written = slices(read_trace(observe::Trace::part_name(folder.file("trace.json"), 0)), "waits");
  ASSERT_EQ(written.size(), 1u);
  EXPECT_EQ(written[0].name, "reduce seen");
}

TEST(Trace, OffWritesNothing) {
  const TempFolder folder;
  observe::Trace never, trace;
  {
    observe::TraceSpan span(never, observe::TraceKind::Step, "step");
    observe::TraceOperation operation;
    operation.begin(never, observe::TraceKind::Gather);
    operation.end("group", 1);
  }
  EXPECT_FALSE(never.stop());
  trace.start(setup_of(folder));
  const auto header = file_text(observe::Trace::part_name(folder.file("trace.json"), 0));
  observe::TraceOperation early, late;
  early.begin(trace, observe::TraceKind::Gather);
  {
    observe::TraceSpan span(trace, observe::TraceKind::Step, "step");
    trace.record(true);  // operations that began before stay invisible
  }
  early.end("group", 1);
  late.begin(trace, observe::TraceKind::Gather);
  trace.record(false);
  late.end("group", 1);
  { observe::TraceSpan span(trace, observe::TraceKind::Step, "step"); }
  trace.counter("activations", 1);
  EXPECT_EQ(trace.total(observe::TraceKind::Step), 0);
  EXPECT_TRUE(trace.stop());
  EXPECT_EQ(file_text(observe::Trace::part_name(folder.file("trace.json"), 0)), header + "\n]\n");
  EXPECT_TRUE(fs::is_empty(folder.path()) || fs::exists(observe::Trace::part_name(folder.file("trace.json"), 0)));
}

TEST(Trace, SpansOfAnEarlierTraceAreDropped) {
  const TempFolder folder;
  observe::Trace trace;
  trace.start(setup_of(folder));
  trace.record(true);
  observe::TraceOperation old;
  old.begin(trace, observe::TraceKind::Gather);
  {
    observe::TraceSpan span(trace, observe::TraceKind::Step, "step");
    EXPECT_TRUE(trace.stop());
    trace.start(setup_of(folder));
    trace.record(true);
  }
  observe::TraceOperation first, second;
  first.begin(trace, observe::TraceKind::Gather);
  old.end("old", 1);  // its lane is another operation's by now
  second.begin(trace, observe::TraceKind::Gather);
  first.end("first", 1);
  second.end("second", 1);
  EXPECT_TRUE(trace.stop());
  const json events = read_trace(observe::Trace::part_name(folder.file("trace.json"), 0));
  EXPECT_EQ(test::nesting_fault(events), "");
  EXPECT_EQ(slices(events, "compute").size(), 0u);
  EXPECT_EQ(slices(events, "gathers").size(), 1u);
  EXPECT_EQ(slices(events, "gathers 2").size(), 1u);
}

TEST(Trace, OverlappingOperationsTakeLanes) {
  const TempFolder folder;
  observe::Trace trace;
  trace.start(setup_of(folder));
  trace.record(true);
  observe::TraceOperation a, b, c;
  a.begin(trace, observe::TraceKind::Gather);
  pause_us(10);
  b.begin(trace, observe::TraceKind::Gather);
  pause_us(10);
  a.end("a", 100);
  c.begin(trace, observe::TraceKind::Gather);  // takes the lane that a gave back
  pause_us(10);
  b.end("b", 200);
  pause_us(10);
  c.end("c", 300);
  EXPECT_TRUE(trace.stop());
  const json events = read_trace(observe::Trace::part_name(folder.file("trace.json"), 0));
  EXPECT_EQ(test::nesting_fault(events), "");
  const auto one = slices(events, "gathers"), two = slices(events, "gathers 2");
  ASSERT_EQ(one.size(), 2u);
  ASSERT_EQ(two.size(), 1u);
  EXPECT_EQ(one[0].name, "a");
  EXPECT_EQ(one[1].name, "c");
  EXPECT_EQ(one[1].value, 300);
  EXPECT_LT(two[0].begin, one[0].end);
  EXPECT_GT(two[0].end, one[1].begin);
}

TEST(Trace, ThreadsHaveTracksAndFullBuffersGoToTheFile) {
  const TempFolder folder;
  observe::Trace trace;
  trace.start(setup_of(folder));
  trace.record(true);
  constexpr int kThreads = 4, kSlices = 10000;  // more than a buffer holds
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < kSlices; ++i) {
        observe::TraceSpan outer(trace, observe::TraceKind::Backward, "backward");
        observe::TraceSpan inner(trace, observe::TraceKind::BackwardUnit, "unit");
      }
    });
  for (auto& thread : threads) thread.join();
  // Written during the trace, not kept in memory.
  EXPECT_GT(fs::file_size(observe::Trace::part_name(folder.file("trace.json"), 0)),
            std::uintmax_t{kThreads} * kSlices * 100);
  EXPECT_TRUE(trace.stop());
  const json events = read_trace(observe::Trace::part_name(folder.file("trace.json"), 0));
  EXPECT_EQ(test::nesting_fault(events), "");
  for (const char* track : {"compute", "compute 2", "compute 3", "compute 4"})
    EXPECT_EQ(slices(events, track).size(), std::size_t{2} * kSlices) << track;
}

TEST(Trace, AKilledRunLeavesAFileThatABracketCloses) {
  const TempFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    observe::Trace trace;
    trace.start(setup_of(folder));
    trace.record(true);
    for (int i = 0; i < 5000; ++i) observe::TraceSpan span(trace, observe::TraceKind::Step, "step", i);
    trace.flush();
    { observe::TraceSpan span(trace, observe::TraceKind::Step, "lost"); }
    ::raise(SIGKILL);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto text = file_text(observe::Trace::part_name(folder.file("trace.json"), 0));
  EXPECT_FALSE(json::accept(text));
  EXPECT_EQ(slices(json::parse(text + "]"), "compute", "step").size(), 5000u);
  // Its part is not taken for a whole one.
  EXPECT_FALSE(observe::merge_trace_parts(setup_of(folder)));
  EXPECT_FALSE(fs::exists(folder.file("trace.json")));
}

TEST(Trace, WhatCannotBeMadeIsSaidAtTheStart) {
  const TempFolder folder;
  observe::Trace trace, other;
  auto setup = setup_of(folder);
  setup.file = folder.text() + "/missing/trace.json";
  try {
    trace.start(setup);
    FAIL() << "a file in a missing folder";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("missing/trace.json.rank-0.json"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(trace.started());
  fs::create_symlink("/dev/full", observe::Trace::part_name(folder.file("trace.json"), 0));
  EXPECT_THROW(trace.start(setup_of(folder)), IoError);
  fs::remove(observe::Trace::part_name(folder.file("trace.json"), 0));
  trace.start(setup_of(folder));
  EXPECT_THROW(trace.start(setup_of(folder)), ConfigError);
  EXPECT_THROW(other.start(setup_of(folder)), ConfigError);  // one file, two writers
  EXPECT_TRUE(trace.stop());
  other.start(setup_of(folder));
  EXPECT_TRUE(other.stop());
}

TEST(Trace, AFullDiskLaterEndsTheTraceWithAWarning) {
  const TempFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {  // the limit is the process's
    ::signal(SIGXFSZ, SIG_IGN);
    std::vector<std::string> warnings;
    set_log_sink([&](LogLevel level, std::string_view line) {
      if (level == LogLevel::Warning) warnings.emplace_back(line);
    });
    observe::Trace trace;
    trace.start(setup_of(folder));
    trace.record(true);
    const rlimit limit{40'000, 40'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    for (int i = 0; i < 20000; ++i) observe::TraceSpan span(trace, observe::TraceKind::Step, "step", i);
    const bool ended = !trace.on(), whole = trace.stop();
    const bool said = warnings.size() == 1 && warnings[0].find("File too large") != std::string::npos;
    ::_exit(ended && !whole && said ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Trace, TheLastRankJoinsTheParts) {
  const TempFolder folder;
  std::ofstream(folder.file("trace.json")) << "[\n{\"name\":\"of an earlier run\"}\n]\n";
  std::vector<std::unique_ptr<observe::Trace>> traces;
  for (int rank = 0; rank < 3; ++rank) {
    traces.push_back(std::make_unique<observe::Trace>());
    traces.back()->start(setup_of(folder, rank, 3));
    traces.back()->record(true);
    observe::TraceSpan span(*traces.back(), observe::TraceKind::Step, "step", rank);
  }
  for (const int rank : {1, 0, 2}) {
    EXPECT_TRUE(traces[static_cast<std::size_t>(rank)]->stop());
    EXPECT_EQ(observe::merge_trace_parts(setup_of(folder, rank, 3)), rank == 2);
  }
  EXPECT_TRUE(observe::merge_trace_parts(setup_of(folder, 0, 3)));  // a later rank finds it merged
  const json events = read_trace(folder.file("trace.json"));
  std::vector<std::int64_t> seen;
  for (const auto& event : events)
    if (event["ph"] == "X") {
      EXPECT_EQ(event["pid"], event["args"]["step"]);
      seen.push_back(event["pid"]);
    }
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2}));
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder.path())) ++files;
  EXPECT_EQ(files, 1u);
  // Parts of another run are not mixed in.
  for (int rank = 0; rank < 2; ++rank) {
    auto setup = setup_of(folder, rank, 2);
    setup.run = rank == 0 ? "now" : "before";
    observe::Trace trace;
    trace.start(setup);
    EXPECT_TRUE(trace.stop());
  }
  auto now = setup_of(folder, 0, 2);
  now.run = "now";
  EXPECT_FALSE(observe::merge_trace_parts(now));
  EXPECT_TRUE(fs::exists(observe::Trace::part_name(folder.file("trace.json"), 1)));
}

TEST(Trace, AMergeThatCannotBeWrittenKeepsTheParts) {
  const TempFolder folder;
  observe::Trace trace;
  trace.start(setup_of(folder));
  EXPECT_TRUE(trace.stop());
  fs::create_directory(folder.file("trace.json") + ".partial");
  EXPECT_THROW(observe::merge_trace_parts(setup_of(folder)), IoError);
  EXPECT_TRUE(fs::exists(observe::Trace::part_name(folder.file("trace.json"), 0)));
}

TEST(Trace, TwoRanksThatEndTogetherJoinOnce) {
  for (int round = 0; round < 20; ++round) {
    const TempFolder folder;
    bool joined[2] = {};
    std::vector<std::thread> ranks;
    observe::Trace traces[2];
    for (int rank = 0; rank < 2; ++rank) traces[rank].start(setup_of(folder, rank, 2));
    for (int rank = 0; rank < 2; ++rank)
      ranks.emplace_back([&, rank] {
        EXPECT_TRUE(traces[rank].stop());
        joined[rank] = observe::merge_trace_parts(setup_of(folder, rank, 2));
      });
    for (auto& rank : ranks) rank.join();
    EXPECT_TRUE(joined[0] || joined[1]);
    EXPECT_EQ(read_trace(folder.file("trace.json")).size(),
              2u * (3 + 2 * 8));  // a rank, and two names for each of its tracks
    EXPECT_FALSE(fs::exists(observe::Trace::part_name(folder.file("trace.json"), 0)));
    EXPECT_FALSE(fs::exists(observe::Trace::part_name(folder.file("trace.json"), 1)));
  }
}

}  // namespace
}  // namespace zero::base::trace_test
