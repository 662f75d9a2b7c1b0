// Saves and loads of one rank, with their times and memory (checkpoint_rank.h).
#include "lab/bench/checkpoint_rank.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fcntl.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <unistd.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <system_error>
#include <thread>

#include "base/gathered_values.h"
#include "lab/bench/bench_gpt.h"
#include "tools/support/pss.h"

namespace zero::cli {
namespace checkpoint_rank_bench {
namespace {

constexpr const char* kTag = "measured";
using CheckpointClock = std::chrono::steady_clock;

double seconds_since(CheckpointClock::time_point begin) {
  return std::chrono::duration<double>(CheckpointClock::now() - begin).count();
}

// Of all ranks: from when all begin until all have ended.
double timed(Communicator& comm, const std::function<void()>& body) {
  comm.barrier();
  const auto begin = CheckpointClock::now();
  body();
  comm.barrier();
  return seconds_since(begin);
}

double slowest(Communicator& comm, double own) {
  const auto all = base::all_gather_values(comm, own);
  return *std::max_element(all.begin(), all.end());
}

// Bytes that read system calls of this process have returned.
std::int64_t bytes_read() {
  std::ifstream in("/proc/self/io");
  for (std::string name; in >> name;) {
    std::int64_t value = 0;
    in >> value;
    if (name == "rchar:") return value;
  }
  throw IoError("[zero bench checkpoint] /proc/self/io has no rchar");
}

// Pages that are not dirty leave the cache.
void drop_from_cache(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int fd = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    (void)::close(fd);
  }
}

// What the disk needs for the bytes of a checkpoint: new files with direct I/O, several transfers under way in each.
class DiskFile {
 public:
  DiskFile(std::string path, std::int64_t bytes)
      : path_(std::move(path)), bytes_((bytes + kSize - 1) / kSize * kSize), fd_(opened(O_DIRECT)) {
    if (fd_ < 0) fd_ = opened(0);  // a file system without direct I/O
    if (fd_ < 0) fail("open", errno);
  }
  ~DiskFile() {
    (void)::close(fd_);
    (void)::unlink(path_.c_str());
  }
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  void write() {
    transfer([this](char* data, off_t at) { return ::pwrite(fd_, data, kSize, at); }, "write");
    if (::fdatasync(fd_) != 0) fail("fdatasync", errno);
  }
  void read() {
    transfer([this](char* data, off_t at) { return ::pread(fd_, data, kSize, at); }, "read");
  }

 private:
  static constexpr std::int64_t kSize = 4 << 20;
  static constexpr int kDepth = 4;

  int opened(int flags) const { return ::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | flags, 0666); }
  [[noreturn]] void fail(const char* what, int error) const {
    throw IoError("[zero bench checkpoint] " + path_ + ": " + what + ": " + std::generic_category().message(error));
  }
  template <class Call>
  void transfer(const Call& call, const char* what) {
    std::vector<std::future<int>> workers;  // 0 or the error
    for (int k = 0; k < kDepth; ++k)
      workers.push_back(std::async(std::launch::async, [&, k] {
        const std::unique_ptr<char, decltype(&std::free)> data(
            static_cast<char*>(std::aligned_alloc(4096, static_cast<std::size_t>(kSize))), &std::free);
        if (!data) return ENOMEM;
        std::memset(data.get(), k + 1, static_cast<std::size_t>(kSize));
        for (std::int64_t at = k * kSize; at < bytes_; at += kDepth * kSize)
          if (const auto n = call(data.get(), static_cast<off_t>(at)); n != kSize) return n < 0 ? errno : EIO;
        return 0;
      }));
    int error = 0;
    for (auto& worker : workers)
      if (const int own = worker.get(); own != 0) error = own;
    if (error != 0) fail(what, error);
  }

  std::string path_;
  std::int64_t bytes_;
  int fd_;
};

void expect_digest(const std::string& found, const std::string& expected, const std::string& what) {
  if (found != expected)
    throw InternalError("[zero bench checkpoint] " + what + ": values with the digest " + found + ", expected " +
                        expected + ", that of the engine which saved");
}

Json measure_disk(const CheckpointTask& task, Communicator& comm) {
  DiskFile file(task.folder + "/disk-" + std::to_string(comm.rank()), task.bytes / comm.size());
  const auto rest = [&] { std::this_thread::sleep_for(std::chrono::seconds(task.rest)); };
  rest();
  const auto write = timed(comm, [&] { file.write(); });
  rest();
  const auto read = timed(comm, [&] { file.read(); });
  return {{"write_s", slowest(comm, write)}, {"read_s", slowest(comm, read)}, {"bytes", task.bytes}};
}

class Run {
 public:
  Run(const CheckpointTask& task, const std::shared_ptr<Communicator>& comm)
      : task_(task),
        comm_(*comm),
        model_(make_gpt(task.model, 1)),
        engine_(model_, options(task), comm),
        inputs_(torch::randint(task.model.vocabulary, {1, task.model.sequence + 1}, at::kLong)) {}

