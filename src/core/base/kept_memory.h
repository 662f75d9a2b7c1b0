// Memory that outlives a rank: `zero run --restarts` makes one sparse memfd per rank and passes it as ZERO_KEEP_FD to
// that rank of every attempt. It is freed when the launcher ends. formats/kept_slot.h says what is in it.
#pragma once
#include <cstdint>
#include <string>

namespace zero::base {

// Each begins at a multiple of kKeptSlotBytes. Only what is written takes memory.
inline constexpr int kKeptSlots = 2;
inline constexpr std::uint64_t kKeptSlotBytes = std::uint64_t{1} << 40;

// The launcher's: a descriptor, close-on-exec, or -1 with errno.
int make_kept_memory();

struct KeptMemory {
  int fd = -1;               // -1: none
  std::string run;           // the launcher's name for the run, the same in all attempts
  std::int64_t attempt = 0;  // 0: the first
};
// This process's, found through ZERO_KEEP_FD, ZERO_RUN_ID and ZERO_RESTART_COUNT at the first call. None if the
// variables are missing, or the descriptor is not what make_kept_memory() returned.
const KeptMemory& kept_memory();

}  // namespace zero::base
