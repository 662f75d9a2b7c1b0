// Tables of bytes by phase of a step: sums, units, both layouts, exact JSON.
#include "tools/report/text/memory_phases.h"

#include <gtest/gtest.h>

#include <sstream>

namespace memory_phases_test {
namespace {

using namespace zero;
using report::MemoryPhases;
using report::Phase;
using Purpose = MemoryReport::Purpose;
using Tier = MemoryReport::Tier;

MemoryReport report_of(std::vector<std::pair<Purpose, std::uint64_t>> bytes, std::uint64_t peak) {
  MemoryReport report;
  for (const auto& [purpose, count] : bytes) report.set(Tier::Device, purpose, count, 0);
  report.set_peak(Tier::Device, peak);
  return report;
}

MemoryPhases example() {
  constexpr std::uint64_t kMiB = 1 << 20;
  MemoryPhases phases;
  auto rest = report_of(
      {{Purpose::Parameters, 2 * kMiB}, {Purpose::MasterParameters, 4 * kMiB}, {Purpose::OptimizerStates, 8 * kMiB}},
      20 * kMiB);
  // Another tier must not be counted.
  rest.set(Tier::Host, Purpose::Parameters, 99 * kMiB, 0);
  phases.note(Phase::BeforeForward, rest);
  phases.note(
      Phase::AfterForward,
      report_of({{Purpose::Parameters, 2 * kMiB}, {Purpose::GatherBuffers, kMiB / 2}, {Purpose::Activations, 100}},
                30 * kMiB));
  phases.note(
      Phase::AfterBackward,
      report_of({{Purpose::Gradients, 3 * kMiB}, {Purpose::ReduceBuffers, kMiB}, {Purpose::Other, kMiB}}, 25 * kMiB));
  phases.note(Phase::AfterStep, rest);
  return phases;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

TEST(MemoryPhases, WideTableHasTheMomentsAsRows) {
  const auto lines = lines_of(example().table(200));
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(words_of(lines[0])[0], "MiB");
  EXPECT_EQ(words_of(lines[1]), (std::vector<std::string>{"before", "forward", "2.00", "0", "0", "0", "12.00", "0", "0",
                                                          "14.00", "20.00"}));
  EXPECT_EQ(words_of(lines[2]), (std::vector<std::string>{"after", "forward", "2.00", "0.50", "0", "0", "0", "<0.01",
                                                          "0", "2.50", "30.00"}));
  EXPECT_EQ(words_of(lines[3]), (std::vector<std::string>{"after", "backward", "0", "0", "3.00", "1.00", "0", "0",
                                                          "1.00", "5.00", "25.00"}));
  // Numbers end under the last letter of their title.
  const auto end = lines[0].find("parameters") + 9;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    EXPECT_NE(lines[i][end], ' ');
    EXPECT_EQ(lines[i][end + 1], ' ');
  }
}

TEST(MemoryPhases, NarrowTableHasThePurposesAsRows) {
  const std::string text = example().table(80);
  const auto lines = lines_of(text);
  ASSERT_EQ(lines.size(), 10u) << text;
  for (const auto& line : lines) EXPECT_LE(line.size(), 80u) << line;
  EXPECT_EQ(words_of(lines[1]), (std::vector<std::string>{"parameters", "2.00", "2.00", "0", "2.00"}));
  EXPECT_EQ(words_of(lines[5]), (std::vector<std::string>{"master", "+", "optimizer", "12.00", "0", "0", "12.00"}));
  EXPECT_EQ(words_of(lines[9]), (std::vector<std::string>{"peak", "in", "phase", "20.00", "30.00", "25.00", "20.00"}));
}

TEST(MemoryPhases, TheUnitFollowsTheLargestNumber) {
  MemoryPhases phases;
  phases.note(Phase::AfterStep, report_of({{Purpose::Parameters, 1023}}, 1023));
  EXPECT_EQ(words_of(lines_of(phases.table(200))[0])[0], "B");
  EXPECT_EQ(words_of(lines_of(phases.table(200))[1])[2], "1023");
  phases.note(Phase::AfterStep, report_of({{Purpose::Parameters, 1024}}, 1024));
  EXPECT_EQ(words_of(lines_of(phases.table(200))[0])[0], "KiB");
  phases.note(Phase::AfterStep, report_of({{Purpose::Parameters, 3ull << 30}}, 3ull << 30));
  EXPECT_EQ(words_of(lines_of(phases.table(200))[0])[0], "GiB");
  EXPECT_EQ(words_of(lines_of(phases.table(200))[1])[2], "3.00");
}

TEST(MemoryPhases, JsonIsExactAndLeavesOutWhatWasNotNoted) {
  MemoryPhases phases;
  EXPECT_EQ(phases.json(), "{}");
  phases.note(
      Phase::AfterForward,
      report_of({{Purpose::MasterParameters, 1000000007}, {Purpose::OptimizerStates, 2}, {Purpose::Activations, 5}},
                2000000000));
  EXPECT_EQ(phases.json(),
            "{\"after_forward\": {\"parameters_bytes\": 0, \"gathered_bytes\": 0, \"gradients_bytes\": 0, "
            "\"reduce_buffers_bytes\": 0, "
            "\"master_and_optimizer_states_bytes\": 1000000009, \"activations_bytes\": 5, \"other_bytes\": 0, "
            "\"total_bytes\": 1000000014, "
            "\"peak_bytes\": 2000000000, \"host_bytes\": 0, \"host_peak_bytes\": 0, \"file_bytes\": 0}}");
}

TEST(MemoryPhases, OtherTiersAreShownWhereSomethingRests) {
  MemoryPhases phases;
  auto report = report_of({{Purpose::Parameters, 1024}}, 1024);
  phases.note(Phase::AfterForward, report);
  EXPECT_EQ(phases.table(200).find("host"), std::string::npos);
  const auto rest = [&](MemoryReport::Tier tier, Purpose purpose, std::uint64_t bytes) {
    report.set(tier, purpose, bytes, 0);
    report.set_peak(tier, bytes);
  };
  rest(MemoryReport::Tier::Host, Purpose::OptimizerStates, 3 << 20);
  rest(MemoryReport::Tier::File, Purpose::Parameters, 7 << 20);
  phases.note(Phase::AfterStep, report);
  const auto table = phases.table(200);
  for (const char* part : {"on the host", "host, peak", "in files", "3.00", "7.00"})
    EXPECT_NE(table.find(part), std::string::npos) << table;
  EXPECT_NE(phases.json().find("\"host_bytes\": 3145728, \"host_peak_bytes\": 3145728, \"file_bytes\": 7340032}"),
            std::string::npos)
      << phases.json();
}

TEST(MemoryPhases, PeaksAreResetAfterEachNote) {
  struct Fake {
    int resets = 0;
    MemoryReport memory() const { return report_of({{Purpose::Parameters, 7}}, 9); }
    void reset_peak_memory() { ++resets; }
  } fake;
  MemoryPhases phases;
  phases.note_and_reset(Phase::BeforeForward, fake);
  phases.note_and_reset(Phase::AfterStep, fake);
  EXPECT_EQ(fake.resets, 2);
  EXPECT_EQ(phases.total(Phase::BeforeForward), 7u);
  EXPECT_FALSE(phases.has(Phase::AfterForward));
  EXPECT_EQ(phases.peak(), 9u);
}

TEST(MemoryPhases, ComparesSetupsInOneUnit) {
  MemoryPhases small;
  small.note(Phase::BeforeForward, report_of({{Purpose::Parameters, 1 << 20}}, 1 << 20));
  const auto lines = lines_of(report::compare_phases({{"0", example()}, {"3", small}}));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].substr(0, 11), "stage (MiB)");
  EXPECT_EQ(words_of(lines[1]), (std::vector<std::string>{"0", "14.00", "2.50", "5.00", "14.00", "30.00"}));
  EXPECT_EQ(words_of(lines[2]), (std::vector<std::string>{"3", "1.00", "-", "-", "-", "1.00"}));
}

}  // namespace
}  // namespace memory_phases_test
