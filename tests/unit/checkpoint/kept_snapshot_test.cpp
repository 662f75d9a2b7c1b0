// Kept snapshots of several ranks: what is loaded from memory after a restart continues as a run that never stopped;
// what is torn, damaged, older, or of something else is never taken.
#include <ATen/core/grad_mode.h>
#include <torch/types.h>
#include <zero/library.h>

#include <unistd.h>

#include "base/fd.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/kept.h"
#include "comm/group.h"
#include "support/nightly.h"
#include "support/on_ranks.h"
#include "unit/checkpoint/trained_model.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/formats/slow_files.h"

namespace zero::test::kept_snapshot_test {
namespace {

constexpr std::int64_t kHidden = 60;
const std::string kEvery = R"(, "keep_snapshot_every": 2)";

// What a launcher with `world` ranks holds.
struct Launcher {
  explicit Launcher(int world) {
    for (int r = 0; r < world; ++r) memory.emplace_back(base::make_kept_memory());
  }
  base::KeptMemory of(int rank, std::int64_t attempt, const std::string& run = "run") const {
    return {memory.at(static_cast<std::size_t>(rank)).get(), run, attempt};
  }
  // Changes one bit of a rank's slot.
  void flip(int rank, int slot, std::uint64_t at) const {
    const int fd = of(rank, 0).fd;
    const auto place = static_cast<off_t>(static_cast<std::uint64_t>(slot) * base::kKeptSlotBytes + at);
    char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, place), 1);
    byte = static_cast<char>(byte ^ 4);
    ASSERT_EQ(::pwrite(fd, &byte, 1, place), 1);
  }
  std::vector<base::Descriptor> memory;
};
// In a slot: the header, the header of the rank file, its data.
constexpr std::uint64_t kHeader = 100, kData = 4096 + 8192 + 64;

// The private state of this rank and the state of all.
std::string all_of(Trained& trained) {
  auto text = checkpoint::logical_hash(trained.state) + " " + trained.state.exports.state_hash();
  for (const auto& buffer : trained.module->buffers()) {
    const auto flat = buffer.contiguous();
    text += " " + formats::hash_of(flat.const_data_ptr(), flat.nbytes());
  }
  return text;
}

struct Rank {
  const std::shared_ptr<Communicator>& comm;
  const Launcher& launcher;
  std::string root;
  std::int64_t attempt = 0;

  base::KeptMemory memory() const { return launcher.of(comm->rank(), attempt); }
  void keep(Trained& trained, formats::FsOps& fs = formats::system_files()) const {
    trained.state.user_state = "after " + std::to_string(trained.state.parts.program->steps());
    checkpoint::keep_snapshot(trained.state, fs, memory(), root);
  }
  // Steps [begin, end), keeping what the configuration says.
  void train(Trained& trained, int begin, int end) const {
    for (int i = begin; i < end; ++i) {
      trained.step(i);
      keep(trained);
    }
  }
  std::string load(Trained& trained, const std::string& tag = "") const {
    return checkpoint::load(trained.state, formats::system_files(), root, tag, {}, memory());
  }
};

const auto kOf4 = "kept snapshot of step 4 (memory)", kOf2 = "kept snapshot of step 2 (memory)";

TEST(KeptSnapshot, ContinuesAsARunThatNeverStopped) {
  for (const auto& place : kPlaces) {
    for (const int world : {1, 2}) {
      TempFolder folder(TempFolder::On::Memory);
      const Launcher launcher(world);
      on_ranks(world, [&](const auto& comm) {
        std::string expected, at_four;
        {
          Trained trained(comm, place, kHidden, kEvery);
          for (int i = 0; i < 8; ++i) {
            if (i == 4) at_four = all_of(trained);
            trained.step(i);
          }
          expected = all_of(trained);
        }
        Rank rank{comm, launcher, folder.text()};
        {
          Trained trained(comm, place, kHidden, kEvery);
          rank.train(trained, 0, 5);  // what comes after step 4 is lost
          rank.keep(trained);         // not a step to keep
        }
        // Twice: what is in memory is loaded again as long as nothing newer is.
        for (rank.attempt = 1; rank.attempt < 3; ++rank.attempt) {
          Trained trained(comm, place, kHidden, kEvery);
          EXPECT_EQ(rank.load(trained), kOf4) << place << " on " << world;
          EXPECT_EQ(trained.state.user_state, "after 4");
          EXPECT_EQ(trained.state.parts.program->steps(), 4);
          EXPECT_EQ(all_of(trained), at_four) << place << " on " << world;
          if (rank.attempt == 2) rank.train(trained, 4, 7);
          for (int i = rank.attempt == 2 ? 7 : 4; i < 8; ++i) trained.step(i);
          EXPECT_EQ(all_of(trained), expected) << place << " on " << world;
        }
        Trained trained(comm, place, kHidden, kEvery);
        EXPECT_EQ(rank.load(trained), "kept snapshot of step 6 (memory)") << place << " on " << world;
      });
    }
  }
}

