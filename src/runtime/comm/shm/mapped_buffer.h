// The SymmetricBuffer of the shm transport: the shards of all arenas mapped contiguously.
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
  const net::ProcessInfo* identity;  // copied from the transport
  std::function<std::vector<std::string>(std::string_view)> all_gather_bytes;
};

// Collective.
std::shared_ptr<SymmetricBuffer> share(const VectorPlace& place, std::int64_t shard_numel, c10::ScalarType dtype);

}  // namespace zero::comm::shm
