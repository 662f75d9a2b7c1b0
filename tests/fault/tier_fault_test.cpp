// Disk failures during training: a short, interrupted or temporarily refused request does not change results; a
// permanent failure ends every rank with an error that names the location, and the last checkpoint is complete.
// Corrupted data is detected.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "engine/file_regions.h"
#include "parity/training.h"
#include "storage/fault_source.h"
#include "support/folder.h"
#include "support/nightly.h"

namespace zero::test::tier_fault_test {
namespace {

namespace fs = std::filesystem;

// The n-th request (of the kind) after it is armed, or every n-th.
class Nth final : public storage::FaultSource {
 public:
  enum class Kind { Read, Write, Any };
  Nth(Kind kind, std::int64_t n, bool every, storage::Fault fault) : kind_(kind), n_(n), every_(every), fault_(fault) {}
  void arm() { armed_ = true; }
  bool fired() const { return fired_; }
  storage::Fault request(bool write, std::int64_t, std::int64_t) override {
    if (!armed_ || (kind_ != Kind::Any && write != (kind_ == Kind::Write))) return {};
    const auto k = ++count_;
    if (every_ ? k % n_ != 0 : k != n_) return {};
    fired_ = true;
    return fault_;
  }

 private:
  const Kind kind_;
  const std::int64_t n_;
  const bool every_;
  const storage::Fault fault_;
  std::atomic<bool> armed_{false}, fired_{false};
  std::atomic<std::int64_t> count_{0};
};

class Installed {
 public:
  explicit Installed(std::shared_ptr<storage::FaultSource> faults) {
    storage::set_faults_of_new_files(std::move(faults));
  }
  ~Installed() { storage::set_faults_of_new_files(nullptr); }
};

Training setup_in(const std::string& folder, int stage = 3) {
  Training setup;
  setup.world = 2;
  setup.stage = stage;
  setup.recipe = "bf16";
  setup.steps = 3;
  setup.zero = R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder + "\"}";
  if (stage == 3)
    setup.zero += R"(, "offload_param": {"device": "nvme", "max_in_cpu": 0, "nvme_path": ")" + folder + "\"}";
  return setup;
}

struct Ended {
  std::string error[2];
  ExitCode code[2] = {ExitCode::kOk, ExitCode::kOk};
  std::string hash, saved;  // after the last step; when the checkpoint was written
};

// Trains; saves a checkpoint before the first step and arms the faults behind it.
Ended train(const Training& setup, const std::string& checkpoint, Nth* faults) {
  Ended ended;
  try {
    run_ranks(setup.world, [&](std::shared_ptr<Communicator> comm) {
      at::set_num_threads(1);
      const auto rank = static_cast<std::size_t>(comm->rank());
      const auto& task = problem(setup.problem);
      auto module = make_module(task);
      try {
        Engine engine(module, Options::from_json(json_of(setup)), comm);
        if (!checkpoint.empty()) engine.save_checkpoint(checkpoint, "before");
        const auto saved = engine.state_hash();
        if (rank == 0) ended.saved = saved;
        comm->barrier();
        if (faults != nullptr) faults->arm();
        for (int k = 0; k < setup.steps; ++k) {
          engine.backward(loss_of(task, *module, comm->rank(), k, dtype_of(setup)));
          engine.step();
        }
        const auto hash = engine.state_hash();
        if (rank == 0) ended.hash = hash;
      } catch (const Error& e) {
        ended.error[rank] = e.what();
        ended.code[rank] = e.code();
        throw;
      }
    });
  } catch (const Error&) {
  }
  return ended;
}

TEST(TierFault, WhatPassesByItselfChangesNoBit) {
  const TempFolder folder;
  for (const int stage : {1, 3}) {
    const auto setup = setup_in(folder.text(), stage);
    const auto plain = train(setup, "", nullptr);
    ASSERT_EQ(plain.error[0] + plain.error[1], "");
    for (const storage::Fault fault :
         {storage::Fault{EINTR, -1}, storage::Fault{EAGAIN, -1}, storage::Fault{0, 4096}}) {
      for (const std::int64_t n : {2, 3, 7}) {
        auto faults = std::make_shared<Nth>(Nth::Kind::Any, n, /*every=*/true, fault);
        const Installed installed(faults);
        const auto run = train(setup, "", faults.get());
        EXPECT_EQ(run.error[0] + run.error[1], "") << fault.error << " at every " << n;
        EXPECT_EQ(run.hash, plain.hash) << fault.error << " at every " << n;
        EXPECT_TRUE(faults->fired());
      }
    }
  }
}

// The n-th request of a run fails permanently, for n from the first to beyond the last.
void expect_an_end(Nth::Kind kind, int error, const char* text) {
  const TempFolder folder, checkpoints;
  const auto setup = setup_in(folder.text());
  const auto plain = train(setup, "", nullptr);
  int ended_early = 0, ran_through = 0;
  OneIn part(3);
  for (std::int64_t n = 1; n <= 100; n += n < 10 ? 1 : 9) {
    if (!part.take()) continue;
    SCOPED_TRACE(n);
    auto faults = std::make_shared<Nth>(kind, n, /*every=*/false, storage::Fault{error, -1});
    Ended run;
    {
      const Installed installed(faults);
      run = train(setup, checkpoints.text(), faults.get());
    }
    if (!faults->fired()) {
      EXPECT_EQ(run.hash, plain.hash);
      ++ran_through;
      continue;
    }
    ++ended_early;
    const int failed = run.code[0] == ExitCode::kIo ? 0 : 1;
    EXPECT_EQ(run.code[failed], ExitCode::kIo) << run.error[0] << "\n" << run.error[1];
    for (const auto& part :
         std::vector<std::string>{text, folder.text(), "offset", "rank " + std::to_string(failed) + "/2"})
      EXPECT_NE(run.error[failed].find(part), std::string::npos) << part << " in " << run.error[failed];
    const auto& other = run.error[1 - failed];
    EXPECT_NE(other.find("rank " + std::to_string(failed)), std::string::npos) << "the other rank said: " << other;
    EXPECT_TRUE(fs::is_empty(folder.text()));
    // The checkpoint from before is whole.
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto module = make_module(problem(setup.problem));
      Engine engine(module, Options::from_json(json_of(setup)), comm);
      engine.load_checkpoint(checkpoints.text());
      const auto hash = engine.state_hash();
      if (comm->rank() == 0) EXPECT_EQ(hash, run.saved);
    });
  }
  EXPECT_GT(ended_early, nightly() ? 5 : 3);
  EXPECT_GE(ended_early + ran_through, nightly() ? 19 : 7);
}

