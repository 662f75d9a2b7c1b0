// `zero reproduce --quick`: each experiment ends in seconds, and its figures are those of the formulas of
// docs/memory.md, which are written here again; the page in docs/ is that of its recorded figures.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "support/file_text.h"
#include "support/process.h"

namespace zero::test::reproduce_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kZero = std::string(ZERO_BINARY_DIR) + "/bin/zero";
const std::set<std::string> kNames{"homework", "stages",      "mixed-precision", "ddp-vs-fsdp",    "largest-model",
                                   "offload",  "superlinear", "checkpointing",   "delayed-update", "experts"};

Ended reproduce(const Words& words, double limit = 240) {
  return run_to_end({Words{kZero, "reproduce"} + words, {"COLUMNS=100", "RANK", "WORLD_SIZE"}, {}, -1}, limit);
}

// What an experiment found. Its files are in the folder.
json found(const std::string& name, const std::string& folder) {
  const auto run = reproduce({name, "--quick", "--json", "--quiet", "--out", folder});
  EXPECT_EQ(run.code, 0) << run.err;
  const auto document = json::parse(run.out, nullptr, false);
  EXPECT_FALSE(document.is_discarded()) << run.out;
  EXPECT_EQ(document.value("schema", ""), "zero.reproduce/1");
  const auto& record = document.at("experiments").at(0);
  EXPECT_EQ(record.at("name"), name);
  EXPECT_EQ(record.at("quick"), true);
  EXPECT_GT(record.at("cpu_seconds").get<double>(), 0.1);
  EXPECT_FALSE(record.at("tables").empty());
  EXPECT_FALSE(record.at("comparisons").empty());
  for (const auto& one : record.at("comparisons"))
    for (const char* part : {"what", "theirs", "ours", "why"}) EXPECT_FALSE(one.at(part).get<std::string>().empty());
  const auto page = file_text(folder + "/index.html");
  EXPECT_NE(page.find("<svg"), std::string::npos);
  EXPECT_NE(page.find("</html>"), std::string::npos);
  EXPECT_EQ(json::parse(file_text(folder + "/reproduction.json")).at("experiments").at(0), record);
  return record.at("data");
}

// Bytes a parameter on one rank: parameters, gradients, masters and moments of Adam.
struct Widths {
  double parameter, gradient, state;
};
Widths widths_of(const std::string& recipe, int stage, double ranks) {
  const bool single = recipe == "fp32";
  return {(single ? 4.0 : 2.0) / (stage == 3 ? ranks : 1), (single ? 4.0 : 2.0) / (stage >= 2 ? ranks : 1),
          (single ? 8.0 : 12.0) / (stage >= 1 ? ranks : 1)};
}
double sum_of(const Widths& w) { return w.parameter + w.gradient + w.state; }

// Padding: some elements a parameter.
constexpr double kPadding = 0.02;
void expect_near(double bytes, double expected, const std::string& what) {
  EXPECT_GE(bytes, expected) << what;
  EXPECT_LE(bytes, expected * (1 + kPadding) + 4096) << what;
}

TEST(Reproduce, HomeworkFollowsTheFormulas) {
  const auto data = found("homework", temporary_folder());
  const auto P = data.at("parameters_elements").get<double>(), N = data.at("ranks").get<double>();
  ASSERT_EQ(data.at("runs").size(), 6u);
  std::vector<double> added;
  for (const auto& run : data.at("runs")) {
    const auto name = run.at("name").get<std::string>();
    const auto w = widths_of(run.at("recipe"), run.at("stage"), N);
    const bool optimizer = run.at("optimizer_on_host"), parameters = run.at("parameters_on_host");
    const auto bytes = [&](const char* moment, const char* purpose) {
      return run.at("memory").at(moment).at(purpose).get<double>();
    };
    const auto states = [&](const char* moment) {  // without tokens
      return bytes(moment, "total_bytes") - bytes(moment, "activations_bytes");
    };
    expect_near(bytes("after_step", "parameters_bytes"), parameters ? 0 : w.parameter * P, name);
    expect_near(bytes("after_step", "gradients_bytes"), optimizer ? 0 : w.gradient * P, name);
    expect_near(bytes("after_step", "master_and_optimizer_states_bytes"), optimizer ? 0 : w.state * P, name);
    const double moved = (parameters ? w.parameter : 0) + (optimizer ? w.state : 0);
    EXPECT_GE(bytes("before_forward", "host_bytes"), moved * P) << name;
    if (moved == 0) EXPECT_EQ(bytes("before_forward", "host_bytes"), 0) << name;
    added.push_back(bytes("after_forward", "total_bytes") - bytes("before_forward", "total_bytes"));
    // At stage 1 the memory of gradients is kept for the next backward; reading memory before forward returns it.
    if (run.at("stage") != 1) EXPECT_EQ(states("after_step"), states("before_forward")) << name;
    EXPECT_EQ(run.at("iterations_bytes").size(), 4u) << name;
    for (const int m : {0, 1, 3})  // after backward: a reduce buffer more or less, by timing
      EXPECT_EQ(run.at("iterations_bytes")[2][m], run.at("iterations_bytes")[3][m]) << name << ", moment " << m;
  }
  // Activations: the same at every stage, half as large in 16 bits.
  for (int i = 1; i < 3; ++i) EXPECT_EQ(added[static_cast<std::size_t>(i)], added[0]);
  EXPECT_LT(added[5], 0.75 * added[3]);
  EXPECT_EQ(data.at("runs")[5].at("theirs_bytes")[1], 9385241600.);
}

