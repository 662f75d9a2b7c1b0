// A checkpoint loads at any number of ranks and at any stage, with equal bits; files that an earlier version wrote
// load.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <mutex>
#include <sstream>

#include <zero/checkpoint_tools.h>

#include "formats/hash.h"
#include "formats/slices.h"
#include "parity/training.h"
#include "support/file_text.h"
#include "support/folder.h"
#include "support/on_ranks.h"
#include "support/process.h"

namespace zero::test::layouts_test {
namespace {
namespace fs = std::filesystem;

using States = std::map<std::string, at::Tensor>;

struct Trained {
  std::shared_ptr<torch::nn::Module> module;
  Engine engine;
  const Training& setup;
  const Problem& task;
  Trained(const Training& setup, const Problem& task, const std::shared_ptr<Communicator>& comm)
      : module(make_module(task)), engine(module, Options::from_json(json_of(setup)), comm), setup(setup), task(task) {}

  std::vector<double> train(int begin, int end) {
    std::vector<double> losses;
    for (int step = begin; step < end; ++step) {
      const auto loss = loss_of(task, *module, engine.communicator().rank(), step, dtype_of(setup));
      losses.push_back(loss.item<double>());
      engine.backward(loss);
      engine.step();
    }
    return losses;
  }
  // [collective] Whole states of all trained parameters, the values of frozen ones, and shared buffers.
  States states() {
    States all;
    for (const auto& item : module->named_parameters()) {
      all["master of " + item.key()] = engine.parameter_state(item.key(), "master").clone();
      if (!item.value().requires_grad()) continue;
      for (const char* slot : {"exp_avg", "exp_avg_sq"})
        all[std::string(slot) + " of " + item.key()] = engine.parameter_state(item.key(), slot).clone();
    }
    return all;
  }
};

Training setup_of(int world, int stage, const std::string& recipe) {
  Training setup;
  setup.world = world;
  setup.stage = stage;
  setup.recipe = recipe;
  setup.clip = 0.5;
  return setup;
}

// Trains some steps at `world` ranks and saves; returns the states.
States saved(const Problem& task, const Training& setup, const fs::path& folder) {
  States states;
  on_ranks(setup.world, [&](const auto& comm) {
    Trained run(setup, task, comm);
    run.train(0, 3);
    run.engine.save_checkpoint(folder, "t");
    auto found = run.states();
    if (comm->rank() == 0) states = std::move(found);
  });
  return states;
}

// --- any number of ranks --------------------------------------------------------------------------

TEST(Layouts, EveryPairHasEqualStates) {
  struct Pair {
    const char* problem;
    int from, to;
  };
  int count = 0;
  for (const auto& [problem_name, from, to] : std::vector<Pair>{{"gpt", 1, 2},
                                                                {"gpt", 2, 1},
                                                                {"gpt", 2, 3},
                                                                {"gpt", 3, 2},
                                                                {"frozen", 4, 2},
                                                                {"frozen", 1, 3},
                                                                {"tiny", 3, 8},
                                                                {"tiny", 8, 3},
                                                                {"batch_norm", 2, 3}}) {
    const TempFolder folder;
    const auto recipe = count % 3 == 1 ? "bf16" : "fp32";
    const auto& task = problem(problem_name);
    const auto wanted = saved(task, setup_of(from, count % 4, recipe), folder.path());
    const auto setup = setup_of(to, 3 - count % 4, recipe);
    const auto label = std::string(problem_name) + " " + std::to_string(from) + " to " + std::to_string(to);
    on_ranks(to, [&](const auto& comm) {
      Trained run(setup, task, comm);
      if (count % 2 == 0) run.train(50, 52);  // into an engine that has trained
      run.engine.load_checkpoint(folder.path());
      EXPECT_EQ(run.engine.global_step(), 3) << label;
      std::string first;
      EXPECT_TRUE(equal_bits(run.states(), wanted, &first)) << label << ": " << first;
      // 16-bit parameters are the rounded masters.
      for (const auto& item : run.module->named_parameters()) {
        const auto scope = run.engine.gathered_parameters({item.key()});
        const auto& master = wanted.at("master of " + item.key());
        EXPECT_TRUE(item.value().equal(master.to(item.value().scalar_type()))) << label << ": " << item.key();
      }
    });
    ++count;
  }
}

// Without a step between them, loads and saves at other numbers of ranks change nothing.
TEST(Layouts, AChainOfLoadsAndSaves) {
  for (const int stage : {1, 3}) {
    const auto& task = problem("gpt");
    const TempFolder first;
    saved(task, setup_of(2, stage, "bf16"), first.path());
    const TempFolder at_4, at_1, at_2;
    const auto pass_on = [&](int world, const fs::path& from, const fs::path& to) {
      const auto setup = setup_of(world, 3 - stage, "bf16");
      on_ranks(world, [&](const auto& comm) {
        Trained run(setup, task, comm);
        run.engine.load_checkpoint(from);
        run.engine.save_checkpoint(to, "t");
      });
    };
    pass_on(4, first.path(), at_4.path());
    pass_on(1, at_4.path(), at_1.path());
    pass_on(2, at_1.path(), at_2.path());
    const auto digest = checkpoint_digest(first.path());
    for (const auto* folder : {&at_4, &at_1, &at_2}) EXPECT_EQ(checkpoint_digest(folder->path()), digest);
    // A run at any number of ranks continues with equal bits from each of them: also that which never changed.
    for (const int world : {2, 3}) {
      std::vector<std::pair<std::vector<double>, std::string>> found;
      for (const auto* folder : {&first, &at_4, &at_1, &at_2}) {
        const auto setup = setup_of(world, stage, "bf16");
        on_ranks(world, [&](const auto& comm) {
          Trained run(setup, task, comm);
          run.engine.load_checkpoint(folder->path());
          const auto losses = run.train(3, 23);
          const auto hash = run.engine.state_hash();
          if (comm->rank() == 0) found.emplace_back(losses, hash);
        });
        EXPECT_EQ(found.back(), found.front()) << world << " ranks, stage " << stage;
      }
    }
    on_ranks(2, [&](const auto& comm) {
      const auto setup = setup_of(2, stage, "bf16");
      Trained never(setup, task, comm), loaded(setup, task, comm);
      never.train(0, 3);
      loaded.engine.load_checkpoint(at_2.path());
      EXPECT_EQ(never.train(3, 23), loaded.train(3, 23));
      EXPECT_EQ(never.engine.state_hash(), loaded.engine.state_hash());
    });
  }
}

std::uint64_t mixed(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9U;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

// The digest, by a plain loop over whole states.
TEST(Layouts, TheDigestOfAModel) {
  const TempFolder folder;
  const auto states = saved(problem("tiny"), setup_of(3, 2, "fp32"), folder.path());
  unsigned __int128 sum = 0;
  for (const auto& [key, values] : states) {
    const auto of = key.find(" of ");
    const auto kind = key.substr(0, of);
    const auto hash = formats::hash_of((kind == "master" ? "" : "opt.") + kind + "/" + key.substr(of + 4));
    const auto a = std::stoull(hash.substr(0, 16), nullptr, 16), b = std::stoull(hash.substr(16), nullptr, 16);
    const auto flat = values.contiguous();
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, flat.const_data_ptr<float>() + i, 4);
      const auto place = static_cast<std::uint64_t>(i);
      sum += (static_cast<unsigned __int128>(mixed(mixed(b + place) ^ bits)) << 64) + mixed(mixed(a + place) ^ bits);
    }
  }
  std::ostringstream wanted;
  wanted << std::hex << std::setfill('0') << std::setw(16) << static_cast<std::uint64_t>(sum >> 64) << std::setw(16)
         << static_cast<std::uint64_t>(sum);
  EXPECT_EQ(checkpoint_digest(folder.path()), wanted.str());
}

// Running statistics differ between ranks: rank r takes those of rank r mod the number of ranks that saved.
TEST(Layouts, BuffersThatDifferBetweenRanks) {
  const TempFolder folder;
  const auto& task = problem("batch_norm");
  std::vector<States> of_ranks(2);
  const auto buffers_of = [](const Trained& run) {
    States buffers;
    for (const auto& item : run.module->named_buffers()) buffers[item.key()] = item.value().clone();
    return buffers;
  };
  on_ranks(2, [&](const auto& comm) {
    const auto setup = setup_of(2, 2, "fp32");
    Trained run(setup, task, comm);
    run.train(0, 3);
    run.engine.save_checkpoint(folder.path(), "t");
    of_ranks[static_cast<std::size_t>(comm->rank())] = buffers_of(run);
  });
  EXPECT_FALSE(equal_bits(of_ranks[0], of_ranks[1]));
  for (const int world : {1, 5})
    on_ranks(world, [&](const auto& comm) {
      const auto setup = setup_of(world, 2, "fp32");
      Trained run(setup, task, comm);
      run.engine.load_checkpoint(folder.path());
      EXPECT_TRUE(equal_bits(buffers_of(run), of_ranks[static_cast<std::size_t>(comm->rank()) % 2])) << comm->rank();
    });
}

TEST(Layouts, TheRuleOfBuffersThatDiffer) {
  const TempFolder folder;
  const auto& task = problem("batch_norm");
  std::vector<States> of_ranks(3);
  const auto buffers_of = [](const Trained& run) {
    States buffers;
    for (const auto& item : run.module->named_buffers()) buffers[item.key()] = item.value().clone();
    return buffers;
  };
  on_ranks(3, [&](const auto& comm) {
    const auto setup = setup_of(3, 1, "fp32");
    Trained run(setup, task, comm);
    run.train(0, 3);
    run.engine.save_checkpoint(folder.path(), "t");
    of_ranks[static_cast<std::size_t>(comm->rank())] = buffers_of(run);
  });
  for (const char* rule : {"rank0", "mean", "error"}) {
    for (const int world : {2, 3}) {
      auto setup = setup_of(world, 1, "fp32");
      setup.extra = std::string(R"(, "libzero": {"private_buffers": ")") + rule + "\"}";
      on_ranks(world, [&](const auto& comm) {
        Trained run(setup, task, comm);
        if (world == 2 && std::string(rule) == "error") {
          try {
            run.engine.load_checkpoint(folder.path());
            ADD_FAILURE() << "loaded";
          } catch (const ConfigError& e) {
            EXPECT_NE(std::string(e.what()).find("running_mean"), std::string::npos) << e.what();
          }
          return;
        }
        run.engine.load_checkpoint(folder.path());
        const auto got = buffers_of(run);
        // At the number of ranks that saved, each takes its own.
        if (world == 3) {
          EXPECT_TRUE(equal_bits(got, of_ranks[static_cast<std::size_t>(comm->rank())]));
          return;
        }
        for (const auto& [name, values] : got) {
          auto wanted = of_ranks[0].at(name);
          if (std::string(rule) == "mean" && wanted.is_floating_point())
            wanted = ((wanted.to(at::kDouble) + of_ranks[1].at(name) + of_ranks[2].at(name)) / 3).to(at::kFloat);
          EXPECT_TRUE(values.equal(wanted)) << rule << ": " << name;
        }
      });
    }
  }
}

// --- the live engine ------------------------------------------------------------------------------

TEST(Layouts, TheLogicalHashIsThatOfACheckpoint) {
  for (const char* name : {"tiny", "frozen", "batch_norm"}) {
    std::string hash;
    const TempFolder first;
    for (const int world : {2, 1, 3}) {
      const TempFolder folder;
      on_ranks(world, [&](const auto& comm) {
        const auto setup = setup_of(world, world, std::string(name) == "tiny" ? "bf16" : "fp32");
        Trained run(setup, problem(name), comm);
        if (world == 2) {
          run.train(0, 2);
          run.engine.save_checkpoint(first.path(), "t");
        } else {
          run.engine.load_checkpoint(first.path());
        }
        const auto live = run.engine.logical_hash();
        run.engine.save_checkpoint(folder.path(), "t");
        EXPECT_EQ(live, checkpoint_digest(folder.path())) << name << " on " << world;
        // Running statistics of one rank alone are shared, of several private.
        if (std::string(name) != "batch_norm") EXPECT_TRUE(hash.empty() || live == hash) << name << " on " << world;
        if (comm->rank() == 0) hash = live;
        comm->barrier();
        run.train(2, 3);
        EXPECT_NE(run.engine.logical_hash(), live);
      });
    }
  }
}

// 3 steps of 2 ranks with 2 samples, 2 steps of 3 ranks with 2 x 2, and an evaluation, which does not count.
TEST(Layouts, SamplesAreCountedOverResumes) {
  const TempFolder folder;
  saved(problem("tiny"), setup_of(2, 1, "fp32"), folder.path());
  auto setup = setup_of(3, 0, "fp32");
  setup.accumulation = 2;
  on_ranks(3, [&](const auto& comm) {
    Trained run(setup, problem("tiny"), comm);
    EXPECT_EQ(run.engine.global_samples(), 0);
    run.engine.load_checkpoint(folder.path());
    EXPECT_EQ(run.engine.global_samples(), 3 * 2 * 2);
    run.train(3, 7);  // 4 micro-batches
    EXPECT_EQ(run.engine.global_step(), 5);
    EXPECT_EQ(run.engine.global_samples(), 3 * 2 * 2 + 2 * 3 * 2 * 2);
    run.engine.save_checkpoint(folder.path(), "u");
    Trained other(setup, problem("tiny"), comm);
    other.engine.load_checkpoint(folder.path());
    EXPECT_EQ(other.engine.global_samples(), 36);
  });
}

// The same states; the numbers after it are the other optimizer's.
TEST(Layouts, AdamTakesTheStatesOfAdamW) {
  const TempFolder folder;
  const auto wanted = saved(problem("tiny"), setup_of(2, 1, "fp32"), folder.path());
  auto setup = setup_of(2, 2, "fp32");
  setup.optimizer = R"({"type": "Adam", "params": {"lr": 0.01}})";
  on_ranks(2, [&](const auto& comm) {
    Trained run(setup, problem("tiny"), comm);
    run.engine.load_checkpoint(folder.path());
    EXPECT_TRUE(equal_bits(run.states(), wanted));
    run.train(3, 4);
  });
}

// Frozen parameters are written once, and again when they have changed.
TEST(Layouts, FrozenParametersAreLinked) {
  const TempFolder folder;
  on_ranks(2, [&](const auto& comm) {
    const auto setup = setup_of(2, 3, "bf16");
    Trained run(setup, problem("frozen"), comm);
    const auto save = [&](const char* tag) {
      run.train(0, 1);
      run.engine.save_checkpoint(folder.path(), tag);
      comm->barrier();
    };
    save("a");
    save("b");
    save("b");
    {
      const auto scope = run.engine.gathered_parameters(true);
      const at::NoGradGuard no_grad;
      for (auto& item : run.module->named_parameters())
        if (!item.value().requires_grad()) item.value().add_(1);
    }
    save("c");
  });
  const auto file = [&](const char* tag) { return folder.path() / tag / "frozen-00001.safetensors"; };
  ASSERT_TRUE(fs::exists(file("a")));
  EXPECT_TRUE(fs::equivalent(file("a"), file("b")));
  EXPECT_EQ(fs::hard_link_count(file("a")), 2u);
  EXPECT_FALSE(fs::equivalent(file("b"), file("c")));
  std::vector<States> states;
  for (const char* tag : {"a", "b", "c"})
    on_ranks(3, [&](const auto& comm) {
      const auto setup = setup_of(3, 0, "bf16");
      Trained run(setup, problem("frozen"), comm);
      run.engine.load_checkpoint(folder.path(), tag);
      auto all = run.states();
      if (comm->rank() == 0) states.push_back(std::move(all));
    });
  int frozen = 0;
  for (const auto& item : make_module(problem("frozen"))->named_parameters()) {
    if (item.value().requires_grad()) continue;
    ++frozen;
    const auto name = "master of " + item.key();
    EXPECT_TRUE(states[0].at(name).equal(states[1].at(name)));
    EXPECT_FALSE(states[1].at(name).equal(states[2].at(name)));
  }
  EXPECT_GT(frozen, 0);
}

// --- damage ---------------------------------------------------------------------------------------

// A byte of the newest checkpoint is another: without a tag the one before is loaded, with its tag the load fails.
TEST(Layouts, DamageInTheNewest) {
  const TempFolder folder;
  const auto& task = problem("tiny");
  const auto setup = setup_of(4, 3, "fp32");
  States older;
  on_ranks(4, [&](const auto& comm) {
    Trained run(setup, task, comm);
    run.train(0, 2);
    run.engine.save_checkpoint(folder.path(), "older");
    auto states = run.states();
    if (comm->rank() == 0) older = std::move(states);
    run.train(2, 4);
    run.engine.save_checkpoint(folder.path(), "newest");
  });
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder.path() / "newest")) files.push_back(entry.path());
  ASSERT_EQ(files.size(), 7u);
  for (const auto& file : files) {
    const auto good = file_text(file.string());
    for (const double place : {0.0, 0.3, 0.6, 0.999}) {
      auto bad = good;
      bad[static_cast<std::size_t>(place * static_cast<double>(bad.size()))] ^= 4;
      std::ofstream(file, std::ios::binary) << bad;
      const auto label = file.filename().string() + " at " + std::to_string(place);
      std::string told;  // warnings
      std::mutex mutex;
      set_log_sink([&](LogLevel level, std::string_view line) {
        const std::lock_guard lock(mutex);
        if (level == LogLevel::Warning) told += std::string(line) + "\n";
      });
      on_ranks(4, [&](const auto& comm) {
        Trained run(setup, task, comm);
        run.train(50, 51);
        try {
          run.engine.load_checkpoint(folder.path(), "newest");
          ADD_FAILURE() << label << " was not noticed";
        } catch (const IoError& e) {
          EXPECT_EQ(e.code(), ExitCode::kCheckpoint) << e.what();
          EXPECT_NE(std::string(e.what()).find("newest/"), std::string::npos) << e.what();
        }
        EXPECT_EQ(run.engine.load_checkpoint(folder.path()), "older") << label;
        EXPECT_EQ(run.engine.global_step(), 2) << label;
        EXPECT_TRUE(equal_bits(run.states(), older)) << label;
      });
      set_log_sink(nullptr);
      // The file, and where data are damaged: these files are one block of 256 KiB.
      const auto at = told.find("skipped newest: ");
      ASSERT_NE(at, std::string::npos) << label << ": " << told;
      const auto line = told.substr(at, told.find('\n', at) - at);
      EXPECT_NE(line.find(file.string() + ": "), std::string::npos) << label << ": " << line;
      if (label.starts_with("rank-"))
        EXPECT_NE(line.find(file.string() + ": the block at offset 0 has the hash "), std::string::npos) << line;
    }
    std::ofstream(file, std::ios::binary) << good;
  }
  // Both are damaged: the error has the fault of each.
  for (const char* tag : {"older", "newest"}) {
    const auto file = folder.path() / tag / "rank-00002.safetensors";
    auto bad = file_text(file.string());
    bad[bad.size() - 3] ^= 1;
    std::ofstream(file, std::ios::binary) << bad;
  }
  on_ranks(4, [&](const auto& comm) {
    Trained run(setup, task, comm);
    const auto before = run.engine.state_hash();
    try {
      run.engine.load_checkpoint(folder.path());
      ADD_FAILURE() << "a damaged checkpoint was loaded";
    } catch (const IoError& e) {
      for (const char* tag : {"skipped older", "skipped newest"})
        EXPECT_NE(std::string(e.what()).find(tag), std::string::npos) << e.what();
    }
    EXPECT_EQ(run.engine.state_hash(), before);
    run.train(0, 1);
  });
}

