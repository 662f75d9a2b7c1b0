// Order between the streams of a device and its host, by vector clocks: what a run leaves to chance, found without
// running it twice. No torch, no device; the simulated GPU reports to it. Not thread-safe.
//
// An operation of a stream comes after the operations that were enqueued on this stream before, after what the stream
// waited for (events), and after what the host knew to be complete when it enqueued the operation. Two accesses to a
// byte, of which one is a write, must be ordered in this way: otherwise the result depends on speed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zero::test {

class HappensBefore {
 public:
  // For each stream the number of its operations that are complete.
  using Clock = std::vector<std::int64_t>;
  struct Access {
    std::uintptr_t begin;
    std::size_t bytes;
    bool write;
  };

  // Enqueues an operation. Each fault is reported once for a pair of operations.
  void operation(int stream, const std::string& name, const std::vector<Access>& accesses);
  // What an event that is recorded on the stream now stands for.
  Clock recorded(int stream) { return clock_of(stream); }
  void stream_waits(int stream, const Clock& clock) { join(clock_of(stream), clock); }
  void host_waits(const Clock& clock) { join(host_, clock); }
  void host_waits_for_all();
  static void join(Clock& to, const Clock& from);
  bool host_knows(const Clock& clock) const;
  // Whether an operation may still write the byte, or (if `read`) read it.
  bool in_use(std::uintptr_t byte, bool read) const;
  bool in_use(std::uintptr_t begin, std::size_t bytes) const;
  // The range's operations that the clock includes are known to be complete by any later user of it.
  void forget(std::uintptr_t begin, std::size_t bytes, const Clock& clock);
  // An access of the host. A fault if an operation that the host does not know to be complete conflicts with it.
  void host_access(const std::string& name, const Access& access);

  std::vector<std::string> take_faults() { return std::exchange(faults_, {}); }

 private:
  struct Use {
    int stream;
    std::int64_t count;  // the operation's number on its stream
    int name;
  };
  struct Interval {
    std::uintptr_t end;
    std::vector<Use> write;  // none or one
    std::vector<Use> reads;  // since the write, the last of each stream
  };
  static bool includes(const Clock& clock, const Use& use);
  Clock& clock_of(int stream);
  int number_of(const std::string& name);
  void split(std::uintptr_t at);
  // Calls body with every interval of the range; the gaps get empty ones.
  template <class Body>
  void over(const Access& access, const Body& body);
  void report(const std::string& later, const Access& access, const Use& earlier, const char* what);

  std::vector<Clock> clocks_;
  Clock host_;
  std::map<std::uintptr_t, Interval> intervals_;
  std::vector<std::string> names_;
  std::map<std::string, int> numbers_;
  std::vector<std::string> faults_;
};

}  // namespace zero::test
