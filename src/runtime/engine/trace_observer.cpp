// See trace_observer.h.
#include "engine/trace_observer.h"

#include <optional>

namespace zero::engine {
namespace {

using observe::TraceKind;

// The trace kind of an operation, and of the time in which the program waits for it. Synchronous operations are shown
// on the thread that performs them.
struct Shown {
  TraceKind kind;
  std::optional<TraceKind> wait;
};

std::optional<Shown> shown(step::OpKind kind) {
  using step::OpKind;
  switch (kind) {
    case OpKind::Unshard:
      return Shown{TraceKind::Gather, TraceKind::GatherWait};
    case OpKind::UnshardSymmetric:
      return Shown{TraceKind::GatherInPlace, TraceKind::GatherWait};
    case OpKind::AllGatherParams:
    case OpKind::SendFromOwners:
      return Shown{TraceKind::Publish, TraceKind::PublishWait};
    case OpKind::Reduce:
    case OpKind::AllGatherGrads:
    case OpKind::SendToOwners:
      return Shown{TraceKind::Reduce, TraceKind::ReduceWait};
    case OpKind::Fetch:
      return Shown{TraceKind::Fetch, TraceKind::FetchWait};
    case OpKind::FetchStates:
      return Shown{TraceKind::FetchStates, TraceKind::FetchWait};
    case OpKind::Store:
      return Shown{TraceKind::Store, TraceKind::StoreWait};
    case OpKind::StoreStates:
      return Shown{TraceKind::StoreStates, TraceKind::StoreWait};
    case OpKind::Copy:
      return Shown{TraceKind::Copy, std::nullopt};
    case OpKind::Update:
      return Shown{TraceKind::Update, std::nullopt};
    case OpKind::Broadcast:
      break;
  }
  return std::nullopt;
}

}  // namespace

class TraceObserver::Slice final : public step::Observed {
 public:
  Slice(observe::Trace& trace, const Shown& shown, const std::string& name, std::int64_t bytes)
      : trace_(trace), wait_kind_(shown.wait), name_(name), bytes_(bytes) {
    if (wait_kind_)
      operation_.begin(trace, shown.kind);
    else
      span_.emplace(trace, shown.kind, name, bytes);
  }
  ~Slice() override {
    wait_.reset();
    operation_.end(name_, bytes_);
  }
  void waiting() override {
    if (wait_kind_) wait_.emplace(trace_, *wait_kind_, name_);
  }

 private:
  observe::Trace& trace_;
  const std::optional<TraceKind> wait_kind_;
  const std::string& name_;
  const std::int64_t bytes_;
  observe::TraceOperation operation_;
  std::optional<observe::TraceSpan> span_, wait_;
};

std::unique_ptr<step::Observed> TraceObserver::issued(const step::Op& op) {
  if (!trace_.on()) return nullptr;
  const auto how = shown(op.kind);
  if (!how || op.reason == step::OpReason::InitialValues) return nullptr;
  return std::make_unique<Slice>(trace_, *how, groups_[static_cast<std::size_t>(op.group)].name, op.bytes);
}

}  // namespace zero::engine
