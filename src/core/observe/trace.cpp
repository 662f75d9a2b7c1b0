// Records, buffers and the file of a Trace. A part is "[", events separated by ",\n", and "]". What was written so far
// becomes valid JSON by appending "]", unless the process died during a write.
#include "observe/trace.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/json_write.h"
#include "base/log.h"
#include "base/standard_streams.h"
#include "base/system.h"

namespace zero::observe {
namespace {

constexpr std::size_t kBufferRecords = 4096;
constexpr std::size_t kWriteBytes = 1 << 16;
constexpr int kLanesOfATrack = 1000;  // limit of concurrent lanes of a track; further slices are dropped

enum Track : std::uint8_t { kCompute, kWaits, kOptimizer, kGathers, kReductions, kFiles, kTiers, kWhole, kTracks };
constexpr const char* kTrackNames[kTracks] = {"compute",    "waits", "optimizer", "gathers",
                                              "reductions", "files", "tiers",     "whole"};

struct Shown {
  Track track;
  const char* category;
  const char* prefix;  // before the name
  const char* value;   // name of the value's argument
};
constexpr Shown kShown[kTraceKinds] = {
    {kCompute, "step", "", "step"},
    {kCompute, "phase", "", "bytes"},
    {kCompute, "phase", "", "bytes"},
    {kCompute, "phase", "", "bytes"},
    {kCompute, "forward", "", "bytes"},
    {kCompute, "backward", "", "bytes"},
    {kWaits, "wait", "gather ", "bytes"},
    {kWaits, "wait", "reduce ", "bytes"},
    {kWaits, "wait", "publish ", "bytes"},
    {kWaits, "wait", "exchange ", "bytes"},
    {kOptimizer, "update", "", "bytes"},
    {kGathers, "gather", "", "bytes"},
    {kGathers, "gather,in-place", "", "bytes"},
    {kGathers, "publish", "publish ", "bytes"},
    {kReductions, "reduce", "", "bytes"},
    {kFiles, "io", "", "bytes"},
    {kFiles, "io", "", "bytes"},
    {kWaits, "wait", "fetch ", "bytes"},
    {kWaits, "wait", "store ", "bytes"},
    {kWaits, "wait", "update ", "bytes"},
    {kTiers, "fetch", "fetch ", "bytes"},
    {kTiers, "fetch,states", "fetch ", "bytes"},
    {kTiers, "store", "store ", "bytes"},
    {kTiers, "store,states", "store ", "bytes"},
    {kTiers, "copy", "copy ", "bytes"},
    {kWhole, "whole", "", "bytes"},
};
const Shown& shown(TraceKind kind) { return kShown[static_cast<std::size_t>(kind)]; }

std::atomic<std::uint64_t> next_id{1};

// Files that Traces of this process are writing.
std::mutex open_mutex;
std::set<std::string>& open_files() {
  static std::set<std::string> files;
  return files;
}

// Viewers of traces differ in what they make of other characters than printable ASCII.
void append_quoted(std::string& out, std::string_view text) {
  std::string ascii(text);
  for (char& c : ascii)
    if (c < 0x20 || c >= 0x7f) c = '?';
  out += base::json_quote(ascii);
}

// Microseconds with nanoseconds as decimals.
void append_us(std::string& out, std::int64_t ns) {
  const std::int64_t size = ns < 0 ? -ns : ns;
  if (ns < 0) out += '-';
  out += std::to_string(size / 1000);
  const auto behind = static_cast<int>(size % 1000);
  out += '.';
  for (const int digit : {behind / 100, behind / 10 % 10, behind % 10}) out += static_cast<char>('0' + digit);
}

std::string metadata(const char* what, int rank, int tid, const std::string& arguments) {
  return base::join("{\"name\":\"", what, "\",\"ph\":\"M\",\"pid\":", rank, ",\"tid\":", tid, ",\"args\":{", arguments,
                    "}},\n");
}

int tid_of(int track, int lane) { return (track + 1) * kLanesOfATrack + lane; }

bool write_all(int fd, const char* data, std::size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(fd, data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    data += written;
    size -= static_cast<std::size_t>(written);
  }
  return true;
}

std::string first_line_of(const std::string& path) {
  std::ifstream in(path);
  std::string bracket, line;
  std::getline(in, bracket);
  std::getline(in, line);
  return line;
}

}  // namespace

struct Trace::Record {
  const char* name;
  std::uint32_t length;
  TraceKind kind;
  bool counter;
  std::int32_t lane;
  std::int64_t begin, end, value;
};

struct Trace::Buffer {
  std::mutex mutex;  // its thread adds; any thread may flush
  std::vector<Record> records;
  int thread = 0;
};

std::int64_t trace_now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

std::string trace_clock_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? base::host_name("?") : id;
}

