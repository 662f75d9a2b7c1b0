// Interface of an attempt to the ranks of one host, local or remote. The attempt decides which failure ends the job.
#pragma once
#include <sys/types.h>

#include <string>
#include <string_view>

#include <zero/log.h>

#include "observe/status_page.h"

namespace zero::launch {

inline constexpr double kSweepSeconds = 2;  // for descendants and last lines, after all ranks were killed

// The launcher looks at its hosts several times a second; a longer pause means that it was itself stopped.
inline constexpr double kStoppedSeconds = 3;

enum class Stream { Out = 0, Err = 1 };

// Ranks are ranks of the world.
class RankObserver {
 public:
  virtual ~RankObserver() = default;
  virtual void line(int rank, Stream stream, std::string_view text) = 0;  // without its newline
  virtual void died(int rank, bool by_signal, int code) = 0;
  // No further reports will arrive from the rank. `why` is a complete phrase.
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
  // The host's name, as it reports it.
  virtual std::string host() const = 0;

  // Readable (poll, epoll) when step() would do something.
  virtual int fd() const = 0;
  // Whether all checks on that host are complete. Throws their errors.
  virtual bool ready() = 0;
  virtual void start() = 0;
  // Reads available data and calls the observer. Lines are not read while listen(false).
  virtual void step() = 0;
  virtual void listen(bool lines) = 0;
  // Call a few times per second.
  virtual void tick() = 0;

  virtual void send(int signal) = 0;
  // This rank failed the job: keeps the pages as they are now and tells the ranks.
  virtual void note_failed(int rank) = 0;
  // Gives up a host that does not respond: its live ranks become lost. No effect on the local host.
  virtual void abandon(const std::string& why) = 0;
  // begin_end: SIGKILL to all ranks. finish_end, once afterwards: their descendants and last lines.
  virtual void begin_end() = 0;
  virtual void finish_end(double seconds) = 0;

  virtual pid_t pid(int rank) const = 0;
  virtual observe::StatusSnapshot page(int rank) const = 0;
  virtual observe::StatusSnapshot page_at_failure(int rank) const = 0;
  virtual char state(int rank) const = 0;  // as in /proc/PID/stat, '?' unknown
  // Whether the kernel killed a process on that host for lack of memory since the start.
  virtual bool out_of_memory() const = 0;
};

}  // namespace zero::launch
