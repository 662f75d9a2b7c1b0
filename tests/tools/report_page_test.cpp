// `zero report` on real runs, with the page in a headless browser. There must be no console errors, and tables,
// drawings and tooltips must show the run's figures. Skipped without Chromium.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/process.h"

namespace zero::test::report_page_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";

Ended run(const Words& words, double limit = 120) { return run_to_end({words, {"OMP_NUM_THREADS=1"}, "", -1}, limit); }

std::string browser() {
  std::istringstream path(std::getenv("PATH") ? std::getenv("PATH") : "");
  for (std::string folder; std::getline(path, folder, ':');)
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (::access((folder + "/" + name).c_str(), X_OK) == 0) return folder + "/" + name;
  return "";
}

struct Shown {
  std::string dom;
  std::vector<std::string> console;
};

// The document after its scripts have run.
Shown show(const std::string& page) {
  const std::string profile = temporary_folder();
  const Ended o = run({browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                       "--user-data-dir=" + profile, "--window-size=1240,2000", "--enable-logging=stderr",
                       "--virtual-time-budget=5000", "--dump-dom", "file://" + page});
  EXPECT_EQ(o.code, 0) << o.err;
  Shown shown{o.out, {}};
  for (const std::string& line : lines(o.err))
    if (line.find("CONSOLE") != std::string::npos) shown.console.push_back(line);
  return shown;
}

// Attributes of every element of that name, as written by the browser's serializer.
std::vector<std::map<std::string, std::string>> elements(const std::string& dom, const std::string& name) {
  std::vector<std::map<std::string, std::string>> all;
  const std::string open = "<" + name + " ";
  const std::regex attribute("([a-zA-Z-]+)=\"([^\"]*)\"");
  for (std::size_t at = dom.find(open); at != std::string::npos; at = dom.find(open, at + 1)) {
    const std::string tag = dom.substr(at, dom.find('>', at) - at);
    std::map<std::string, std::string> found;
    for (std::sregex_iterator m(tag.begin(), tag.end(), attribute), end; m != end; ++m) found[(*m)[1]] = (*m)[2];
    all.push_back(std::move(found));
  }
  return all;
}

// data-value by table, row and column.
double cell(const std::string& dom, const std::string& table, const std::string& row, const std::string& column) {
  const std::size_t begin = dom.find("data-table=\"" + table + "\"");
  EXPECT_NE(begin, std::string::npos) << table;
  if (begin == std::string::npos) return -1;
  for (const auto& td : elements(dom.substr(begin, dom.find("</table>", begin) - begin), "td")) {
    const auto r = td.find("data-row"), c = td.find("data-column");
    if (r != td.end() && c != td.end() && r->second == row && c->second == column)
      return std::stod(td.at("data-value"));
  }
  ADD_FAILURE() << "no cell " << table << " / " << row << " / " << column;
  return -1;
}

class ReportPage : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder = temporary_folder();
    std::ofstream text(folder + "/text.txt");
    for (int i = 0; i < 3000; ++i) text << "the river went over seven horses " << i * 7919 % 1000 << "\n";
    text.close();
    for (const int stage : {0, 3}) {
      const Ended o = train(folder + "/run" + std::to_string(stage), 2, {"--stage", std::to_string(stage)});
      ASSERT_EQ(o.code, 0) << o.err;
    }
    const Ended o = run({kZero, "report", folder + "/run0", folder + "/run3", "--out", page(), "--json"});
    ASSERT_EQ(o.code, 0) << o.err;
    const json document = json::parse(o.out);
    EXPECT_EQ(document["schema"], "zero.report/1");
    EXPECT_EQ(document["runs"][1]["label"], "stage 3");
    EXPECT_EQ(document["bytes"], fs::file_size(page()));
  }
  // 8 steps of a small GPT.
  static Ended train(const std::string& out, int ranks, const Words& more) {
    Words words{kZero,
                "run",
                "-n",
                std::to_string(ranks),
                "--no-prefix",
                kZero,
                "train",
                ZERO_SOURCE_DIR "/configs/stage3-fp16.json",
                "--text",
                folder + "/text.txt",
                "--steps",
                "8",
                "--json",
                "--sample",
                "0",
                "--out",
                out};
    for (const char* setting : {"libzero.model.layers=2", "libzero.model.hidden=48", "libzero.model.heads=3",
                                "libzero.model.seq_length=32", "libzero.data.eval_batches=2"})
      words.insert(words.end(), {"--set", setting});
    return run(words + more);
  }
  void SetUp() override {
    if (browser().empty()) GTEST_SKIP() << "no chromium in PATH: apt-get install chromium";
    ASSERT_TRUE(fs::exists(page()));
  }
  static std::string page() { return folder + "/report.html"; }
  static std::vector<json> log(int stage) {
    std::vector<json> steps;
    for (const std::string& line : lines(file_text(folder + "/run" + std::to_string(stage) + "/log.jsonl")))
      steps.push_back(json::parse(line));
    return steps;
  }
  static json record(int stage) {
    return json::parse(file_text(folder + "/run" + std::to_string(stage) + "/run.json"));
  }

  static std::string folder;
};
std::string ReportPage::folder;