TEST(KeptSnapshot, ParametersThatStayFp32Continue) {
  const auto more = kEvery + R"(, "keep_fp32": "norm.*")";
  for (const int stage : {1, 3}) {
    TempFolder folder(TempFolder::On::Memory);
    const Launcher launcher(2);
    const auto place = R"({"stage": )" + std::to_string(stage) + R"(}, "bf16": {"enabled": true})";
    on_ranks(2, [&](const auto& comm) {
      Rank rank{comm, launcher, folder.text()};
      std::string expected;
      {
        Trained trained(comm, place, kHidden, more);
        for (int i = 0; i < 5; ++i) trained.step(i);
        expected = all_of(trained);
      }
      {
        Trained trained(comm, place, kHidden, more);
        rank.train(trained, 0, 4);
      }
      rank.attempt = 1;
      Trained trained(comm, place, kHidden, more);
      EXPECT_EQ(rank.load(trained), kOf4);
      EXPECT_EQ(trained.module->norm->weight.scalar_type(), at::kFloat);
      trained.step(4);
      EXPECT_EQ(all_of(trained), expected) << "stage " << stage;
    });
  }
}

TEST(KeptSnapshot, RandomNumbersContinue) {
  TempFolder folder(TempFolder::On::Memory);
  const Launcher launcher(1);
  on_ranks(1, [&](const auto& comm) {
    Rank rank{comm, launcher, folder.text()};
    at::manual_seed(7);
    at::Tensor expected;
    {
      Trained trained(comm, kPlaces[1], kHidden, kEvery);
      rank.train(trained, 0, 2);
      expected = at::rand({5});
    }
    rank.attempt = 1;
    Trained trained(comm, kPlaces[1], kHidden, kEvery);
    EXPECT_EQ(rank.load(trained), kOf2);
    EXPECT_TRUE(at::equal(at::rand({5}), expected));
  });
}

TEST(KeptSnapshot, TheNewerOfMemoryAndDiskIsLoaded) {
  for (const int saved : {1, 2, 4, 5}) {
    TempFolder folder;
    const Launcher launcher(2);
    on_ranks(2, [&](const auto& comm) {
      Rank rank{comm, launcher, folder.text()};
      std::string at_saved;
      {
        Trained trained(comm, kPlaces[1], kHidden, kEvery);
        rank.train(trained, 0, saved);
        checkpoint::save(trained.state, formats::system_files(), rank.root, "disk");
        EXPECT_EQ(checkpoint::finish_save(trained.state), "disk");
        at_saved = all_of(trained);
        rank.train(trained, saved, 5);
      }
      rank.attempt = 1;
      const bool newer = saved <= 4;
      Trained trained(comm, kPlaces[1], kHidden, kEvery);
      EXPECT_EQ(rank.load(trained), newer ? kOf4 : "disk") << saved;
      if (!newer) EXPECT_EQ(all_of(trained), at_saved);
    });
  }
}

// A tag that is asked for, an engine that has trained, and a snapshot of the same attempt: each time the run continues
// from the disk, and what was kept is of no run any more.
TEST(KeptSnapshot, ALoadFromDiskForgetsWhatWasKept) {
  for (const std::string how : {"tag", "trained", "same attempt"}) {
    TempFolder folder;
    const Launcher launcher(2);
    on_ranks(2, [&](const auto& comm) {
      Rank rank{comm, launcher, folder.text()};
      {
        Trained trained(comm, kPlaces[1], kHidden, kEvery);
        rank.train(trained, 0, 1);
        checkpoint::save(trained.state, formats::system_files(), rank.root, "disk");
        checkpoint::finish_save(trained.state);
        rank.train(trained, 1, 4);
      }
      rank.attempt = how == "same attempt" ? 0 : 1;
      {
        Trained trained(comm, kPlaces[1], kHidden, kEvery);
        if (how == "trained") trained.step(0);
        EXPECT_EQ(rank.load(trained, how == "tag" ? "disk" : ""), "disk") << how;
      }
      ++rank.attempt;
      Trained trained(comm, kPlaces[1], kHidden, kEvery);
      EXPECT_EQ(rank.load(trained), "disk") << how;
    });
  }
}

