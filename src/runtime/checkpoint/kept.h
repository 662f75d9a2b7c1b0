// Kept snapshots: each rank keeps all that it stores in memory that outlives it, and loads it after a restart in the
// same layout. No file is written, and no rank needs what another has kept. See docs/checkpoints.md.
#pragma once
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/kept_memory.h"
#include "engine/state.h"
#include "formats/kept_slot.h"
#include "formats/manifest.h"

namespace zero::checkpoint {

// [collective] Engine::keep_snapshot().
void keep_snapshot(engine::State& state, formats::FsOps& fs, const base::KeptMemory& memory, const std::string& root);

// What an attempt finds in this rank's memory.
class KeptSnapshots {
 public:
  KeptSnapshots(engine::State& state, formats::FsOps& fs, const base::KeptMemory& memory, const std::string& root);

  struct Choice {
    int slot = 0;
    std::int64_t step = 0;
    // "kept snapshot of step 40 (memory)"
    std::string name() const;
  };
  // Lines about the snapshots of earlier attempts that fit this rank, and that no fault is known of. What this attempt
  // has kept is nothing to go back to.
  std::string offers() const;
  // [local] The newest that is in the offers of all ranks, if it has at least this number of steps.
  static std::optional<Choice> newest(const std::vector<std::string>& offers, std::int64_t least_step);
  // Call for a slot that is in offers().
  formats::Folder folder(int slot) { return slots_[static_cast<std::size_t>(slot)]->folder(); }
  formats::Manifest manifest(int slot);
  // Removes all that fit this rank: the run continues from something else.
  void forget();
  void refuse(int slot) { headers_[static_cast<std::size_t>(slot)].reset(); }

 private:
  const std::int64_t attempt_;
  std::unique_ptr<formats::KeptSlot> slots_[base::kKeptSlots];
  std::optional<formats::KeptHeader> headers_[base::kKeptSlots];
};

}  // namespace zero::checkpoint