TEST(TierFault, AReadThatFailsEndsEveryRank) { expect_an_end(Nth::Kind::Read, EIO, std::strerror(EIO)); }
// The error of a background update persists even if the program catches it: a partial update never becomes visible.
TEST(TierFault, AFailedLateUpdateIsNotForgotten) {
  const TempFolder folder;
  auto setup = setup_in(folder.text(), 1);
  setup.world = 1;
  setup.zero += R"(, "delayed_update": {"enabled": true, "start_step": 1})";
  auto faults = std::make_shared<Nth>(Nth::Kind::Read, 1, /*every=*/false, storage::Fault{EIO, -1});
  const Installed installed(faults);
  const auto& task = problem(setup.problem);
  auto module = make_module(task);
  Engine engine(module, Options::from_json(json_of(setup)), Communicator::local());
  const auto pass = [&](int k) { engine.backward(loss_of(task, *module, 0, k, dtype_of(setup))); };
  pass(0);
  engine.step();
  pass(1);
  faults->arm();
  engine.step();  // the update begins, and fails
  EXPECT_THROW(engine.set_lr(0, 0.1), IoError);
  EXPECT_THROW(engine.set_lr(0, 0.1), IoError);
  pass(2);
  EXPECT_THROW(engine.step(), IoError);
  EXPECT_THROW(engine.step(), Error);
}

TEST(TierFault, AFullDiskEndsEveryRank) { expect_an_end(Nth::Kind::Write, ENOSPC, "free"); }

// A failed write is repeated at another location (file_io_test), and training is not affected.
TEST(TierFault, OneFailedWriteIsMovedAndChangesNoBit) {
  const TempFolder folder;
  const auto setup = setup_in(folder.text());
  const auto plain = train(setup, "", nullptr);
  for (const std::int64_t n : {1, 2, 5, 11}) {
    auto faults = std::make_shared<Nth>(Nth::Kind::Write, n, /*every=*/false, storage::Fault{EIO, -1});
    const Installed installed(faults);
    const auto run = train(setup, "", faults.get());
    EXPECT_EQ(run.error[0] + run.error[1], "");
    EXPECT_EQ(run.hash, plain.hash) << n;
  }
}

// --- data that is read back ----------------------------------------------------------------------

// A second descriptor of the file that this process has open in the folder.
int open_again(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = fs::read_symlink(entry.path(), error).string();
    if (!error && target.starts_with(folder + "/")) return ::open(entry.path().c_str(), O_RDWR);
  }
  return -1;
}

