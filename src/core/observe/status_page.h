// The status page: what a rank is doing, in memory that it shares with its launcher and that
// outlives it. `zero run` makes one memfd of 4096 bytes a rank and passes it as ZERO_STATUS_FD;
// a rank writes its own page without system calls, the launcher (and a peer) only read.
// From it come the step of the root-cause block, hang detection and the late rank's name.
// Nothing here decides anything, and nothing here needs torch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <zero/errors.h>

namespace zero::observe {

enum class StatusPhase : std::int32_t { Idle = 0, Startup, Load, Forward, Backward, Reduce, Step, Save };
enum class CollectiveState : std::uint32_t { Before = 0, Inside, After };

// "backward", "inside": the words of the root-cause block.
const char* phase_name(StatusPhase phase);
const char* state_name(CollectiveState state);

// Bytes of one rank's page, and how many of its last collectives it keeps.
inline constexpr std::size_t kStatusPageBytes = 4096;
inline constexpr std::size_t kStatusRing = 32;
struct StatusPage;  // the layout; status_page.cpp only

// Writes one page. All calls are safe from any thread, cost under 0.2 us, never throw, and do
// nothing when there is no page. Texts are cut to what fits. Not for signal handlers.
class StatusWriter {
 public:
  StatusWriter() = default;  // writes nowhere
  explicit StatusWriter(StatusPage* page);

  bool active() const { return page_ != nullptr; }
  // Steps count from 0, micro-batches of a step too.
  void set_step(std::int64_t step, int micro_batch = 0);
  void set_phase(StatusPhase phase);
  // The module at work: "layers.7". Cut to 91 bytes.
  void set_unit(std::string_view unit);
  // Collective number `sequence` of this rank (same number, same collective on every rank): call
  // it with Before or Inside when it begins and with After when it is complete. Several may be
  // open at once. Cut to: op 15, dtype 11, group 19, site 23 bytes.
  void set_collective(std::uint64_t sequence, std::string_view op, std::string_view dtype, std::int64_t numel,
                      CollectiveState state, std::string_view group = {}, std::string_view site = {});
  // The error this rank is about to end with, before its peers see the consequences.
  void set_error(std::string_view text, ExitCode code = ExitCode::kFailed);
  // This rank computes. Counts as a change when the last one is a fifth of a second old.
  void note_use();
  // A checkpoint became whole on disk: a restart after it is progress, not a crash loop.
  void note_commit();
  // Says "alive" without saying "progress".
  void beat();

  // The rank whose failure ends the job, as the launcher knows it; -1 while there is none.
  // Waits should look at it about every 100 ms, and no save may begin once it is set.
  int failed_rank() const;

 private:
  void changed();
  StatusPage* page_ = nullptr;
};

// This process's page: found through ZERO_STATUS_FD and LOCAL_RANK at the first call, which also
// writes the pid; a writer that does nothing when the variable is absent or is not such a memfd.
StatusWriter& status_page();

// While it lives, a thread beats once a second, so that a stopped process can be told from a slow
// one. Starts no thread for an inactive writer.
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

// One page as read at one moment. Times are CLOCK_MONOTONIC nanoseconds, 0 = never.
struct StatusSnapshot {
  int pid = 0;  // 0: the program never opened its page
  std::uint64_t heartbeat_ns = 0, changes = 0, changed_ns = 0;
  std::int64_t step = -1;  // -1: none yet
  std::uint64_t commits = 0;
  int micro_batch = 0;
  StatusPhase phase = StatusPhase::Idle;
  std::string unit;
  std::string error;  // empty: none
  int error_code = 0;
  std::vector<CollectiveSnapshot> collectives;  // oldest first, at most kStatusRing
};

// The memory behind the pages; the launcher owns one.
class StatusMemory {
 public:
  // Throws IoError when the memfd cannot be made or mapped.
  explicit StatusMemory(int ranks);
  ~StatusMemory();
  StatusMemory(const StatusMemory&) = delete;
  StatusMemory& operator=(const StatusMemory&) = delete;

  // Close-on-exec; hand a rank a duplicate and its number in ZERO_STATUS_FD.
  int fd() const { return fd_; }
  int ranks() const { return ranks_; }
  StatusSnapshot read(int rank) const;
  StatusWriter writer(int rank);
  // Tells all ranks which one ended the job. The first call wins.
  void set_failed_rank(int rank);
  // Empty pages, for the next attempt.
  void clear();

 private:
  StatusPage* page(int rank) const;
  int fd_ = -1;
  int ranks_ = 0;
  void* memory_ = nullptr;
};

}  // namespace zero::observe
