// Resuming from a checkpoint equals not having stopped, bit for bit: state, losses, loss scale, learning rate, random
// numbers, buffers. A checkpoint that is rejected leaves the engine unchanged.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>

#include <nlohmann/json.hpp>

#include "parity/training.h"
#include "support/folder.h"
#include "support/on_ranks.h"

namespace zero::test::resume_test {
namespace {
namespace fs = std::filesystem;

struct Trace {
  std::vector<double> losses, scales, rates, norms;
  std::string hash;
  std::map<std::string, at::Tensor> masters, buffers;
  std::int64_t steps = 0, skipped = 0;
  bool operator==(const Trace& other) const {
    return losses == other.losses && scales == other.scales && rates == other.rates && norms == other.norms &&
           hash == other.hash && equal_bits(masters, other.masters) && equal_bits(buffers, other.buffers) &&
           steps == other.steps && skipped == other.skipped;
  }
};

struct Rank {
  std::shared_ptr<torch::nn::Module> module;
  Engine engine;
  const Training& setup;
  const Problem& task;
  Rank(const Training& setup, const Problem& task, const std::shared_ptr<Communicator>& comm)
      : module(make_module(task)), engine(module, Options::from_json(json_of(setup)), comm), setup(setup), task(task) {}

  void micro(int step, int micro, Trace* trace) {
    const int rank = engine.communicator().rank();
    auto loss = loss_of(task, *module, rank, step * setup.accumulation + micro, dtype_of(setup));
    trace->losses.push_back(loss.item<double>());
    engine.backward(loss);
    const auto result = engine.step();
    if (micro + 1 < setup.accumulation) return;
    trace->norms.push_back(result.grad_norm);
    trace->rates.push_back(result.lr);
    trace->scales.push_back(result.loss_scale);
  }
  void run(int begin, int end, Trace* trace) {
    for (int step = begin; step < end; ++step)
      for (int m = 0; m < setup.accumulation; ++m) micro(step, m, trace);
  }
  void finish(Trace* trace) {
    trace->hash = engine.state_hash();
    trace->masters = engine.full_state_dict();
    for (const auto& item : module->named_buffers()) trace->buffers[item.key()] = item.value().clone();
    trace->steps = engine.global_step();
    trace->skipped = engine.skipped_steps();
  }
};

// Steps 0..stop, a checkpoint at `save_at`; every rank's trace of what came after it.
std::vector<Trace> straight(const Training& setup, const Problem& task, const fs::path& folder, int save_at, int stop) {
  std::vector<Trace> traces(static_cast<std::size_t>(setup.world));
  on_ranks(setup.world, [&](const auto& comm) {
    Rank rank(setup, task, comm);
    Trace before, after;
    rank.run(0, save_at, &before);
    rank.engine.set_user_state(R"({"next": 17, "text": "ü\n"})");
    rank.engine.save_checkpoint(folder, "at-" + std::to_string(save_at));
    rank.run(save_at, stop, &after);
    rank.finish(&after);
    traces[static_cast<std::size_t>(comm->rank())] = after;
  });
  return traces;
}

std::vector<Trace> resumed(const Training& setup, const Problem& task, const fs::path& folder, int save_at, int stop,
                           int warm_up = 0) {
  std::vector<Trace> traces(static_cast<std::size_t>(setup.world));
  on_ranks(setup.world, [&](const auto& comm) {
    Rank rank(setup, task, comm);
    Trace before, after;
    // Loading into an engine that has already trained replaces its state.
    rank.run(100, 100 + warm_up, &before);
    EXPECT_EQ(rank.engine.load_checkpoint(folder), "at-" + std::to_string(save_at));
    EXPECT_EQ(rank.engine.user_state(), R"({"next": 17, "text": "ü\n"})");
    EXPECT_EQ(rank.engine.global_step(), save_at);
    rank.run(save_at, stop, &after);
    rank.finish(&after);
    traces[static_cast<std::size_t>(comm->rank())] = after;
  });
  return traces;
}

void expect_equal(const std::vector<Trace>& got, const std::vector<Trace>& wanted, const std::string& label) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t r = 0; r < got.size(); ++r) {
    EXPECT_EQ(got[r].hash, wanted[r].hash) << label << " rank " << r;
    EXPECT_EQ(got[r].losses, wanted[r].losses) << label << " rank " << r;
    EXPECT_TRUE(got[r] == wanted[r]) << label << " rank " << r;
  }
}

