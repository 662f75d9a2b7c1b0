// The output of `zero train`. Files of the run folder are plain text for other tools: log.jsonl (one step per line),
// config.json, sample.txt, result.json.
#include "apps/finetune/train_report.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include <zero/checkpoint_tools.h>

#include "base/printable.h"
#include "config/settings.h"
#include "tools/report/text/plot.h"
#include "tools/report/text/text.h"
#include "tools/support/trace_text.h"

namespace zero::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::size_t kCurvePoints = 400;
constexpr const char* kPerByte = "nats per byte";  // the unit of the built-in GPT's loss

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

// null if not finite.
json number(double value) { return std::isfinite(value) ? json(value) : json(nullptr); }

// All effective values by dotted key: a record of the run, not a configuration.
json config_json(const TrainPlan& plan) {
  json values = json::object();
  for (const auto& [key, text] : plan.options.effective()) {
    json value = json::parse(text, nullptr, false);
    values[key] = value.is_discarded() ? json(text) : std::move(value);
  }
  return {{"schema", "zero.train-config/1"}, {"file", plan.config}, {"command", plan.command}, {"values", values}};
}

// At most `most` points, each the mean of equally many neighbors, which reduces noise.
std::vector<std::pair<std::int64_t, double>> thinned(const std::vector<std::pair<std::int64_t, double>>& curve,
                                                     std::size_t most) {
  const std::size_t group = std::max<std::size_t>(1, (curve.size() + most - 1) / most);
  std::vector<std::pair<std::int64_t, double>> points;
  for (std::size_t begin = 0; begin < curve.size(); begin += group) {
    const std::size_t end = std::min(curve.size(), begin + group);
    double sum = 0;
    for (std::size_t i = begin; i < end; ++i) sum += curve[i].second;
    points.emplace_back(curve[end - 1].first, sum / static_cast<double>(end - begin));
  }
  return points;
}

// The metrics for monitors, with DeepSpeed's names.
std::vector<std::pair<std::string, double>> metrics_of(const report::StepRow& row) {
  std::vector<std::pair<std::string, double>> values{{monitor_tag::kTrainLoss, row.loss}};
  const auto add = [&](const char* tag, const std::optional<double>& value, double factor = 1) {
    if (value) values.emplace_back(tag, *value * factor);
  };
  add(monitor_tag::kLr, row.lr);
  add(monitor_tag::kLossScale, row.loss_scale);
  add(monitor_tag::kGradNorm, row.grad_norm);
  add(monitor_tag::kForwardMs, row.forward_seconds, 1e3);
  add(monitor_tag::kBackwardMs, row.backward_seconds, 1e3);
  if (row.backward_seconds && row.reduce_seconds)
    values.emplace_back(monitor_tag::kBackwardInnerMs, 1e3 * (*row.backward_seconds - *row.reduce_seconds));
  add(monitor_tag::kBackwardAllreduceMs, row.reduce_seconds, 1e3);
  add(monitor_tag::kStepMs, row.update_seconds, 1e3);
  return values;
}

// "held-out 1.4400 nats/byte  perplexity 4.22"
std::string heldout_text(const TrainSummary& s) {
  std::string text =
      "held-out " + format("%.4f", *s.heldout) + " " + (s.loss_unit == kPerByte ? "nats/byte" : s.loss_unit);
  for (const auto& [name, value] : s.metrics) text += "  " + name + " " + format("%.4g", value);
  return text;
}

// Generated text may contain any byte, including terminal escape codes.
std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '\n' || (c >= ' ' && c < 0x7f) ? c : '?';
  return out;
}

}  // namespace

TrainReport::TrainReport(const Global& global, const TrainPlan& plan, int rank)
    : active_(rank == 0),
      json_(global.json),
      least_(log_threshold(global)),
      out_(report::describe_terminal(1, global.color)),
      print_every_(plan.options.settings().steps_per_print.value_or(0)),
      total_(plan.steps),
      monitor_(plan.options, rank) {
  if (!active_) return;
  const report::Terminal err = report::describe_terminal(2, global.color);
  draws_ = report::progress_wanted(err, rank, global.progress, global.json, global.quiet);
  // On one terminal the progress line replaces the step lines, except for breakdowns.
  const auto& settings_of_run = plan.options.settings();
  const bool breakdown = settings_of_run.wall_clock_breakdown || settings_of_run.memory_breakdown;
  lines_ = !json_ && (breakdown || !(draws_ && out_.tty));
  report::ProgressLine::Settings settings;
  settings.enabled = draws_;
  settings.dumb = err.dumb;
  settings.columns = err.columns;
  settings.utf8 = err.utf8;
  settings.unit = "step";
  progress_ = std::make_unique<report::ProgressLine>(settings);
  open_folder(plan);
}

