// Uses of parameters by operators, in any thread: they are unsharded before, and what autograd saves is kept as the
// configuration says.
#pragma once
#include <atomic>
#include <functional>
#include <vector>

#include "engine/checks.h"
#include "torch_hooks/interception.h"

namespace zero::engine {

class ForwardListener final : public torch_hooks::UseListener {
 public:
  ForwardListener(Parts& parts, const Checks& checks) : p_(parts), checks_(checks) {}

  // Every parameter of the model is intercepted from now on; on_gradient(group, member): its gradient is final.
  void attach(const std::function<void(int group, int member)>& on_gradient);
  // None is any more, nor has a hook.
  void detach() noexcept;

  // The next use begins a forward, or a phase, anew.
  void begin_phase() { shown_group_ = -1; }
  // In a thread with several Engines the one whose parameter was used last says how activations are kept.
  void end_activations() const;
  // Bytes that changed go to the trace.
  void count_bytes();

 private:
  void before_use(const int* tags, int count, const char* op) override;
  void after_use(const int* tags, int count) noexcept override;
  bool before_write(int tag, const char* op) override;
  void begin_forward();
  void show(int group);

  struct Member {
    int group, index;
  };
  Parts& p_;
  const Checks& checks_;
  std::vector<Member> members_;       // of all parameters, whose index is the interception's tag
  std::atomic<int> shown_group_{-1};  // on the status page
};

}  // namespace zero::engine