// Attempt 0 keeps steps 2 and 4, in slots 0 and 1, and has step 1 on disk. `spoil` is called between the attempts.
// Returns what attempt 1 loads; its state must be that of the step.
std::string loaded_after(
    const std::function<void(const Launcher&)>& spoil, const std::string& more = kEvery,
    const std::function<void(Rank&)>& change = [](Rank&) {}) {
  TempFolder folder;
  const Launcher launcher(2);
  std::string loaded;
  on_ranks(2, [&](const auto& comm) {
    Rank rank{comm, launcher, folder.text()};
    std::map<std::int64_t, std::string> states;
    {
      Trained trained(comm, kPlaces[1], kHidden, kEvery);
      for (int i = 0; i < 5; ++i) {
        rank.train(trained, i, i + 1);
        states[i + 1] = all_of(trained);
        if (i > 0) continue;
        checkpoint::save(trained.state, formats::system_files(), rank.root, "disk");
        checkpoint::finish_save(trained.state);
      }
    }
    comm->barrier();
    if (comm->rank() == 0) spoil(launcher);
    comm->barrier();
    rank.attempt = 1;
    change(rank);
    Trained trained(comm, kPlaces[1], kHidden, more);
    const auto name = rank.load(trained);
    EXPECT_EQ(all_of(trained), states.at(trained.state.parts.program->steps())) << name;
    if (comm->rank() == 0) loaded = name;
  });
  return loaded;
}

TEST(KeptSnapshot, DamageIsNeverLoaded) {
  EXPECT_EQ(loaded_after([](const auto&) {}), kOf4);
  for (const int rank : {0, 1})
    for (const auto at : {kHeader, kData}) {
      EXPECT_EQ(loaded_after([&](const auto& launcher) { launcher.flip(rank, 1, at); }), kOf2) << rank << " " << at;
      EXPECT_EQ(loaded_after([&](const auto& launcher) {
                  launcher.flip(rank, 1, at);
                  launcher.flip(1 - rank, 0, at);
                }),
                "disk")
          << rank << " " << at;
    }
}

// The whole slot of one rank, a bit in each of its pages.
TEST(KeptSnapshot, DamageAnywhereIsNeverLoaded) {
  for (std::uint64_t at = 5000; at < 60000; at += 5003) {
    const auto name = loaded_after([&](const auto& launcher) { launcher.flip(1, 1, at); });
    EXPECT_TRUE(name == kOf2 || name == kOf4) << name;  // between files there is nothing to damage
  }
}

TEST(KeptSnapshot, ARankWithoutItLeavesTheDisk) {
  const auto empty = [](int rank) {
    return [rank](const Launcher& launcher) {
      for (const int slot : {0, 1}) launcher.flip(rank, slot, kHeader);
    };
  };
  EXPECT_EQ(loaded_after(empty(0)), "disk");
  EXPECT_EQ(loaded_after(empty(1)), "disk");
}

