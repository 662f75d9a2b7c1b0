#include "comm/family.h"

#include <algorithm>

namespace zero::comm {

void Family::join(Transport& transport) {
  {
    std::scoped_lock lock(advancing_, mutex_);
    transports_.push_back(&transport);
  }
  transport.on_wait([family = weak_from_this()] {
    const auto here = family.lock();
    return here && here->advance();
  });
}

void Family::leave(Transport& transport) {
  std::scoped_lock lock(advancing_, mutex_);
  std::erase(transports_, &transport);
  if (!transport.identity().group.empty()) across_of_ended_ += transport.bytes_across_hosts();
}

// Without mutex_: a transport that finds a failure asks for the family's.
bool Family::advance() {
  std::unique_lock lock(advancing_, std::try_to_lock);
  if (!lock || transports_.size() < 2) return false;
  bool more = false;
  for (auto* transport : transports_) more |= transport->advance();
  return more;
}

void Family::count(const std::string& op, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  auto& row = named_.by_op[op];
  ++row.calls;
  row.bytes_sent += bytes;
}

void Family::count_control(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  ++named_.control.calls;
  named_.control.bytes_sent += bytes;
}

void Family::add_named_groups(CommStats& stats) const {
  std::lock_guard lock(mutex_);
  for (const auto& [op, row] : named_.by_op) {
    stats.by_op[op].calls += row.calls;
    stats.by_op[op].bytes_sent += row.bytes_sent;
  }
  stats.control.calls += named_.control.calls;
  stats.control.bytes_sent += named_.control.bytes_sent;
}

void Family::forget_named_groups() {
  std::lock_guard lock(mutex_);
  named_ = {};
}

std::uint64_t Family::named_bytes_across_hosts() const {
  std::lock_guard lock(mutex_);
  std::uint64_t sum = across_of_ended_;
  for (const auto* transport : transports_)
    if (!transport->identity().group.empty()) sum += transport->bytes_across_hosts();
  return sum;
}

void Family::stop(const PeerFailure& cause) noexcept {
  std::lock_guard lock(mutex_);
  if (transports_.size() < 2) return;  // the only one has already told its ranks
  for (auto* transport : transports_) transport->stop(cause.reason, cause.rank);
}

std::optional<PeerFailure> Family::failure() const {
  std::lock_guard lock(mutex_);
  return transports_.empty() ? std::nullopt : transports_.front()->failure();
}

}  // namespace zero::comm