std::string Trace::part_name(const std::string& file, int rank) {
  return file + ".rank-" + std::to_string(rank) + ".json";
}

Trace::Trace() : id_(next_id.fetch_add(1)), lanes_(kTracks) {}

Trace::~Trace() { stop(); }

void Trace::start(Setup setup) {
  const auto part = part_name(setup.file, setup.rank);
  if (started())
    throw ConfigError("[trace] got " + setup.file + " while " + setup_.file +
                      " is being written, expected one trace at a time. Hint: stop_trace() ends the first.");
  {
    std::lock_guard lock(open_mutex);
    if (!open_files().insert(part).second)
      throw ConfigError("[trace] got " + part +
                        ", which another Engine of this process writes, expected a file of its own");
  }
  {
    std::lock_guard lock(lanes_mutex_);
    lanes_.assign(kTracks, {});
  }
  std::lock_guard lock(file_mutex_);
  setup_ = std::move(setup);
  failed_ = false;
  named_.assign(kTracks, {});
  std::string lines = "[\n{\"name\":\"zero_trace\",\"ph\":\"M\",\"pid\":" + std::to_string(setup_.rank) + ",\"args\":{";
  lines += "\"run\":";
  append_quoted(lines, setup_.run);
  lines += base::join(",\"rank\":", setup_.rank, ",\"ranks\":", setup_.ranks, "}},\n");
  std::string host;
  append_quoted(host, base::join("rank ", setup_.rank, " on ", base::host_name("?")));
  lines += metadata("process_name", setup_.rank, 0, "\"name\":" + host);
  lines += metadata("process_sort_index", setup_.rank, 0, "\"sort_index\":" + std::to_string(setup_.rank));
  for (int track = 0; track < kTracks; ++track) name_track(lines, track, 0);
  lines.resize(lines.size() - 2);  // the next event adds its ",\n"
  fd_ = base::off_standard(::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (fd_ < 0 || !write_all(fd_, lines.data(), lines.size())) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
    std::lock_guard open_lock(open_mutex);
    open_files().erase(part);
    throw IoError(base::join("[trace] got \"", std::strerror(error), "\" for ", part, ", expected to write it (rank ",
                             setup_.rank, "/", setup_.ranks, "). Hint: the folder must exist and have room."));
  }
  started_ns_.store(trace_now());
  started_.store(true);
}

void Trace::record(bool on) {
  std::lock_guard lock(file_mutex_);
  choose(on && fd_ >= 0 && !failed_);
}

void Trace::count_always() {
  counting_.store(true);
  on_.store(true);
}

void Trace::choose(bool recording) {
  recording_.store(recording);
  on_.store(recording || counting_.load());
}

Trace::Buffer& Trace::buffer_of_this_thread() {
  // A new Trace may have the address of an earlier one, but never its id.
  thread_local std::vector<std::pair<std::uint64_t, Buffer*>> mine;
  for (const auto& [id, buffer] : mine)
    if (id == id_) return *buffer;
  std::lock_guard lock(buffers_mutex_);
  buffers_.push_back(std::make_unique<Buffer>());
  auto& buffer = *buffers_.back();
  buffer.thread = static_cast<int>(buffers_.size()) - 1;
  buffer.records.reserve(kBufferRecords);
  if (mine.size() >= 8) mine.erase(mine.begin());  // of destroyed Traces
  mine.emplace_back(id_, &buffer);
  return buffer;
}

void Trace::add(const Record& record) {
  auto& buffer = buffer_of_this_thread();
  std::lock_guard lock(buffer.mutex);
  buffer.records.push_back(record);
  if (buffer.records.back().lane < 0) buffer.records.back().lane = buffer.thread;
  if (buffer.records.size() == kBufferRecords) write_out(buffer);
}

