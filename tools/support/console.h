// Output and exit codes of all subcommands (docs/cli.md sections 2, 3, 9): results go to stdout, everything else to
// stderr as "zero <command>: ..."; errors are converted to exit codes here. Programs other than `zero` that use the
// same options have a name of their own.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include <zero/errors.h>
#include <zero/log.h>

#include "tools/report/text/terminal.h"

namespace zero::cli {

// For another program than `zero`: the word that messages and help begin with. Call it first, in one thread.
void name_program(std::string name);
// What the user wrote to start a command: "zero run"; for "" the program alone.
std::string words_of(std::string_view command);

// The options that all subcommands have.
struct Global {
  bool quiet = false, verbose = false, json = false;
  std::string log_level;  // "", "debug", "info", "warning", "error"
  std::string log_dir;    // --log-dir, else ZERO_LOG_DIR, else empty
  report::Choice color = report::Choice::Auto, progress = report::Choice::Auto;
};

// The lowest level that is shown: --log-level, else -q (error) or -v (debug), else ZERO_LOG_LEVEL, else info. Throws
// ConfigError for an unknown value of the variable.
LogLevel log_threshold(const Global& global);

// Writes results to stdout at once. A closed pipe is not an error: the function returns false from then on and prints
// nothing. Throws IoError (exit code 5) if the disk is full or the device fails.
bool print_result(std::string_view text);

// Prints one line on stderr, "zero run: warning: text" with words_of(command), in one write(2). Info lines have no
// level.
void print_note(std::string_view command, LogLevel level, std::string_view text);
// Prints "zero run: error: text" at any log level.
void print_error(std::string_view command, std::string_view text);

// Prints the library's notices with print_note, according to `global`'s level.
void install_log_sink(std::string command, const Global& global);

// Runs `body` and converts exceptions to the exit codes of docs/cli.md section 3, with an error message: zero::Error
// has its own code, std::bad_alloc 4, all others 1. Ignores SIGPIPE.
int guarded(const std::string& command, const std::function<int()>& body);

}  // namespace zero::cli
