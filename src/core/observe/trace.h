// What a rank does in time, written while it runs as the JSON that chrome://tracing and ui.perfetto.dev open: one
// event a line, pid = rank, tid = track. Every kind of slice has its track; slices of one track nest, so threads have
// tracks of their own, and operations that may overlap each other take lanes. Off, a slice costs one relaxed load.
// Memory is bounded: records of fixed size in a buffer a thread, written out when it is full. Knows no torch; which
// step is traced is decided by the engine (engine/step_trace.h).
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

// What a slice shows. The order is that of the table in trace.cpp.
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

// CLOCK_MONOTONIC in ns: one clock for all processes of a host.
std::int64_t trace_now();
// The same for all processes that share that clock.
std::string trace_clock_id();

class Trace {
 public:
  struct Setup {
    std::string file;  // this rank writes part_name(file, rank)
    int rank = 0, ranks = 1;
    std::int64_t origin_ns = 0;  // the moment shown as 0
    std::string run;             // the same on all ranks, another in every run
  };

  Trace();
  ~Trace();  // stop()
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Makes the file and writes what names the tracks. Nothing is recorded before record(true). Throws ConfigError when
  // it is started already or another Trace of this process writes that file, IoError when the file cannot be made.
  void start(Setup setup);
  bool started() const { return started_.load(std::memory_order_relaxed); }
  void record(bool on);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // From now on total() counts whether or not anything is recorded.
  void count_always();
  // Recording or counting.
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // What was recorded goes to the file. A file that cannot be written ends the recording with a warning in the log.
  void flush();
  // Writes the rest and ends the array. True when the part is whole.
  bool stop();

  // On the calling thread's track of that kind. `name` is kept as a pointer until the next flush(). value: bytes (of
  // Step: its number); negative: not shown. Slices that begin before start() are dropped.
  void slice(TraceKind kind, std::string_view name, std::int64_t begin_ns, std::int64_t end_ns,
             std::int64_t value = -1);
  // Bytes of what `name` says (kept as above), from now on.
  void counter(std::string_view name, std::int64_t value);

  // Nanoseconds of all slices of a kind that were recorded or counted.
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
  std::vector<std::vector<bool>> lanes_;  // by track: taken
  std::mutex file_mutex_;                 // the members below
  std::vector<std::vector<bool>> named_;  // by track: lanes that have a name in the file
  int fd_ = -1;
  bool failed_ = false;
};

// The time it lives, as a slice.
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

// An operation that goes on beside the thread that began it, and may overlap others of its kind.
class TraceOperation {
 public:
  void begin(Trace& trace, TraceKind kind) {
    if (trace.on()) begin_on(trace, kind);
  }
  // Nothing when it was begun unseen.
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

// Puts the parts of all ranks together as `file` and removes them, if all are there, whole and of that run. Any rank
// may call it after its stop(); the last one finds all. True: `file` is there and of this run. Throws IoError when the
// parts can be read and `file` cannot be written; the parts stay then.
bool merge_trace_parts(const Trace::Setup& setup);

}  // namespace zero::observe
