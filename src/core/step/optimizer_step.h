// The optimizer step of all groups. States in memory are updated in place in one pass. States in files, and parameters
// that the update cannot write in place, are streamed through host memory in tiles: one tile is read, one updated and
// one written at the same time (ZeRO-Infinity, arXiv:2104.07857, section 5.2.2). The backend implements the update
// rule.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "step/group.h"

namespace zero::step {

class OptimizerStep {
 public:
  // Both must outlive it. Allocates the tile buffers.
  OptimizerStep(const Context& context, const Groups& groups);
  ~OptimizerStep();
  OptimizerStep(const OptimizerStep&) = delete;
  OptimizerStep& operator=(const OptimizerStep&) = delete;

  // Prefetches tiles in proportion to backward's progress, `done` of `all` groups, limited by the tile buffers. No
  // effect without pipeline_read.
  void read_ahead(std::size_t done, std::size_t all);
  enum class To { Params, PendingParams };
  // Updates every group in order, after the backend's begin_update(). `updated` is called when a group's new parameters
  // are stored or being written to a file; on a GPU after the updates of all groups, which are one launch.
  void run(To to, const std::function<void(Group&)>& updated);
  // Waits until no operation is pending; drops prefetched tiles.
  void settle();

  // Called before elements [begin, begin + numel) of a group's owned range change, with their states, so that saves
  // in the background can copy them first. Run in the updating thread. By the save that wants to know.
  using BeforeChange = std::function<void(int group, std::int64_t begin, std::int64_t numel, const UpdateTarget&)>;
  std::map<const void*, BeforeChange> before_change;

 private:
  struct Tile {
    Group* group;
    std::size_t segment;
    std::int64_t begin, numel;  // within the segment
  };
  // Buffers that tiles use in turn.
  struct Slot {
    View states[1 + kMaxSlots], param;  // master and optimizer states; the new parameter
    Pending reads, writes, param_write;
  };
  void make_slots(std::int64_t numel, std::int64_t count);
  void give_slots();
  void read_until(std::size_t end);
  // Of an UpdateRule: the buffer of fp32 gradients and of what ranks exchange, until the end of run().
  View scratch_of(const Tile& tile, Tier tier);
  std::int64_t scratch_numel(const GroupFacts& facts, std::int64_t updated) const;
  std::vector<std::unique_ptr<Observed>> observe_owners(const Tile& tile);
  void update(const Tile& tile, To to, Slot* slot);
  std::unique_ptr<Observed> observe(const Tile& tile, OpKind kind, OpReason reason, Tier from, Tier to,
                                    std::int64_t bytes);
  const Segment& segment_of(const Tile& tile) const { return tile.group->facts.segments[tile.segment]; }
  std::int64_t state_bytes(const Tile& tile) const { return tile.group->facts.state_bytes(tile.numel); }
  // Of the master (0) and the optimizer states. Buffers have room for the widest dtype of all groups.
  static View part_of(int state, const View& stored, std::int64_t begin, std::int64_t numel) {
    return state == 0 ? stored.part(begin, numel) : slot_part(stored, begin, numel);
  }
  static View part_of(const Slot& slot, int state, const Tile& tile, Dtype dtype) {
    return part_of(state, {slot.states[state].buffer, 0, 0, dtype}, 0, tile.numel);
  }
  Slot& slot_of(std::size_t tile) { return slots_[tile % slots_.size()]; }

  const Context& c_;
  const Groups& groups_;
  std::vector<Tile> tiles_;  // of all segments that need tiles, in order
  std::vector<Slot> slots_;
  View scratch_[2];       // on the device, in host memory
  std::size_t read_ = 0;  // number of tiles whose read has started
};

}  // namespace zero::step
