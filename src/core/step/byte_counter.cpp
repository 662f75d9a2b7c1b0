// See byte_counter.h.
#include "step/byte_counter.h"

#include <utility>

namespace zero::step {

void Traffic::add(const Traffic& other, std::int64_t times) {
  for (const auto field :
       {&Traffic::gathered, &Traffic::reduced, &Traffic::collectives, &Traffic::to_host, &Traffic::from_host,
        &Traffic::read, &Traffic::written, &Traffic::updated, &Traffic::updated_offloaded})
    this->*field += times * (other.*field);
}

ByteCounter::ByteCounter(const RunFacts& run) : gpu_(run.topology.gpu) {}

Traffic ByteCounter::take() { return std::exchange(traffic_, {}); }

std::unique_ptr<Observed> ByteCounter::issued(const Op& op) {
  count(op);
  return nullptr;
}

void ByteCounter::count(const Op& op) {
  auto& t = traffic_;
  switch (op.kind) {
    case OpKind::Unshard:
    case OpKind::UnshardSymmetric:
    case OpKind::AllGatherParams:
      if (op.node) return;  // inside a node; not counted by the axis's communicator
      t.gathered += op.sent;
      ++t.collectives;
      return;
    case OpKind::Reduce:
    case OpKind::AllGatherGrads:
      t.reduced += op.sent;
      t.collectives += op.to_all ? 2 : 1;
      return;
    case OpKind::SendToOwners:
      t.reduced += op.sent;
      ++t.collectives;
      return;
    case OpKind::SendFromOwners:
      t.gathered += op.sent;
      ++t.collectives;
      return;
    case OpKind::Fetch:
    case OpKind::FetchStates:
      t.read += op.bytes;
      return;
    case OpKind::Store:
    case OpKind::StoreStates:
      t.written += op.bytes;
      return;
    case OpKind::Copy:
      if (gpu_ && op.from == Tier::Device && op.to == Tier::Host) t.to_host += op.bytes;
      if (gpu_ && op.from == Tier::Host && op.to == Tier::Device) t.from_host += op.bytes;
      return;
    case OpKind::Update:
      t.updated += op.numel;
      if (op.from != Tier::Device) t.updated_offloaded += op.numel;
      return;
    case OpKind::Broadcast:
      return;
  }
}

}  // namespace zero::step
