// The four errors libzero throws, and nothing else. Every message reads
//   [where] got X, expected Y (rank 2/4, group blocks.3, step 17). Hint: what to change.
// The library itself never prints, exits or aborts.
#pragma once
#include <stdexcept>
#include <string>

#include <zero/export.h>

namespace zero {

// What a program should return to its caller for an error (see docs/cli.md).
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,       // our bug, or a failure of no other class
  kConfig = 2,       // usage or configuration
  kCheckpoint = 3,   // checkpoint missing or damaged
  kOutOfMemory = 4,  // planned or real
  kIo = 5,           // I/O error or disk full
  kPeer = 6,         // a rank died, hung, or lost its peers
  kNumerical = 7,    // Inf/NaN policy
};

class ZERO_API Error : public std::runtime_error {
 public:
  ExitCode code() const noexcept { return code_; }

 protected:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

 private:
  ExitCode code_;
};

// The user can fix it: a configuration, a model the engine cannot take, a call out of order.
class ZERO_API ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message, ExitCode code = ExitCode::kConfig) : Error(code, message) {}
};

// A peer or the network failed. The communicator is unusable afterwards.
class ZERO_API CommError : public Error {
 public:
  explicit CommError(const std::string& message, int rank = -1) : Error(ExitCode::kPeer, message), rank_(rank) {}
  // The rank that failed, or -1 when it is not known.
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

// A file or a disk failed: path, offset, wanted and got bytes, the system's text.
class ZERO_API IoError : public Error {
 public:
  explicit IoError(const std::string& message, ExitCode code = ExitCode::kIo) : Error(code, message) {}
};

// A bug of libzero, or numbers that cannot be trusted any more (code kNumerical).
class ZERO_API InternalError : public Error {
 public:
  explicit InternalError(const std::string& message, ExitCode code = ExitCode::kFailed) : Error(code, message) {}
};

}  // namespace zero
