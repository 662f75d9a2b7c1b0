// Records a rank's activity over time and writes it as JSON for chrome://tracing and ui.perfetto.dev: one event per
// line, pid = rank, tid = track. Each kind of slice has a track; slices of a track nest, so each thread has its own
// tracks, and operations that may overlap are placed in lanes. When off, a slice costs one relaxed load. Memory is
// bounded: each thread has a buffer of fixed-size records that is written when full. The engine decides which steps are
// traced (engine/step_trace.h).
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace zero::observe {

// What a slice shows, in the order of the table in trace.cpp.
// clang-format off
enum class TraceKind : std::uint8_t {
  Step, Forward, Backward, Act, ForwardUnit, BackwardUnit,  // track compute
  GatherWait, ReduceWait, PublishWait, ExchangeWait,        // waits
  Update,                                                   // optimizer
  Gather, GatherInPlace, Publish,                           // gathers
  Reduce,                                                   // reductions
  Save, Load,                                               // files
  FetchWait, StoreWait, UpdateWait,                         // waits
  Fetch, FetchStates, Store, StoreStates,                   // tiers: from and to files; parameters, or optimizer states
  Copy,                                                     // tiers: from one memory to another
  Whole,                                                    // whole groups
};
// clang-format on
inline constexpr std::size_t kTraceKinds = 26;

// CLOCK_MONOTONIC in ns, common to all processes of a host.
std::int64_t trace_now();
// Identifies the clock: equal for processes that share it.
std::string trace_clock_id();

class Trace {
 public:
  struct Setup {
    std::string file;  // this rank writes part_name(file, rank)
    int rank = 0, ranks = 1;
    std::int64_t origin_ns = 0;  // the time shown as 0
    std::string run;             // the same on all ranks, different in every run
  };

  Trace();
  ~Trace();  // calls stop()
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Creates the file and writes the names of the tracks. Recording starts with record(true). Throws ConfigError if it
  // is already started or another Trace of this process writes that file, IoError if the file cannot be created.
  void start(Setup setup);
  bool started() const { return started_.load(std::memory_order_relaxed); }
  void record(bool on);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // total() counts from now on, also while nothing is recorded.
  void count_always();
  // Recording or counting.
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Writes recorded slices to the file. A write error ends the recording with a warning in the log.
  void flush();
  // Writes the rest and closes the array. Returns whether the part is complete.
  bool stop();

  // Adds a slice to the calling thread's track of that kind. `name` is kept as a pointer until the next flush(). value:
  // bytes, or the number of a Step; negative: not shown. Slices that begin before start() are dropped.
  void slice(TraceKind kind, std::string_view name, std::int64_t begin_ns, std::int64_t end_ns,
             std::int64_t value = -1);
  // Sets the byte counter `name`, which is kept as above.
  void counter(std::string_view name, std::int64_t value);

  // Nanoseconds of all recorded or counted slices of a kind.
  std::int64_t total(TraceKind kind) const {
    return totals_[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed);
  }

  static std::string part_name(const std::string& file, int rank);

 private:
  friend class TraceOperation;
  struct Record;
  struct Buffer;
  int take_lane(TraceKind kind);
  void give_lane(TraceKind kind, int lane);
  void add(const Record& record);
  Buffer& buffer_of_this_thread();
  void write_out(Buffer& buffer);
  void append(const std::string& lines);
  void name_track(std::string& lines, int track, int lane);
  void fail(const std::string& what, int error);

  void choose(bool recording);
  std::atomic<bool> on_{false}, recording_{false}, started_{false};
  std::atomic<bool> counting_{false};
  std::array<std::atomic<std::int64_t>, kTraceKinds> totals_{};
  const std::uint64_t id_;
  Setup setup_;
  std::atomic<std::int64_t> started_ns_{0};
  std::mutex buffers_mutex_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::mutex lanes_mutex_;
  std::vector<std::vector<bool>> lanes_;  // by track: lanes in use
  std::mutex file_mutex_;                 // guards the members below
  std::vector<std::vector<bool>> named_;  // by track: lanes that are named in the file
  int fd_ = -1;
  bool failed_ = false;
};

// RAII: records its lifetime as a slice.
class TraceSpan {
 public:
  TraceSpan(Trace& trace, TraceKind kind, std::string_view name, std::int64_t value = -1)
      : trace_(trace), kind_(kind), name_(name), value_(value), begin_(trace.on() ? trace_now() : 0) {}
  ~TraceSpan() {
    if (begin_ != 0) trace_.slice(kind_, name_, begin_, trace_now(), value_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace& trace_;
  TraceKind kind_;
  std::string_view name_;
  std::int64_t value_, begin_;
};

// An asynchronous operation, which may overlap others of its kind.
class TraceOperation {
 public:
  void begin(Trace& trace, TraceKind kind) {
    if (trace.on()) begin_on(trace, kind);
  }
  // No effect if tracing was off at begin().
  void end(std::string_view name, std::int64_t bytes) {
    if (begin_ != 0) end_on(name, bytes);
  }

 private:
  void begin_on(Trace& trace, TraceKind kind);
  void end_on(std::string_view name, std::int64_t bytes);
  Trace* trace_ = nullptr;
  TraceKind kind_{};
  int lane_ = 0;
  std::int64_t begin_ = 0;
};

// Merges the parts of all ranks into `file` and removes them, if all parts are present, complete and of that run. Any
// rank may call it after stop(); the last one finds all parts. Returns whether `file` exists and is of this run. Throws
// IoError if the parts can be read but `file` cannot be written; the parts are then kept.
bool merge_trace_parts(const Trace::Setup& setup);

}  // namespace zero::observe