TrainReport::~TrainReport() = default;

void TrainReport::open_folder(const TrainPlan& plan) {
  folder_ = plan.out;
  if (folder_.empty()) {
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    gmtime_r(&now, &utc);
    char stamp[32];
    std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &utc);
    folder_ = std::string("runs/") + stamp + "-stage" + std::to_string(plan.options.settings().zero.stage);
    // Two runs may start within a second.
    const std::string first = folder_;
    for (int i = 2; fs::exists(folder_); ++i) folder_ = first + "-" + std::to_string(i);
  }
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error)
    throw IoError("[--out] cannot write to " + folder_ + ": " + error.message() +
                  ". Hint: --out DIR names a folder that you may write.");
  // Found out now, not at the first save.
  if (const auto& dir = plan.checkpoint_dir; !dir.empty() && (plan.resume.empty() || plan.resume == "auto")) {
    fs::create_directories(dir, error);
    if (!error && ::access(dir.c_str(), W_OK) != 0) error = std::error_code(errno, std::generic_category());
    if (error) throw IoError("[--checkpoint-dir] cannot write to " + dir + ": " + error.message());
    probe_checkpoints(dir);
  }
  write_file("config.json", config_json(plan).dump(2, ' ', false, json::error_handler_t::replace) + "\n");
  // A resumed run appends to the previous logs.
  const auto open = [&](std::ofstream& log, const char* name) {
    log.open(folder_ + "/" + name, plan.resume.empty() ? std::ios::trunc : std::ios::app);
    if (!log) throw IoError("[--out] cannot write " + folder_ + "/" + name + ": " + std::strerror(errno));
  };
  open(log_, "log.jsonl");
  if (plan.options.settings().model.experts.num_experts > 0) open(load_log_, "experts.jsonl");
}

void TrainReport::write_file(const std::string& name, const std::string& text) {
  const std::string path = folder_ + "/" + name;
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out)
    throw IoError("[--out] cannot write " + path + ", " + std::to_string(text.size()) +
                  " bytes: " + std::strerror(errno));
}

void TrainReport::note(LogLevel level, const std::string& text) {
  if (!active_ || level < least_) return;
  std::string line = "zero train: ";
  if (level == LogLevel::Warning) line += "warning: ";
  progress_->print(line + base::printable(text) + "\n");
}

void TrainReport::step(const report::StepRow& row, std::int64_t samples) {
  if (!active_) return;
  curve_.emplace_back(row.step, row.loss);
  write_line(report::step_json(row));
  monitor_.write(metrics_of(row), samples);
  if (lines_ && prints(row.step)) {
    if (draws_ && out_.tty) progress_->finish();  // until the next update
    print_result(report::step_line(row) + "\n");
  }
  if (!draws_) return;
  const double now = row.tokens_per_s.value_or(0);
  shown_tokens_per_s_ = shown_tokens_per_s_ > 0 ? 0.9 * shown_tokens_per_s_ + 0.1 * now : now;
  progress_->update(row.step, total_,
                    "loss " + format("%.4f", row.loss) + format("  %.0f tok/s", shown_tokens_per_s_) + "  mem " +
                        report::human_bytes(row.memory_bytes.value_or(0)));
}

void TrainReport::evaluated(const report::HeldoutRow& row, std::int64_t samples) {
  if (!active_) return;
  write_line(report::heldout_json(row));
  std::vector<std::pair<std::string, double>> values{{monitor_tag::kEvalLoss, row.loss}};
  for (const auto& [name, value] : row.metrics) values.emplace_back(monitor_tag::kEvalPrefix + name, value);
  monitor_.write(values, samples);
  if (json_ || row.step >= row.steps) return;  // finish() prints the last one
  if (lines_)
    print_result(report::heldout_line(row) + "\n");
  else
    note(LogLevel::Info, report::heldout_line(row));
}

// To log.jsonl, and to stdout with --json.
void TrainReport::write_line(const std::string& object) {
  log_ << object << "\n" << std::flush;
  if (!log_) throw IoError("[--out] cannot write " + folder_ + "/log.jsonl: " + std::strerror(errno));
  if (json_) print_result(object + "\n");
}

void TrainReport::load(const report::ExpertLoad& of_step) {
  if (!active_) return;
  if (load_.layers.empty())
    load_ = of_step;
  else
    load_.add(of_step);
  if (of_step.last % report::steps_of_load_line(total_) == 0) write_load();
}

void TrainReport::write_load() {
  if (load_.layers.empty()) return;
  load_log_ << report::load_json(load_) << "\n" << std::flush;
  if (!load_log_) throw IoError("[--out] cannot write " + folder_ + "/experts.jsonl: " + std::strerror(errno));
  last_load_ = std::exchange(load_, {});
}

