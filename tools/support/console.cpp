// Unbuffered output: one write(2) per line, so that lines of several processes do not mix.
#include "tools/support/console.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "base/printable.h"

namespace zero::cli {
namespace {

// Returns 0 or the errno.
int write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return 0;
}

std::string& program() {
  static std::string name = "zero";
  return name;
}

const char* word(LogLevel level) {
  switch (level) {
    case LogLevel::Debug:
      return "debug: ";
    case LogLevel::Warning:
      return "warning: ";
    case LogLevel::Error:
      return "error: ";
    default:
      return "";
  }
}

}  // namespace

void name_program(std::string name) { program() = std::move(name); }

std::string words_of(std::string_view command) {
  std::string words = program();
  if (!command.empty()) words.append(" ").append(command);
  return words;
}

LogLevel log_threshold(const Global& global) {
  std::string level = global.log_level;
  const char* source = "--log-level";
  if (level.empty()) {
    if (global.quiet) return LogLevel::Error;
    if (global.verbose) return LogLevel::Debug;
    const char* variable = std::getenv("ZERO_LOG_LEVEL");
    if (!variable || !*variable) return LogLevel::Info;
    level = variable;
    source = "environment ZERO_LOG_LEVEL";
  }
  if (level == "debug") return LogLevel::Debug;
  if (level == "info") return LogLevel::Info;
  if (level == "warning") return LogLevel::Warning;
  if (level == "error") return LogLevel::Error;
  throw ConfigError(std::string("[") + source + "] got \"" + level + "\", expected debug, info, warning or error");
}

bool print_result(std::string_view text) {
  static bool closed = false;
  if (closed) return false;
  const int error = write_all(1, text);
  if (error == EPIPE) {
    closed = true;
  } else if (error != 0) {
    throw IoError(std::string("[stdout] got ") + std::strerror(error) + ", expected to write " +
                  std::to_string(text.size()) + " bytes. Hint: is the disk full?");
  }
  return !closed;
}

void print_note(std::string_view command, LogLevel level, std::string_view text) {
  std::string line = words_of(command);
  line.append(": ").append(word(level)).append(base::printable(text)).append("\n");  // may contain external names
  write_all(2, line);
}

void print_error(std::string_view command, std::string_view text) { print_note(command, LogLevel::Error, text); }

void install_log_sink(std::string command, const Global& global) {
  const LogLevel least = log_threshold(global);
  set_log_sink([command = std::move(command), least](LogLevel level, std::string_view text) {
    if (level >= least) print_note(command, level, text);
  });
}

int guarded(const std::string& command, const std::function<int()>& body) {
  signal(SIGPIPE, SIG_IGN);
  try {
    return body();
  } catch (const Error& error) {
    print_error(command, error.what());
    return static_cast<int>(error.code());
  } catch (const std::bad_alloc&) {
    print_error(command, "[memory] cannot allocate: out of memory. Hint: see `zero doctor` for the limits.");
    return static_cast<int>(ExitCode::kOutOfMemory);
  } catch (const std::exception& error) {
    print_error(command, error.what());
    return static_cast<int>(ExitCode::kFailed);
  }
}

}  // namespace zero::cli
