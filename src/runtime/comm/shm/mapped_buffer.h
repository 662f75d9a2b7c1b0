// The SymmetricBuffer of the shm transport: the shards' pages of all arenas side by side in one stretch of addresses.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm/arena.h"
#include "comm/shm/group.h"
#include "comm/shm/shared_pieces.h"
#include "comm/symmetric_buffer.h"

namespace zero::comm::shm {

struct VectorPlace {
  std::shared_ptr<Arena> arena;
  std::shared_ptr<Group> group;  // keeps the peers' arenas mapped
  std::shared_ptr<SharedPieces> pieces;
  const net::ProcessInfo* identity;  // the transport's, copied
  std::function<std::vector<std::string>(std::string_view)> exchange;
};

// Called by all ranks together.
std::shared_ptr<SymmetricBuffer> share(const VectorPlace& place, std::int64_t shard_numel, c10::ScalarType dtype);

}  // namespace zero::comm::shm
