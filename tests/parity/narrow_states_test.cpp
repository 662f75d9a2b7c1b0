// Masters and optimizer states of 16 and 8 bits: the bits of a plain loop that rounds to the nearest; with stochastic
// rounding the same bits at every stage, on every tier and after a resume, losses near those of fp32 states, and the
// bytes of the formula.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <zero/update_rule.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "parity/training.h"
#include "support/blocks8_reference.h"
#include "support/folder.h"

namespace zero::test::narrow_states_test {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

constexpr const char* kMasters = R"(, "bf16_master_weights_and_grads": true)";
constexpr const char* kBoth = R"(, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true)";
constexpr const char* kHalfMasters = R"(, "fp16_master_weights_and_grads": true)";
constexpr const char* kStates16 =
    R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.05, "state_bits": 16}})";
constexpr const char* kStates8 = R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.05, "state_bits": 8}})";
constexpr const char* kNearest = R"(, "libzero": {"stochastic_rounding": false})";

struct Recipe {
  const char* name;
  const char* recipe;
  const char* block;
  const char* optimizer;
  int bits;                                                                             // of a state
  bool has_masters() const { return *block == '\0' && std::string(recipe) != "fp32"; }  // of its own
};
constexpr const char* kAdamW = R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.05}})";
const Recipe kRecipes[] = {{"bf16 masters", "bf16", kMasters, kAdamW, 32},
                           {"bf16 masters and states", "bf16", kBoth, kAdamW, 16},
                           {"fp16 masters", "fp16", kHalfMasters, kAdamW, 32},
                           {"fp32 masters, bf16 states", "bf16", "", kStates16, 16},
                           {"fp32 parameters, bf16 states", "fp32", "", kStates16, 16},
                           {"fp32 masters, 8-bit states", "bf16", "", kStates8, 8},
                           {"fp32 parameters, 8-bit states", "fp32", "", kStates8, 8},
                           {"bf16 masters, 8-bit states", "bf16", kMasters, kStates8, 8}};

Training setup_of(const Recipe& recipe, int stage, int world = 2) {
  Training setup;
  setup.recipe = recipe.recipe;
  setup.block = recipe.block;
  setup.optimizer = recipe.optimizer;
  setup.stage = stage;
  setup.world = world;
  setup.steps = 5;
  setup.clip = 0.1;
  return setup;
}

TEST(NarrowStates, EveryStageHasTheSameBits) {
  for (const auto& recipe : kRecipes)
    for (const int world : {1, 2, 3}) {
      const auto wanted = train_threads(setup_of(recipe, 0, world));
      for (int stage = 1; stage <= 3; ++stage) {
        const auto run = train_threads(setup_of(recipe, stage, world));
        EXPECT_EQ(run.hash, wanted.hash) << recipe.name << ", world " << world << ", stage " << stage;
        EXPECT_EQ(run.losses, wanted.losses);
        EXPECT_TRUE(equal_bits(run.masters, wanted.masters));
      }
    }
}

