// Layout and access of the status page. All fields are accessed atomically, because two processes share them. The unit,
// which changes constantly, has two slots and a version that selects the current one, so a writer that is preempted or
// killed does not block readers. The other texts are written once; their version is odd during the write, and a text
// whose version stays odd is omitted. A reader never returns a mixture.
#include "observe/status_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/memory_file.h"
#include "base/system.h"

namespace zero::observe {

namespace {
constexpr std::uint32_t kMagic = 0x5a535031;  // "ZSP1"
constexpr std::uint64_t kUseNs = 200'000'000;

struct CollectiveEntry {
  std::uint32_t version;
  std::uint32_t state;
  std::uint64_t sequence_plus_one;  // 0: empty
  std::int64_t numel;
  char op[24], dtype[12], group[20], site[24];
};
static_assert(sizeof(CollectiveEntry) == 104);
}  // namespace

struct StatusPage {
  std::uint32_t magic;
  std::int32_t failed_rank_plus_one;  // written by the launcher
  std::int32_t pid;
  std::int32_t phase;
  std::uint64_t heartbeat_ns, changes, changed_ns;
  std::int64_t step_plus_one;
  std::uint64_t commits;
  std::int32_t micro_batch;
  std::uint32_t unit_version;  // unit[version % 2] is current
  char unit[2][92];
  std::uint32_t error_version;
  std::int32_t error_code;
  char error[380];
  CollectiveEntry ring[kStatusRing];
  std::uint32_t rule_version;  // 0: no rule
  std::uint32_t save_version;
  std::int64_t rule[5];  // the members of WorldRule, in their order
  std::uint64_t save_written, save_bytes;
  char save[64];
};
static_assert(sizeof(StatusPage) <= kStatusPageBytes);
static_assert(sizeof(StatusPage) % 8 == 0);

namespace {

template <class T>
T load(const T& field) {
  return std::atomic_ref<T>(const_cast<T&>(field)).load(std::memory_order_acquire);
}
template <class T>
void store(T& field, T value) {
  std::atomic_ref<T>(field).store(value, std::memory_order_release);
}

template <std::size_t N>
void store_text(char (&field)[N], std::string_view text) {
  std::size_t n = std::min(text.size(), N - 1);
  for (std::size_t i = 0; i < n; ++i) store(field[i], text[i]);
  store(field[n], '\0');
}
template <std::size_t N>
std::string load_text(const char (&field)[N]) {
  std::string text;
  for (std::size_t i = 0; i < N; ++i) {
    char c = load(field[i]);
    if (!c) break;
    text += c;
  }
  return text;
}

// Serializes threads of one process; the version is for readers in other processes.
std::mutex& write_mutex() {
  static std::mutex mutex;
  return mutex;
}
template <class Body>
void write_versioned(std::uint32_t& version, Body body) {
  std::lock_guard<std::mutex> lock(write_mutex());
  const std::uint32_t odd = load(version) | 1u;
  store(version, odd);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  body();
  store(version, odd + 1);
}
// Returns false if the data that `body` read may be inconsistent.
template <class Body>
bool read_versioned(const std::uint32_t& version, Body body) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint32_t before = load(version);
    body();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!(before & 1) && load(version) == before) return true;
    std::this_thread::yield();
  }
  return false;
}

template <std::size_t N>
void store_in_turn(std::uint32_t& version, char (&places)[2][N], std::string_view text) {
  std::lock_guard<std::mutex> lock(write_mutex());
  const std::uint32_t next = load(version) + 1;
  // Orders the text's bytes after the version that made this slot the old one.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  store_text(places[next % 2], text);
  store(version, next);
}
// Empty if the text changed during a hundred attempts.
template <std::size_t N>
std::string load_in_turn(const std::uint32_t& version, const char (&places)[2][N]) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint32_t before = load(version);
    char copy[N];
    for (std::size_t i = 0; i < N; ++i) copy[i] = load(places[before % 2][i]);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (load(version) == before) return std::string(copy, strnlen(copy, N));
  }
  return "";
}

std::uint64_t monotonic_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000ull + static_cast<std::uint64_t>(t.tv_nsec);
}