TEST(Reproduce, StagesFollowTheFormulas) {
  const auto data = found("stages", temporary_folder());
  const auto P = data.at("parameters_elements").get<double>(), N = data.at("ranks").get<double>();
  ASSERT_EQ(data.at("runs").size(), 12u);
  double sent = 0;
  for (const auto& run : data.at("runs")) {
    const int stage = run.at("stage");
    const auto recipe = run.at("recipe").get<std::string>();
    const auto w = widths_of(recipe, stage, N);
    expect_near(run.at("parameters_bytes"), w.parameter * P, recipe);
    expect_near(run.at("gradients_bytes"), w.gradient * P, recipe);
    expect_near(run.at("states_bytes"), w.state * P, recipe);
    if (stage == 0) sent = run.at("bytes_sent_per_step");
    EXPECT_NEAR(run.at("bytes_sent_per_step").get<double>() / sent, stage == 3 ? 1.5 : 1, 0.02) << recipe << stage;
  }
}

TEST(Reproduce, MixedPrecisionSearchesTheScale) {
  const auto data = found("mixed-precision", temporary_folder());
  const auto P = data.at("parameters_elements").get<double>();
  expect_near(data.at("runs")[0].at("parameters_bytes"), 4 * P, "fp32");
  expect_near(data.at("runs")[1].at("parameters_bytes"), 2 * P, "fp16");
  expect_near(data.at("runs")[1].at("states_bytes"), 12 * P, "fp16");
  // The first overflow keeps 2^32, each further one halves it, until the first clean step.
  const auto powers = data.at("scale_powers").get<std::vector<double>>();
  const auto clean = data.at("first_clean_step").get<std::size_t>();
  ASSERT_GT(clean, 3u);
  for (std::size_t step = 1; step <= clean; ++step)
    EXPECT_EQ(powers[step - 1], step == 1 ? 32 : 34 - static_cast<double>(step)) << step;
  EXPECT_GE(data.at("skipped_steps").get<std::size_t>(), clean - 1);
}

TEST(Reproduce, DdpStopsWhereItsStatesDoNotFit) {
  const auto data = found("ddp-vs-fsdp", temporary_folder());
  const auto budget = data.at("budget_bytes").get<double>(), N = data.at("ranks").get<double>();
  bool only_fsdp = false, both = false;
  for (const auto& row : data.at("rows")) {
    const auto P = row.at("parameters_elements").get<double>();
    for (const char* name : {"ddp", "fsdp"}) {
      const auto& side = row.at(name);
      const double states = sum_of(widths_of("bf16", name == std::string("ddp") ? 0 : 3, N)) * P;
      EXPECT_EQ(side.at("refused"), !side.at("planned_fits").get<bool>()) << "plan and run agree: " << name << " " << P;
      if (states > budget) EXPECT_TRUE(side.at("refused").get<bool>()) << name << " " << P;
      if (side.at("refused").get<bool>()) {
        EXPECT_NE(side.at("reason").get<std::string>().find("memory.device: got"), std::string::npos) << side;
        continue;
      }
      EXPECT_GE(side.at("peak_bytes").get<double>(), states);
      EXPECT_LE(side.at("peak_bytes").get<double>(), budget);
      EXPECT_GT(side.at("step_s").get<double>(), 0);
    }
    only_fsdp = only_fsdp || (row.at("ddp").at("refused").get<bool>() && !row.at("fsdp").at("refused").get<bool>());
    both = both || !row.at("ddp").at("refused").get<bool>();
  }
  EXPECT_TRUE(only_fsdp && both);
}