TEST(NarrowStates, EveryTierHasTheSameBits) {
  const TempFolder folder;
  const auto on = [&](const char* block, const char* device, const char* more) {
    return std::string(", \"") + block + R"(": {"device": ")" + device + R"(", "nvme_path": ")" + folder.text() + "\"" +
           more + "}";
  };
  for (const auto& recipe : kRecipes) {
    for (const int stage : {1, 3}) {
      const auto wanted = train_threads(setup_of(recipe, stage));
      for (const auto& zero :
           {on("offload_optimizer", "cpu", ""), on("offload_optimizer", "nvme", ""),
            on("offload_optimizer", "nvme", R"(, "ratio": 0.3, "buffer_count": 4)") + R"(, "sub_group_size": 0)",
            on("offload_optimizer", "nvme", "") + on("offload_param", "nvme", R"(, "max_in_cpu": 0)")}) {
        if (stage == 1 && zero.find("offload_param") != std::string::npos) continue;
        auto setup = setup_of(recipe, stage);
        setup.zero = zero;
        const auto run = train_threads(setup);
        EXPECT_EQ(run.hash, wanted.hash) << recipe.name << ", stage " << stage << zero;
        EXPECT_EQ(run.losses, wanted.losses);
      }
    }
    // The update of a step in the background.
    auto late = setup_of(recipe, 2);
    late.zero = on("offload_optimizer", "cpu", "") + R"(, "delayed_update": {"enabled": true, "start_step": 1})";
    const auto two = train_threads(late);
    late.stage = 3;
    EXPECT_EQ(train_threads(late).hash, two.hash) << recipe.name;
  }
}

// A state as it is stored, in fp32.
at::Tensor stored(const at::Tensor& state, int bits, bool has_sign) {
  if (bits == 32) return state;
  if (bits == 16) return state.to(at::kBFloat16).to(at::kFloat);
  const Blocks8Reference reference(has_sign);
  const auto rounded = state.contiguous().clone();
  auto* const values = rounded.mutable_data_ptr<float>();
  constexpr std::int64_t kBlock = 256;
  for (std::int64_t begin = 0; begin < rounded.numel(); begin += kBlock) {
    const auto end = std::min(begin + kBlock, rounded.numel());
    float maximum = 0;
    for (auto i = begin; i < end; ++i) maximum = std::max(maximum, std::fabs(values[i]));
    if (maximum < 0x1p-96f) maximum = 0;
    for (auto i = begin; i < end; ++i)
      values[i] = maximum == 0 ? 0 : reference.value(reference.code(values[i], maximum), maximum);
  }
  return rounded;
}

// Gradients of one rank, and libtorch's fused AdamW on fp32 copies; what is stored is rounded to the nearest.
TEST(NarrowStates, ToTheNearestIsALoopOfLibtorch) {
  for (const auto& recipe : kRecipes) {
    auto setup = setup_of(recipe, 2, 1);
    setup.problem = "padded_free_gpt";  // libtorch rounds the last elements of other sizes in another order
    setup.clip = 0;
    setup.extra = kNearest;
    if (setup.recipe == "fp16") setup.block = std::string(kHalfMasters) + R"(, "loss_scale": 64)";
    const auto run = train_threads(setup);
    const bool fp16 = setup.recipe == "fp16";
    const auto dtype = dtype_of(setup);
    const auto master_dtype = std::string(recipe.block).empty() ? at::kFloat : dtype;
    const auto& task = problem(setup.problem);
    const auto module = make_module(task);
    struct State {
      std::string name;
      at::Tensor parameter, master, m, v, count;
    };
    std::vector<State> states;
    for (auto& item : module->named_parameters()) {
      auto p = item.value();
      const auto is_p = [&](const State& state) { return state.parameter.is_same(p); };
      if (std::any_of(states.begin(), states.end(), is_p)) continue;  // tied
      const auto initial = p.detach().clone();
      p.set_data(initial.to(dtype));
      const auto zeros = at::zeros(p.sizes());
      states.push_back({item.key(), p, initial.to(master_dtype), zeros, zeros.clone(), at::zeros({})});
    }
    for (int step = 0; step < setup.steps; ++step) {
      auto loss = loss_of(task, *module, 0, step, dtype);
      if (fp16) loss = loss.to(at::kFloat) * 64;
      loss.backward();
      const at::NoGradGuard no_grad;
      for (auto& s : states) {
        auto p = s.master.to(at::kFloat), m = s.m, v = s.v;
        const auto gradient = s.parameter.grad().defined() ? s.parameter.grad().to(at::kFloat) * (fp16 ? 1.0 / 64 : 1)
                                                           : at::zeros_like(p);
        s.count += 1;
        at::_fused_adamw_({p}, {gradient}, {m}, {v}, {}, {s.count}, 0.01, 0.9, 0.999, 0.05, 1e-8, false, false);
        s.master = p.to(master_dtype);
        s.m = stored(m, recipe.bits, /*has_sign=*/true), s.v = stored(v, recipe.bits, /*has_sign=*/false);
        s.parameter.set_data(s.master.to(dtype));
        s.parameter.mutable_grad() = at::Tensor();
      }
    }
    std::map<std::string, at::Tensor> masters;
    for (const auto& s : states)
      if (run.masters.contains(s.name)) masters[s.name] = s.master.to(at::kFloat);
    std::string first;
    EXPECT_TRUE(equal_bits(run.masters, masters, &first)) << recipe.name << ": " << first;
  }
}

// Bytes of masters and states; the sizes of the model are multiples of what shards are rounded to.
TEST(NarrowStates, BytesAreThoseOfTheFormula) {
  for (const auto& recipe : kRecipes)
    for (int stage = 0; stage <= 3; ++stage) {
      auto setup = setup_of(recipe, stage);
      setup.problem = "padded_free_gpt";
      setup.accumulation = 2;
      run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
        at::set_num_threads(1);
        const auto& task = problem(setup.problem);
        auto module = make_module(task);
        Engine engine(module, Options::from_json(json_of(setup)), comm);
        for (int k = 0; k < 4; ++k) {
          engine.backward(loss_of(task, *module, comm->rank(), k, dtype_of(setup)));
          engine.step();
        }
        const auto memory = engine.memory();
        const auto device = [&](Purpose purpose) { return memory.current(Tier::Device, purpose); };
        std::uint64_t all = 0;
        for (const auto& [name, numel] : engine.units()) all += static_cast<std::uint64_t>(numel);
        if (recipe.bits == 8) {  // parameters and shards are padded to blocks
          const auto stored = device(Purpose::Parameters) * (stage >= 3 ? 2 : 1) / (setup.recipe == "fp32" ? 4 : 2);
          EXPECT_GE(stored, all);
          EXPECT_LE(stored, all + 256 * module->parameters().size() + 512 * engine.units().size());
          all = stored;
        }
        const auto owned = all / (stage >= 1 ? 2 : 1);
        EXPECT_EQ(device(Purpose::MasterParameters), recipe.has_masters() ? 4 * owned : 0) << recipe.name << stage;
        const auto of_states = recipe.bits == 8 ? 2 * owned + 2 * 4 * owned / 256 : owned * 2 * recipe.bits / 8;
        EXPECT_EQ(device(Purpose::OptimizerStates), of_states) << recipe.name << stage;
        // Without fp32 masters accumulated gradients stay in the parameters' dtype.
        EXPECT_EQ(device(Purpose::Gradients), (*recipe.block == '\0' ? 4 : 2) * all / (stage >= 2 ? 2 : 1))
            << recipe.name << stage;
      });
    }
}

