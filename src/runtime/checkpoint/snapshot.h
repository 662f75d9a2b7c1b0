// The states of a save that is written while the program trains. A tile is copied by the thread that writes, or by the
// update just before it changes the tile, whichever comes first: a save whose writer is ahead of the next update copies
// nothing extra.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/state.h"
#include "engine/state_piece.h"
#include "gpu/streams.h"

namespace zero::checkpoint {

class Snapshot {
 public:
  // Pieces that do not belong to a group are copied now. memory: most bytes of tiles that are held for the writer.
  // Waits for the device.
  Snapshot(engine::State& state, std::vector<engine::StatePiece>& pieces, std::int64_t memory);
  ~Snapshot();  // the writer has ended

  // The writer: elements [at, at + numel) of a piece, as they were when the snapshot was made; valid while the pointer
  // lives. Asked once for each tile, as formats::Source says; of frozen parameters also more often.
  std::shared_ptr<const void> read(std::size_t piece, std::int64_t at, std::int64_t numel);
  // The update is about to change elements [begin, begin + numel) of what this rank owns of a group. old: what it has
  // in memory of them, by state and place in the range.
  using Old = std::function<at::Tensor(int state, std::int64_t at, std::int64_t numel)>;
  void before_change(int group, std::int64_t begin, std::int64_t numel, const Old& old);
  // From now on, and no longer, updates call before_change().
  void watch();
  void stop_watching();
  // Returns when every tile is copied, or the writer has ended.
  void release();
  // Bytes that the writer must copy before an update of everything finds room for the rest.
  std::int64_t missing_room() const;
  // Returns when enough(missing_room()), or the writer has ended.
  void wait_for_room(const std::function<bool(std::int64_t missing)>& enough);
  // The writer has ended: tiles that it has not asked for are not needed.
  void end();

  struct Stats {
    double stalled = 0;          // seconds that updates waited for the writer
    std::int64_t most_held = 0;  // bytes
    std::int64_t held = 0;       // all bytes that were copied before a change
  };
  Stats stats() const;

 private:
  enum class Status { Pending, Busy, Held, Done };
  struct Tile {
    std::size_t piece;
    std::int64_t at, numel, bytes;
    Status status = Status::Pending;
    std::shared_ptr<char[]> held = nullptr;
  };
  struct Owned {  // the place of a tile in a group's owned range
    std::int64_t begin, end;
    std::size_t tile;
  };
  bool take_room(std::int64_t bytes);
  void give_room(Tile& tile);
  std::int64_t missing() const { return std::max<std::int64_t>(0, pending_ - (memory_ - held_)); }
  void hold(Tile& tile, std::unique_lock<std::mutex>& lock, const std::function<at::Tensor()>& values);
  void finish(Tile& tile);

  engine::State& state_;
  const gpu::SideStream stream_;  // of the writer
  const std::vector<engine::StatePiece>& pieces_;
  const std::int64_t memory_;
  std::vector<Tile> tiles_;
  std::vector<std::size_t> first_tile_;      // by piece
  std::map<int, std::vector<Owned>> owned_;  // by group, by begin
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t held_ = 0;
  std::int64_t pending_ = 0;  // bytes of pending tiles that updates change
  std::size_t left_ = 0;      // tiles of states that are not done or held
  bool ended_ = false;
  Stats stats_;
};

}  // namespace zero::checkpoint