std::string TrainReport::result_json(const TrainSummary& s) const {
  json curve = json::array();
  for (const auto& [step, loss] : thinned(curve_, kCurvePoints)) curve.push_back({step, number(loss)});
  json result{{"schema", "zero.train/1"},
              {"final_loss", number(s.final_loss)},
              {s.loss_unit == kPerByte ? "heldout_nats_per_byte" : "heldout_loss",
               s.heldout ? number(*s.heldout) : json(nullptr)},
              {"heldout_samples", s.heldout_samples},
              {"steps", s.steps},
              {"skipped_steps", s.skipped},
              {"seconds", s.seconds},
              {"tokens_per_s", number(s.tokens_per_s)},
              {"peak_bytes", s.peak_bytes},
              {"curve", std::move(curve)}};
  if (s.sent) {
    result["mesh"] = {{"dp", s.mesh.data}, {"sp", s.mesh.sequence}, {"tp", s.mesh.tensor}, {"ep", s.mesh.expert}};
    result["sent_per_step"] = {{"zero", s.sent->zero},
                               {"tensor_parallel", s.sent->tensor},
                               {"sequence_parallel", s.sent->sequence},
                               {"expert_parallel", s.sent->expert}};
  }
  for (const auto& [name, value] : s.metrics) result["metrics"][name] = number(value);
  if (!last_load_.layers.empty())
    result["experts"] = {{"steps", {last_load_.first, last_load_.last}},
                         {"load_max", last_load_.max_over_mean()},
                         {"dropped", last_load_.dropped()}};
  if (s.memory.has(report::Phase::AfterStep)) result["memory"] = json::parse(s.memory.json());
  if (!s.checkpoint.empty()) result["checkpoint"] = s.checkpoint;
  if (s.trace) result["trace"] = trace_json(*s.trace);
  if (s.stopped_by != 0) result["stopped_by_signal"] = s.stopped_by;
  for (const TaskSample& sample : s.samples)
    result["samples"].push_back({{"prompt", sample.prompt}, {"text", sample.text}});
  // A text may end within a character.
  return result.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

void TrainReport::finish(const TrainSummary& s) {
  if (!active_) return;
  progress_->finish();
  write_load();
  write_file("result.json", result_json(s));
  std::string samples;
  for (const TaskSample& sample : s.samples)
    samples += (samples.empty() ? "" : "\n") + sample.prompt + sample.text + "\n";
  if (!samples.empty()) write_file("sample.txt", samples);
  if (json_) {
    if (s.heldout) note(LogLevel::Info, heldout_text(s) + ", files in " + folder_);
    if (s.trace)
      for (const auto& line : trace_lines(*s.trace)) note(LogLevel::Info, line);
    return;
  }
  std::string text;
  const auto points = thinned(curve_, 2 * static_cast<std::size_t>(out_.columns));
  if (points.size() > 2) {
    report::Series losses{"loss", {}, {}};
    for (const auto& [step, loss] : points) {
      losses.x.push_back(static_cast<double>(step));
      losses.y.push_back(loss);
    }
    report::PlotSettings plot;
    plot.columns = out_.columns;
    plot.utf8 = out_.utf8;
    plot.color = out_.color;
    plot.title = "training loss, " + s.loss_unit;
    plot.x_name = "step";
    text += "\n" + report::line_plot({losses}, plot);
  }
  if (s.memory.has(report::Phase::AfterStep))
    text += "\nmemory of rank 0 in one step\n" + s.memory.table(static_cast<std::size_t>(out_.columns));
  if (!last_load_.layers.empty()) text += "\n" + report::load_text(last_load_);
  if (s.sent) text += "\nrank 0 sent in a step: " + report::axes_text(*s.sent, s.mesh) + "\n";
  for (const TaskSample& sample : s.samples)
    text += "\nsample, after the " + std::to_string(sample.prompt.size()) + " bytes \"" + printable(sample.prompt) +
            "\"\n" + printable(sample.text) + "\n";
  text += "\nsteps " + std::to_string(s.steps) + (s.skipped > 0 ? " (" + std::to_string(s.skipped) + " skipped)" : "");
  if (!curve_.empty()) text += "  loss " + format("%.4f", s.final_loss);
  if (s.heldout) text += "  " + heldout_text(s);
  if (!curve_.empty()) text += "  " + report::human_duration(s.seconds) + format("  %.0f tok/s", s.tokens_per_s);
  text += "\nfiles in " + folder_ + "\n";
  if (s.trace)
    for (const auto& line : trace_lines(*s.trace)) text += line + "\n";
  print_result(text);
}

}  // namespace zero::cli