void Trace::slice(TraceKind kind, std::string_view name, std::int64_t begin_ns, std::int64_t end_ns,
                  std::int64_t value) {
  if (!on() || begin_ns < started_ns_.load(std::memory_order_relaxed)) return;
  totals_[static_cast<std::size_t>(kind)].fetch_add(end_ns - begin_ns, std::memory_order_relaxed);
  if (recording())
    add({name.data(), static_cast<std::uint32_t>(name.size()), kind, false, -1, begin_ns, end_ns, value});
}

void Trace::counter(std::string_view name, std::int64_t value) {
  if (!recording()) return;
  const auto now = trace_now();
  add({name.data(), static_cast<std::uint32_t>(name.size()), TraceKind::Step, true, 0, now, now, value});
}

int Trace::take_lane(TraceKind kind) {
  std::lock_guard lock(lanes_mutex_);
  auto& lanes = lanes_[shown(kind).track];
  const auto free = std::find(lanes.begin(), lanes.end(), false);
  const auto lane = static_cast<int>(free - lanes.begin());
  if (lane == kLanesOfATrack) return -1;
  if (free == lanes.end()) lanes.push_back(false);
  lanes[static_cast<std::size_t>(lane)] = true;
  return lane;
}

void Trace::give_lane(TraceKind kind, int lane) {
  std::lock_guard lock(lanes_mutex_);
  lanes_[shown(kind).track][static_cast<std::size_t>(lane)] = false;
}

void TraceOperation::begin_on(Trace& trace, TraceKind kind) {
  trace_ = &trace;
  kind_ = kind;
  lane_ = trace.take_lane(kind);
  begin_ = lane_ < 0 ? 0 : trace_now();
}

void TraceOperation::end_on(std::string_view name, std::int64_t bytes) {
  const auto begin = std::exchange(begin_, 0);
  if (begin < trace_->started_ns_.load(std::memory_order_relaxed))
    return;  // belongs to an earlier trace, as does its lane
  if (trace_->on()) {
    const auto end = trace_now();
    trace_->totals_[static_cast<std::size_t>(kind_)].fetch_add(end - begin, std::memory_order_relaxed);
    if (trace_->recording())
      trace_->add({name.data(), static_cast<std::uint32_t>(name.size()), kind_, false, lane_, begin, end, bytes});
  }
  trace_->give_lane(kind_, lane_);
}

void Trace::name_track(std::string& lines, int track, int lane) {
  auto& lanes = named_[static_cast<std::size_t>(track)];
  const auto at = static_cast<std::size_t>(lane);
  if (lanes.size() <= at) lanes.resize(at + 1);
  if (lanes[at]) return;
  lanes[at] = true;
  std::string name;
  append_quoted(name, lane == 0 ? std::string(kTrackNames[track]) : base::join(kTrackNames[track], " ", lane + 1));
  lines += metadata("thread_name", setup_.rank, tid_of(track, lane), "\"name\":" + name);
  lines += metadata("thread_sort_index", setup_.rank, tid_of(track, lane),
                    "\"sort_index\":" + std::to_string(tid_of(track, lane)));
}

