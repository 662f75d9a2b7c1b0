// The status page: the state of a rank in memory shared with its launcher, which outlives the rank. `zero run` creates
// one memfd with 4096 bytes per rank and passes it as ZERO_STATUS_FD. A rank writes its own page without system calls;
// the launcher and peers only read. The root-cause block, hang detection and the late rank's name are based on it.
// Needs no torch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/errors.h>

#include "base/world_rule.h"

namespace zero::observe {

enum class StatusPhase : std::int32_t { Idle = 0, Startup, Load, Forward, Backward, Reduce, Step, Save };
enum class CollectiveState : std::uint32_t { Before = 0, Inside, After };

// "backward", "inside": as in the root-cause block.
const char* phase_name(StatusPhase phase);
const char* state_name(CollectiveState state);

// Bytes of one rank's page, and the number of recent collectives it stores.
inline constexpr std::size_t kStatusPageBytes = 4096;
inline constexpr std::size_t kStatusRing = 32;
struct StatusPage;  // the layout; status_page.cpp only

// Writes one page. All calls are thread-safe, take less than 0.2 us, do not throw, and have no effect without a page.
// Long texts are truncated. Not for signal handlers.
class StatusWriter {
 public:
  StatusWriter() = default;  // no page
  explicit StatusWriter(StatusPage* page);

  bool active() const { return page_ != nullptr; }
  // Steps and the micro-batches of a step count from 0.
  void set_step(std::int64_t step, int micro_batch = 0);
  void set_phase(StatusPhase phase);
  // The module being executed: "layers.7". Truncated to 91 bytes.
  void set_unit(std::string_view unit);
  // Collective number `sequence` of this rank, the same number on every rank: call with Before or Inside when it begins
  // and with After when it is complete. Several may be open. Truncated to: op 15, dtype 11, group 19, site 23 bytes.
  void set_collective(std::uint64_t sequence, std::string_view op, std::string_view dtype, std::int64_t numel,
                      CollectiveState state, std::string_view group = {}, std::string_view site = {});
  // The error that will end this rank. Call before peers see its consequences.
  void set_error(std::string_view text, ExitCode code = ExitCode::kFailed);
  // Which numbers of ranks the program's configuration allows. Call before an error about the present number.
  void set_world_rule(const base::WorldRule& rule);
  // The checkpoint that is written while the program trains, and its bytes of this rank: how many are written, of how
  // many. Empty: none. Counts as a change, since a disk that is slow but moving is no hang. Truncated to 63 bytes.
  void set_save(std::string_view tag, std::uint64_t written, std::uint64_t bytes);
  // This rank is computing. Counts as a change if the last one is at least 0.2 s old.
  void note_use();
  // A checkpoint is complete on disk: a restart after it is progress, not a crash loop.
  void note_commit();
  // Updates the heartbeat only; not a sign of progress.
  void beat();

  // The rank whose failure ends the job, set by the launcher; -1: none. Waits should check it about every 100 ms, and
  // no save may begin once it is set.
  int failed_rank() const;

 private:
  void changed();
  StatusPage* page_ = nullptr;
};

// This process's page, found through ZERO_STATUS_FD and LOCAL_RANK at the first call, which also writes the pid.
// Inactive if the variable is missing or is not such a memfd.
StatusWriter& status_page();

// RAII: a thread updates the heartbeat once a second, which distinguishes a stopped process from a slow one. Starts no
// thread for an inactive writer.
class Heartbeat {
 public:
  explicit Heartbeat(StatusWriter& writer = status_page());
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  struct Thread;
  std::unique_ptr<Thread> thread_;
};

struct CollectiveSnapshot {
  std::uint64_t sequence = 0;
  std::int64_t numel = 0;
  CollectiveState state = CollectiveState::Before;
  std::string op, dtype, group, site;
};

// A snapshot of one page. Times are CLOCK_MONOTONIC nanoseconds, 0 = never.
struct StatusSnapshot {
  int pid = 0;  // 0: the program never opened its page
  std::uint64_t heartbeat_ns = 0, changes = 0, changed_ns = 0;
  std::int64_t step = -1;  // -1: none yet
  std::uint64_t commits = 0;
  int micro_batch = 0;
  StatusPhase phase = StatusPhase::Idle;
  std::string unit;
  std::string save;  // tag of a checkpoint that is written in the background; empty: none
  std::uint64_t save_written = 0, save_bytes = 0;
  std::string error;  // empty: none
  int error_code = 0;
  std::optional<base::WorldRule> world_rule;
  std::vector<CollectiveSnapshot> collectives;  // oldest first, at most kStatusRing
};

// The memory of all pages, owned by the launcher.
class StatusMemory {
 public:
  // Throws IoError if the memfd cannot be created or mapped.
  explicit StatusMemory(int ranks);
  ~StatusMemory();
  StatusMemory(const StatusMemory&) = delete;
  StatusMemory& operator=(const StatusMemory&) = delete;

  // Close-on-exec. Give each rank a duplicate and its number in ZERO_STATUS_FD.
  int fd() const { return fd_; }
  int ranks() const { return ranks_; }
  StatusSnapshot read(int rank) const;
  StatusWriter writer(int rank);
  // Tells all ranks which rank ended the job. The first call wins.
  void set_failed_rank(int rank);
  // Clears the pages for the next attempt.
  void clear();

 private:
  StatusPage* page(int rank) const;
  int fd_ = -1;
  int ranks_ = 0;
  void* memory_ = nullptr;
};

}  // namespace zero::observe
