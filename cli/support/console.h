// The streams and exit codes of every subcommand (docs/cli.md sections 2, 3, 9): results go to stdout,
// everything else to stderr as "zero <command>: ..."; errors become exit codes in one place.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include <zero/errors.h>
#include <zero/log.h>

#include "report/text/terminal.h"

namespace zero::cli {

// The options that every subcommand has.
struct Global {
  bool quiet = false, verbose = false, json = false;
  std::string log_level;  // "", "debug", "info", "warning", "error"
  std::string log_dir;    // --log-dir, else ZERO_LOG_DIR, else empty
  report::Choice color = report::Choice::Auto, progress = report::Choice::Auto;
};

// Lowest level that is shown: --log-level, else -q (error) or -v (debug), else ZERO_LOG_LEVEL, else info.
// Throws ConfigError for an unknown word in the variable.
LogLevel log_threshold(const Global& global);

// Writes results to stdout at once. A closed pipe is no error: output ends quietly, and the function
// returns false from then on. Throws IoError (exit 5) when the disk is full or the device fails.
bool print_result(std::string_view text);

// One line on stderr, "zero run: warning: text"; Info has no level word. One write(2).
void print_note(std::string_view command, LogLevel level, std::string_view text);
// "zero run: error: text", whatever the log level.
void print_error(std::string_view command, std::string_view text);

// Lets the library's notices reach stderr through print_note, from `global`'s level on.
void install_log_sink(std::string command, const Global& global);

// Runs `body` and turns what it throws into the exit codes of docs/cli.md section 3, printing the
// error: zero::Error its own code, std::bad_alloc 4, anything else 1. SIGPIPE is ignored.
int guarded(const std::string& command, const std::function<int()>& body);

}  // namespace zero::cli
