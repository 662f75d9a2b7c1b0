// Failures of a program that is one of many ranks: exceptions as an exit code and a text, and one message where all
// ranks have the same.
#pragma once
#include <functional>
#include <string>

#include <zero/communicator.h>
#include <zero/errors.h>

namespace zero::cli {

// The exit code and the text to print.
struct Failure {
  ExitCode code = ExitCode::kOk;
  std::string text;
};

// Converts exceptions of body() to an exit code and a text without a stack trace.
Failure failure_of(const std::function<void()>& body);

// Hands the failure to the launcher, for its root-cause block.
void publish(const Failure& failure);

// For a failure that every rank has, with the same text: the first rank prints it. Needs no Communicator. Returns the
// exit code.
int fail_alike(const std::string& command, const Failure& failure);

// [collective] Drops failures that other ranks print as well. Returns this rank's exit code, or 0 if no rank failed.
int agree_on_start(const std::string& command, Communicator& comm, const Failure& mine);

}  // namespace zero::cli