TEST_F(ReportPage, TheRecordHasOneStepInDetail) {
  for (const int stage : {0, 3}) {
    const json r = record(stage);
    EXPECT_EQ(r["schema"], "zero.run/1");
    EXPECT_EQ(r["stage"], stage);
    EXPECT_EQ(r["world"], 2);
    const json& step = r["recorded"];
    EXPECT_EQ(step["step"], 3);
    EXPECT_EQ(step["memory"].size(), 4u);
    EXPECT_GT(step["samples"].size(), 5u);
    std::uint64_t sent = 0;
    for (const json& row : step["traffic"])
      if (row["operation"] != "control") sent += row["bytes_sent"].get<std::uint64_t>();
    EXPECT_GT(sent, 0u);
    EXPECT_EQ(log(stage)[2]["bytes_sent"], sent);
    std::set<std::string> categories;
    for (const json& slice : step["timeline"]) categories.insert(slice["category"].get<std::string>());
    for (const char* category : {"phase", "forward", "backward", "update", "reduce"})
      EXPECT_TRUE(categories.count(category)) << stage << " " << category;
    bool has_stage = false;
    for (const json& row : r["configuration"])
      if (row["key"] == "zero_optimization.stage")
        has_stage = row["value"] == stage && row["source"].get<std::string>().rfind("CLI --stage", 0) == 0;
    EXPECT_TRUE(has_stage);
    // The trace of that step, of both ranks, is in the same folder.
    EXPECT_TRUE(fs::exists(folder + "/run" + std::to_string(stage) + "/trace.json"));
  }
}

