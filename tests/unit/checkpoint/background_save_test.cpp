// A save in the background holds the state of its call, whatever the program does next, within its memory; a fault of
// its writer is an error of all ranks before the next step acts, and leaves the checkpoint before.
#include <sys/wait.h>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/types.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/snapshot.h"
#include "comm/group.h"
#include "formats/digest.h"
#include "formats/rank_file.h"
#include "observe/status_page.h"
#include "support/file_text.h"
#include "support/nightly.h"
#include "support/on_ranks.h"
#include "unit/checkpoint/trained_model.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/formats/slow_files.h"

namespace zero::test::background_save_test {
namespace {
namespace fs = std::filesystem;
using Fault = FaultyFiles::Fault;

constexpr std::int64_t kHidden = 1200;  // 17 MB of states, five tiles

std::string digest(const std::string& root, const std::string& tag) { return checkpoint_digest(root, tag); }

// What saves say of themselves (checkpoint.writer.show_statistics), one line a rank.
class Told {
 public:
  Told() {
    set_log_sink([this](LogLevel, std::string_view text) {
      const std::lock_guard lock(mutex_);
      if (text.find("updates waited") != std::string_view::npos) lines_.emplace_back(text);
    });
  }
  ~Told() { set_log_sink({}); }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;
  // The numbers between two texts, of each line.
  std::vector<double> numbers(const std::string& before, const std::string& after) const {
    const std::lock_guard lock(mutex_);
    std::vector<double> all;
    for (const auto& line : lines_) {
      const auto end = line.find(after), begin = line.rfind(before, end);
      if (end == std::string::npos || begin == std::string::npos) throw std::runtime_error("unexpected: " + line);
      all.push_back(std::stod(line.substr(begin + before.size(), end - begin - before.size())));
    }
    return all;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

// One save while the program continues: `scribbles` fills all parameters right after the call, else it trains.
struct Round {
  std::string place;
  int world;
  std::int64_t pool;  // bytes
  bool scribbles;
};

// The most bytes that a rank held.
std::int64_t check_round(const Round& round) {
  // Of a run that does not save, by place and number of ranks.
  static std::map<std::pair<std::string, int>, std::string> undisturbed;
  auto& after = undisturbed[{round.place, round.world}];
  if (after.empty())
    on_ranks(round.world, [&](const auto& comm) {
      Trained other(comm, round.place, kHidden);
      for (int i = 0; i < 6; ++i) other.step(i);
      const auto hash = checkpoint::logical_hash(other.state);
      if (comm->rank() == 0) after = hash;
    });
  TempFolder folder(TempFolder::On::Memory);
  const auto root = folder.text();
  const Told told;
  on_ranks(round.world, [&](const auto& comm) {
    Trained trained(comm, round.place, kHidden, "", round.pool);
    trained.step(0);
    trained.step(1);
    const auto wanted = checkpoint::logical_hash(trained.state);
    SlowFiles slow(std::chrono::milliseconds(10));
    checkpoint::save(trained.state, slow, root, "t");
    EXPECT_NE(trained.state.parts.progress.background, nullptr);
    if (round.scribbles) {
      const auto groups = trained.state.scopes.begin({.all = true}, true);
      {
        const at::NoGradGuard no_grad;
        for (auto& p : trained.module->parameters()) p.fill_(0.5);
      }
      trained.state.scopes.end(groups, true);
    }
    for (int i = 2; i < 6; ++i) trained.step(i);
    EXPECT_EQ(checkpoint::finish_save(trained.state), "t");
    EXPECT_EQ(trained.state.parts.progress.background, nullptr);
    EXPECT_EQ(digest(root, "t"), wanted);
    // What is loaded continues as a run that did not save; so did the run that saved.
    Trained resumed(comm, round.place, kHidden);
    EXPECT_EQ(checkpoint::load(resumed.state, formats::system_files(), root, ""), "t");
    for (int i = 2; i < 6; ++i) resumed.step(i);
    EXPECT_EQ(checkpoint::logical_hash(resumed.state), after);
    EXPECT_EQ(checkpoint::logical_hash(trained.state) == after, !round.scribbles);
  });
  const auto held = told.numbers("bytes, ", " at once");
  EXPECT_EQ(held.size(), static_cast<std::size_t>(round.world));
  const auto most = static_cast<std::int64_t>(*std::max_element(held.begin(), held.end()));
  EXPECT_LE(most, round.pool);
  return most;
}

// Places, numbers of ranks and pools in turn: two tiles (the least that is allowed), three, all states.
// ZERO_ASYNC_ROUNDS: how many; 36, each of these once, unless given.
TEST(BackgroundSave, HoldsTheStateOfItsCall) {
  const std::vector<std::int64_t> pools{kLeastPool, 12 << 20, 64 << 20};
  const char* given = std::getenv("ZERO_ASYNC_ROUNDS");
  const int rounds = given != nullptr ? std::stoi(given) : nightly() ? 36 : 6;
  std::map<std::int64_t, std::int64_t> held;  // by pool
  for (int i = 0; i < rounds; ++i) {
    const auto n = static_cast<std::size_t>(i);
    const auto places = kPlaces.size(), turn = n / places;
    // Of three turns of all places each has every pool; ranks change after three turns, the kind of change after each.
    const Round round{kPlaces[n % places], 1 + static_cast<int>(turn / 3 % 2), pools[(n + turn) % 3], turn % 2 == 1};
    SCOPED_TRACE(round.place + " on " + std::to_string(round.world) + ", pool " + std::to_string(round.pool) +
                 (round.scribbles ? ", scribbled on" : ""));
    auto& most = held[round.pool];
    most = std::max(most, check_round(round));
  }
  std::cout << rounds << " saves in the background";
  for (const auto& [pool, most] : held) std::cout << ", " << most << " of at most " << pool << " bytes held";
  std::cout << "\n";
  EXPECT_GT(held[kLeastPool], 4 << 20) << "no update met a tile that was not written";
}

// What steps take longer while a slow disk is written is what is counted as waited.
TEST(BackgroundSave, StepsAreSlowerByTheWaitThatIsCounted) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = folder.text();
  const Told told;
  on_ranks(1, [&](const auto& comm) {
    Trained trained(comm, kPlaces[1], 2000);  // 48 MB of states
    const auto steps = [&](int first) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = first; i < first + 3; ++i) trained.step(i);
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    (void)steps(0);
    const auto without = steps(3);
    SlowFiles slow(std::chrono::milliseconds(700));
    checkpoint::save(trained.state, slow, root, "t");
    const auto with = steps(6);
    checkpoint::finish_save(trained.state);
    const auto counted = told.numbers("updates waited ", " s and").at(0);
    std::cout << "3 steps take " << without << " s, with a save to a slow disk " << with << " s, of which " << counted
              << " s are counted as waited\n";
    EXPECT_GT(counted, 0.7) << "the disk is not slow enough for the test";
    EXPECT_LE(counted, with);
    // The rest, copies and the writer's hashes, is little compared with it, also on a busy machine.
    EXPECT_LE(with - without, 1.25 * counted + without);
  });
}

TEST(BackgroundSave, ShowsItsBytesOnTheStatusPage) {
  TempFolder folder;
  observe::StatusMemory memory(1);
  const auto before = std::exchange(observe::status_page(), memory.writer(0));
  on_ranks(1, [&](const auto& comm) {
    Trained trained(comm, kPlaces[1], 1800);
    trained.step(0);
    SlowFiles slow(kSlow);
    checkpoint::save(trained.state, slow, folder.text(), "t");
    std::set<std::uint64_t> written;
    auto page = memory.read(0);
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
         std::chrono::steady_clock::now() < end && (page.save_bytes == 0 || page.save_written < page.save_bytes);
         std::this_thread::sleep_for(kSlow / 10)) {
      page = memory.read(0);
      if (page.save == "t") written.insert(page.save_written);
    }
    EXPECT_GT(written.size(), 3U) << "no progress was shown";
    EXPECT_EQ(page.save, "t");
    EXPECT_EQ(checkpoint::finish_save(trained.state), "t");
    // The files have headers and padding as well.
    std::uint64_t bytes = 0;
    for (const auto* const name : {"rank-00000.safetensors", "frozen-00000.safetensors"})
      bytes += fs::file_size(folder.path() / "t" / name);
    EXPECT_EQ(page.save_written, page.save_bytes);
    EXPECT_LE(page.save_bytes, bytes);
    EXPECT_GT(page.save_bytes, bytes - (std::uint64_t{1} << 18));
    EXPECT_EQ(memory.read(0).save, "");
  });
  observe::status_page() = before;
}

// The first tiles are held, then updates wait for the writer.
TEST(BackgroundSave, StaysWithinItsMemory) {
  // On a busy machine the writers may be done before the first step changes anything; then another save is tried.
  std::uint64_t copied = 0;
  for (int attempt = 0; attempt < 20 && copied < 4194304u; ++attempt) {
    TempFolder folder;
    const auto root = folder.text();
    on_ranks(1, [&](const auto& comm) {
      Trained trained(comm, kPlaces[1]);
      trained.step(0);
      const auto wanted = checkpoint::logical_hash(trained.state);
      using Report = MemoryReport;
      const auto peak = [&] { return trained.state.memory().peak(Report::Tier::Host, Report::Purpose::Other); };
      std::atomic<bool> begun{false}, stepped{false};  // the call itself writes, too
      FilesThatWaitFor files([&] { return !begun || stepped || peak() >= 4194304u; }, kSlow);
      checkpoint::save(trained.state, files, root, "t");
      begun = true;
      for (int i = 1; i < 4; ++i) trained.step(i);
      stepped = true;
      checkpoint::finish_save(trained.state);
      EXPECT_EQ(digest(root, "t"), wanted);
      copied = peak();
      EXPECT_LE(copied, static_cast<std::uint64_t>(kLeastPool));
      EXPECT_EQ(trained.state.memory().current(Report::Tier::Host, Report::Purpose::Other), 0u);
    });
  }
  EXPECT_GE(copied, 4194304u);
}

// An update before which nothing was written copies tiles until the next has no room, then it waits.
TEST(BackgroundSave, UpdatesCopyWhatHasRoom) {
  on_ranks(1, [&](const auto& comm) {
    Trained trained(comm, kPlaces[1], kHidden);
    trained.step(0);
    const auto changes = [](const auto& piece) { return piece.group >= 0 && piece.requires_grad; };
    for (const std::int64_t pool : std::vector<std::int64_t>{kLeastPool, 12 << 20, 64 << 20}) {
      SCOPED_TRACE("pool " + std::to_string(pool));
      auto pieces = trained.state.exports.pieces_to_save();
      std::int64_t all = 0;
      for (const auto& piece : pieces)
        if (changes(piece)) all += piece.numel * static_cast<std::int64_t>(c10::elementSize(piece.dtype));
      const bool fits = all <= pool;
      const auto booked = [&] {
        return trained.state.memory().current(MemoryReport::Tier::Host, MemoryReport::Purpose::Other);
      };
      const auto before = booked();
      EXPECT_EQ(fits, pool == 64 << 20);
      checkpoint::Snapshot snapshot(trained.state, pieces, pool);
      std::thread update([&] {
        for (const auto& piece : pieces)
          if (changes(piece))
            snapshot.before_change(piece.group, piece.owned_begin, piece.numel,
                                   [](int, std::int64_t, std::int64_t numel) { return at::zeros({numel}); });
      });
      const auto least = fits ? all : pool - formats::kReadBytes + 1;
      const auto held = [&] { return snapshot.stats().most_held; };
      for (int i = 0; i < 2000 && held() < least; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      snapshot.end();
      update.join();
      EXPECT_GE(held(), least);
      EXPECT_LE(held(), std::min(all, pool));
      EXPECT_EQ(booked() - before, static_cast<std::uint64_t>(held()));
    }
  });
}

// A state that cannot be read for the copy, as from a file that is gone.
TEST(BackgroundSave, ACopyThatFailsGivesItsRoomBack) {
  on_ranks(1, [&](const auto& comm) {
    Trained trained(comm, kPlaces[1]);
    trained.step(0);
    auto pieces = trained.state.exports.pieces_to_save();
    const auto host = [&] {
      return trained.state.memory().current(MemoryReport::Tier::Host, MemoryReport::Purpose::Other);
    };
    checkpoint::Snapshot snapshot(trained.state, pieces, kLeastPool);
    const auto& piece = pieces[0];
    const auto before = host();
    const auto change = [&](const auto& old) {
      snapshot.before_change(piece.group, piece.owned_begin, piece.numel, old);
    };
    EXPECT_THROW(change([](int, std::int64_t, std::int64_t) -> at::Tensor { throw IoError("gone"); }), IoError);
    EXPECT_EQ(host(), before);
    // The tile was not copied, and is once it can be read.
    change([&](int, std::int64_t, std::int64_t numel) { return at::zeros({numel}); });
    EXPECT_GT(host(), before);
    snapshot.end();
  });
}

TEST(BackgroundSave, IsCompletedByAStep) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = folder.text();
  on_ranks(2, [&](const auto& comm) {
    Trained trained(comm, kPlaces[2], 100);
    trained.step(0);
    const auto wanted = checkpoint::logical_hash(trained.state);
    checkpoint::save(trained.state, formats::system_files(), root, "t");
    EXPECT_EQ(code_of([&] { digest(root, "t"); }), kDamaged) << "there before it is complete";
    comm->barrier();
    for (int i = 1; trained.state.parts.progress.background; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      trained.step(i);
      ASSERT_LT(i, 200);
    }
    EXPECT_EQ(digest(root, "t"), wanted);
    // A second save, and a load, first complete the one before.
    SlowFiles slow(kSlow);
    checkpoint::save(trained.state, slow, root, "u");
    checkpoint::save(trained.state, slow, root, "v");
    EXPECT_EQ(digest(root, "u"), checkpoint::logical_hash(trained.state));
    EXPECT_EQ(checkpoint::load(trained.state, formats::system_files(), root, "v"), "v");
  });
}

// What changes states other than an update.
TEST(BackgroundSave, IsNotReachedByOtherWrites) {
  for (const auto& place : kPlaces) {
    TempFolder folder;
    const auto root = folder.text();
    on_ranks(2, [&](const auto& comm) {
      Trained trained(comm, place);
      trained.step(0);
      const auto save = [&](const char* tag) {
        const auto wanted = checkpoint::logical_hash(trained.state);
        static SlowFiles slow(kSlow);
        checkpoint::save(trained.state, slow, root, tag);
        return wanted;
      };
      const auto check = [&](const char* tag, const std::string& wanted) {
        checkpoint::finish_save(trained.state);
        EXPECT_EQ(digest(root, tag), wanted) << tag << " " << place;
      };
      auto wanted = save("scope");
      {
        const auto groups = trained.state.scopes.begin({.all = true}, true);
        {
          const at::NoGradGuard no_grad;
          for (auto& p : trained.module->parameters()) p.fill_(0.5);
        }
        trained.state.scopes.end(groups, true);
      }
      check("scope", wanted);
      wanted = save("state");
      trained.state.states.set("middle.weight", "exp_avg", at::full({1100, 1100}, 7.0));
      trained.state.states.set("out.bias", "master", at::full({3}, 7.0));
      check("state", wanted);
      wanted = save("buffers");
      for (auto& b : trained.module->buffers()) b.fill_(9);
      trained.state.user_state = "later";
      at::manual_seed(5);
      check("buffers", wanted);
      // Unfreezing allocates states, which a file does not have.
      if (place.find("nvme") != std::string::npos) return;
      wanted = save("unfrozen");
      trained.module->out->bias.set_requires_grad(true);
      trained.step(1);
      check("unfrozen", wanted);
    });
  }
}

TEST(BackgroundSave, AFaultIsTheErrorOfAllBeforeTheNextStep) {
  for (const int hit : {0, 1}) {
    TempFolder folder(TempFolder::On::Memory);
    const auto root = folder.text();
    int failed = 0;
    on_ranks(2, [&](const auto& comm) {
      Trained trained(comm, kPlaces[1], 40);
      trained.step(0);
      checkpoint::save(trained.state, formats::system_files(), root, "old");
      EXPECT_EQ(checkpoint::finish_save(trained.state), "old");
      const auto old = digest(root, "old");
      for (int k = 1;; ++k) {
        FaultyFiles files(Fault::Error, k, ENOSPC);
        std::string text;
        std::int64_t before = 0;
        bool begun = false;
        const int code = code_of(
            [&] {
              checkpoint::save(trained.state,
                               comm->rank() == hit ? static_cast<formats::FsOps&>(files) : formats::system_files(),
                               root, "new");
              begun = true;
              for (int i = 0; trained.state.parts.progress.background; ++i) {
                before = trained.state.parts.program->steps();
                if (i < 100)
                  trained.step(i);
                else
                  checkpoint::finish_save(trained.state);
              }
            },
            &text);
        const auto codes = comm->all_gather_bytes(std::to_string(code) + text);
        EXPECT_EQ(codes[0], codes[1]);
        if (comm->all_gather_bytes(files.struck() ? "1" : "0")[static_cast<std::size_t>(hit)] == "0") {
          EXPECT_EQ(code, 0) << text;
          break;
        }
        if (code != 0) {
          EXPECT_EQ(code, static_cast<int>(ExitCode::kIo)) << text;
          EXPECT_NE(text.find("rank " + std::to_string(hit) + "/2"), std::string::npos) << text;
          EXPECT_EQ(trained.state.parts.progress.background, nullptr);
          if (begun) EXPECT_EQ(trained.state.parts.program->steps(), before) << "the step acted";
          if (comm->rank() == 0) ++failed;
        }
        // The engine continues with the step that did not act, and the checkpoint before is whole.
        if (trained.state.parts.accumulated().micro_batches > 0) trained.state.stepper.step();
        trained.step(7);
        EXPECT_EQ(digest(root, "old"), old);
        comm->barrier();
        if (comm->rank() == 0) {
          fs::remove_all(folder.path() / "new");
          write_all(folder.path() / "latest", formats::latest_text({"old", 1}));
        }
        comm->barrier();
      }
    });
    EXPECT_GT(failed, hit == 0 ? 25 : 5);
    for (const auto& entry : fs::directory_iterator(folder.path()))
      EXPECT_FALSE(entry.path().filename().string().starts_with(".tmp-")) << entry.path();
  }
}

// Of files with data, not of the lock.
struct FullDisk : formats::FsOps {
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    return bytes < 4096 ? FsOps::pwrite(fd, data, bytes, offset) : -ENOSPC;
  }
};

