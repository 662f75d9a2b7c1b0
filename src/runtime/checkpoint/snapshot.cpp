// See snapshot.h.
#include "checkpoint/snapshot.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/check.h"
#include "formats/rank_file.h"

namespace zero::checkpoint {

namespace {

constexpr auto kTileBytes = formats::kReadBytes;

// Updates do not change it, and the writer may read it more than once.
bool is_frozen(const engine::StatePiece& piece) { return piece.group >= 0 && !piece.requires_grad; }
bool changes(const engine::StatePiece& piece) { return piece.group >= 0 && piece.requires_grad; }

}  // namespace

Snapshot::Snapshot(engine::State& state, std::vector<engine::StatePiece>& pieces, std::int64_t memory)
    : state_(state), stream_(state.parts.plan.device, /*high_priority=*/false), pieces_(pieces), memory_(memory) {
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    auto& piece = pieces[p];
    first_tile_.push_back(tiles_.size());
    if (piece.group < 0) {
      const auto copy = piece.read(0, piece.numel).clone();
      piece.read = [copy](std::int64_t at, std::int64_t numel) { return copy.narrow(0, at, numel); };
    }
    const auto width = static_cast<std::int64_t>(c10::elementSize(piece.dtype));
    for (std::int64_t at = 0; at < piece.numel;) {
      const auto numel = is_frozen(piece) ? piece.numel : std::min(piece.numel - at, kTileBytes / width);
      if (changes(piece))
        owned_[piece.group].push_back({piece.owned_begin + at, piece.owned_begin + at + numel, tiles_.size()});
      tiles_.push_back({p, at, numel, numel * width});
      if (changes(piece)) pending_ += numel * width;
      at += numel;
    }
  }
  for (auto& [group, tiles] : owned_)
    std::sort(tiles.begin(), tiles.end(), [](const Owned& a, const Owned& b) { return a.begin < b.begin; });
  for (const auto& tile : tiles_) left_ += pieces[tile.piece].group >= 0 ? 1 : 0;
  gpu::synchronize(state.parts.plan.device);  // updates in the caller's streams
}

Snapshot::~Snapshot() {
  if (held_ > 0) state_.parts.memory->ledger->book(step::Tier::Host, step::Purpose::Other, -held_);
}

void Snapshot::finish(Tile& tile) {
  if (tile.status != Status::Held && pieces_[tile.piece].group >= 0) --left_;
  tile.status = Status::Done;
  changed_.notify_all();
}

std::shared_ptr<const void> Snapshot::read(std::size_t number, std::int64_t at, std::int64_t numel) {
  const auto& piece = pieces_[number];
  // Copies from a GPU do not wait for the steps that run meanwhile. What they read does not change before the tile is
  // finished.
  const gpu::SideStream::Scope beside_the_steps(stream_, /*after_current=*/false);
  if (is_frozen(piece)) {
    const auto values = std::make_shared<at::Tensor>(piece.read(at, numel));
    return {values, values->const_data_ptr()};
  }
  const auto width = static_cast<std::int64_t>(c10::elementSize(piece.dtype));
  auto& tile = tiles_[first_tile_[number] + static_cast<std::size_t>(at / (kTileBytes / width))];
  ZERO_CHECK(tile.at == at && tile.numel == numel, "tile of ", piece.name, " at ", at, ": ", numel, " elements");
  std::unique_lock lock(mutex_);
  ZERO_CHECK(tile.status == Status::Pending || tile.status == Status::Held, "tile of ", piece.name, " at ", at,
             " twice");
  if (tile.status == Status::Held)
    return {tile.held.get(), [this, &tile](const void*) {
              const std::lock_guard last(mutex_);
              give_room(tile);
              finish(tile);
            }};
  tile.status = Status::Busy;
  if (changes(piece)) pending_ -= tile.bytes;
  lock.unlock();
  const auto values = std::make_shared<at::Tensor>(piece.read(at, numel));
  return {values->const_data_ptr(), [this, &tile, values](const void*) {
            const std::lock_guard last(mutex_);
            finish(tile);
          }};
}