TEST_F(ReportPage, NoConsoleErrorAndTheRunsNumbers) {
  const Shown shown = show(page());
  EXPECT_TRUE(shown.console.empty()) << shown.console.front();
  EXPECT_NE(shown.dom.find("data-drawn=\"yes\""), std::string::npos) << "the script did not come to its end";
  for (const int stage : {0, 3}) {
    const std::string label = "stage " + std::to_string(stage);
    const auto steps = log(stage);
    const json r = record(stage),
               result = json::parse(file_text(folder + "/run" + std::to_string(stage) + "/result.json"));
    EXPECT_DOUBLE_EQ(cell(shown.dom, "runs", label, "last loss"), steps.back()["loss"].get<double>());
    EXPECT_DOUBLE_EQ(cell(shown.dom, "runs", label, "held-out loss"), result["heldout_nats_per_byte"].get<double>());
    EXPECT_DOUBLE_EQ(cell(shown.dom, "runs", label, "steps"), 8);
    std::vector<double> speeds;
    for (const json& step : steps) speeds.push_back(step["tokens_per_s"]);
    std::nth_element(speeds.begin(), speeds.begin() + 4, speeds.end());
    EXPECT_DOUBLE_EQ(cell(shown.dom, "runs", label, "tokens per second"), speeds[4]);
    EXPECT_DOUBLE_EQ(cell(shown.dom, "loss", "1", label), steps[0]["loss"].get<double>());
    double peak = 0;
    for (const json& phase : r["recorded"]["memory"]) {
      const json& device = phase["tiers"]["device"];
      const std::string row = label + ", " + phase["phase"].get<std::string>();
      double total = 0;
      for (const auto& [purpose, bytes] : device["bytes"].items()) {
        EXPECT_DOUBLE_EQ(cell(shown.dom, "memory", row, purpose), bytes.get<double>());
        total += bytes.get<double>();
      }
      EXPECT_DOUBLE_EQ(cell(shown.dom, "memory", row, "total"), total);
      peak = std::max(peak, device["peak_bytes"].get<double>());
      EXPECT_GE(peak, total);
    }
    EXPECT_DOUBLE_EQ(cell(shown.dom, "memory", label + ", peak", "total"), peak);
    EXPECT_DOUBLE_EQ(cell(shown.dom, "planned", label + ", peak", "measured"), peak);
    EXPECT_GT(cell(shown.dom, "planned", label + ", peak", "planned"), 0);
    double sent = 0;
    for (const json& row : r["recorded"]["traffic"]) {
      if (row["operation"] == "control") continue;
      EXPECT_DOUBLE_EQ(cell(shown.dom, "traffic", label, row["operation"]), row["bytes_sent"].get<double>());
      sent += row["bytes_sent"].get<double>();
    }
    EXPECT_DOUBLE_EQ(cell(shown.dom, "traffic", label, "all"), sent);
    // The drawings.
    bool curve = false;
    for (const auto& path : elements(shown.dom, "path")) {
      if (!path.count("data-key") || path.at("data-key") != "loss" ||
          path.at("data-runs").find(label) == std::string::npos)
        continue;
      curve = true;
      EXPECT_EQ(path.at("data-points"), "8");
      EXPECT_DOUBLE_EQ(std::stod(path.at("data-last")), steps.back()["loss"].get<double>());
      EXPECT_EQ(std::count(path.at("d").begin(), path.at("d").end(), 'L'), 7);
    }
    EXPECT_TRUE(curve) << label;
    double drawn = 0;
    for (const auto& rect : elements(shown.dom, "rect"))
      if (rect.count("data-run") && rect.at("data-run") == label &&
          (rect.at("data-name").find("all_") == 0 || rect.at("data-name").find("reduce_") == 0))
        drawn += std::stod(rect.at("data-value"));
    EXPECT_DOUBLE_EQ(drawn, sent) << label;
  }
  // The page states that both stages are drawn as one line.
  const auto zero = log(0), three = log(3);
  const bool same = std::equal(zero.begin(), zero.end(), three.begin(),
                               [](const json& a, const json& b) { return a["loss"] == b["loss"]; });
  EXPECT_TRUE(same) << "stages give the same bits";
  EXPECT_NE(shown.dom.find("All 2 runs have the same numbers at every step"), std::string::npos);
}