const char* kSchedule =
    R"(, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 14, "warmup_num_steps": 6, "warmup_max_lr": 0.01}})";

class Resume : public ::testing::TestWithParam<std::tuple<int, const char*>> {};

TEST_P(Resume, EqualsARunThatNeverStopped) {
  const auto [world, recipe] = GetParam();
  for (int stage = 0; stage <= 3; ++stage) {
    TempFolder folder;
    Training setup;
    setup.world = world;
    setup.recipe = recipe;
    setup.stage = stage;
    setup.clip = 0.5;
    setup.extra = kSchedule;
    const auto& task = problem("gpt");
    const auto wanted = straight(setup, task, folder.path(), 5, 10);
    expect_equal(resumed(setup, task, folder.path(), 5, 10), wanted, "stage " + std::to_string(stage));
    if (stage == 3) expect_equal(resumed(setup, task, folder.path(), 5, 10, 3), wanted, "warm engine");
  }
}

INSTANTIATE_TEST_SUITE_P(Cells, Resume,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values("fp32", "bf16", "fp16")),
                         [](const auto& info) {
                           return "world" + std::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
                         });

TEST(ResumeAcross, EveryStageLoadsWhatEveryOtherSaved) {
  Training setup;
  setup.recipe = "bf16";
  const auto& task = problem("gpt");
  for (int from = 0; from <= 3; ++from) {
    TempFolder folder;
    setup.stage = from;
    const auto wanted = straight(setup, task, folder.path(), 3, 6);
    for (int to = 0; to <= 3; ++to) {
      setup.stage = to;
      expect_equal(resumed(setup, task, folder.path(), 3, 6), wanted,
                   std::to_string(from) + " to " + std::to_string(to));
    }
  }
}

TEST(ResumeAcross, EveryKindOfModel) {
  for (const char* name : {"frozen", "tiny", "batch_norm", "reused", "recurrent", "convolution"}) {
    for (const int stage : {0, 2, 3}) {
      TempFolder folder;
      Training setup;
      setup.stage = stage;
      setup.world = 3;
      const auto wanted = straight(setup, problem(name), folder.path(), 3, 6);
      expect_equal(resumed(setup, problem(name), folder.path(), 3, 6, 2), wanted,
                   std::string(name) + " stage " + std::to_string(stage));
    }
  }
}

TEST(ResumeAcross, EveryOptimizer) {
  for (const char* optimizer :
       {R"({"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": false, "weight_decay": 0.1}})",
        R"({"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": true}})",
        R"({"type": "SGD", "params": {"lr": 0.05}})", R"({"type": "Lion", "params": {"lr": 0.001}})",
        R"({"type": "Adagrad", "params": {"lr": 0.01}})"}) {
    TempFolder folder;
    Training setup;
    setup.optimizer = optimizer;
    setup.stage = 2;
    const auto wanted = straight(setup, problem("mlp"), folder.path(), 3, 6);
    expect_equal(resumed(setup, problem("mlp"), folder.path(), 3, 6), wanted, optimizer);
  }
}

// The loss scale overflows at first: it is halved before and after the checkpoint, and the
// hysteresis is partly used at the checkpoint.
TEST(ResumeAcross, TheLossScaleInTheMiddleOfItsSearch) {
  std::set<double> seen;
  for (int save_at = 1; save_at <= 6; ++save_at) {
    TempFolder folder;
    Training setup;
    setup.recipe = "fp16";
    setup.stage = 2;
    setup.clip = 0;
    const auto& task = problem("mlp");
    auto options = nlohmann::json::parse(json_of(setup));
    options["fp16"] = {{"enabled", true}, {"initial_scale_power", 24}, {"loss_scale_window", 3}, {"hysteresis", 2}};
    std::vector<Trace> traces[2];
    for (const int part : {0, 1}) {
      traces[part].resize(2);
      on_ranks(2, [&](const auto& comm) {
        auto module = make_module(task);
        Engine engine(module, Options::from_json(options.dump()), comm);
        auto& trace = traces[part][static_cast<std::size_t>(comm->rank())];
        if (part == 1) engine.load_checkpoint(folder.path());
        for (int step = part == 0 ? 0 : save_at; step < 20; ++step) {
          auto loss = loss_of(task, *module, comm->rank(), step, at::kHalf);
          engine.backward(loss);
          const auto result = engine.step();
          if (part == 0 && step + 1 == save_at) engine.save_checkpoint(folder.path(), "t");
          if (step < save_at) continue;
          trace.losses.push_back(loss.template item<double>());
          trace.scales.push_back(result.loss_scale);
        }
        trace.hash = engine.state_hash();
        trace.skipped = engine.skipped_steps();
      });
    }
    expect_equal(traces[1], traces[0], "saved after " + std::to_string(save_at));
    for (const double scale : traces[0][0].scales) seen.insert(scale);
    EXPECT_GT(traces[0][0].skipped, 2);
  }
  EXPECT_GE(seen.size(), 4u) << "the scale did not move";
}

