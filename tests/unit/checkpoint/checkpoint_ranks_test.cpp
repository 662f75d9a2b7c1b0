// Several ranks save or load one checkpoint and one of them encounters a fault: all ranks throw the same error, which
// names rank, path and the system's text; the previous checkpoint remains; the engines stay usable. If a rank is killed
// during a save, the directory can still be loaded.
#include <sys/wait.h>

#include <chrono>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include "checkpoint/checkpoint.h"
#include "comm/group.h"
#include "engine/rank_agreement.h"
#include "support/on_ranks.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/formats/slow_files.h"

namespace zero::test::checkpoint_ranks_test {
namespace {
namespace fs = std::filesystem;
using Fault = FaultyFiles::Fault;

struct Small : torch::nn::Module {
  torch::nn::Linear in{nullptr}, out{nullptr};
  Small() {
    in = register_module("in", torch::nn::Linear(9, 13));
    out = register_module("out", torch::nn::Linear(13, 3));
    at::NoGradGuard no_grad;
    for (auto& p : parameters()) p.fill_(0.1);
  }
};

struct Trained {
  std::shared_ptr<Small> module = std::make_shared<Small>();
  engine::State state;
  Trained(const std::shared_ptr<Communicator>& comm, int stage)
      : state(module,
              Options::from_json(
                  R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
          "zero_optimization": {"stage": )" +
                  std::to_string(stage) + "}}"),
              comm) {}
  void step(int number) {
    const auto x =
        at::arange(9, at::TensorOptions().dtype(at::kFloat)).view({1, 9}) * 0.1 + number + state.job.comm->rank();
    state.backward.run(module->out(at::tanh(module->in(x))).pow(2).mean(), {});
    state.stepper.step();
  }
};

TEST(CheckpointAgreement, OneOutcomeForAll) {
  for (int failing = 0; failing < 8; ++failing) {
    on_ranks(3, [&](const auto& comm) {
      const int rank = comm->rank();
      const bool fails = (failing >> rank & 1) != 0;
      try {
        const auto answers = engine::agree(*comm::group_of(*comm), "test", [&]() -> std::string {
          if (fails && rank == 1) throw IoError("one", ExitCode::kCheckpoint);
          if (fails) throw ConfigError("mine " + std::to_string(rank));
          return "answer " + std::to_string(rank);
        });
        EXPECT_EQ(failing, 0);
        for (int r = 0; r < 3; ++r) EXPECT_EQ(answers[static_cast<std::size_t>(r)], "answer " + std::to_string(r));
      } catch (const Error& e) {
        EXPECT_NE(failing, 0);
        const bool io = (failing & 1) == 0 && (failing & 2) != 0;
        EXPECT_EQ(dynamic_cast<const IoError*>(&e) != nullptr, io);
        EXPECT_EQ(e.code(), io ? ExitCode::kCheckpoint : ExitCode::kConfig);
        const std::string text = e.what();
        for (int r = 0; r < 3; ++r)
          EXPECT_EQ(text.find("rank " + std::to_string(r) + "/3") != std::string::npos, (failing >> r & 1) != 0)
              << text;
      }
      EXPECT_EQ(comm->all_gather_bytes("still here").size(), 3u);
    });
  }
  on_ranks(2, [&](const auto& comm) {
    std::string text;
    EXPECT_EQ(code_of(
                  [&] {
                    engine::agree(*comm::group_of(*comm), "test",
                                  []() -> std::string { throw ConfigError("the same"); });
                  },
                  &text),
              static_cast<int>(ExitCode::kConfig));
    EXPECT_EQ(text, "the same");
    EXPECT_EQ(code_of([&] {
                engine::agree(*comm::group_of(*comm), "test", []() -> std::string { throw std::runtime_error("odd"); });
              }),
              static_cast<int>(ExitCode::kFailed));
  });
}

// A rank whose disk is slow is waited for, as long as bytes move: here for longer than the longest wait of a
// collective.
TEST(CheckpointRanks, ASlowDiskIsNoTimeout) {
  TempFolder folder(TempFolder::On::Memory);
  ThreadFaults faults;
  faults.timeout = std::chrono::milliseconds(600);
  for (const int slow : {0, 1}) {
    run_ranks(2, faults, [&](std::shared_ptr<Communicator> comm) {
      at::set_num_threads(1);
      SlowFiles files(std::chrono::milliseconds(comm->rank() == slow ? 300 : 0));
      Trained trained(comm, 3);
      trained.step(0);
      const auto saved = trained.state.exports.state_hash();
      const auto begin = std::chrono::steady_clock::now();
      checkpoint::save(trained.state, files, folder.text(), "slow");
      EXPECT_GT(std::chrono::steady_clock::now() - begin, faults.timeout) << "the test must outlast the limit";
      trained.step(1);
      EXPECT_EQ(checkpoint::load(trained.state, files, folder.text(), "slow"), "slow");
      EXPECT_EQ(trained.state.exports.state_hash(), saved);
    });
  }
}

TEST(CheckpointRanks, ADiskThatStandsStillIsNamed) {
  TempFolder folder(TempFolder::On::Memory);
  ThreadFaults faults;
  faults.timeout = std::chrono::seconds(1);
  run_ranks(2, faults, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    SlowFiles files(std::chrono::milliseconds(0), comm->rank() == 1 ? 3 : 0);
    Trained trained(comm, 3);
    trained.step(0);
    const auto begin = std::chrono::steady_clock::now();
    try {
      checkpoint::save(trained.state, files, folder.text(), "stuck");
      ADD_FAILURE() << "rank " << comm->rank() << " saved";
    } catch (const CommError& e) {
      EXPECT_NE(std::string(e.what()).find("rank 1/2 has moved no byte for 1 s"), std::string::npos) << e.what();
      EXPECT_EQ(e.rank(), 1);
    }
    if (comm->rank() == 0) EXPECT_LT(std::chrono::steady_clock::now() - begin, SlowFiles::kStuck);
  });
}

TEST(CheckpointRanks, AFaultOfOneRankIsTheErrorOfAll) {
  for (const int hit : {0, 1}) {
    TempFolder folder(TempFolder::On::Memory);
    const auto root = folder.text();
    int failed = 0, strikes = 0;
    on_ranks(2, [&](const auto& comm) {
      Trained trained(comm, 3);
      trained.step(0);
      checkpoint::save(trained.state, formats::system_files(), root, "old");
      const auto saved = trained.state.exports.state_hash();
      trained.step(1);
      for (int k = 1;; ++k) {
        FaultyFiles files(Fault::Error, k, ENOSPC);
        std::string text;
        const int code = code_of(
            [&] {
              if (comm->rank() == hit)
                checkpoint::save(trained.state, files, root, "new");
              else
                checkpoint::save(trained.state, formats::system_files(), root, "new");
            },
            &text);
        const auto codes = comm->all_gather_bytes(std::to_string(code) + text);
        EXPECT_EQ(codes[0], codes[1]);
        const auto struck = comm->all_gather_bytes(files.struck() ? "1" : "0");
        if (struck[static_cast<std::size_t>(hit)] == "0") {
          EXPECT_EQ(code, 0) << text;
          break;
        }
        if (code != 0) {
          EXPECT_EQ(code, static_cast<int>(ExitCode::kIo)) << text;
          EXPECT_TRUE(text.find("rank " + std::to_string(hit) + "/2") != std::string::npos &&
                      text.find(root) != std::string::npos && text.find("No space left") != std::string::npos)
              << text;
        }
        if (comm->rank() == 0) {
          failed += code != 0;
          ++strikes;
        }
        // The newest checkpoint loads, and the engine that could not save continues.
        Trained fresh(comm, 1);
        const auto tag = checkpoint::load(fresh.state, formats::system_files(), root, "");
        if (tag == "old")
          EXPECT_EQ(fresh.state.exports.state_hash(), saved);
        else
          EXPECT_EQ(fresh.state.exports.state_hash(), trained.state.exports.state_hash());
        comm->barrier();
        if (comm->rank() == 0) fs::remove_all(folder.path() / "new");
        if (comm->rank() == 0) write_all(folder.path() / "latest", formats::latest_text({"old", 1}));
        comm->barrier();
      }
      trained.step(2);
    });
    EXPECT_GT(failed, hit == 0 ? 30 : 8);
    EXPECT_LT(failed, strikes + 1);
  }
}

// A fault before the first byte of the state has changed leaves the engine as it was. A later one makes it refuse every
// call but a load, and the load of a whole checkpoint makes it whole. An engine that has neither stepped nor loaded is
// filled in one pass.
TEST(CheckpointRanks, AFaultWhileLoadingLeavesTheEngineWholeOrRefused) {
  for (const bool fresh : {false, true}) {
    TempFolder folder(TempFolder::On::Memory);
    const auto root = folder.text();
    int unchanged = 0, refused = 0;
    on_ranks(2, [&](const auto& comm) {
      Trained source(comm, 2);
      source.step(0);
      checkpoint::save(source.state, formats::system_files(), root, "t");
      const auto saved = source.state.exports.state_hash();
      for (int k = 1;; ++k) {
        Trained trained(comm, 2);
        if (!fresh) trained.step(5);
        const auto before = trained.state.exports.state_hash();
        FaultyFiles files(Fault::Error, k, EIO);
        std::string text, refusal;
        const int code = code_of(
            [&] {
              auto& own = comm->rank() == 1 ? static_cast<formats::FsOps&>(files) : formats::system_files();
              checkpoint::load(trained.state, own, root, "");
            },
            &text);
        const auto codes = comm->all_gather_bytes(std::to_string(code) + text);
        EXPECT_EQ(codes[0], codes[1]);
        if (comm->all_gather_bytes(files.struck() ? "1" : "0")[1] == "0") {
          EXPECT_EQ(code, 0) << text;
          break;
        }
        if (code == 0) continue;  // closing a file that was read
        EXPECT_EQ(code, static_cast<int>(ExitCode::kIo)) << text;
        EXPECT_NE(text.find("rank 1/2"), std::string::npos) << text;
        const int step = code_of([&] { trained.step(6); }, &refusal);
        if (step == 0) {
          trained.state.exports.state_hash();
          Trained other(comm, 2);
          if (!fresh) other.step(5);
          EXPECT_EQ(other.state.exports.state_hash(), before);
          other.step(6);
          EXPECT_EQ(trained.state.exports.state_hash(), other.state.exports.state_hash()) << k << ": " << text;
          if (comm->rank() == 0) ++unchanged;
          continue;
        }
        EXPECT_NE(refusal.find("failed halfway"), std::string::npos) << refusal;
        EXPECT_EQ(code_of([&] { checkpoint::save(trained.state, formats::system_files(), root, "no"); }),
                  static_cast<int>(ExitCode::kConfig));
        checkpoint::load(trained.state, formats::system_files(), root, "");
        EXPECT_EQ(trained.state.exports.state_hash(), saved);
        trained.step(6);
        if (comm->rank() == 0) ++refused;
      }
    });
    EXPECT_GT(unchanged, 8);
    EXPECT_GT(refused, 2);
  }
}

// Counts what is read, and how much at once.
struct CountingFiles : formats::FsOps {
  std::atomic<std::uint64_t> bytes{0}, most{0};
  ssize_t pread(int fd, void* out, std::size_t n, std::uint64_t offset) override {
    bytes += n;
    if (n > most) most = n;
    return FsOps::pread(fd, out, n, offset);
  }
};

// A rank reads the blocks of what it stores, once in a new engine, in windows: not the other ranks' elements.
TEST(CheckpointRanks, ReadsOnlyWhatItStores) {
  struct Wide : torch::nn::Module {
    torch::nn::Linear first{nullptr}, second{nullptr};
    Wide() {
      first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
      second = register_module("second", torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
    }
  };
  constexpr std::uint64_t kStateBytes = std::uint64_t{2} * 2048 * 2048 * 12;
  const auto options = [](int stage) {
    return Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"},
          "zero_optimization": {"stage": )" +
                              std::to_string(stage) + "}}");
  };
  TempFolder folder;
  const auto root = folder.text();
  std::string digest;
  on_ranks(2, [&](const auto& comm) {
    engine::State state(std::make_shared<Wide>(), options(1), comm);
    state.states.set("first.weight", "exp_avg", at::rand({2048, 2048}));
    checkpoint::save(state, formats::system_files(), root, "t");
    digest = checkpoint::logical_hash(state);
  });
  for (const int world : {8, 2, 1}) {
    on_ranks(world, [&](const auto& comm) {
      engine::State state(std::make_shared<Wide>(), options(3), comm);
      CountingFiles files;
      checkpoint::load(state, files, root, "");
      const auto needed = kStateBytes / static_cast<std::uint64_t>(world);
      // Six states in two files: blocks at both ends, and the small files that rank 0 reads to choose.
      EXPECT_LT(files.bytes, needed + std::uint64_t{6} * 2 * 256 * 1024) << world;
      EXPECT_GE(files.bytes, needed);
      EXPECT_LE(files.most, formats::RangeReader::kMostWindowBytes);
      EXPECT_EQ(checkpoint::logical_hash(state), digest) << world;
    });
  }
}

// Runs the job in a child process, in which rank 1 or rank 0 kills all ranks at call k.
TEST(CheckpointRanks, KilledAtEveryCallOfEitherRank) {
  for (const int stage : {1, 3}) {
    for (const int hit : {0, 1}) {
      int died = 0, arrived = 0;
      // Every call of rank 1; every third of rank 0, whose calls checkpoint_crash_test takes one by one.
      for (int k = 1;; k += hit == 0 ? 3 : 1) {
        TempFolder folder(TempFolder::On::Memory);
        const auto root = folder.text();
        const auto child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
          int code = 1;
          try {
            at::set_num_threads(1);
            on_ranks(2, [&](const auto& comm) {
              Trained trained(comm, stage);
              trained.step(0);
              checkpoint::save(trained.state, formats::system_files(), root, "old");
              trained.step(1);
              FaultyFiles files(Fault::DieBefore, k);
              if (comm->rank() == hit)
                checkpoint::save(trained.state, files, root, "new");
              else
                checkpoint::save(trained.state, formats::system_files(), root, "new");
            });
            code = 0;
          } catch (...) {
          }
          ::_exit(code);
        }
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        ASSERT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0))
            << "stage " << stage << " call " << k << " status " << status;
        const auto reader = ::fork();
        ASSERT_GE(reader, 0);
        if (reader == 0) {
          int code = 1;
          try {
            at::set_num_threads(1);
            std::string tag;
            on_ranks(2, [&](const auto& comm) {
              Trained wanted(comm, 0), got(comm, 0);
              const auto taken = checkpoint::load(got.state, formats::system_files(), root, "");
              wanted.step(0);
              if (taken == "new") wanted.step(1);
              if (got.state.exports.state_hash() != wanted.state.exports.state_hash())
                throw std::runtime_error("other bits");
              if (comm->rank() == 0) tag = taken;
            });
            code = tag == "new" ? 10 : tag == "old" ? 11 : 1;
          } catch (const std::exception& e) {
            std::fprintf(stderr, "reader: %s\n", e.what());  // the child's only way to say why
          }
          ::_exit(code);
        }
        ASSERT_EQ(::waitpid(reader, &status, 0), reader);
        ASSERT_TRUE(WIFEXITED(status) && (WEXITSTATUS(status) == 10 || WEXITSTATUS(status) == 11))
            << "stage " << stage << " call " << k;
        arrived += WEXITSTATUS(status) == 10;
        if (!killed) {
          EXPECT_EQ(WEXITSTATUS(status), 10);
          break;
        }
        ++died;
      }
      EXPECT_GT(died, 8);
      EXPECT_GE(arrived, 1);
    }
  }
}

}  // namespace
}  // namespace zero::test::checkpoint_ranks_test
