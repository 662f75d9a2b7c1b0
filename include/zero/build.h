// Building a module without allocating its parameters. The Engine materialises them unit by
// unit, so that never more than a shard plus one unit is in memory, and bit-identical to an
// eager build with the same torch::manual_seed.
#pragma once
#include <memory>
#include <utility>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {
namespace detail {
// While it lives, parameters made by this thread get no memory and their initialisers are recorded.
class ZERO_API DeferredScope {
 public:
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
}  // namespace detail

// Runs make() with deferred allocation and returns what it returns: a std::shared_ptr to the
// module, or a module holder. The module cannot run before an Engine has taken it. Local. What make() throws goes
// through.
template <class Make>
auto build(Make&& make) {
  detail::DeferredScope scope;
  return std::forward<Make>(make)();
}
template <class Make>
[[deprecated("the options have no part in it: build(make)")]] auto build(const Options&, Make&& make) {
  return build(std::forward<Make>(make));
}

}  // namespace zero