// Floats in a region of a file.
struct Floats {
  Floats(const std::shared_ptr<engine::ShardFile>& file, std::int64_t numel) : numel(numel), region(file, numel * 4) {}
  at::Tensor read(std::int64_t begin, std::int64_t count) const {
    auto values = at::empty({count}, at::kFloat);
    region.read(begin * 4, values.mutable_data_ptr(), count * 4);
    return values;
  }
  at::Tensor read() const { return read(0, numel); }
  void write(std::int64_t begin, const at::Tensor& values) {
    region.write(begin * 4, values.contiguous().const_data_ptr(), values.numel() * 4);
  }
  std::int64_t bytes() const { return (numel * 4 + 4095) / 4096 * 4096; }
  const std::int64_t numel;
  const engine::FileRegion region;
};

TEST(Checksums, OtherBytesThanWereWrittenAreAnErrorThatSaysWhere) {
  const TempFolder folder;
  const auto file = std::make_shared<engine::ShardFile>(folder.text(), storage::IoSettings(), "rank 2/4", true);
  Floats before(file, 5000), store(file, 10000);
  file->make();
  EXPECT_TRUE(at::equal(store.read(), at::zeros({10000}))) << "a new region is zero, and known to be";
  const auto values = at::arange(10000, at::kFloat);
  store.write(0, values);
  store.write(3000, values.narrow(0, 0, 50));  // within a block
  auto expected = values.clone();
  expected.narrow(0, 3000, 50).copy_(values.narrow(0, 0, 50));
  EXPECT_TRUE(at::equal(store.read(), expected));

  const int fd = open_again(folder.text());
  ASSERT_GE(fd, 0);
  const auto offset = before.bytes() + 2 * 4096 + 17;
  char flipped = 0;
  ASSERT_EQ(pread(fd, &flipped, 1, offset), 1);
  flipped = static_cast<char>(flipped ^ 0x40);
  ASSERT_EQ(pwrite(fd, &flipped, 1, offset), 1);
  ASSERT_EQ(fsync(fd), 0);
  EXPECT_TRUE(at::equal(store.read(0, 1024), expected.narrow(0, 0, 1024))) << "other blocks are not concerned";
  EXPECT_TRUE(at::equal(before.read(), at::zeros({5000})));
  try {
    store.read();
    FAIL() << "nothing was noticed";
  } catch (const IoError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("offset " + std::to_string(before.bytes() + 2 * 4096)), std::string::npos) << text;
    EXPECT_NE(text.find("rank 2/4"), std::string::npos) << text;
    EXPECT_NE(text.find(folder.text()), std::string::npos) << text;
  }
  // Written again it is right again.
  store.write(0, values);
  EXPECT_TRUE(at::equal(store.read(), values));
  close(fd);
}

TEST(Checksums, CanBeTurnedOff) {
  const TempFolder folder;
  const auto file = std::make_shared<engine::ShardFile>(folder.text(), storage::IoSettings(), "rank 0/1", false);
  Floats store(file, 2000);
  file->make();
  store.write(0, at::ones({2000}));
  const int fd = open_again(folder.text());
  ASSERT_GE(fd, 0);
  const float other = 5;
  ASSERT_EQ(pwrite(fd, &other, sizeof other, 0), static_cast<ssize_t>(sizeof other));
  ASSERT_EQ(fsync(fd), 0);
  EXPECT_EQ(store.read()[0].item<float>(), 5);
  close(fd);
}

// Training stops if its offload file was changed by someone else.
TEST(Checksums, TrainingStopsAtBytesThatChanged) {
  const TempFolder folder;
  auto setup = setup_in(folder.text(), 1);
  setup.world = 1;
  const auto& task = problem(setup.problem);
  auto module = make_module(task);
  Engine engine(module, Options::from_json(json_of(setup)), Communicator::local());
  const auto step = [&](int k) {
    engine.backward(loss_of(task, *module, 0, k, dtype_of(setup)));
    engine.step();
  };
  step(0);
  const int fd = open_again(folder.text());
  ASSERT_GE(fd, 0);
  char byte = 0;
  ASSERT_EQ(pread(fd, &byte, 1, 100), 1);
  byte = static_cast<char>(byte ^ 1);
  ASSERT_EQ(pwrite(fd, &byte, 1, 100), 1);
  ASSERT_EQ(fsync(fd), 0);
  close(fd);
  EXPECT_THROW(step(1), IoError);
}

}  // namespace
}  // namespace zero::test::tier_fault_test
