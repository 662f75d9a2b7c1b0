// The SharedVector of the shm transport: the shards' pages of all arenas side by side in one stretch of addresses.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/shared_vector.h"
#include "comm/shm_arena.h"
#include "comm/shm_group.h"
#include "comm/shm_pieces.h"

namespace zero::comm::shm {

struct VectorPlace {
  std::shared_ptr<Arena> arena;
  std::shared_ptr<Group> group;  // keeps the peers' arenas mapped
  std::shared_ptr<SharedPieces> pieces;
  const Identity* identity;  // the transport's, copied
  std::function<std::vector<std::string>(std::string_view)> exchange;
};

// Called by all ranks together.
std::shared_ptr<SharedVector> share(const VectorPlace& place, std::int64_t shard_numel, c10::ScalarType dtype);

}  // namespace zero::comm::shm