TEST(KeptSnapshot, OfAnythingElseIsNotTaken) {
  const auto nothing = [](const Launcher&) {};
  EXPECT_EQ(loaded_after(nothing, R"(, "keep_snapshot_every": 3)"), "disk") << "another configuration";
  EXPECT_EQ(loaded_after(nothing, ""), "disk") << "not asked for";
  // Each rank finds the other's.
  EXPECT_EQ(loaded_after([](const Launcher& launcher) {
              auto& memory = const_cast<Launcher&>(launcher).memory;
              std::swap(memory[0], memory[1]);
            }),
            "disk");
  // Another run, and another directory of the same run.
  TempFolder folder;
  const Launcher launcher(1);
  on_ranks(1, [&](const auto& comm) {
    Rank rank{comm, launcher, folder.text() + "/a"};
    {
      Trained trained(comm, kPlaces[1], kHidden, kEvery);
      rank.train(trained, 0, 2);
    }
    const auto load = [&](const std::string& root, const std::string& run, std::int64_t attempt, std::int64_t hidden) {
      Trained trained(comm, kPlaces[1], hidden, kEvery);
      return code_of([&] {
        checkpoint::load(trained.state, formats::system_files(), root, "", {}, launcher.of(0, attempt, run));
      });
    };
    EXPECT_EQ(load(rank.root, "run", 1, kHidden), 0);
    EXPECT_EQ(load(rank.root + "/./", "run", 1, kHidden), 0);
    EXPECT_EQ(load(folder.text() + "/b", "run", 1, kHidden), kDamaged);
    EXPECT_EQ(load(rank.root, "other", 1, kHidden), kDamaged);
    EXPECT_EQ(load(rank.root, "run", 0, kHidden), kDamaged);
    EXPECT_EQ(load(rank.root, "run", 1, kHidden + 1), kDamaged) << "another model";
  });
}

// Nothing on disk: a damaged snapshot leaves a new engine as it was.
TEST(KeptSnapshot, DamageWithoutADiskLeavesTheEngineUsable) {
  TempFolder folder(TempFolder::On::Memory);
  const Launcher launcher(2);
  on_ranks(2, [&](const auto& comm) {
    Rank rank{comm, launcher, folder.text()};
    {
      Trained trained(comm, kPlaces[2], kHidden, kEvery);
      rank.train(trained, 0, 2);
    }
    comm->barrier();
    if (comm->rank() == 1) launcher.flip(1, 0, kData);
    comm->barrier();
    rank.attempt = 1;
    Trained trained(comm, kPlaces[2], kHidden, kEvery), other(comm, kPlaces[2], kHidden, kEvery);
    EXPECT_EQ(code_of([&] { rank.load(trained); }), kDamaged);
    trained.step(0);
    other.step(0);
    EXPECT_EQ(all_of(trained), all_of(other));
  });
}

// A write that fails at any call, on one rank, is a warning; the one before is loaded.
TEST(KeptSnapshot, AFillThatFailsLeavesTheOneBefore) {
  for (const int hit : {0, 1}) {
    bool through = false;
    int failed = 0;
    for (int k = 1; !through; k += 2) {
      TempFolder folder(TempFolder::On::Memory);
      const Launcher launcher(2);
      on_ranks(2, [&](const auto& comm) {
        Rank rank{comm, launcher, folder.text()};
        FaultyFiles files(FaultyFiles::Fault::Error, k, ENOSPC);
        {
          Trained trained(comm, kPlaces[1], kHidden, kEvery);
          rank.train(trained, 0, 2);
          trained.step(2);
          trained.step(3);
          rank.keep(trained, comm->rank() == hit ? static_cast<formats::FsOps&>(files) : formats::system_files());
          trained.step(4);
        }
        const bool struck = comm->all_gather_bytes(files.struck() ? "1" : "0")[static_cast<std::size_t>(hit)] == "1";
        rank.attempt = 1;
        Trained trained(comm, kPlaces[1], kHidden, kEvery);
        EXPECT_EQ(rank.load(trained), struck ? kOf2 : kOf4) << "call " << k;
        if (comm->rank() == 0) through = !struck;
      });
      failed += !through;
      ASSERT_LT(k, 100);
    }
    EXPECT_GT(failed, 2);
  }
}

// The next one takes the slot of the one that failed.
TEST(KeptSnapshot, ContinuesAfterAFillThatFailed) {
  TempFolder folder(TempFolder::On::Memory);
  const Launcher launcher(2);
  on_ranks(2, [&](const auto& comm) {
    Rank rank{comm, launcher, folder.text()};
    FaultyFiles files(FaultyFiles::Fault::Error, 3, ENOSPC);
    {
      Trained trained(comm, kPlaces[1], kHidden, kEvery);
      rank.train(trained, 0, 2);
      trained.step(2);
      trained.step(3);
      rank.keep(trained, comm->rank() == 1 ? static_cast<formats::FsOps&>(files) : formats::system_files());
      EXPECT_EQ(trained.state.parts.progress.kept_slot, 0);
      rank.train(trained, 4, 7);
      EXPECT_EQ(trained.state.parts.progress.kept_slot, 0) << "that of step 6 is not known to be complete";
      rank.train(trained, 7, 8);
      EXPECT_EQ(trained.state.parts.progress.kept_slot, 1);
    }
    rank.attempt = 1;
    Trained trained(comm, kPlaces[1], kHidden, kEvery);
    EXPECT_EQ(rank.load(trained), "kept snapshot of step 8 (memory)");
  });
}