StatusWriter open_from_environment() {
  const auto fd = base::number_in_env("ZERO_STATUS_FD", 1 << 20);
  const auto rank = base::number_in_env("LOCAL_RANK", 1 << 20);
  if (fd < 0 || rank < 0) return StatusWriter();
  // The descriptor may be stale (closed or reused by a program in between): accept only a sealed memfd of whole pages
  // with the magic number.
  struct stat info {};
  const int seals = fcntl(static_cast<int>(fd), F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(static_cast<int>(fd), &info) != 0) return StatusWriter();
  const off_t offset = static_cast<off_t>(rank) * static_cast<off_t>(kStatusPageBytes);
  if (info.st_size < offset + static_cast<off_t>(kStatusPageBytes)) return StatusWriter();
  // A page of the system may hold those of several ranks: 64 KiB on some aarch64 systems.
  const off_t before = offset % static_cast<off_t>(sysconf(_SC_PAGESIZE));
  const std::size_t bytes = static_cast<std::size_t>(before) + kStatusPageBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(fd), offset - before);
  if (memory == MAP_FAILED) return StatusWriter();
  auto* page = reinterpret_cast<StatusPage*>(static_cast<char*>(memory) + before);
  if (load(page->magic) != kMagic) {
    munmap(memory, bytes);
    return StatusWriter();
  }
  StatusWriter writer(page);
  store(page->pid, static_cast<std::int32_t>(getpid()));
  writer.set_phase(StatusPhase::Startup);
  return writer;
}

}  // namespace

const char* phase_name(StatusPhase phase) {
  static constexpr const char* kNames[] = {"idle", "startup", "load", "forward", "backward", "reduce", "step", "save"};
  const auto i = static_cast<std::size_t>(phase);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

const char* state_name(CollectiveState state) {
  return state == CollectiveState::Before ? "before" : state == CollectiveState::Inside ? "inside" : "after";
}

StatusWriter::StatusWriter(StatusPage* page) : page_(page) {}

void StatusWriter::changed() {
  const std::uint64_t now = monotonic_ns();
  store(page_->changed_ns, now);
  store(page_->heartbeat_ns, now);
  std::atomic_ref<std::uint64_t>(page_->changes).fetch_add(1, std::memory_order_acq_rel);
}

void StatusWriter::set_step(std::int64_t step, int micro_batch) {
  if (!page_) return;
  store(page_->step_plus_one, step + 1);
  store(page_->micro_batch, static_cast<std::int32_t>(micro_batch));
  changed();
}

void StatusWriter::set_phase(StatusPhase phase) {
  if (!page_) return;
  store(page_->phase, static_cast<std::int32_t>(phase));
  changed();
}

void StatusWriter::set_unit(std::string_view unit) {
  if (!page_) return;
  store_in_turn(page_->unit_version, page_->unit, unit);
  changed();
}

void StatusWriter::set_collective(std::uint64_t sequence, std::string_view op, std::string_view dtype,
                                  std::int64_t numel, CollectiveState state, std::string_view group,
                                  std::string_view site) {
  if (!page_) return;
  CollectiveEntry& entry = page_->ring[sequence % kStatusRing];
  if (load(entry.sequence_plus_one) == sequence + 1 && load_text(entry.op) == op.substr(0, sizeof entry.op - 1)) {
    store(entry.state, static_cast<std::uint32_t>(state));
  } else if (load(entry.sequence_plus_one) <= sequence + 1) {  // otherwise it was overwritten in the ring
    write_versioned(entry.version, [&] {
      store(entry.sequence_plus_one, sequence + 1);
      store(entry.state, static_cast<std::uint32_t>(state));
      store(entry.numel, numel);
      store_text(entry.op, op);
      store_text(entry.dtype, dtype);
      store_text(entry.group, group);
      store_text(entry.site, site);
    });
  }
  changed();
}

void StatusWriter::set_error(std::string_view text, ExitCode code) {
  if (!page_) return;
  write_versioned(page_->error_version, [&] {
    store(page_->error_code, static_cast<std::int32_t>(code));
    store_text(page_->error, text);
  });
  changed();
}

void StatusWriter::set_world_rule(const base::WorldRule& rule) {
  if (!page_) return;
  const std::int64_t members[] = {rule.batch_parts, rule.data_parallel, rule.copy, rule.tensor, rule.experts};
  static_assert(sizeof members == sizeof page_->rule && sizeof members == sizeof rule);
  write_versioned(page_->rule_version, [&] {
    for (std::size_t i = 0; i < std::size(members); ++i) store(page_->rule[i], members[i]);
  });
  changed();
}

void StatusWriter::set_save(std::string_view tag, std::uint64_t written, std::uint64_t bytes) {
  if (!page_) return;
  write_versioned(page_->save_version, [&] {
    store_text(page_->save, tag);
    store(page_->save_written, written);
    store(page_->save_bytes, bytes);
  });
  changed();
}

void StatusWriter::note_commit() {
  if (!page_) return;
  std::atomic_ref<std::uint64_t>(page_->commits).fetch_add(1, std::memory_order_acq_rel);
  changed();
}

void StatusWriter::note_use() {
  if (page_ && monotonic_ns() - load(page_->changed_ns) > kUseNs) changed();
}

void StatusWriter::beat() {
  if (page_) store(page_->heartbeat_ns, monotonic_ns());
}

int StatusWriter::failed_rank() const { return page_ ? load(page_->failed_rank_plus_one) - 1 : -1; }

StatusWriter& status_page() {
  static StatusWriter writer = open_from_environment();
  return writer;
}

struct Heartbeat::Thread {
  std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;
  std::thread thread;
};

Heartbeat::Heartbeat(StatusWriter& writer) {
  if (!writer.active()) return;
  thread_ = std::make_unique<Thread>();
  thread_->thread = std::thread([state = thread_.get(), copy = writer]() mutable {
    std::unique_lock<std::mutex> lock(state->mutex);
    while (!state->stop) {
      copy.beat();
      state->wake.wait_for(lock, std::chrono::seconds(1), [state] { return state->stop; });
    }
  });
}

Heartbeat::~Heartbeat() {
  if (!thread_) return;
  {
    std::lock_guard<std::mutex> lock(thread_->mutex);
    thread_->stop = true;
  }
  thread_->wake.notify_all();
  thread_->thread.join();
}

StatusMemory::StatusMemory(int ranks) : ranks_(ranks) {
  ZERO_CHECK(ranks > 0, "status pages for ", ranks, " ranks");
  const std::size_t bytes = kStatusPageBytes * static_cast<std::size_t>(ranks);
  fd_ = base::open_memory_file("zero-status", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0 ||
      (memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0)) == MAP_FAILED) {
    const std::string why = std::strerror(errno);
    if (fd_ >= 0) ::close(fd_);
    throw IoError(base::join("[StatusMemory] got ", why, ", expected a memfd of ", bytes,
                             " bytes. Hint: the ranks need shared memory; see `zero doctor`."));
  }
  clear();
}