TEST(Reproduce, TheLargestModelFitsAndTheNextIsRefused) {
  const auto data = found("largest-model", temporary_folder());
  const auto budget = data.at("budget_bytes").get<double>(), N = data.at("ranks").get<double>();
  double before = 0;
  ASSERT_EQ(data.at("rows").size(), 4u);
  for (const auto& row : data.at("rows")) {
    const int stage = row.at("stage");
    const auto most = row.at("parameters_elements").get<double>();
    const double width = sum_of(widths_of("bf16", stage, N));
    EXPECT_EQ(row.at("planned_layers"), row.at("layers")) << "the plan is what ranks do, stage " << stage;
    EXPECT_NE(row.at("refusal").get<std::string>().find("memory.device"), std::string::npos) << row;
    EXPECT_LE(row.at("peak_bytes").get<double>(), budget);
    EXPECT_NEAR(row.at("formula_parameters").get<double>(), budget / width, 1);
    EXPECT_LE(most * width, budget);
    EXPECT_GT(most * width, 0.4 * budget) << stage;
    EXPECT_GT(most, before) << stage;
    before = most;
  }
}

TEST(Reproduce, EachTierHoldsALargerModel) {
  const auto data = found("offload", temporary_folder());
  double before = 0;
  ASSERT_EQ(data.at("rows").size(), 4u);
  for (const auto& row : data.at("rows")) {
    const auto most = row.at("parameters_elements").get<double>();
    double room = 0;
    for (const char* tier : {"device_budget_bytes", "host_budget_bytes", "file_budget_bytes"})
      room += row.at(tier).get<double>();
    EXPECT_FALSE(row.at("refusal").get<std::string>().empty());
    EXPECT_LE(sum_of(widths_of("bf16", row.at("stage"), data.at("ranks"))) * most, room) << row.at("name");
    EXPECT_GT(most, 1.2 * before) << row.at("name");
    EXPECT_LE(row.at("peak_bytes"), row.at("device_budget_bytes"));
    before = most;
  }
}

TEST(Reproduce, TheBatchGrowsAsStatesShrink) {
  const auto data = found("superlinear", temporary_folder());
  const auto budget = data.at("budget_bytes").get<double>(), P = data.at("parameters_elements").get<double>();
  double batch = 0;
  for (const auto& row : data.at("rows")) {
    const double width = sum_of(widths_of("bf16", 2, row.at("ranks")));
    EXPECT_NEAR(row.at("states_bytes").get<double>(), width * P, 1);
    EXPECT_GT(row.at("batch").get<double>(), batch);
    batch = row.at("batch");
    EXPECT_LE(row.at("measured_peak_bytes").get<double>(), 1.02 * budget);
    EXPECT_NEAR(row.at("measured_peak_bytes").get<double>() / row.at("planned_peak_bytes").get<double>(), 1, 0.05);
    EXPECT_GE(row.at("measured_peak_bytes").get<double>(), width * P);
  }
}

TEST(Reproduce, RecomputationMakesRoomForALargerBatch) {
  const auto data = found("checkpointing", temporary_folder());
  const auto& rows = data.at("rows");
  ASSERT_EQ(rows.size(), 6u);
  for (const auto& row : rows) EXPECT_LE(row.at("device_peak_bytes"), data.at("budget_bytes"));
  for (int i = 0; i < 2; ++i)
    EXPECT_NEAR(rows[i].at("planned_batch").get<double>() / rows[i].at("largest_batch").get<double>(), 1, 0.05) << i;
  EXPECT_GT(rows[1].at("largest_batch").get<double>(), 1.5 * rows[0].at("largest_batch").get<double>());
}

TEST(Reproduce, ADelayedUpdateIsTheSameUntilItBegins) {
  const auto data = found("delayed-update", temporary_folder());
  const auto start = data.at("start_step").get<std::size_t>();
  const auto plain = data.at("rows")[0].at("losses").get<std::vector<double>>();
  const auto late = data.at("rows")[0].at("losses_delayed").get<std::vector<double>>();
  ASSERT_EQ(plain.size(), data.at("steps").get<std::size_t>());
  ASSERT_EQ(late.size(), plain.size());
  // Step i, from 0, reads parameters with all updates before it up to i = start; the next one lacks an update.
  for (std::size_t i = 0; i <= start; ++i) EXPECT_EQ(plain[i], late[i]) << i;
  EXPECT_NE(plain[start + 1], late[start + 1]);
}