  Json save() {
    for (int i = 0; i < 2; ++i) step();
    const auto without = timed(comm_, [&] { steps(task_.steps); });
    std::uint64_t usual = 0;
    {
      PssSampler sampler;
      steps(2);
      usual = sampler.stop();
    }
    rest([&] { step(); });
    const auto digest = engine_.logical_hash();
    comm_.barrier();
    const auto begin = CheckpointClock::now();
    engine_.save_checkpoint(task_.folder, kTag);
    const auto call = seconds_since(begin);
    steps(task_.steps);
    const auto with = seconds_since(begin);
    engine_.finish_checkpoint();
    const auto until_complete = seconds_since(begin);
    std::uint64_t peak = 0;
    {
      PssSampler sampler;
      engine_.save_checkpoint(task_.folder, std::string(kTag) + "-again");
      steps(2);
      engine_.finish_checkpoint();
      peak = sampler.stop();
    }
    std::int64_t bytes = 0;
    if (comm_.rank() == 0) {
      bytes = inspect_checkpoint(task_.folder, kTag).bytes;
      expect_digest(checkpoint_digest(task_.folder, kTag), digest, task_.folder + "/" + kTag);
    }
    return {{"without_s", slowest(comm_, without)},
            {"call_s", slowest(comm_, call)},
            {"stall_s", slowest(comm_, with) - slowest(comm_, without)},
            {"durable_s", slowest(comm_, task_.what == "save" ? call : until_complete)},
            {"bytes", base::all_gather_values(comm_, bytes)[0]},
            {"digest", digest},
            {"peak_bytes", base::all_gather_values(comm_, peak > usual ? static_cast<std::int64_t>(peak - usual) : 0)}};
  }

  Json load() {
    const auto own = engine_.memory().current(MemoryReport::Tier::Device, MemoryReport::Purpose::MasterParameters) +
                     engine_.memory().current(MemoryReport::Tier::Device, MemoryReport::Purpose::OptimizerStates);
    comm_.barrier();
    if (comm_.rank() == 0) drop_from_cache(task_.folder);
    rest([&] {
      const at::NoGradGuard no_grad;
      (void)model_->forward(inputs_.narrow(1, 0, task_.model.sequence));
    });
    comm_.barrier();
    const auto read = bytes_read();
    const auto seconds = timed(comm_, [&] { engine_.load_checkpoint(task_.folder, kTag); });
    const auto all = bytes_read() - read;
    const auto digest = engine_.logical_hash();
    expect_digest(digest, task_.digest, "the load of " + task_.folder + "/" + kTag);
    const auto before = pss_bytes();
    PssSampler sampler;
    engine_.load_checkpoint(task_.folder, kTag);
    const auto peak = sampler.stop();
    return {
        {"load_s", slowest(comm_, seconds)},
        {"read_bytes", base::all_gather_values(comm_, all)},
        {"needed_bytes", base::all_gather_values(comm_, static_cast<std::int64_t>(own))},
        {"digest", digest},
        {"peak_bytes", base::all_gather_values(comm_, peak > before ? static_cast<std::int64_t>(peak - before) : 0)}};
  }

 private:
  static Options options(const CheckpointTask& task) {
    Json json = {{"train_micro_batch_size_per_gpu", 1},
                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}}}}},
                 {"bf16", {{"enabled", task.recipe == "bf16"}}},
                 {"zero_optimization", {{"stage", task.stage}}},
                 {"checkpoint", {{"writer", {{"decoupled", task.what == "background"}}}}}};
    return Options::from_json(json.dump());
  }

  void step() {
    const auto logits = model_->forward(inputs_.narrow(1, 0, task_.model.sequence));
    const auto loss = torch::nn::functional::cross_entropy(logits.to(at::kFloat).flatten(0, 1),
                                                           inputs_.narrow(1, 1, task_.model.sequence).flatten());
    engine_.backward(loss);
    engine_.step();
  }
  void steps(std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) step();
  }

  // Work without I/O: a machine that idles is slower afterwards. `work` leaves a new engine new, or not.
  void rest(const std::function<void()>& work) {
    if (task_.rest == 0) return;
    const auto one = slowest(comm_, timed(comm_, work));
    for (auto left = static_cast<double>(task_.rest); left > 0; left -= one) work();
  }

  const CheckpointTask& task_;
  Communicator& comm_;
  models::Gpt model_;
  Engine engine_;
  at::Tensor inputs_;
};

}  // namespace
}  // namespace checkpoint_rank_bench

Json CheckpointTask::json() const {
  using namespace checkpoint_rank_bench;
  return {{"what", what},
          {"folder", folder},
          {"recipe", recipe},
          {"stage", stage},
          {"steps", steps},
          {"threads", threads},
          {"rest", rest},
          {"bytes", bytes},
          {"digest", digest},
          {"layers", model.layers},
          {"hidden", model.hidden},
          {"heads", model.heads},
          {"sequence", model.sequence},
          {"vocabulary", model.vocabulary}};
}

CheckpointTask CheckpointTask::from(const Json& json) {
  using namespace checkpoint_rank_bench;
  CheckpointTask task;
  json.at("what").get_to(task.what);
  json.at("folder").get_to(task.folder);
  json.at("recipe").get_to(task.recipe);
  json.at("digest").get_to(task.digest);
  for (const auto& [name, field] :
       std::initializer_list<std::pair<const char*, std::int64_t*>>{{"stage", &task.stage},
                                                                    {"steps", &task.steps},
                                                                    {"threads", &task.threads},
                                                                    {"rest", &task.rest},
                                                                    {"bytes", &task.bytes},
                                                                    {"layers", &task.model.layers},
                                                                    {"hidden", &task.model.hidden},
                                                                    {"heads", &task.model.heads},
                                                                    {"sequence", &task.model.sequence},
                                                                    {"vocabulary", &task.model.vocabulary}})
    json.at(name).get_to(*field);
  return task;
}

Json measure_checkpoint(const CheckpointTask& task, const std::shared_ptr<Communicator>& comm) {
  using namespace checkpoint_rank_bench;
  if (task.what == "disk") return measure_disk(task, *comm);
  at::set_num_threads(static_cast<int>(task.threads));
  Run run(task, comm);
  return task.what == "load" ? run.load() : run.save();
}

}  // namespace zero::cli
