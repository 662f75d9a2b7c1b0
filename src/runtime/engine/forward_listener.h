// Called before and after operators that read parameters, in any thread. Unshards the parameters, and starts the
// handling of saved activations that the configuration selects.
#pragma once
#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "engine/checks.h"
#include "torch_hooks/interception.h"

namespace zero::engine {

class ForwardListener final : public torch_hooks::UseListener {
 public:
  ForwardListener(Parts& parts, const Checks& checks) : p_(parts), checks_(checks) {}

  // Intercepts every parameter of the model; calls on_gradient(group, member) when a gradient is complete.
  void attach(const std::function<void(int group, int member)>& on_gradient);
  // Removes the interception and the hooks.
  void detach() noexcept;

  // The next use begins a new forward or phase.
  void begin_phase() { shown_group_ = -1; }
  // The forward has ended: ends this thread's policy for saved activations (with several Engines, that of the last used
  // one) and what split products keep for one forward.
  void end_forward() const;
  // Records changes of the byte counts in the trace.
  void count_bytes();

 private:
  torch_hooks::CallHandler* handler_of(const ModelParameter& member, int tag) const;
  void before_use(const int* tags, int count, const char* op) override;
  void after_use(const int* tags, int count) noexcept override;
  bool before_write(int tag, const char* op) override;
  std::string on_refused_dtype(int tag, const char* op, const at::Tensor& other) override;
  bool begin_forward();
  void check_parts(const int* tags, int count, bool begun);
  void show(int group);

  struct Member {
    int group, index;
  };
  Parts& p_;
  const Checks& checks_;
  // Of uses in forwards with tensor parallelism: those that began the last one, how many times the parts of each group
  // have been checked, and had been at the last use of each tag.
  std::vector<int> first_tags_;
  std::vector<int> checks_made_;
  std::vector<int> checked_at_use_;
  bool compared_ = false;             // the first forward has compared the inputs of tensor-parallel ranks
  std::vector<Member> members_;       // of all parameters; the index is the interception's tag
  std::atomic<int> shown_group_{-1};  // shown on the status page
};

}  // namespace zero::engine