// The bytes of each kind of parallelism are apart, in a table, in a drawing and next to the plan's, which are equal.
TEST_F(ReportPage, OfAMesh) {
  const std::string out = folder + "/mesh";
  const Ended trained = train(out, 4,
                              {"--dtype", "fp32", "--stage", "1", "--tensor-parallel", "2", "--sequence-parallel", "2",
                               "--set", "libzero.model.heads=4"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::string file = folder + "/mesh.html";
  const Ended written = run({kZero, "report", folder + "/run3", out, "--out", file, "--json"});
  ASSERT_EQ(written.code, 0) << written.err;
  const json told = json::parse(written.out)["runs"][1], sent = told["sent_bytes"];
  EXPECT_EQ(told["label"], "stage 1 tp 2 sp 2");
  EXPECT_EQ(told["mesh"], (json{{"dp", 1}, {"sp", 2}, {"tp", 2}, {"ep", 1}}));
  EXPECT_EQ(told["planned_sent_bytes"], sent);
  const Shown shown = show(file);
  EXPECT_TRUE(shown.console.empty()) << shown.console.front();
  const std::string label = told["label"];
  const std::pair<const char*, const char*> axes[] = {
      {"ZeRO", "zero"}, {"tensor parallelism", "tensor_parallel"}, {"sequence parallelism", "sequence_parallel"}};
  for (const auto& [name, key] : axes) {
    const auto bytes = sent[key].get<double>();
    EXPECT_GT(bytes, 0) << name;
    EXPECT_DOUBLE_EQ(cell(shown.dom, "axes", label, name), bytes);
    for (const char* column : {"planned", "measured"})
      EXPECT_DOUBLE_EQ(cell(shown.dom, "planned", label + ", sent by " + name, column), bytes) << name;
    double drawn = 0;
    for (const auto& rect : elements(shown.dom, "rect"))
      if (rect.count("data-run") != 0 && rect.at("data-run") == label && rect.at("data-name") == name)
        drawn += std::stod(rect.at("data-value"));
    EXPECT_DOUBLE_EQ(drawn, bytes) << name;
  }
  const json r = json::parse(file_text(out + "/run.json"));
  EXPECT_DOUBLE_EQ(cell(shown.dom, "meshes", label, "tokens a step"), r["tokens_per_step"].get<double>());
  EXPECT_DOUBLE_EQ(cell(shown.dom, "meshes", label, "parameters of rank 0"),
                   r["mesh"]["parameters_per_rank"].get<double>());
  EXPECT_DOUBLE_EQ(cell(shown.dom, "ranks", label + ", 3", "tp"), 1);
  EXPECT_DOUBLE_EQ(cell(shown.dom, "ranks", label + ", 3", "at rest"),
                   r["recorded"]["ranks"][3]["at_rest_bytes"].get<double>());
}

TEST_F(ReportPage, ThePointerIsToldTheValues) {
  std::string text = file_text(page());
  const std::string script = R"js(<pre id="told"></pre><script>
for (const hit of document.querySelectorAll(".hit")) {
  const box = hit.closest(".chart"), frame = hit.getBoundingClientRect();
  hit.dispatchEvent(new PointerEvent("pointermove", {clientX: frame.right - 1, clientY: frame.top + 4}));
  document.getElementById("told").append(box.id + ": " + box.querySelector(".tip").innerText.replaceAll("\n", " | ") + "\n");
  hit.dispatchEvent(new PointerEvent("pointerleave"));
  if (getComputedStyle(box.querySelector(".tip")).visibility !== "hidden") throw new Error(box.id + " keeps its note");
}
dispatchEvent(new Event("resize"));
</script>)js";
  text.insert(text.rfind("</body>"), script);
  const std::string probe = folder + "/probe.html";
  std::ofstream(probe) << text;
  const Shown shown = show(probe);
  EXPECT_TRUE(shown.console.empty()) << shown.console.front();
  const std::size_t at = shown.dom.find("<pre id=\"told\">");
  ASSERT_NE(at, std::string::npos);
  const std::string told = shown.dom.substr(at, shown.dom.find("</pre>", at) - at);
  for (const char* box :
       {"loss: step 8 | stage 0 ", "throughput: step 8 | ", "lr: step 8", "scale: step 8",
        "area-0: ", "area-1: ", "rest: stage 0: ", "rest: stage 3: ", "wire: stage 3: ", "groups-0: ", "groups-1: "})
    EXPECT_NE(told.find(box), std::string::npos) << box << "\n" << told;
  std::ostringstream loss;
  loss.precision(5);
  loss << log(3).back()["loss"].get<double>();
  EXPECT_NE(told.find("stage 3 " + loss.str()), std::string::npos) << told;
}

TEST_F(ReportPage, ABrokenScriptWouldBeSeen) {
  std::string text = file_text(page());
  text.insert(text.rfind("</body>"), "<script>undefinedFunction()</script>");
  std::ofstream(folder + "/broken.html") << text;
  EXPECT_FALSE(show(folder + "/broken.html").console.empty());
}

TEST_F(ReportPage, ALogAloneAndHostileWordsDrawToo) {
  const std::string odd = folder + "/a<b>&\"'</script>";
  fs::create_directories(odd);
  std::ofstream(odd + "/log.jsonl")
      << "{\"step\": 1, \"loss\": null}\n{\"step\": 2, \"loss\": 3.5, \"tokens_per_s\": 10}\n";
  const std::string out = folder + "/odd.html";
  const Ended o = run({kZero, "report", odd, folder + "/run3", "--out", out});
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("no recorded step"), std::string::npos);
  const Shown shown = show(out);
  EXPECT_TRUE(shown.console.empty()) << shown.console.front();
  EXPECT_NE(shown.dom.find("data-drawn=\"yes\""), std::string::npos);
}