// false: the memory, or the budget of host memory, is used up.
bool Snapshot::take_room(std::int64_t bytes) {
  if (held_ + bytes > memory_) return false;
  try {
    state_.parts.memory->ledger->book(step::Tier::Host, step::Purpose::Other, bytes);
  } catch (const ConfigError&) {
    return false;
  }
  held_ += bytes;
  stats_.held += bytes;
  stats_.most_held = std::max(stats_.most_held, held_);
  return true;
}

void Snapshot::give_room(Tile& tile) {
  tile.held.reset();
  held_ -= tile.bytes;
  state_.parts.memory->ledger->book(step::Tier::Host, step::Purpose::Other, -tile.bytes);
}

// Copies a tile, or waits until the writer has.
void Snapshot::hold(Tile& tile, std::unique_lock<std::mutex>& lock, const std::function<at::Tensor()>& read) {
  if (tile.status == Status::Done || tile.status == Status::Held) return;
  if (tile.status == Status::Pending && !ended_ && take_room(tile.bytes)) {
    try {
      tile.held = std::make_shared_for_overwrite<char[]>(static_cast<std::size_t>(tile.bytes));
      const auto values = read();
      ZERO_CHECK(values.numel() == tile.numel, "a tile of ", values.numel(), " of ", tile.numel, " elements");
      std::memcpy(tile.held.get(), values.const_data_ptr(), static_cast<std::size_t>(tile.bytes));
    } catch (...) {
      give_room(tile);  // the tile stays pending
      throw;
    }
    tile.status = Status::Held;
    pending_ -= tile.bytes;
    --left_;
    changed_.notify_all();
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  changed_.wait(lock, [&] { return tile.status == Status::Done || (ended_ && tile.status != Status::Busy); });
  stats_.stalled += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Snapshot::before_change(int group, std::int64_t begin, std::int64_t numel, const Old& old) {
  const auto found = owned_.find(group);
  if (found == owned_.end()) return;
  const auto& tiles = found->second;
  // Tiles are at most kTileBytes long, so those that reach into the range begin shortly before it.
  auto next = std::lower_bound(tiles.begin(), tiles.end(), begin - kTileBytes,
                               [](const Owned& tile, std::int64_t value) { return tile.begin < value; });
  std::unique_lock lock(mutex_);
  for (; next != tiles.end() && next->begin < begin + numel; ++next) {
    if (next->end <= begin) continue;
    auto& tile = tiles_[next->tile];
    const auto& piece = pieces_[tile.piece];
    // A state in a file was read for the update, and is not read again.
    const bool inside = next->begin >= begin && next->end <= begin + numel;
    hold(tile, lock,
         [&] { return inside ? old(piece.state, next->begin - begin, tile.numel) : piece.read(tile.at, tile.numel); });
  }
}

void Snapshot::watch() {
  state_.parts.program->optimizer().before_change[this] = [this](int group, std::int64_t begin, std::int64_t numel,
                                                                 const step::UpdateTarget& target) {
    before_change(group, begin, numel, [&](int state, std::int64_t at, std::int64_t count) {
      const auto& stored = state == engine::kMaster ? target.master : target.slots[state - 1];
      return engine::StateAccess(state_.parts.memory->buffers).read_state(stored, state, at, count).cpu();
    });
  };
}

void Snapshot::stop_watching() {
  state_.parts.backend->update.settle();  // a delayed update calls it
  state_.parts.program->optimizer().before_change.erase(this);
}

void Snapshot::release() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ || left_ == 0; });
}

std::int64_t Snapshot::missing_room() const {
  const std::lock_guard lock(mutex_);
  return missing();
}

void Snapshot::wait_for_room(const std::function<bool(std::int64_t missing)>& enough) {
  constexpr std::chrono::milliseconds kPause{50};  // it may depend on more than the tiles
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!ended_ && !enough(missing())) changed_.wait_for(lock, kPause);
  stats_.stalled += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Snapshot::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

Snapshot::Stats Snapshot::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace zero::checkpoint
