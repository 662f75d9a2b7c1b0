// The four error classes of libzero. It throws no others. Messages about values read
//   [where] got X, expected Y (rank 2/4, group blocks.3, step 17). Hint: what to change.
// and messages about failed operations "[where] cannot do X: reason. Hint: ...". The library never prints, exits or
// aborts, except where a GPU waits for a dead rank and the host with it: exit code 6 (docs/errors.md).
#pragma once
#include <stdexcept>
#include <string>

#include <zero/export.h>

namespace zero {

// The exit code that a program should return for an error (docs/cli.md).
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,       // a bug of libzero, or any other failure
  kConfig = 2,       // usage or configuration
  kCheckpoint = 3,   // a checkpoint is missing or damaged
  kOutOfMemory = 4,  // a budget or the memory is exhausted
  kIo = 5,           // an I/O error or a full disk
  kPeer = 6,         // a rank died, hung, or lost its peers
  kNumerical = 7,    // too many steps with Inf or NaN
};

class ZERO_API Error : public std::runtime_error {
 public:
  ExitCode code() const noexcept { return code_; }

 protected:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

 private:
  ExitCode code_;
};

// An error that the user can fix: a configuration, an unsupported model, a call out of order.
class ZERO_API ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message, ExitCode code = ExitCode::kConfig) : Error(code, message) {}
};

// A peer or the network failed. The communicator is unusable afterwards.
class ZERO_API CommError : public Error {
 public:
  explicit CommError(const std::string& message, int rank = -1) : Error(ExitCode::kPeer, message), rank_(rank) {}
  // The rank that failed, or -1 if unknown.
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

// A file or disk failed. The message has the path, the offset, the expected and actual bytes, and the system's error
// text.
class ZERO_API IoError : public Error {
 public:
  explicit IoError(const std::string& message, ExitCode code = ExitCode::kIo) : Error(code, message) {}
};

// A bug of libzero, or numerical failure (code kNumerical).
class ZERO_API InternalError : public Error {
 public:
  explicit InternalError(const std::string& message, ExitCode code = ExitCode::kFailed) : Error(code, message) {}
};

}  // namespace zero