// --- orders of elements ---------------------------------------------------------------------------

// Every element of a tensor has one place in each order, whatever the cuts are.
TEST(Layouts, RunsBetweenCuts) {
  using formats::Box;
  using Slices = std::vector<std::vector<Box>>;
  const std::vector<std::int64_t> shape{6, 4, 3};
  const auto cut = [&](std::size_t dim, const std::vector<std::vector<std::pair<int, int>>>& ranges) {
    Slices slices;
    for (const auto& slice : ranges) {
      slices.emplace_back();
      for (const auto& [begin, end] : slice) {
        Box box{{0, 0, 0}, shape};
        box.start[dim] = begin;
        box.size[dim] = end - begin;
        slices.back().push_back(box);
      }
    }
    return slices;
  };
  const std::vector<Slices> cuts{{},
                                 cut(0, {{{0, 3}}, {{3, 6}}}),
                                 cut(0, {{{0, 1}, {3, 4}}, {{1, 3}, {4, 6}}}),
                                 cut(1, {{{0, 1}}, {{1, 4}}}),
                                 cut(2, {{{0, 2}}, {{2, 3}}}),
                                 cut(2, {{{0, 1}}, {{1, 2}}, {{2, 3}}})};
  // By a plain loop: the row-major number of the element at each place.
  const auto order = [&](const Slices& slices) {
    std::vector<std::int64_t> numbers;
    const auto add = [&](const Box& box) {
      for (auto i = box.start[0]; i < box.start[0] + box.size[0]; ++i)
        for (auto j = box.start[1]; j < box.start[1] + box.size[1]; ++j)
          for (auto k = box.start[2]; k < box.start[2] + box.size[2]; ++k) numbers.push_back((i * 4 + j) * 3 + k);
    };
    if (slices.empty()) add({{0, 0, 0}, shape});
    for (const auto& slice : slices)
      for (const auto& box : slice) add(box);
    return numbers;
  };
  for (const auto& wanted : cuts)
    for (const auto& stored : cuts)
      for (const auto& [begin, end] : std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 72}, {5, 31}, {70, 72}}) {
        const auto a = order(wanted), b = order(stored);
        std::vector<int> seen(72);
        std::int64_t last = 0;
        for (const auto& run : formats::runs_between(shape, wanted, stored, begin, end)) {
          EXPECT_GE(run.stored, last);
          last = run.stored + run.numel;
          for (std::int64_t i = 0; i < run.numel; ++i) {
            const auto place = static_cast<std::size_t>(run.wanted + i);
            EXPECT_EQ(a.at(place), b.at(static_cast<std::size_t>(run.stored + i)));
            ++seen[place];
          }
        }
        for (std::int64_t i = 0; i < 72; ++i)
          EXPECT_EQ(seen[static_cast<std::size_t>(i)], i >= begin && i < end ? 1 : 0);
      }
  const auto scalar = formats::runs_between({}, {}, {{Box{}}}, 0, 1);  // no dimension to cut along
  ASSERT_EQ(scalar.size(), 1u);
  EXPECT_TRUE(scalar[0].wanted == 0 && scalar[0].stored == 0 && scalar[0].numel == 1);
}

