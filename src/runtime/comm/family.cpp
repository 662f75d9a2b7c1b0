#include "comm/family.h"

#include <algorithm>

namespace zero::comm {

void Family::join(Transport& transport) {
  std::lock_guard lock(mutex_);
  transports_.push_back(&transport);
}

void Family::leave(Transport& transport) {
  std::lock_guard lock(mutex_);
  std::erase(transports_, &transport);
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
