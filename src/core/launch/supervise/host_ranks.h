// The ranks of one host as an attempt sees them, wherever they run: what it can ask of them, and what it
// hears of them. Decides nothing; which failure ends the job is the attempt's business.
#pragma once
#include <sys/types.h>

#include <string>
#include <string_view>

#include <zero/log.h>

#include "observe/status_page.h"

namespace zero::launch {

inline constexpr double kSweepSeconds = 2;  // for descendants and last lines, once all was killed

enum class Stream { Out = 0, Err = 1 };

// Ranks are numbered as in the world.
class RankObserver {
 public:
  virtual ~RankObserver() = default;
  virtual void line(int rank, Stream stream, std::string_view text) = 0;  // without its newline
  virtual void died(int rank, bool by_signal, int code) = 0;
  // Nothing more will be heard of the rank; `why` is a whole phrase.
  virtual void lost(int rank, const std::string& why) = 0;
  virtual void notice(LogLevel level, std::string_view text) = 0;
};

class HostRanks {
 public:
  virtual ~HostRanks() = default;
  HostRanks() = default;
  HostRanks(const HostRanks&) = delete;
  HostRanks& operator=(const HostRanks&) = delete;

  virtual int first_rank() const = 0;
  virtual int ranks() const = 0;
  // The host's own name for itself.
  virtual std::string host() const = 0;

  // Readable (poll, epoll) when step() would do something.
  virtual int fd() const = 0;
  // All checks on that host have been made. Throws what they found.
  virtual bool ready() = 0;
  virtual void start() = 0;
  // Reads what there is and tells the observer. Lines are left where they are while `listen(false)`.
  virtual void step() = 0;
  virtual void listen(bool lines) = 0;
  // To be called a few times a second.
  virtual void tick() = 0;

  virtual void send(int signal) = 0;
  // The job has failed by this rank: keeps the pages as they are now, and tells the ranks.
  virtual void note_failed(int rank) = 0;
  // Gives up a host that does not answer: its living ranks become lost. Nothing to do for this one.
  virtual void abandon(const std::string& why) = 0;
  // SIGKILL to all that is left; then, once, what follows: their descendants, the last lines.
  virtual void begin_end() = 0;
  virtual void finish_end(double seconds) = 0;

  virtual pid_t pid(int rank) const = 0;
  virtual observe::StatusSnapshot page(int rank) const = 0;
  virtual observe::StatusSnapshot page_at_failure(int rank) const = 0;
  virtual char state(int rank) const = 0;  // as in /proc/PID/stat, '?' unknown
  // The kernel has ended something on that host for lack of memory since the start.
  virtual bool out_of_memory() const = 0;
};

}  // namespace zero::launch
