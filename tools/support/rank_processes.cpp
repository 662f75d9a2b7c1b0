// Prints the launcher's lines on stderr, and receives rank 0's result through an anonymous file (rank_processes.h).
#include "tools/support/rank_processes.h"

#include <unistd.h>
#include <zero/errors.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/memory_file.h"
#include "tools/launch/machine/machine.h"
#include "tools/launch/supervise/launcher.h"

namespace zero::cli {
namespace {

class Lines final : public launch::LaunchSink {
 public:
  Lines(std::string command, LogLevel least) : command_(std::move(command)), least_(least) {}
  void line(int rank, launch::Stream, std::string_view text) override {
    print_note(command_, LogLevel::Info, "[" + std::to_string(rank) + "] " + std::string(text));
  }
  void notice(LogLevel level, std::string_view text) override {
    if (level >= least_ && level > LogLevel::Info) print_note(command_, level, text);
  }
  void failed(const launch::FailureReport& report) override {
    print_error(command_, "a rank failed\n" + launch::failure_text(report));
  }
  bool pump() override { return true; }
  bool full() const override { return false; }
  int out_error() const override { return 0; }

 private:
  std::string command_;
  LogLevel least_;
};

// An anonymous file, freed with the last process that has it open.
class ResultFile {
 public:
  ResultFile() : fd_(base::open_memory_file("zero-result", 0)) {  // without MFD_CLOEXEC: the ranks inherit it
    if (fd_ < 0) throw IoError(std::string("[zero bench] got ") + std::strerror(errno) + ", expected a file in memory");
  }
  ~ResultFile() { ::close(fd_); }
  ResultFile(const ResultFile&) = delete;
  ResultFile& operator=(const ResultFile&) = delete;
  int fd() const { return fd_; }
  std::string text() const {
    std::string all;
    char part[65536];
    for (ssize_t n; (n = ::pread(fd_, part, sizeof part, static_cast<off_t>(all.size()))) != 0;) {
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw IoError(std::string("[zero bench] got ") + std::strerror(errno) + ", expected a rank's result");
      all.append(part, static_cast<std::size_t>(n));
    }
    return all;
  }

 private:
  int fd_;
};

}  // namespace

RankOutcome run_rank_processes(const RankProcesses& ranks, const Json& task, const Global& global) {
  const ResultFile file;
  launch::LaunchSettings settings;
  const std::string word = ranks.command.substr(ranks.command.find(' ') + 1) + "-rank";
  settings.program = {launch::own_path().string(), word, task.dump(), std::to_string(file.fd())};
  launch::LaunchHost host{.name = "localhost", .slots = {}, .here = true};
  for (int slot = 0; slot < static_cast<int>(ranks.world); ++slot) host.slots.push_back(slot);
  settings.hosts = {host};
  settings.log_folder = global.log_dir;
  settings.environment["OMP_NUM_THREADS"] = std::to_string(ranks.threads);
  settings.environment["ZERO_TRANSPORT"] = ranks.transport;
  Lines lines(ranks.command, log_threshold(global));
  launch::Launcher launcher(settings, lines);
  const auto ended = launcher.run();
  if (ended.exit_code != 0) return {ended.exit_code, {}};
  auto result = Json::parse(file.text(), nullptr, /*allow_exceptions=*/false);
  if (result.is_discarded())
    throw InternalError("[zero " + ranks.command + "] got no result from rank 0, expected a JSON document");
  return {0, std::move(result)};
}

RankTask RankTask::from(const std::string& word, int argc, char** argv) {
  RankTask task;
  if (argc == 3) {
    task.task = Json::parse(argv[1], nullptr, /*allow_exceptions=*/false);
    char* end = nullptr;
    const long fd = std::strtol(argv[2], &end, 10);
    if (task.task.is_object() && *end == '\0' && fd > 2 && fd < 1 << 20) {
      task.result_fd = static_cast<int>(fd);
      return task;
    }
  }
  throw ConfigError("[" + word + "] got a start by hand, expected one by the command without \"-rank\"");
}

void RankTask::hand_over(const Json& result) const {
  const std::string text = result.dump();
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(result_fd, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      throw IoError(std::string("[zero bench] got ") + std::strerror(errno) + ", expected to hand over the result");
    at += static_cast<std::size_t>(n);
  }
}

}  // namespace zero::cli