// Updates, and whatever else changes states, while the writer is slow.
TEST(KeptSnapshot, HoldsTheStateOfItsCall) {
  OneIn part(3);
  for (const auto& place : kPlaces) {
    if (!part.take()) continue;
    TempFolder folder(TempFolder::On::Memory);
    const Launcher launcher(2);
    on_ranks(2, [&](const auto& comm) {
      for (const std::string change : {"steps", "scope", "state", "buffers", "save"}) {
        Rank rank{comm, launcher, folder.text() + "/" + change};
        std::string kept;
        SlowFiles slow(std::chrono::milliseconds(10));
        {
          Trained trained(comm, place, 600, kEvery);
          trained.step(0);
          trained.step(1);
          kept = all_of(trained);
          rank.keep(trained, slow);
          if (change == "steps") {
            trained.step(2);
            trained.step(3);
          } else if (change == "scope") {
            const auto groups = trained.state.scopes.begin({.all = true}, true);
            {
              const at::NoGradGuard no_grad;
              for (auto& p : trained.module->parameters()) p.fill_(0.5);
            }
            trained.state.scopes.end(groups, true);
          } else if (change == "state") {
            trained.state.states.set("middle.weight", "exp_avg", at::full({600, 600}, 7.0));
          } else if (change == "save") {
            checkpoint::save(trained.state, formats::system_files(), rank.root, "t");
            trained.step(2);
            checkpoint::finish_save(trained.state);
          } else {
            for (auto& b : trained.module->buffers()) b.fill_(9);
            trained.state.user_state = "later";
          }
        }
        rank.attempt = 1;
        Trained trained(comm, place, 600, kEvery);
        EXPECT_EQ(rank.load(trained), kOf2) << change << " " << place;
        EXPECT_EQ(trained.state.user_state, "after 2") << change;
        EXPECT_EQ(all_of(trained), kept) << change << " " << place;
      }
    });
  }
}

TEST(KeptSnapshot, BelongsToOneEngine) {
  TempFolder folder(TempFolder::On::Memory);
  const Launcher launcher(1);
  on_ranks(1, [&](const auto& comm) {
    Rank rank{comm, launcher, folder.text()};
    {
      Trained first(comm, kPlaces[1], kHidden, kEvery), second(comm, kPlaces[1], kHidden, kEvery);
      rank.train(first, 0, 2);
      std::string text;
      EXPECT_EQ(code_of([&] { rank.train(second, 0, 2); }, &text), static_cast<int>(ExitCode::kConfig));
      EXPECT_NE(text.find("another Engine"), std::string::npos) << text;
    }
    Trained later(comm, kPlaces[1], kHidden, kEvery);
    rank.train(later, 0, 2);
  });
}

TEST(KeptSnapshot, WithoutMemoryNothingIsKept) {
  TempFolder folder(TempFolder::On::Memory);
  on_ranks(2, [&](const auto& comm) {
    Trained trained(comm, kPlaces[1], kHidden, kEvery);
    trained.step(0);
    trained.step(1);
    checkpoint::keep_snapshot(trained.state, formats::system_files(), {}, folder.text());
    EXPECT_EQ(trained.state.parts.progress.kept, nullptr);
    EXPECT_EQ(code_of([&] { checkpoint::keep_snapshot(trained.state, formats::system_files(), {}, ""); }),
              static_cast<int>(ExitCode::kConfig));
    if (comm->rank() == 0) trained.state.user_state.assign(formats::kMostUserStateBytes + 1, 'x');
    EXPECT_EQ(code_of([&] { checkpoint::keep_snapshot(trained.state, formats::system_files(), {}, folder.text()); }),
              static_cast<int>(ExitCode::kConfig));
    EXPECT_EQ(code_of([&] { checkpoint::save(trained.state, formats::system_files(), folder.text(), "t"); }),
              static_cast<int>(ExitCode::kConfig));
    EXPECT_TRUE(std::filesystem::is_empty(folder.text()));
  });
}

}  // namespace
}  // namespace zero::test::kept_snapshot_test
