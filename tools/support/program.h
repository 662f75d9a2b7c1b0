// The main function of a program that `zero` replaces itself by: `zero-torch`, `zero-train`, `zero-lab`.
#pragma once
#include <initializer_list>

namespace zero::cli {

struct Subcommand {
  const char* name;
  // argv[0] is the name. Returns the exit code of the process, and may throw the four errors.
  int (*run)(int argc, char** argv);
};

// Runs the command that argv[1] names; `program` is for the error that names them all.
int run_program(const char* program, std::initializer_list<Subcommand> commands, int argc, char** argv);

}  // namespace zero::cli