TEST(BackgroundSave, WarnsTwiceIfAsked) {
  TempFolder folder(TempFolder::On::Memory);
  on_ranks(1, [&](const auto& comm) {
    Trained trained(comm, kPlaces[1], 40, R"(, "save_errors": "warn")");
    trained.step(0);
    checkpoint::save(trained.state, formats::system_files(), folder.text(), "good");
    EXPECT_EQ(checkpoint::finish_save(trained.state), "good");
    std::vector<int> codes;
    for (int i = 0; i < 4; ++i) {
      FullDisk files;
      codes.push_back(code_of([&] {
        checkpoint::save(trained.state, files, folder.text(), "t" + std::to_string(i));
        EXPECT_EQ(checkpoint::finish_save(trained.state), "") << "not the tag of the save before";
      }));
    }
    EXPECT_EQ(codes, (std::vector{0, 0, static_cast<int>(ExitCode::kIo), static_cast<int>(ExitCode::kIo)}));
  });
}

// One rank's disk takes longer than the longest wait of a collective. The other rank waits for it as long as bytes
// move: before a step whose update finds no room, and before parameters are modified.
TEST(BackgroundSave, ASlowDiskOfOneRankIsNoTimeout) {
  for (const bool steps : {true, false}) {
    const int slow = steps ? 1 : 0;
    TempFolder folder;
    const auto root = folder.text();
    ThreadFaults faults;
    faults.timeout = std::chrono::milliseconds(800);
    run_ranks(2, faults, [&](std::shared_ptr<Communicator> comm) {
      at::set_num_threads(1);
      Trained trained(comm, kPlaces[1], 2800);
      trained.step(0);
      const auto wanted = checkpoint::logical_hash(trained.state);
      SlowFiles files(std::chrono::milliseconds(comm->rank() == slow ? 500 : 0));
      const auto begin = std::chrono::steady_clock::now();
      checkpoint::save(trained.state, files, root, "t");
      if (steps) {
        trained.step(1);
      } else {
        const auto groups = trained.state.scopes.begin({.all = true}, true);
        trained.state.scopes.end(groups, true);
      }
      EXPECT_GT(std::chrono::steady_clock::now() - begin, faults.timeout) << "the test must outlast the limit";
      checkpoint::finish_save(trained.state);
      EXPECT_EQ(digest(root, "t"), wanted);
    });
  }
}