StatusMemory::~StatusMemory() {
  munmap(memory_, kStatusPageBytes * static_cast<std::size_t>(ranks_));
  ::close(fd_);
}

StatusPage* StatusMemory::page(int rank) const {
  ZERO_CHECK(rank >= 0 && rank < ranks_, "status page of rank ", rank, " of ", ranks_);
  return reinterpret_cast<StatusPage*>(static_cast<char*>(memory_) + kStatusPageBytes * static_cast<std::size_t>(rank));
}

StatusWriter StatusMemory::writer(int rank) { return StatusWriter(page(rank)); }

void StatusMemory::set_failed_rank(int rank) {
  for (int r = 0; r < ranks_; ++r) {
    std::int32_t none = 0;
    std::atomic_ref<std::int32_t>(page(r)->failed_rank_plus_one).compare_exchange_strong(none, rank + 1);
  }
}

void StatusMemory::clear() {
  std::memset(memory_, 0, kStatusPageBytes * static_cast<std::size_t>(ranks_));
  for (int r = 0; r < ranks_; ++r) store(page(r)->magic, kMagic);
}

StatusSnapshot StatusMemory::read(int rank) const {
  const StatusPage& p = *page(rank);
  StatusSnapshot s;
  s.pid = load(p.pid);
  s.heartbeat_ns = load(p.heartbeat_ns);
  s.changes = load(p.changes);
  s.changed_ns = load(p.changed_ns);
  s.step = load(p.step_plus_one) - 1;
  s.commits = load(p.commits);
  s.micro_batch = load(p.micro_batch);
  s.phase = static_cast<StatusPhase>(load(p.phase));
  s.unit = load_in_turn(p.unit_version, p.unit);
  const bool error_whole = read_versioned(p.error_version, [&] {
    s.error_code = load(p.error_code);
    s.error = load_text(p.error);
  });
  if (!error_whole) s.error.clear();
  const bool save_whole = read_versioned(p.save_version, [&] {
    s.save = load_text(p.save);
    s.save_written = load(p.save_written);
    s.save_bytes = load(p.save_bytes);
  });
  if (!save_whole) s.save.clear();
  base::WorldRule rule;
  const bool rule_whole = read_versioned(p.rule_version, [&] {
    rule = {load(p.rule[0]), load(p.rule[1]), load(p.rule[2]), load(p.rule[3]), load(p.rule[4])};
  });
  // Divisors: a page that another program wrote must not end the launcher.
  if (rule_whole && load(p.rule_version) != 0 && rule.copy > 0 && rule.tensor > 0 && rule.experts > 0)
    s.world_rule = rule;
  for (const CollectiveEntry& entry : p.ring) {
    CollectiveSnapshot c;
    std::uint64_t sequence_plus_one = 0;
    const bool whole = read_versioned(entry.version, [&] {
      sequence_plus_one = load(entry.sequence_plus_one);
      c.state = static_cast<CollectiveState>(load(entry.state));
      c.numel = load(entry.numel);
      c.op = load_text(entry.op);
      c.dtype = load_text(entry.dtype);
      c.group = load_text(entry.group);
      c.site = load_text(entry.site);
    });
    if (!whole || !sequence_plus_one) continue;
    c.sequence = sequence_plus_one - 1;
    s.collectives.push_back(std::move(c));
  }
  std::sort(s.collectives.begin(), s.collectives.end(),
            [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
  return s;
}

}  // namespace zero::observe