// A single step is drawn as a dot. Runs of a version with fewer purposes and runs whose step took no time are drawn.
TEST_F(ReportPage, LittleToDrawDraws) {
  const auto copy = [&](const char* name, const json& record, const std::string& text) {
    const std::string to = folder + "/" + name;
    fs::create_directories(to);
    std::ofstream(to + "/run.json") << record;
    std::ofstream(to + "/log.jsonl") << text;
    return to;
  };
  const auto steps = file_text(folder + "/run0/log.jsonl");
  const auto one = copy("one", record(0), steps.substr(0, steps.find('\n') + 1));
  auto fewer = record(3);
  fewer["recorded"]["purposes"].erase(0);
  for (auto& sample : fewer["recorded"]["samples"]) sample["bytes"].erase(0);
  const auto other = copy("fewer", fewer, steps);
  auto flat = record(0);
  flat["recorded"]["timeline"] = json::array();
  flat["recorded"]["samples"] = json::array({flat["recorded"]["samples"][0]});
  flat["recorded"]["samples"][0]["ms"] = 0;
  const std::string out = folder + "/little.html";
  const Ended o = run({kZero, "report", one, other, copy("flat", flat, steps), "--out", out});
  ASSERT_EQ(o.code, 0) << o.err;
  const Shown shown = show(out);
  EXPECT_TRUE(shown.console.empty()) << shown.console.front();
  bool dot = false;
  for (const auto& path : elements(shown.dom, "path"))
    if (path.count("data-key") != 0 && path.at("data-points") == "1")
      dot = dot || path.at("d").find("h0") != std::string::npos;
  EXPECT_TRUE(dot);
}

TEST(Report, BadInputIsNamed) {
  const std::string folder = temporary_folder();
  const auto fails = [&](const Words& words, int code, const std::string& says) {
    const Ended o = run(Words{kZero, "report"} + words + Words{"--out", folder + "/page.html"});
    EXPECT_EQ(o.code, code) << o.err;
    EXPECT_NE(o.err.find(says), std::string::npos) << o.err;
    EXPECT_EQ(lines(o.err).size(), 1u) << o.err;
    EXPECT_FALSE(fs::exists(folder + "/page.html"));
  };
  fails({}, 2, "RUN");
  fails({folder + "/none"}, 5, "got no folder " + folder + "/none");
  fails({folder}, 5, folder + "/log.jsonl");
  std::ofstream(folder + "/log.jsonl") << "";
  fails({folder}, 2, "without a step");
  std::ofstream(folder + "/log.jsonl") << "{\"step\": 1, \"loss\": 2}\n{\"step\": 2, \"lo\n{\"step\": 3}\n";
  fails({folder}, 2, folder + "/log.jsonl:2: ");
  std::ofstream(folder + "/log.jsonl") << "{\"step\": 1, \"loss\": 2}\n";
  std::ofstream(folder + "/run.json") << "{\"schema\": \"zero.run/1\"";
  fails({folder}, 2, folder + "/run.json");
  fs::remove(folder + "/run.json");
  const Ended o = run({kZero, "report", folder, "--out", folder + "/missing/page.html"});
  EXPECT_EQ(o.code, 5) << o.err;
}

}  // namespace
}  // namespace zero::test::report_page_test
