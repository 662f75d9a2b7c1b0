#include "lab/bench/fio.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include <zero/errors.h>

extern char** environ;

namespace zero::cli {
namespace {

std::string output_of(const std::vector<std::string>& words) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw IoError(std::string("[zero bench io] got ") + std::strerror(errno) + " for a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  std::vector<char*> argv;
  for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string text;
  if (error == 0) {
    char part[4096];
    ssize_t n = 0;
    while ((n = read(ends[0], part, sizeof part)) > 0 || (n < 0 && errno == EINTR))
      if (n > 0) text.append(part, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  if (error != 0)
    throw ConfigError(std::string("[zero bench io] got ") + std::strerror(error) +
                      " for the program fio, expected it in PATH. Hint: apt install fio, or leave --fio out.");
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw IoError("[zero bench io] fio failed: " + text.substr(0, 400));
  return text;
}

const char* word_of(IoPattern pattern) {
  return pattern == IoPattern::Read ? "read" : pattern == IoPattern::Write ? "write" : "rw";
}

}  // namespace

Fio::Fio(const std::string& folder, std::int64_t bytes)
    : path_(folder + "/zero-bench-fio." + std::to_string(getpid())), bytes_(bytes) {
  version_ = output_of({"fio", "--version"});
  while (!version_.empty() && version_.back() == '\n') version_.pop_back();
  try {
    output_of({"fio", "--name=layout", "--filename=" + path_, "--size=" + std::to_string(bytes), "--rw=write",
               "--bs=1M", "--ioengine=psync", "--direct=1", "--output-format=json"});
  } catch (...) {
    unlink(path_.c_str());
    throw;
  }
}

Fio::~Fio() { unlink(path_.c_str()); }

IoMeasurement::Result Fio::run(IoPattern pattern, const storage::IoSettings& settings, double seconds) {
  const auto text =
      output_of({"fio", "--name=measured", "--filename=" + path_, "--size=" + std::to_string(bytes_),
                 std::string("--rw=") + word_of(pattern), "--bs=" + std::to_string(settings.block_size),
                 "--iodepth=" + std::to_string(settings.queue_depth), "--numjobs=" + std::to_string(settings.threads),
                 "--group_reporting", "--ioengine=io_uring", "--direct=1", "--overwrite=1", "--time_based",
                 "--runtime=" + std::to_string(std::llround(seconds * 1e3)) + "ms", "--output-format=json"});
  const auto document = nlohmann::json::parse(
      text.begin() + static_cast<std::ptrdiff_t>(std::min(text.find('{'), text.size())), text.end(), nullptr, false);
  if (document.is_discarded() || !document.contains("jobs") || document["jobs"].size() != 1)
    throw IoError("[zero bench io] got no result from fio: " + text.substr(0, 400));
  const auto& job = document["jobs"][0];
  return {job["read"]["bw_bytes"].get<double>(), job["write"]["bw_bytes"].get<double>()};
}

}  // namespace zero::cli
