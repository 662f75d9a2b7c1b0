// Trials by the launcher (trials.h).
#include "lab/reproduce/trials.h"

#include <sys/resource.h>
#include <zero/errors.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "tools/launch/machine/host.h"
#include "tools/launch/machine/machine.h"
#include "tools/launch/supervise/launcher.h"
#include "tools/report/text/progress.h"
#include "tools/report/text/terminal.h"

namespace zero::cli {
namespace {

constexpr std::size_t kMostOutput = 256 << 20;

// Of this process's ended descendants.
double cpu_of_children() {
  rusage used{};
  ::getrusage(RUSAGE_CHILDREN, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Keeps what rank 0 prints, and the last lines of errors.
class Kept final : public launch::LaunchSink {
 public:
  explicit Kept(std::function<void(const std::string&)> shown) : shown_(std::move(shown)) {}
  void line(int rank, launch::Stream stream, std::string_view text) override {
    if (stream == launch::Stream::Out && rank == 0 && out.size() < kMostOutput) out.append(text) += '\n';
    if (stream == launch::Stream::Err) {
      errors.emplace_back(text);
      if (errors.size() > 40) errors.erase(errors.begin());
      if (shown_) shown_("[" + std::to_string(rank) + "] " + std::string(text));
    }
  }
  void notice(LogLevel, std::string_view) override {}
  void failed(const launch::FailureReport& report) override {
    reason = report.error.empty() ? report.cause : report.error;
    block = launch::failure_text(report);
  }
  bool pump() override { return true; }
  bool full() const override { return false; }
  int out_error() const override { return 0; }

  std::string out, reason, block;
  std::vector<std::string> errors;

 private:
  std::function<void(const std::string&)> shown_;
};

}  // namespace

Trials::Trials(std::string command, const Global& global) : command_(std::move(command)), global_(global) {
  const auto err = report::describe_terminal(2, global.color);
  const bool draws = report::progress_wanted(err, 0, global.progress, global.json, global.quiet);
  report::ProgressLine::Settings settings;
  settings.enabled = draws, settings.dumb = err.dumb, settings.columns = err.columns, settings.utf8 = err.utf8;
  settings.unit = "trial";
  progress_ = std::make_unique<report::ProgressLine>(settings);
  notes_ = !draws && log_threshold(global) <= LogLevel::Info;
}

Trials::~Trials() = default;

void Trials::begin(const std::string& experiment, int count) {
  experiment_ = experiment;
  count_ = count, done_ = 0;
}

Trial Trials::run(const std::string& what, const Program& program, bool may_be_refused) {
  ++done_;
  if (count_ < done_) count_ = 0;  // more than expected: no longer known
  progress_->update(done_ - 1, count_, experiment_ + ": " + what);
  if (notes_)
    print_note(
        command_, LogLevel::Info,
        experiment_ + " " + std::to_string(done_) + (count_ > 1 ? "/" + std::to_string(count_) : "") + ": " + what);
  launch::LaunchSettings settings;
  settings.program = {launch::own_path().replace_filename("zero").string()};
  settings.program.insert(settings.program.end(), program.words.begin(), program.words.end());
  launch::LaunchHost host{.name = "localhost", .slots = {}, .here = true};
  for (int slot = 0; slot < program.ranks; ++slot) host.slots.push_back(slot);
  settings.hosts = {host};
  settings.log_folder = global_.log_dir;
  settings.environment["OMP_NUM_THREADS"] = std::to_string(program.threads);
  // Ranks are on this host and on its CPUs, whatever the user's shell says of other runs.
  settings.environment["ZERO_TRANSPORT"] = program.ranks > 1 ? "shm" : "auto";
  Kept kept([&](const std::string& line) {
    if (global_.verbose) progress_->print(line);
  });
  launch::Launcher launcher(settings, kept);
  const double before = cpu_of_children();
  const auto ended = launcher.run();
  Trial trial{ended.exit_code, std::move(kept.out), std::move(kept.reason), ended.seconds, cpu_of_children() - before};
  cpu_seconds_ += trial.cpu_seconds;
  if (ended.exit_code == 0 || (may_be_refused && trial.refused())) return trial;
  progress_->finish();
  const bool stopped = ended.exit_code == 130 || ended.exit_code == 143 || ended.exit_code == 75;
  if (!stopped) {
    std::string words;
    for (const auto& word : program.words) words += " " + word;
    std::string lines;
    for (const auto& line : kept.errors) lines += "\n  " + line;
    print_error(command_, "[" + experiment_ + "] `zero" + words + "` with " + std::to_string(program.ranks) +
                              " ranks ended with " + std::to_string(ended.exit_code) + lines + "\n" + kept.block);
  }
  // A program that could save and be started again is of no use without this one.
  throw Stopped{ended.exit_code == 75 ? 143 : ended.exit_code};
}

void Trials::tell(const std::string& line) {
  if (!global_.json && !global_.quiet) progress_->print(line);
}

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) all.push_back(std::move(json));
  }
  return all;
}

Json json_document(const std::string& text, const std::string& program) {
  auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    throw InternalError("[zero reproduce] got no JSON document from " + program + ", expected one");
  return json;
}

}  // namespace zero::cli
