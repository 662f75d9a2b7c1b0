// The optimizer step of all groups. States in memory are updated in one pass where they are. States in files, and
// parameters that the update cannot write in place, go through host memory tile by tile: one tile is read, one updated
// and one written at the same time (ZeRO-Infinity, arXiv:2104.07857, section 5.2.2). The update rule is the backend's.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "step/group.h"

namespace zero::step {

class OptimizerStep {
 public:
  // Both outlive it. Makes the buffers of the tiles.
  OptimizerStep(const Context& context, const Groups& groups);
  ~OptimizerStep();
  OptimizerStep(const OptimizerStep&) = delete;
  OptimizerStep& operator=(const OptimizerStep&) = delete;

  // Backward has reduced `done` of `all` groups: begins to read that part of the first tiles, as many as have buffers.
  // Nothing without pipeline_read.
  void read_ahead(std::size_t done, std::size_t all);
  enum class To { Params, PendingParams };
  // Updates every group in order. `updated`: the group's new parameters are where they rest, or on their way to a file.
  void run(float factor, To to, const std::function<void(Group&)>& updated);
  // Nothing is under way any more; what was read ahead is dropped.
  void settle();

  // Called before elements [begin, begin + numel) of a group's owned range change, with their states: how a save in the
  // background copies them first. From the thread that runs the update.
  std::function<void(int group, std::int64_t begin, std::int64_t numel, const UpdateTarget&)> before_change;

 private:
  struct Tile {
    Group* group;
    std::size_t segment;
    std::int64_t begin, numel;  // within the segment
  };
  // Buffers that one tile after the other goes through.
  struct Slot {
    View states[3], param;  // master and optimizer states; the new parameter
    Pending reads, writes, param_write;
  };
  void make_slots(std::int64_t numel, std::int64_t count);
  void give_slots();
  void read_until(std::size_t end);
  void update(const Tile& tile, float factor, To to, Slot* slot);
  std::unique_ptr<Observed> observe(const Tile& tile, OpKind kind, OpReason reason, Tier from, Tier to,
                                    std::int64_t bytes);
  const Segment& segment_of(const Tile& tile) const { return tile.group->facts.segments[tile.segment]; }
  Slot& slot_of(std::size_t tile) { return slots_[tile % slots_.size()]; }

  const Context& c_;
  const Groups& groups_;
  std::vector<Tile> tiles_;  // of all segments that need any, in order
  std::vector<Slot> slots_;
  std::size_t read_ = 0;  // tiles whose read has begun
};

}  // namespace zero::step
