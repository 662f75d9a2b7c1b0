// Writing and reading run records, errors with file and line for damaged ones, the figures of charts, and a page that
// loads nothing and escapes all text of a run.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include <zero/errors.h>

#include "support/file_text.h"
#include "support/folder.h"
#include "tools/report/page/chart_data.h"
#include "tools/report/page/html_page.h"
#include "tools/report/page/run_record.h"
#include "tools/report/text/text.h"

namespace zero::report::page_test {
namespace {

using zero::test::file_text;

namespace fs = std::filesystem;

struct Folder : test::TempFolder {
  void write(const std::string& name, const std::string& text) const { std::ofstream(path() / name) << text; }
};

constexpr const char* kHostile = "<script>alert('x')</script>&\"--><!--";

RunRecord sample() {
  RunRecord r;
  r.started = "2026-01-02T03:04:05Z";
  r.recipe = "bf16", r.device = "cpu", r.transport = "shm", r.text = kHostile;
  r.command = {"train", kHostile};
  r.stage = 3, r.world = 2, r.mesh.data = 2, r.steps = 4, r.parameters = 1234567, r.samples_per_step = 16,
  r.tokens_per_step = 2048;
  r.model = {{"layers", "4"}};
  r.environment = {{"CPU", kHostile}, {"host", "w0"}};
  r.configuration = {{"zero_optimization.stage", "3", "ds.json:3:5", false},
                     {"seed", "1234", "default", true},
                     {"libzero.data.text", "\"</script>\"", "CLI", false}};
  r.recorded_step = 3;
  r.phases = {
      {"before forward", {{"device", {{"parameters", 1000}, {"optimizer states", 4000}}, 6000}}},
      {"after forward", {{"device", {{"parameters", 1000}, {"optimizer states", 4000}, {"activations", 700}}, 8192}}},
      {"after backward",
       {{"device", {{"parameters", 1000}, {"gradients", 500}}, 7000}, {"host", {{"gradients", 5}}, 9}}}};
  r.purposes = {"parameters", "gradients", "optimizer states", "activations"};
  r.samples = {{0.0, {1000, 0, 4000, 0}}, {1.5, {1000, 0, 4000, 700}}, {4.25, {1000, 500, 4000, 0}}};
  r.timeline = {
      {"compute", "forward", "phase", 0, 2, -1},         {"compute", "backward", "phase", 2, 4.5, -1},
      {"compute", "step()", "phase", 4.5, 5, -1},        {"compute", "blocks.0", "forward", 0.5, 1.5, -1},
      {"compute", "embed", "forward", 0, 0.5, -1},       {"compute", "blocks.0", "backward", 2.5, 4, -1},
      {"gathers", "blocks.0", "gather", 0.1, 0.4, 2048}, {"gathers", "publish embed", "publish", 4.6, 4.9, 64},
      {"waits", "gather blocks.0", "wait", 0.3, 0.4, -1}};
  r.planned = {{"device", {{"parameters", 1000}, {"optimizer states", 4100}}, 8000}};
  r.planned_sent = {3072, 0, 0};
  r.traffic = {{"all_gather", 3, 2048}, {"reduce_scatter", 2, 1024}, {"control", 5, 40}};
  return r;
}

// The same on 2 data-parallel x 2 sequence-parallel x 3 tensor-parallel ranks.
RunRecord on_mesh() {
  RunRecord r = sample();
  r.world = 12;
  r.mesh = {2, 2, 3};
  r.own_parameters = 411522;
  r.traffic = {{"all_gather", 3, 2048},   {"reduce_scatter", 2, 1024}, {"tp.all_reduce", 8, 5000},
               {"tp.all_gather", 1, 500}, {"sp.all_to_all", 4, 700},   {"control", 5, 40}};
  r.planned_sent = {3072, 6000, 700};
  r.ranks = {{0, 0, 0, 0, 5000, 8192, {3072, 5500, 700}}, {1, 0, 0, 1, 5100, 8200, {3072, 5500, 710}}};
  return r;
}

std::string log_of(int steps) {
  std::string log;
  for (int i = 1; i <= steps; ++i)
    log += "{\"step\": " + std::to_string(i) + ", \"loss\": " + std::to_string(5.5 / i) +
           ", \"grad_norm\": null, \"lr\": 0.001, \"loss_scale\": 1, \"step_ms\": 12.5, \"tokens_per_s\": " +
           std::to_string(1000 + i) + ", \"memory_bytes\": 8192, \"bytes_sent\": 3072}\n";
  return log;
}

TEST(RunRecord, ReadsWhatItWrote) {
  const Folder folder;
  const RunRecord written = sample();
  folder.write("run.json", run_json(written));
  folder.write("log.jsonl", log_of(4));
  folder.write("result.json", "{\"heldout_nats_per_byte\": 2.25}");
  const RunRecord read = read_run(folder.path());
  EXPECT_EQ(run_json(read), run_json(written));
  EXPECT_EQ(read.phases.size(), 3u);
  EXPECT_EQ(read.phases[1].tiers[0].by_purpose[2], (std::pair<std::string, std::uint64_t>("activations", 700)));
  EXPECT_EQ(read.timeline[6].bytes, 2048);
  EXPECT_EQ(read.configuration[0].value, "3");
  EXPECT_FALSE(read.configuration[0].is_default);
  EXPECT_EQ(read.log.size(), 4u);
  EXPECT_FALSE(read.log[0].grad_norm);
  EXPECT_DOUBLE_EQ(*read.log[1].loss, 2.75);
  EXPECT_DOUBLE_EQ(*read.heldout, 2.25);
  EXPECT_TRUE(nlohmann::json::accept(run_json(written)));
}

TEST(RunRecord, OfATaskWithMetrics) {
  const Folder folder;
  RunRecord written = sample();
  written.metrics = {{"exact_match", 71.5}, {"f1", 83.25}};
  folder.write("run.json", run_json(written));
  folder.write("log.jsonl", log_of(2));
  folder.write("result.json", "{\"heldout_loss\": 0.75}");
  const RunRecord read = read_run(folder.path());
  EXPECT_EQ(read.metrics, written.metrics);
  EXPECT_DOUBLE_EQ(*read.heldout, 0.75);
  const std::string page = html_page({read});
  EXPECT_NE(page.find(">f1<"), std::string::npos);
  EXPECT_NE(page.find("83.2500"), std::string::npos);
  EXPECT_EQ(html_page({sample()}).find(">f1<"), std::string::npos);
}

// A run with evaluations between steps: lines of their own in the log, of which the chart has those steps alone.
TEST(RunRecord, OfEvaluationsBetweenSteps) {
  const Folder folder;
  RunRecord written = sample();
  written.loss_unit = "nats per sample";
  folder.write("run.json", run_json(written));
  const std::string steps = log_of(4);
  const auto second = steps.find("{\"step\": 3");
  folder.write("log.jsonl", steps.substr(0, second) +
                                R"({"step": 2, "heldout_loss": 3.5, "metrics": {"f1": 20}})"
                                "\n" +
                                steps.substr(second) +
                                R"({"step": 4, "heldout_loss": 1.25})"
                                "\n");
  const RunRecord read = read_run(folder.path());
  EXPECT_EQ(read.loss_unit, "nats per sample");
  ASSERT_EQ(read.log.size(), 4u);
  EXPECT_DOUBLE_EQ(*read.log[1].loss, 2.75) << "of the step, which the evaluation leaves as it is";
  EXPECT_DOUBLE_EQ(*read.log[1].heldout_loss, 3.5);
  EXPECT_FALSE(read.log[2].heldout_loss);
  EXPECT_DOUBLE_EQ(*read.log[3].heldout_loss, 1.25);
  const auto data = nlohmann::json::parse(chart_json({read}));
  EXPECT_EQ(data["runs"][0]["heldout_loss"], (nlohmann::json{3.5, 1.25}));
  EXPECT_EQ(data["runs"][0]["heldout_loss_steps"], (nlohmann::json{2, 4}));
  EXPECT_EQ(data["loss_unit"], "nats per sample");
  const std::string page = html_page({read});
  EXPECT_NE(page.find("Held-out loss, nats per sample"), std::string::npos);
  EXPECT_NE(page.find("Training loss, nats per sample"), std::string::npos);
  EXPECT_EQ(html_page({sample()}).find("Held-out loss, nats"), std::string::npos);
  EXPECT_EQ(loss_unit({read, sample()}), "nats");
  // Steps done again after a restart replace evaluations of the first attempt, too.
  folder.write("log.jsonl", steps +
                                R"({"step": 4, "heldout_loss": 1.25})"
                                "\n" +
                                R"({"step": 4, "loss": 9})"
                                "\n");
  EXPECT_FALSE(read_run(folder.path()).log.back().heldout_loss);
}

// `zero train --steps 0`.
TEST(HtmlPage, OfARunWithoutAStep) {
  const Folder folder;
  RunRecord written = sample();
  written.recorded_step = 0;
  written.metrics = {{"f1", 83.25}};
  folder.write("run.json", run_json(written));
  folder.write("log.jsonl", "");
  folder.write("result.json", "{\"heldout_loss\": 0.75}");
  const std::string page = html_page({read_run(folder.path())});
  EXPECT_NE(page.find("83.2500"), std::string::npos);
  EXPECT_NE(page.find("0.7500"), std::string::npos);
}

TEST(RunRecord, OfAMesh) {
  const Folder folder;
  const RunRecord written = on_mesh();
  folder.write("run.json", run_json(written));
  folder.write("log.jsonl", log_of(4));
  const RunRecord read = read_run(folder.path());
  EXPECT_EQ(run_json(read), run_json(written));
  EXPECT_EQ(ranks_text(read), "12 ranks = 2 dp x 2 sp x 3 tp");
  EXPECT_EQ(ranks_text(sample()), "2 ranks");
  EXPECT_EQ(sent_by_axis(read), (AxisBytes{3072, 5500, 700}));
  EXPECT_EQ(read.planned_sent, (AxisBytes{3072, 6000, 700}));
  ASSERT_EQ(read.ranks.size(), 2u);
  EXPECT_EQ(read.ranks[1].sent, (AxisBytes{3072, 5500, 710}));
  EXPECT_EQ(read.ranks[1].tensor, 1);
  EXPECT_EQ(read.own_parameters, 411522);
  // A record of a version without meshes: all ranks are data-parallel, and all bytes are ZeRO's.
  auto old = nlohmann::ordered_json::parse(run_json(sample()));
  old.erase("mesh");
  old["recorded"]["planned"].erase("sent_bytes");
  old["recorded"]["planned"]["bytes_sent"] = 3072;
  folder.write("run.json", old.dump());
  const RunRecord plain = read_run(folder.path());
  EXPECT_EQ(plain.mesh, (Degrees{2, 1, 1}));
  EXPECT_EQ(plain.planned_sent, (AxisBytes{3072, 0, 0}));
}

TEST(RunRecord, ALogAloneIsEnoughAndAnUnfinishedLineIsDropped) {
  const Folder folder;
  folder.write("log.jsonl", log_of(3) + "{\"step\": 4, \"los");
  const RunRecord read = read_run(folder.path());
  EXPECT_EQ(read.log.size(), 3u);
  EXPECT_EQ(read.stage, -1);
  EXPECT_FALSE(read.heldout);
}

TEST(RunRecord, StepsDoneAgainReplaceTheOlderOnes) {
  const Folder folder;
  folder.write("log.jsonl", log_of(5) + "{\"step\": 4, \"loss\": 9}\n");
  const RunRecord read = read_run(folder.path());
  ASSERT_EQ(read.log.size(), 4u);
  EXPECT_DOUBLE_EQ(*read.log[3].loss, 9);
}

std::string message_of(const fs::path& path) {
  try {
    read_run(path);
  } catch (const Error& error) {
    return std::to_string(static_cast<int>(error.code())) + " " + error.what();
  }
  return "none";
}

TEST(RunRecord, WhatIsWrongIsNamedByFileAndLine) {
  const Folder folder;
  EXPECT_EQ(message_of(folder.path() / "none").rfind("5 [report] got no folder ", 0), 0u);
  EXPECT_NE(message_of(folder.path()).find("log.jsonl"), std::string::npos);
  folder.write("log.jsonl", log_of(2) + "{\"step\": 3, \"loss\"\n" + log_of(1));
  EXPECT_NE(message_of(folder.path()).find("2 [report] got " + (folder.path() / "log.jsonl").string() + ":3: "),
            std::string::npos)
      << message_of(folder.path());
  for (const char* line : {"[1]", "{\"loss\": 1}", "{\"step\": \"x\"}", "{\"step\": 1, \"loss\": \"high\"}", ""}) {
    folder.write("log.jsonl", std::string(line) + "\n");
    EXPECT_NE(message_of(folder.path()).find("log.jsonl:1: "), std::string::npos)
        << line << ": " << message_of(folder.path());
  }
  folder.write("log.jsonl", log_of(2));
  const std::string good = run_json(sample());
  for (const std::string& bad :
       {std::string("{"), std::string("{}"), good.substr(0, good.size() / 2),
        std::regex_replace(good, std::regex("zero.run/1"), "zero.run/2"),
        std::regex_replace(good, std::regex("\"ms\":1.5,\"bytes\":\\[1000,"), "\"ms\":1.5,\"bytes\":["),
        std::regex_replace(good, std::regex("\"world\": 2"), "\"world\": \"two\"")}) {
    folder.write("run.json", bad);
    const std::string message = message_of(folder.path());
    EXPECT_EQ(message.rfind("2 [report] got " + (folder.path() / "run.json").string(), 0), 0u) << message;
  }
}

TEST(RunRecord, LabelsTellRunsApart) {
  std::vector<RunRecord> runs(2, sample());
  runs[0].stage = 0;
  runs[0].folder = "a/x", runs[1].folder = "b/x/";
  label_runs(runs);
  EXPECT_EQ(runs[0].label + "|" + runs[1].label, "stage 0|stage 3");
  runs[0].stage = 3;
  runs[1].mesh = {1, 2, 4};
  label_runs(runs);
  EXPECT_EQ(runs[0].label + "|" + runs[1].label, "stage 3|stage 3 tp 4 sp 2");
  runs[1].mesh = {};
  label_runs(runs);
  EXPECT_EQ(runs[0].label + "|" + runs[1].label, "a/x|b/x/");
  runs[1].folder = "b/y/";
  label_runs(runs);
  EXPECT_EQ(runs[0].label + "|" + runs[1].label, "x|y");
  runs[1].folder = runs[0].folder;
  label_runs(runs);
  EXPECT_EQ(runs[0].label + "|" + runs[1].label, "a/x #1|a/x #2");
}

TEST(ChartData, LongCurvesAreMeansOfNeighboursAndEndWithTheLastStep) {
  RunRecord run;
  for (int i = 1; i <= 4000; ++i) {
    StepPoint point;
    point.step = i;
    if (i != 3) point.loss = i;
    run.log.push_back(point);
  }
  const Curve curve = curve_of(run, &StepPoint::loss);
  EXPECT_LE(curve.steps.size(), kMostPoints);
  EXPECT_EQ(curve.steps.front(), 3);
  EXPECT_DOUBLE_EQ(*curve.values[0], 1.5);  // of 1 and 2; the third is not known
  EXPECT_DOUBLE_EQ(*curve.values[1], 5);
  EXPECT_EQ(curve.steps.back(), 4000);
  EXPECT_DOUBLE_EQ(*median_of(run, &StepPoint::loss), 2001);
  EXPECT_DOUBLE_EQ(*highest_of(run, &StepPoint::loss), 4000);
  EXPECT_FALSE(median_of(run, &StepPoint::lr));
  const Curve spiky{{1, 2, 3, 4, 5}, {1.0, 100.0, 3.0, {}, 5.0}};
  const Curve calm = smoothed(spiky, 3);
  EXPECT_DOUBLE_EQ(*calm.values[1], 3);
  EXPECT_DOUBLE_EQ(*calm.values[4], 5);
}

TEST(ChartData, GroupsAreRowsInTheOrderOfForward) {
  const GroupRows groups = group_rows(sample());
  EXPECT_EQ(groups.rows, (std::vector<std::string>{"embed", "blocks.0", "this rank stands still"}));
  EXPECT_DOUBLE_EQ(groups.total(1, "fwd"), 1);
  EXPECT_DOUBLE_EQ(groups.total(1, "bwd"), 1.5);
  EXPECT_NEAR(groups.total(1, "gat"), 0.3, 1e-12);
  EXPECT_NEAR(groups.total(0, "gat"), 0.3, 1e-12);  // its publication
  EXPECT_NEAR(groups.total(2, "wai"), 0.1, 1e-12);
  EXPECT_DOUBLE_EQ(step_end_ms(sample()), 5);
  ASSERT_EQ(step_parts(sample()).size(), 3u);
  EXPECT_EQ(step_parts(sample())[2].name, "step");
  EXPECT_EQ(peak_of(sample().phases), 8192u);
}

TEST(PageText, HtmlHasNoWayOut) {
  EXPECT_EQ(html_text("<a href=\"x\">&'\x01\xff\u00e9\n"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;?\ufffd\u00e9\n");
}

TEST(HtmlPage, LoadsNothingAndShowsWordsAsWords) {
  std::vector<RunRecord> runs(2, sample());
  runs[0].folder = kHostile, runs[1].folder = "other";
  runs[0].stage = 2;
  for (RunRecord& run : runs)
    for (int i = 1; i <= 12; ++i) {
      StepPoint point;
      point.step = i, point.loss = 6.0 / i, point.tokens_per_s = 12345, point.step_ms = 8, point.lr = 1e-3;
      run.log.push_back(point);
    }
  label_runs(runs);
  const std::string page = html_page(runs);
  EXPECT_EQ(page.find("alert('x')"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;alert(&#39;x&#39;)"), std::string::npos);
  std::size_t scripts = 0, ends = 0;
  for (std::size_t at = page.find("<script"); at != std::string::npos; at = page.find("<script", at + 1)) ++scripts;
  for (std::size_t at = page.find("</script"); at != std::string::npos; at = page.find("</script", at + 1)) ++ends;
  EXPECT_EQ(scripts, 2u);
  EXPECT_EQ(ends, 2u);
  EXPECT_EQ(page.find("<!--"), std::string::npos);
  for (const char* outside : {"src=", "href=", "url(", "@import", "https://", "fetch("})
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  // The only address is the name of SVG.
  EXPECT_EQ(page.find("http:"), page.find("http://www.w3.org/2000/svg"));
  EXPECT_NE(page.find("data-column=\"last loss\" data-value=\"0.5\""), std::string::npos);
  EXPECT_NE(page.find("data-row=\"stage 2, peak\" data-column=\"planned\" data-value=\"8000\""), std::string::npos);
  EXPECT_NE(page.find("+2.40 %"), std::string::npos);  // 8192 for 8000
  EXPECT_NE(page.find("12,345"), std::string::npos);
  EXPECT_NE(page.find("8.00 KiB"), std::string::npos);
  // Without any record, the log alone makes a page.
  RunRecord bare;
  bare.folder = "x";
  bare.log = runs[0].log;
  std::vector<RunRecord> one{bare};
  label_runs(one);
  EXPECT_NE(html_page(one).find("data-table=\"runs\""), std::string::npos);
}

// Bytes of each kind of parallelism are apart, next to the plan's, and every rank has a row.
TEST(HtmlPage, OfAMesh) {
  std::vector<RunRecord> runs{sample(), on_mesh()};
  for (RunRecord& run : runs) run.log.resize(1);
  label_runs(runs);
  const std::string page = html_page(runs);
  const auto cell = [](const std::string& row, const std::string& column, const std::string& value) {
    return "data-row=\"" + row + "\" data-column=\"" + column + "\" data-value=\"" + value + "\"";
  };
  const std::string label = "stage 3 tp 3 sp 2";
  for (const std::string& part :
       {cell(label, "tp", "3"), cell(label, "parameters of rank 0", "411522"), cell(label, "ZeRO", "3072"),
        cell(label, "tensor parallelism", "5500"), cell(label, "sequence parallelism", "700"),
        cell(label, "all", "9272"), cell("stage 3", "tensor parallelism", "0"),
        cell(label + ", sent by ZeRO", "planned", "3072"),
        cell(label + ", sent by tensor parallelism", "planned", "6000"),
        cell(label + ", sent by tensor parallelism", "measured", "5500"),
        cell(label + ", sent by sequence parallelism", "measured", "700"), cell(label + ", 1", "peak", "8200"),
        cell(label + ", 1", "sequence parallelism", "710"), cell(label, "tp.all_reduce", "5000")})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  EXPECT_EQ(page.find("stage 3, sent by ZeRO"), std::string::npos) << "one kind of parallelism needs no second row";
  EXPECT_NE(page.find("Ranks: stage 3: 2 ranks; stage 3 tp 3 sp 2: 12 ranks = 2 dp x 2 sp x 3 tp"), std::string::npos);
  EXPECT_NE(html_page({runs[1]}).find("12 ranks = 2 dp x 2 sp x 3 tp on CPUs"), std::string::npos);
  EXPECT_EQ(html_page({runs[0]}).find("The mesh"), std::string::npos);
}

TEST(HtmlPage, HasTheFilesOfTheFolderPageInIt) {
  const auto bytes_of = [](const char* name) {
    return file_text(std::string(ZERO_SOURCE_DIR "/tools/report/page/") + name);
  };
  const std::string page = html_page({sample()});
  EXPECT_NE(page.find("<script>\n" + bytes_of("page.js") + "</script>\n</body>"), std::string::npos);
  EXPECT_NE(page.find("<style>\n" + bytes_of("page.css") + "</style></head>"), std::string::npos);
}

}  // namespace
}  // namespace zero::report::page_test