// The save is lost, and nothing else.
TEST(BackgroundSave, EndsWithItsEngine) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = folder.text();
  on_ranks(2, [&](const auto& comm) {
    SlowFiles slow(kSlow);
    {
      Trained trained(comm, kPlaces[2]);
      trained.step(0);
      checkpoint::save(trained.state, formats::system_files(), root, "old");
      checkpoint::finish_save(trained.state);
      checkpoint::save(trained.state, slow, root, "new");
      trained.step(1);
    }
    comm->barrier();
    Trained other(comm, kPlaces[2]);
    EXPECT_EQ(checkpoint::load(other.state, formats::system_files(), root, ""), "old");
  });
}

// Killed at every call of a save in the background: the old checkpoint or the new one loads, with the right digest.
TEST(BackgroundSave, KilledAtEveryCall) {
  int died = 0, arrived = 0;
  for (int k = 1;; ++k) {
    TempFolder folder(TempFolder::On::Memory);
    const auto root = folder.text();
    const auto child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int code = 1;
      try {
        on_ranks(1, [&](const auto& comm) {
          Trained trained(comm, kPlaces[1], 40);
          trained.step(0);
          checkpoint::save(trained.state, formats::system_files(), root, "old");
          checkpoint::finish_save(trained.state);
          write_all(folder.path() / "old.digest", digest(root, "old"));
          trained.step(1);
          write_all(folder.path() / "new.digest", checkpoint::logical_hash(trained.state));
          FaultyFiles files(Fault::DieBefore, k);
          checkpoint::save(trained.state, files, root, "new");
          for (int i = 2; i < 5; ++i) trained.step(i);
          checkpoint::finish_save(trained.state);
        });
        code = 0;
      } catch (...) {
      }
      ::_exit(code);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    ASSERT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << "call " << k << " status " << status;
    const auto tag = formats::choose(formats::system_files(), root, "").tag;
    EXPECT_EQ(digest(root, tag), file_text(folder.path() / (tag + ".digest"))) << "call " << k;
    arrived += tag == "new";
    if (!killed) {
      EXPECT_EQ(tag, "new");
      break;
    }
    ++died;
  }
  EXPECT_GT(died, 40);
  EXPECT_GE(arrived, 1);
}

}  // namespace
}  // namespace zero::test::background_save_test
