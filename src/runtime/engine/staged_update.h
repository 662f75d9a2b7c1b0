// The update of all groups, of whatever tier: what is in memory where it lies; what rests in a file, or whose compute
// copy must travel, tile by tile through host memory, so that tiles are read, updated and written at the same time
// (ZeRO-Infinity, arXiv:2104.07857, section 5.2.2). Tiles cut no bits: the rules are element-wise.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/param_group.h"
#include "observe/trace.h"
#include "optim/sharded_optimizer.h"
#include "step/memory_ledger.h"

namespace zero::engine {

class StagedUpdate {
 public:
  struct Policy {
    std::int64_t tile_numel = 0;  // elements of a tile, a multiple of what GroupStates cuts by
    int tiles = 3;                // in host memory at once: read ahead, being updated, written
    bool read_ahead = true, write_behind = true;
  };
  // The tile for a limit in elements (0: the smallest).
  static std::int64_t tile_for(std::int64_t limit);

  // `groups` live as long as this.
  StagedUpdate(std::vector<ParamGroup*> groups, const Policy& policy, step::MemoryLedger& ledger,
               observe::Trace& trace);
  ~StagedUpdate();

  // The states are at rest until run(): what it needs first may be read from files meanwhile, a part the more with
  // every call while backward goes from `done` of `all` groups to all. The disk has backward's own parameters to bring,
  // too, and those are waited for.
  void read_ahead(std::size_t done, std::size_t all);
  // Updates everything once. When this returns, states may still be on their way to their files: settle(). `updated` is
  // called for each group, in order, when its new parameters are where they rest (those of a file may still be on their
  // way to it; they are there when this returns). Nobody but run() may touch states before everything under way has
  // come to rest: what was read ahead is dropped.
  void settle();
  enum class To { Parameters, NextParameters };  // where the compute copy goes: ParamGroup::next_parameters()
  void run(optim::ShardedOptimizer& optimizer, float factor, To to, const std::function<void(ParamGroup&)>& updated);

 private:
  struct Tile {
    ParamGroup* group;
    const GroupStates::Segment* segment;
    std::int64_t begin, numel;  // within the segment
  };
  struct Slot;
  void begin_fetch(Slot& slot, const Tile& tile);
  void update(Slot& slot, const Tile& tile, optim::ShardedOptimizer& optimizer, float factor, To to);
  void finish_store(Slot& slot);
  void finish_parameters(Slot& slot);
  Slot& slot_of(std::size_t tile) { return *slots_[tile % slots_.size()]; }
  void fetch_until(std::size_t end);

  std::vector<ParamGroup*> groups_;
  const Policy policy_;
  observe::Trace& trace_;
  std::vector<Tile> tiles_;  // in the order of groups
  std::vector<std::unique_ptr<Slot>> slots_;
  std::size_t fetched_ = 0;  // tiles of the next or the present run whose fetch has begun
};

}  // namespace zero::engine