// --- old files ------------------------------------------------------------------------------------

// Files of format 1 in the tree, with a hash of every state. They are never written again.
TEST(Layouts, GoldenFilesOfEveryFormat) {
  for (const auto& [name, recipe] :
       std::vector<std::pair<std::string, std::string>>{{"frozen", "bf16"}, {"batch_norm", "fp32"}, {"tiny", "fp16"}}) {
    for (const char* format : {"checkpoint-1", "checkpoint-2"}) {
      const auto folder = fs::path(ZERO_SOURCE_DIR) / "tests/golden" / format / name;
      const auto hashes = [](const States& states) {
        std::string text;
        for (const auto& [key, values] : states)
          text += formats::hash_of(values.contiguous().const_data_ptr(), values.nbytes()) + " " + key + "\n";
        return text;
      };
      // Of the current format alone.
      if (std::getenv("ZERO_WRITE_GOLDEN") != nullptr && !fs::exists(folder)) {
        ASSERT_STREQ(format, "checkpoint-2") << "files of an earlier format cannot be written";
        fs::create_directories(folder);
        const auto text = hashes(saved(problem(name), setup_of(2, 2, recipe), folder));
        std::ofstream(folder / "hashes.txt") << text;
        fs::remove(folder / ".lock");
      }
      for (const int world : {1, 2, 3}) {
        const TempFolder copy;  // loads take no lock, but a test changes nothing in the tree
        fs::copy(folder, copy.path(), fs::copy_options::recursive);
        on_ranks(world, [&](const auto& comm) {
          const auto setup = setup_of(world, 3, recipe);
          Trained run(setup, problem(name), comm);
          EXPECT_EQ(run.engine.load_checkpoint(copy.path()), "t");
          EXPECT_EQ(hashes(run.states()), file_text((folder / "hashes.txt").string()))
              << format << ", " << name << ", " << world << " ranks";
        });
      }
    }
  }
}

// Format 1 has hashes of whole parts.
TEST(Layouts, DamageInFormat1) {
  const TempFolder copy;
  fs::copy(fs::path(ZERO_SOURCE_DIR) / "tests/golden/checkpoint-1/tiny", copy.path(), fs::copy_options::recursive);
  const auto file = copy.path() / "t/rank-00001.safetensors";
  auto bad = file_text(file.string());
  bad[bad.size() - 5200] ^= 1;  // before the random numbers of rank 1, which nobody reads
  std::ofstream(file, std::ios::binary) << bad;
  on_ranks(1, [&](const auto& comm) {
    const auto setup = setup_of(1, 1, "fp16");
    Trained run(setup, problem("tiny"), comm);
    try {
      run.engine.load_checkpoint(copy.path());
      ADD_FAILURE() << "a damaged checkpoint was loaded";
    } catch (const IoError& e) {
      EXPECT_EQ(e.code(), ExitCode::kCheckpoint);
      for (const char* text : {"rank-00001.safetensors", "key ", "offset "})
        EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  });
}

}  // namespace
}  // namespace zero::test::layouts_test