// Trains steps [first, last) and saves or loads; rank 0's hash.
std::string train(const Training& setup, int first, int last, const std::string& folder, bool load,
                  std::string* log = nullptr) {
  std::string hash;
  std::mutex mutex;
  if (log != nullptr)
    set_log_sink([&](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex);
      *log += std::string(line) + "\n";
    });
  run_ranks(setup.world, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    const auto& task = problem(setup.problem);
    auto module = make_module(task);
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    if (load) engine.load_checkpoint(folder);
    for (int step = first; step < last; ++step) {
      engine.backward(loss_of(task, *module, comm->rank() % 2, step, dtype_of(setup)));
      engine.step();
    }
    if (!load) engine.save_checkpoint(folder, "t");
    const auto own = engine.state_hash();
    const std::lock_guard lock(mutex);
    if (comm->rank() == 0) hash = own;
  });
  set_log_sink(nullptr);
  return hash;
}

TEST(NarrowStates, AResumedRunContinuesWithTheSameBits) {
  for (const auto& recipe : kRecipes) {
    const TempFolder folder, other;
    const auto wanted = train(setup_of(recipe, 1), 0, 6, other.text(), false);
    train(setup_of(recipe, 1), 0, 3, folder.text(), false);
    for (const int stage : {0, 1, 3}) {
      auto setup = setup_of(recipe, stage);
      if (stage == 3)
        setup.zero = R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.text() + "\"}";
      std::string log;
      EXPECT_EQ(train(setup, 3, 6, folder.text(), true, &log), wanted) << recipe.name << ", stage " << stage;
      EXPECT_EQ(log.find("rounded"), std::string::npos) << log;
    }
  }
}

TEST(NarrowStates, CheckpointsOfOtherDtypesAreTakenAndSaidSo) {
  const TempFolder wide, narrow;
  const Recipe fp32{"fp32 masters", "bf16", "", kAdamW, 32};
  train(setup_of(fp32, 2), 0, 3, wide.text(), false);
  train(setup_of(kRecipes[1], 2), 0, 3, narrow.text(), false);
  std::string log;
  EXPECT_EQ(train(setup_of(kRecipes[1], 2), 3, 6, wide.text(), true, &log),
            train(setup_of(kRecipes[1], 3), 3, 6, wide.text(), true));
  EXPECT_NE(log.find("in F32, this run stores it in BF16; it and others like it are rounded to the nearest"),
            std::string::npos)
      << log;
  std::string quiet;
  EXPECT_EQ(train(setup_of(fp32, 2), 3, 6, narrow.text(), true, &quiet),
            train(setup_of(fp32, 3), 3, 6, narrow.text(), true));
  EXPECT_EQ(quiet.find("rounded"), std::string::npos) << quiet;
}

