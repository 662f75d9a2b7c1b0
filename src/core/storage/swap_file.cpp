// Combines space and queue with the first I/O path that passes a test write and read.
#include "storage/swap_file.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "storage/fault_source.h"
#include "storage/io_buffers.h"
#include "storage/io_ring.h"
#include "storage/io_threads.h"
#include "storage/request_queue.h"

namespace zero::storage {
namespace {

using base::join;

void check(const std::string& name, std::int64_t got, std::int64_t least, std::int64_t most) {
  if (got < least || got > most)
    throw ConfigError(join("[SwapFile] got aio.", name, " ", got, ", expected ", least, " to ", most));
}

std::shared_ptr<FaultSource> of_new_files;

}  // namespace

// Members are destroyed in reverse order: the path, which waits for requests in flight, first.
struct SwapFile::State {
  State(const std::string& folder, std::int64_t bytes, const IoSettings& settings, const std::string& who,
        std::shared_ptr<FaultSource> faults)
      : faults(std::move(faults)), space(folder, bytes, who, this->faults.get()), settings(settings) {}
  ~State() { pool->serve(nullptr); }

  // Tests the path of `make` with one request each way. Throws IoError.
  template <class Make>
  void start(int together, Make make) {
    pool->serve(nullptr);
    path.reset();
    queue = std::make_unique<RequestQueue>(space, settings, together);
    path = make();
    pool->serve(path.get());
    try {
      prove();
    } catch (...) {
      pool->serve(nullptr);
      path.reset();
      throw;
    }
    before = queue->stats();
  }

  std::shared_ptr<Work> begin(bool write, std::int64_t offset, char* data, std::int64_t bytes) {
    const auto aligned = space.file().alignment();
    ZERO_CHECK(offset >= 0 && bytes >= 0 && offset % aligned == 0 && bytes % aligned == 0 &&
                   reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(aligned) == 0,
               "a transfer of ", bytes, " bytes at offset ", offset, " is not aligned to ", aligned);
    ZERO_CHECK(bytes <= space.bytes() && offset <= space.bytes() - bytes, "a transfer of ", bytes, " bytes at offset ",
               offset, " leaves a swap file of ", space.bytes());
    ZERO_CHECK(getpid() == owner, "a swap file is used in a child of its process");
    auto transfer = std::make_shared<Transfer>(write, offset, data, bytes);
    if (bytes > 0) {
      queue->add(transfer);
      path->wake();
    }
    return transfer;
  }

  void prove() {
    const auto size = std::max(kPage, space.file().alignment());
    const auto take = [&] {
      void* data = pool->take(size);
      if (!data) throw IoError(join("[SwapFile::create] got no memory for ", size, " bytes (", space.who(), ")"));
      return IoBuffer(pool, data, size);
    };
    const auto out = take(), in = take();
    const auto bytes = static_cast<std::size_t>(size);
    for (std::size_t i = 0; i < bytes; ++i)
      static_cast<unsigned char*>(out.data())[i] = static_cast<unsigned char>(i * 131 + i / 256);
    std::memset(in.data(), 0, bytes);
    begin(true, 0, static_cast<char*>(out.data()), size)->wait();
    begin(false, 0, static_cast<char*>(in.data()), size)->wait();
    if (std::memcmp(out.data(), in.data(), bytes) != 0)
      throw IoError(join("[SwapFile::create] got other bytes than were written to ", space.file().path(), " by ",
                         path->name(), " (", space.who(), ")"));
    // Restore the zeros of a new file.
    std::memset(out.data(), 0, bytes);
    begin(true, 0, static_cast<char*>(out.data()), size)->wait();
  }