// Requires the buffer's mutex.
void Trace::write_out(Buffer& buffer) {
  // Slices that begin together are ordered outermost first, as viewers require.
  std::stable_sort(buffer.records.begin(), buffer.records.end(), [](const Record& a, const Record& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  std::lock_guard lock(file_mutex_);
  std::string lines;
  for (const auto& record : buffer.records) {
    if (record.lane >= kLanesOfATrack) continue;
    const std::string_view name(record.name, record.length);
    const auto& look = shown(record.kind);
    if (!record.counter) name_track(lines, look.track, record.lane);
    lines += "{\"name\":";
    append_quoted(lines, (record.counter ? "bytes of " : look.prefix) + std::string(name));
    if (!record.counter) lines.append(",\"cat\":\"").append(look.category) += '"';
    lines += record.counter ? ",\"ph\":\"C\",\"ts\":" : ",\"ph\":\"X\",\"ts\":";
    append_us(lines, record.begin - setup_.origin_ns);
    if (!record.counter) {
      lines += ",\"dur\":";
      append_us(lines, record.end - record.begin);
    }
    lines.append(",\"pid\":").append(std::to_string(setup_.rank));
    if (!record.counter) lines.append(",\"tid\":").append(std::to_string(tid_of(look.track, record.lane)));
    if (record.counter || record.value >= 0)
      lines.append(",\"args\":{\"")
          .append(record.counter ? "bytes" : look.value)
          .append("\":")
          .append(std::to_string(record.value)) += '}';
    lines += "},\n";
    if (lines.size() >= kWriteBytes) append(std::exchange(lines, {}));
  }
  append(lines);
  buffer.records.clear();
}

// Requires file_mutex_. Turns "a,\nb,\n" into ",\na,\nb".
void Trace::append(const std::string& lines) {
  if (lines.empty() || fd_ < 0 || failed_) return;
  const std::string text = ",\n" + lines.substr(0, lines.size() - 2);
  if (!write_all(fd_, text.data(), text.size())) fail("events", errno);
}

void Trace::fail(const std::string& what, int error) {
  failed_ = true;
  choose(false);
  base::log(LogLevel::Warning, "[trace] got \"" + std::string(std::strerror(error)) + "\" for " +
                                   part_name(setup_.file, setup_.rank) + ", expected to write " + what +
                                   "; the trace ends here, the run continues");
}

void Trace::flush() {
  if (!started()) return;
  std::lock_guard lock(buffers_mutex_);
  for (const auto& buffer : buffers_) {
    std::lock_guard buffer_lock(buffer->mutex);
    if (!buffer->records.empty()) write_out(*buffer);
  }
}

bool Trace::stop() {
  if (!started()) return false;
  choose(false);
  flush();
  std::lock_guard lock(file_mutex_);
  if (!failed_ && !write_all(fd_, "\n]\n", 3)) fail("the end of the array", errno);
  if (::close(std::exchange(fd_, -1)) != 0 && !failed_) fail("the end of the array", errno);
  started_.store(false);
  std::lock_guard open_lock(open_mutex);
  open_files().erase(part_name(setup_.file, setup_.rank));
  return !failed_;
}

bool merge_trace_parts(const Trace::Setup& setup) {
  const auto is_of_this_run = [&](const std::string& path) {
    std::string run = "\"run\":";
    append_quoted(run, setup.run);
    return first_line_of(path).find(run) != std::string::npos;
  };
  // Serializes ranks: a later one finds the merged file, or incomplete parts of others.
  const int gate = ::open(Trace::part_name(setup.file, 0).c_str(), O_RDONLY | O_CLOEXEC);
  if (gate < 0) return is_of_this_run(setup.file);
  struct Closed {
    int fd;
    ~Closed() { ::close(fd); }
  } closed{gate};
  while (::flock(gate, LOCK_EX) != 0 && errno == EINTR) {
  }
  if (is_of_this_run(setup.file)) return true;
  constexpr std::streamoff kEnd = 3;  // "\n]\n"
  for (int rank = 0; rank < setup.ranks; ++rank) {
    const auto part = Trace::part_name(setup.file, rank);
    char end[kEnd + 1] = {};
    std::ifstream in(part, std::ios::binary | std::ios::ate);
    if (!in || in.tellg() < kEnd + 2 || !in.seekg(-kEnd, std::ios::end) || !in.read(end, kEnd) ||
        std::string(end) != "\n]\n" || !is_of_this_run(part))
      return false;
  }
  const auto partial = setup.file + ".partial";
  base::fill_standard_streams();
  std::ofstream out(partial, std::ios::binary | std::ios::trunc);
  for (int rank = 0; rank < setup.ranks && out; ++rank) {
    std::ifstream in(Trace::part_name(setup.file, rank), std::ios::binary | std::ios::ate);
    auto left = static_cast<std::streamoff>(in.tellg()) - kEnd - 1;  // without "[" and the end
    in.seekg(1);
    out << (rank == 0 ? "[" : ",");
    std::vector<char> piece(kWriteBytes);
    while (left > 0 &&
           in.read(piece.data(), std::min<std::streamoff>(left, static_cast<std::streamoff>(kWriteBytes)))) {
      out.write(piece.data(), in.gcount());
      left -= in.gcount();
    }
    if (left > 0) out.setstate(std::ios::failbit);
  }
  out << "\n]\n";
  out.close();
  if (!out || std::rename(partial.c_str(), setup.file.c_str()) != 0) {
    const int error = errno;
    std::remove(partial.c_str());
    throw IoError(base::join("[trace] got \"", std::strerror(error), "\" for ", setup.file,
                             ", expected to write it. Hint: the files of the ranks are kept in the same folder."));
  }
  for (int rank = 0; rank < setup.ranks; ++rank) std::remove(Trace::part_name(setup.file, rank).c_str());
  return true;
}

}  // namespace zero::observe