// A load reads a state in the parts that the ranks saved; each part of a block would round the rest of it again.
TEST(NarrowStates, AStateInBlocksIsWrittenWhole) {
  const TempFolder of_three, of_one;
  const Recipe wide{"fp32 masters", "bf16", "", kAdamW, 32}, blocks{"8-bit states", "bf16", "", kStates8, 8};
  train(setup_of(wide, 2, 3), 0, 3, of_three.text(), false);
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    auto module = make_module(problem("gpt"));
    Engine engine(module, Options::from_json(json_of(setup_of(wide, 2, 1))), comm);
    engine.load_checkpoint(of_three.path());
    engine.save_checkpoint(of_one.path(), "t");
  });
  EXPECT_EQ(train(setup_of(blocks, 2, 1), 3, 3, of_three.text(), true),
            train(setup_of(blocks, 2, 1), 3, 3, of_one.text(), true));
}

// A matrix of more elements than a tile, whose states are read and written in tiles.
TEST(NarrowStates, TilesOfAFileHaveWholeBlocks) {
  const TempFolder folder;
  const auto hash_of = [&](const std::string& zero, int bits) {
    std::string hash;
    run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
      at::manual_seed(5);
      const auto model = std::make_shared<torch::nn::LinearImpl>(900, 900);
      Engine engine(model,
                    Options::from_json(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params":
                        {"lr": 0.01, "state_bits": )" +
                                       std::to_string(bits) + R"(}}, "zero_optimization": {"stage": 2)" + zero + "}}"),
                    comm);
      for (int step = 0; step < 3; ++step) {
        engine.backward(model->forward(at::randn({2, 900})).square().mean());
        engine.step();
      }
      hash = engine.state_hash();
    });
    return hash;
  };
  const auto in_file =
      R"(, "sub_group_size": 0, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.text() + "\"}";
  for (const int bits : {8, 16}) EXPECT_EQ(hash_of(in_file, bits), hash_of("", bits)) << bits;
}

// Rounding to the nearest loses updates below half a step of bf16; their mean is not lost: the mean loss of 300 steps.
TEST(NarrowStates, LossesStayNearThoseOfFp32States) {
  const auto mean_loss = [](const char* block, const std::string& extra, int bits = 32) {
    Training setup;
    setup.recipe = "bf16";
    setup.block = block;
    setup.extra = extra;
    setup.steps = 300;
    setup.optimizer = R"({"type": "AdamW", "params": {"lr": 0.0005, "state_bits": )" + std::to_string(bits) + "}}";
    const auto run = train_threads(setup);
    double sum = 0;
    for (const double loss : run.losses) sum += loss;
    return sum / 300;
  };
  const auto fp32 = mean_loss("", "");
  const auto stochastic = mean_loss(kBoth, ""), nearest = mean_loss(kBoth, kNearest);
  EXPECT_LT(std::fabs(stochastic - fp32), 0.01 * fp32) << stochastic << " " << fp32;
  EXPECT_GT(nearest, 1.1 * fp32);
  const auto in_blocks = mean_loss("", "", 8);
  EXPECT_LT(std::fabs(in_blocks - fp32), 0.005 * fp32) << in_blocks << " " << fp32;
}

class Nothing : public UpdateRule {
 public:
  std::string name() const override { return "Nothing"; }
  std::vector<std::string> states(const std::string&, const std::vector<std::int64_t>&) const override { return {}; }
  double lr() const override { return 0.1; }
  void update(std::span<UpdatePiece>) override {}
};

TEST(NarrowStates, AnOptimizerOfTheProgramNeedsFp32) {
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    const auto module = make_module(problem("gpt"));
    try {
      Engine engine(module,
                    Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true)" +
                                       std::string(kMasters) + "}}"),
                    comm, std::make_shared<Nothing>());
      ADD_FAILURE() << "was taken";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("Nothing, an optimizer of the program, with masters"), std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace zero::test::narrow_states_test
