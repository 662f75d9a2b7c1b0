// What the other ranks learn of an error of this one. An error in the middle of collectives leaves the peers waiting:
// they are told at once, and the communicator has ended. An error that was found before anything was sent or changed is
// the program's alone: where all ranks made the same mistake all may go on. Should it end the Engine instead (the stack
// is unwound past it), the peers are told then.
#pragma once
#include <exception>
#include <string>
#include <utility>

#include <zero/errors.h>

#include "comm/group.h"
#include "torch_hooks/normal_mode.h"

namespace zero::engine {

class ErrorRelay {
 public:
  explicit ErrorRelay(comm::Group& comm) : comm_(comm) {}

  // Runs fn; its error is told to the peers before it goes on.
  template <class Fn>
  auto telling(Fn&& fn) {
    const torch_hooks::NormalMode normal;
    try {
      return fn();
    } catch (const CommError& e) {
      ended_ = e.what();
      throw;
    } catch (const std::exception& e) {
      tell(e.what());
      throw;
    }
  }

  // Runs fn, which neither sends nor changes anything; its error is kept.
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
    kept_ = std::move(error);
    uncaught_ = std::uncaught_exceptions();
  }
  // The ranks have met since, so the error has ended nothing.
  void forget() { kept_.clear(); }

  void tell(const std::string& error) noexcept {
    kept_.clear();
    try {
      ended_ = error;
    } catch (...) {  // no memory for the words
    }
    if (comm_.size() == 1) return;  // nobody to tell; another Engine may go on with it
    comm_.abort(error);
  }
  // The error that was told, after which nothing here can go on; empty: none.
  const std::string& ended() const { return ended_; }
  // Tells what was kept if an exception is on its way past the caller.
  void tell_if_unwinding() noexcept {
    if (!kept_.empty() && comm_.size() > 1 && std::uncaught_exceptions() > uncaught_) tell(std::string(kept_));
  }

 private:
  comm::Group& comm_;
  std::string kept_, ended_;
  int uncaught_ = 0;  // exceptions in flight when it was kept
};

}  // namespace zero::engine