  const pid_t owner = getpid();
  const std::shared_ptr<FaultSource> faults;
  SwapSpace space;
  const IoSettings settings;
  const std::shared_ptr<IoBuffers> pool = std::make_shared<IoBuffers>();
  Stats before;  // of the test's requests
  std::unique_ptr<RequestQueue> queue;
  std::unique_ptr<IoPath> path;
};

void set_faults_of_new_files(std::shared_ptr<FaultSource> faults) { of_new_files = std::move(faults); }

std::unique_ptr<SwapFile> SwapFile::create(const std::string& folder, std::int64_t bytes, const IoSettings& settings,
                                           const std::string& who, std::shared_ptr<FaultSource> faults) {
  check("block_size", settings.block_size, kPage, 1 << 30);
  check("queue_depth", settings.queue_depth, 1, 4096);
  check("intra_op_parallelism", settings.threads, 1, 64);
  if (settings.block_size % kPage != 0)
    throw ConfigError(join("[SwapFile] got aio.block_size ", settings.block_size, ", expected a multiple of ", kPage));
  if (bytes < 0) throw ConfigError(join("[SwapFile] got ", bytes, " bytes, expected none or more"));
  if (!faults) faults = of_new_files;
  const auto size = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  auto state = std::make_unique<State>(folder, size, settings, who, std::move(faults));
  auto* const source = state->faults.get();
  auto& made = *state;
  bool started = false;
  if (settings.path != IoSettings::Path::Threads) {
    try {
      made.start(0, [&] { return make_io_ring(*made.queue, made.settings, made.space.file().alignment(), source); });
      started = true;
    } catch (const IoError& error) {
      if (settings.path == IoSettings::Path::Ring) throw;
      base::log(LogLevel::Info, join("io_uring does not work here, threads take its place: ", error.what()));
    }
  }
  if (!started) {
    const int threads = IoThreads::threads_for(settings);
    made.start(settings.overlap_events ? 0 : threads, [&] {
      return std::make_unique<IoThreads>(*made.queue, threads, made.space.file().alignment(), source);
    });
  }
  return std::unique_ptr<SwapFile>(new SwapFile(std::move(state)));
}

SwapFile::SwapFile(std::unique_ptr<State> state) : state_(std::move(state)) {}

SwapFile::~SwapFile() {
  // A forked child has the file but no threads to join.
  if (state_->owner != getpid()) static_cast<void>(state_.release());
}

std::int64_t SwapFile::bytes() const { return state_->space.bytes(); }
std::int64_t SwapFile::alignment() const { return state_->space.file().alignment(); }

IoBuffer SwapFile::buffer(std::int64_t bytes) {
  if (bytes <= 0) return {};
  void* data = state_->pool->take(bytes);
  if (!data)
    throw IoError(join("[SwapFile::buffer] got no memory, expected ", bytes, " bytes (", state_->space.who(),
                       "). Hint: fewer or smaller offload buffers."));
  return IoBuffer(state_->pool, data, bytes);
}

std::shared_ptr<Work> SwapFile::begin_read(std::int64_t offset, void* data, std::int64_t bytes) {
  return state_->begin(false, offset, static_cast<char*>(data), bytes);
}

std::shared_ptr<Work> SwapFile::begin_write(std::int64_t offset, const void* data, std::int64_t bytes) {
  return state_->begin(true, offset, const_cast<char*>(static_cast<const char*>(data)), bytes);
}

SwapFile::Stats SwapFile::stats() const {
  auto stats = state_->queue->stats();
  const auto& before = state_->before;
  stats.bytes_read -= before.bytes_read;
  stats.bytes_written -= before.bytes_written;
  stats.reads -= before.reads;
  stats.writes -= before.writes;
  stats.retries -= before.retries;
  stats.seconds_busy -= before.seconds_busy;
  return stats;
}

std::string SwapFile::description() const {
  auto text = state_->path->name() + (state_->space.file().direct() ? ", O_DIRECT" : ", page cache");
  if (const auto memory = state_->path->memory_name(); !memory.empty()) text += ", " + memory;
  return text;
}

std::string SwapFile::path() const { return state_->space.file().path(); }

}  // namespace zero::storage