struct Dropping : torch::nn::Module {
  torch::nn::Linear in{nullptr}, out{nullptr};
  Dropping() {
    in = register_module("in", torch::nn::Linear(8, 32));
    out = register_module("out", torch::nn::Linear(32, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return out(at::dropout(at::relu(in(x)), 0.5, true)); }
};

TEST(ResumeAcross, TheGeneratorOfRandomNumbers) {
  const Problem task{"dropping", [] { return std::make_shared<Dropping>(); },
                     [](torch::nn::Module& module, const at::Generator& g, at::ScalarType d) {
                       const auto x = at::randn({4, 8}, g, at::TensorOptions().dtype(at::kFloat)).to(d);
                       return dynamic_cast<Dropping&>(module).forward(x).to(at::kFloat).pow(2).mean();
                     }};
  for (const int stage : {0, 3}) {
    TempFolder folder;
    Training setup;
    setup.world = 1;  // ranks as threads would share the process's generator
    setup.stage = stage;
    torch::manual_seed(11);
    const auto wanted = straight(setup, task, folder.path(), 4, 8);
    torch::manual_seed(99);
    expect_equal(resumed(setup, task, folder.path(), 4, 8), wanted, "dropout");
    torch::manual_seed(99);
    Trace other;
    on_ranks(1, [&](const auto& comm) {
      Rank rank(setup, task, comm);
      rank.run(0, 4, &other);
    });
    EXPECT_NE(std::vector<double>(other.losses), wanted[0].losses);
  }
}

// --- refused checkpoints -----------------------------------------------------------------------

// Runs body on every rank; it must throw E with the same text on all. Returns the text.
template <class E>
std::string refused(int world, const std::function<void(const std::shared_ptr<Communicator>&)>& body, ExitCode code) {
  std::vector<std::string> texts(static_cast<std::size_t>(world));
  on_ranks(world, [&](const auto& comm) {
    auto& text = texts[static_cast<std::size_t>(comm->rank())];
    try {
      body(comm);
      ADD_FAILURE() << "rank " << comm->rank() << " was not refused";
    } catch (const E& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      text = e.what();
    }
  });
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(CheckpointRefuses, ALoadBetweenMicroBatches) {
  TempFolder folder;
  Training setup;
  setup.accumulation = 3;
  for (const int stage : {0, 3}) {
    setup.stage = stage;
    const auto text = refused<ConfigError>(
        2,
        [&](const auto& comm) {
          Rank rank(setup, problem("mlp"), comm);
          Trace trace;
          rank.micro(0, 0, &trace);
          rank.engine.load_checkpoint(folder.path());
        },
        ExitCode::kConfig);
    EXPECT_TRUE(contains(text, "1 of 3 micro-batches")) << text;
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(CheckpointRefuses, AMissingDirectoryOrTag) {
  TempFolder folder;
  Training setup;
  const auto load = [&](const fs::path& path, const std::string& tag) {
    return refused<IoError>(
        2, [&](const auto& comm) { Rank(setup, problem("mlp"), comm).engine.load_checkpoint(path, tag); },
        ExitCode::kCheckpoint);
  };
  EXPECT_TRUE(contains(load(folder.path() / "none", ""), "no such directory"));
  EXPECT_TRUE(contains(load(folder.path(), ""), "no complete checkpoint"));
  on_ranks(2,
           [&](const auto& comm) { Rank(setup, problem("mlp"), comm).engine.save_checkpoint(folder.path(), "here"); });
  const auto text = load(folder.path(), "there");
  EXPECT_TRUE(contains(text, "there are here")) << text;
}

TEST(CheckpointRefuses, BadAndDifferentTags) {
  TempFolder folder;
  Training setup;
  for (const char* tag : {"", "..", ".hidden", "a/b", "latest", "-x", "a b"})
    refused<ConfigError>(
        2, [&](const auto& comm) { Rank(setup, problem("mlp"), comm).engine.save_checkpoint(folder.path(), tag); },
        ExitCode::kConfig);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  const auto save = [&](const auto& comm) {
    Rank(setup, problem("mlp"), comm)
        .engine.save_checkpoint(folder.path(), "of-rank" + std::string(comm->rank() + 1, 'x'));
  };
  setup.extra = R"(, "checkpoint": {"tag_validation": "Fail"})";
  const auto text = refused<ConfigError>(2, save, ExitCode::kConfig);
  EXPECT_TRUE(contains(text, "\"of-rankxx\"") && contains(text, "\"of-rankx\"")) << text;
  EXPECT_TRUE(fs::is_empty(folder.path()));
  for (const char* rule : {"Warn", "Ignore"}) {
    setup.extra = std::string(R"(, "checkpoint": {"tag_validation": ")") + rule + "\"}";
    on_ranks(2, save);
    EXPECT_TRUE(fs::exists(folder.path() / "of-rankx" / "SUMS"));
    EXPECT_FALSE(fs::exists(folder.path() / "of-rankxx"));
    fs::remove_all(folder.path() / "of-rankx");
  }
}

TEST(CheckpointRefuses, AnotherModelOrOptimizer) {
  TempFolder folder;
  Training setup;
  on_ranks(2, [&](const auto& comm) { Rank(setup, problem("gpt"), comm).engine.save_checkpoint(folder.path(), "t"); });
  const auto load = [&](const char* model, const char* optimizer) {
    auto other = setup;
    other.optimizer = optimizer;
    return refused<ConfigError>(
        2,
        [&](const auto& comm) {
          Rank rank(other, problem(model), comm);
          const auto before = rank.engine.state_hash();
          try {
            rank.engine.load_checkpoint(folder.path());
          } catch (...) {
            EXPECT_EQ(rank.engine.state_hash(), before);
            throw;
          }
        },
        ExitCode::kConfig);
  };
  const char* adamw = R"({"type": "AdamW", "params": {"lr": 0.01}})";
  auto text = load("gpt", R"({"type": "SGD", "params": {"lr": 0.01}})");
  EXPECT_TRUE(contains(text, "AdamW") && contains(text, "SGD")) << text;
  text = load("aligned_gpt", adamw);
  EXPECT_TRUE(contains(text, "[29, 16]") && contains(text, "[32, 16]") && contains(text, "blocks.2") &&
              contains(text, "not in the model"))
      << text;
  text = load("mlp", adamw);
  EXPECT_TRUE(contains(text, "differences") && contains(text, "more")) << text;
}

// One damaged byte in one rank's file: every rank reports it, no rank has changed, and training continues.
TEST(CheckpointRefuses, ADamagedPartAndTheEngineStaysAsItWas) {
  TempFolder folder;
  Training setup;
  on_ranks(2, [&](const auto& comm) {
    Rank rank(setup, problem("mlp"), comm);
    Trace trace;
    rank.run(0, 3, &trace);
    rank.engine.save_checkpoint(folder.path(), "t");
  });
  const auto file = folder.path() / "t" / "rank-00001.safetensors";
  {
    std::fstream io(file, std::ios::in | std::ios::out | std::ios::binary);
    io.seekg(-100, std::ios::end);
    const auto at = io.tellg();
    const char byte = static_cast<char>(io.get() ^ 4);
    io.seekp(at);
    io.put(byte);
  }
  std::vector<std::string> hashes[2];
  for (const bool tried : {false, true}) {
    hashes[tried].resize(2);
    on_ranks(2, [&](const auto& comm) {
      Rank rank(setup, problem("mlp"), comm);
      Trace trace;
      rank.run(0, 2, &trace);
      if (tried) {
        try {
          rank.engine.load_checkpoint(folder.path());
          ADD_FAILURE() << "the damage was not seen";
        } catch (const IoError& e) {
          EXPECT_EQ(e.code(), ExitCode::kCheckpoint);
          EXPECT_TRUE(contains(e.what(), "rank-00001.safetensors") && contains(e.what(), "block at") &&
                      contains(e.what(), "offset"))
              << e.what();
        }
      }
      rank.run(2, 5, &trace);
      hashes[tried][static_cast<std::size_t>(comm->rank())] = rank.engine.state_hash();
    });
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST(CheckpointSave, ReplacesATagAndNamesTheLatest) {
  TempFolder folder;
  Training setup;
  std::string first, second;
  on_ranks(2, [&](const auto& comm) {
    Rank rank(setup, problem("mlp"), comm);
    Trace trace;
    rank.run(0, 2, &trace);
    rank.engine.save_checkpoint(folder.path() / "deep" / "er", "best");
    rank.run(2, 3, &trace);
    rank.engine.save_checkpoint(folder.path() / "deep" / "er", "other");
    rank.run(3, 4, &trace);
    rank.engine.save_checkpoint(folder.path() / "deep" / "er", "best");
    const auto now = rank.engine.state_hash();
    Rank fresh(setup, problem("mlp"), comm);
    EXPECT_EQ(fresh.engine.load_checkpoint(folder.path() / "deep" / "er"), "best");
    EXPECT_EQ(fresh.engine.state_hash(), now);
    EXPECT_EQ(fresh.engine.load_checkpoint(folder.path() / "deep" / "er", "other"), "other");
    EXPECT_EQ(fresh.engine.global_step(), 3);
    EXPECT_NE(fresh.engine.state_hash(), now);
  });
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path() / "deep" / "er")) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{".lock", "best", "latest", "other"}));
}

TEST(CheckpointSave, StoresTiedAndEqualTensorsOnce) {
  TempFolder folder;
  Training setup;
  setup.world = 3;
  on_ranks(3, [&](const auto& comm) {
    Rank(setup, problem("gpt"), comm).engine.save_checkpoint(folder.path(), "gpt");
    Rank bn(setup, problem("batch_norm"), comm);
    bn.engine.save_checkpoint(folder.path(), "equal");
    Trace trace;
    bn.run(0, 1, &trace);
    bn.engine.save_checkpoint(folder.path(), "own");
  });
  const auto manifest = [&](const char* tag) {
    return nlohmann::json::parse(std::ifstream(folder.path() / tag / "manifest.json"));
  };
  const auto count = [](const nlohmann::json& list, const std::string& kind, const std::string& name) {
    return std::count_if(list.begin(), list.end(),
                         [&](const auto& t) { return t["kind"] == kind && t["name"] == name; });
  };
  const auto gpt = manifest("gpt");
  ASSERT_EQ(gpt["aliases"].size(), 1u);
  const auto tied = gpt["aliases"].begin().key(), owner = gpt["aliases"].begin().value().get<std::string>();
  EXPECT_EQ(count(gpt["tensors"], "master", tied), 0);
  EXPECT_EQ(count(gpt["tensors"], "master", owner), 1);
  EXPECT_EQ(count(gpt["tensors"], "opt.exp_avg", owner), 1);
  EXPECT_EQ(count(manifest("equal")["tensors"], "buffer", "batch.running_mean"), 1);
  const auto own = manifest("own");
  EXPECT_EQ(count(own["tensors"], "buffer", "batch.running_mean"), 0);
  EXPECT_EQ(count(own["tensors"], "buffer", "batch.num_batches_tracked"), 1);
  ASSERT_EQ(own["ranks"].size(), 3u);
  for (const auto& rank : own["ranks"]) EXPECT_EQ(count(rank, "buffer", "batch.running_mean"), 1);
}

TEST(CheckpointSave, NothingThatIsNotFiniteReachesTheDisk) {
  TempFolder folder;
  Training setup;
  std::string text = refused<InternalError>(
      2,
      [&](const auto& comm) {
        Rank rank(setup, problem("mlp"), comm);
        rank.engine.save_checkpoint(folder.path(), "good");
        {
          auto scope = rank.engine.gathered_parameters(true);
          at::NoGradGuard no_grad;
          if (comm->rank() == 0) rank.module->parameters().back().fill_(std::numeric_limits<float>::quiet_NaN());
        }
        rank.engine.save_checkpoint(folder.path(), "bad");
      },
      ExitCode::kNumerical);
  EXPECT_TRUE(contains(text, "not finite")) << text;
  EXPECT_FALSE(fs::exists(folder.path() / "bad"));
  on_ranks(2, [&](const auto& comm) {
    EXPECT_EQ(Rank(setup, problem("mlp"), comm).engine.load_checkpoint(folder.path()), "good");
  });
}

}  // namespace
}  // namespace zero::test::resume_test