TEST(Reproduce, ExpertsAddParametersOnly) {
  const auto data = found("experts", temporary_folder());
  const auto& rows = data.at("rows");
  ASSERT_EQ(rows.size(), 2u);
  const double experts = rows[1].at("experts"), hidden = 64, blocks = 1;  // every second of two blocks
  const double mlp = 2 * 4 * hidden * hidden + 5 * hidden;
  const auto dense = rows[0].at("parameters_elements").get<double>();
  EXPECT_EQ(rows[1].at("parameters_elements").get<double>(), dense + blocks * ((experts - 1) * mlp + experts * hidden));
  EXPECT_EQ(rows[1].at("active_parameters_elements").get<double>(), dense + blocks * experts * hidden);
}

TEST(Reproduce, ListsExperimentsAndRefusesOthers) {
  for (const Words& words : {Words{}, Words{"list"}}) {
    const auto list = reproduce(words);
    EXPECT_EQ(list.code, 0);
    for (const auto& name : kNames) EXPECT_NE(list.out.find(name + " "), std::string::npos) << name;
  }
  const auto document = json::parse(reproduce({"--json"}).out);
  std::set<std::string> names;
  for (const auto& one : document.at("experiments")) names.insert(one.at("name"));
  EXPECT_EQ(names, kNames);
  const auto folder = temporary_folder();
  const auto refused = [&](const Words& words, const std::string& text) {
    const auto run = reproduce(words + Words{"--out", folder + "/out"});
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_NE(run.err.find(text), std::string::npos) << run.err;
    EXPECT_FALSE(fs::exists(folder + "/out"));
  };
  refused({"homwork"}, "did you mean \"homework\"?");
  refused({"stages", "stages"}, "got \"stages\" a second time");
  refused({"list", "stages"}, "got \"list\" a second time, or with an experiment");
  refused({"stages", "--text", folder}, "[--text]");
  refused({"--docs", folder + "/a.md"}, "[--docs] got no experiment");
  refused({"--from", folder + "/a.json"}, "without --docs");
}

TEST(Reproduce, AStopLeavesNoProcess) {
  const auto folder = temporary_folder();
  const std::string mark = "ZERO_TEST_MARK=reproduce-" + std::to_string(::getpid());
  Process process({{kZero, "reproduce", "delayed-update", "--out", folder}, {mark}, {}, -1});
  ASSERT_TRUE(process.wait_for("rate-3e-4-plain", 60)) << process.err;
  ::usleep(1'500'000);
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(20), 130) << process.err;
  EXPECT_LT(process.seconds, 5);
  EXPECT_TRUE(left_behind(mark).empty());
  EXPECT_FALSE(fs::exists(folder + "/reproduction.json")) << "nothing was found";
}

TEST(Reproduce, PagesComeFromRecordsAlone) {
  const auto folder = temporary_folder();
  const std::string docs = ZERO_SOURCE_DIR "/docs/", recorded_file = ZERO_SOURCE_DIR "/lab/results/reproduction.json";
  const auto made = reproduce({"--from", recorded_file, "--docs", folder + "/reproduction.md"});
  ASSERT_EQ(made.code, 0) << made.err;
  std::set<std::string> names;
  const auto recorded = json::parse(file_text(recorded_file));
  for (const auto& one : recorded.at("experiments")) {
    names.insert(one.at("name"));
    EXPECT_EQ(one.at("quick"), false) << one.at("name");
  }
  EXPECT_EQ(names, kNames);
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const bool is_record = fs::path(recorded_file).filename() == name;
    EXPECT_EQ(file_text(entry.path()), file_text(is_record ? recorded_file : docs + name))
        << name << ": zero reproduce --from lab/results/reproduction.json --docs "
        << "docs/reproduction.md";
    ++files;
  }
  EXPECT_GE(files, 2 + kNames.size());
  for (const auto& entry : fs::directory_iterator(docs))
    if (entry.path().filename().string().starts_with("reproduction"))
      EXPECT_TRUE(fs::exists(folder / entry.path().filename())) << entry.path() << " is of no record";
}

TEST(Reproduce, FilesOfAnotherFormAreRefused) {
  const auto folder = temporary_folder();
  const auto file = folder + "/a.json";
  const auto refused = [&](const std::string& text, int code) {
    std::ofstream(file) << text;
    const auto run = reproduce({"--from", file, "--docs", folder + "/page.md"});
    EXPECT_EQ(run.code, code) << run.err;
    EXPECT_FALSE(fs::exists(folder + "/page.md"));
  };
  refused("", 5);
  refused("[]", 2);
  refused(R"({"schema": "zero.reproduce/1"})", 2);
  refused(R"({"schema": "zero.reproduce/1", "experiments": [{"name": "../../x"}]})", 2);
  refused(R"({"schema": "zero.reproduce/1", "experiments": [)" + std::string(100000, '['), 2);
}

}  // namespace
}  // namespace zero::test::reproduce_test
