// Reports this rank's errors to the other ranks. An error between collectives would leave peers waiting, so they are
// told at once, and the communicator is unusable. An error found before anything was sent or changed stays local: if
// all ranks make the same mistake, all can continue. Peers are told of it only if it unwinds the stack past the Engine.
#pragma once
#include <exception>
#include <string>
#include <utility>

#include <zero/errors.h>

#include "comm/group.h"
#include "torch_hooks/normal_mode.h"

namespace zero::engine {

// The text of an error; empty texts stand for "no error".
inline std::string described(std::string error) { return error.empty() ? "an error without a message" : error; }

class ErrorRelay {
 public:
  explicit ErrorRelay(comm::Group& comm) : comm_(comm) {}

  // Runs fn; an error is reported to the peers, then rethrown.
  template <class Fn>
  auto reporting(Fn&& fn) {
    const torch_hooks::NormalMode normal;
    try {
      return fn();
    } catch (const CommError& e) {
      ended_ = described(e.what());
      throw;
    } catch (const std::exception& e) {
      report(e.what());
      throw;
    }
  }

  // Runs fn, which neither sends nor changes anything; an error is kept, then rethrown.
  template <class Fn>
  auto keeping(Fn&& fn) {
    const torch_hooks::NormalMode normal;
    try {
      return fn();
    } catch (const std::exception& e) {
      keep(e.what());
      throw;
    }
  }

  void keep(std::string error) {
    kept_ = described(std::move(error));
    uncaught_ = std::uncaught_exceptions();
  }
  // The ranks have communicated since, so the error did not end the run.
  void forget() { kept_.clear(); }

  void report(const std::string& error) noexcept {
    kept_.clear();
    try {
      ended_ = described(error);
    } catch (...) {  // out of memory: the text is lost, the peers are still informed
    }
    if (comm_.size() == 1) return;  // another Engine may continue with this communicator
    comm_.abort(error);
  }
  // The error that was reported, after which this Engine is unusable; empty: none.
  const std::string& ended() const { return ended_; }
  // Reports the kept error if an exception is unwinding the caller.
  void report_if_unwinding() noexcept {
    if (!kept_.empty() && comm_.size() > 1 && std::uncaught_exceptions() > uncaught_) report(std::string(kept_));
  }

 private:
  comm::Group& comm_;
  std::string kept_, ended_;
  int uncaught_ = 0;  // uncaught exceptions when the error was kept
};

}  // namespace zero::engine
