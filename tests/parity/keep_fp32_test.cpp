// Parameters that stay fp32 in a run in 16 bits (libzero.keep_fp32): the bits of a plain loop whose parameters have
// these dtypes, at every stage and tier, and in checkpoints.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>

#include "base/check.h"
#include "parity/problems.h"
#include "parity/training.h"
#include "support/folder.h"
#include "support/require.h"
#include "support/shm_threads.h"

namespace zero::test::keep_fp32_test {
namespace {

constexpr int kWidth = 64, kSamples = 4, kSteps = 4, kWorld = 2;
constexpr double kScale = 64;  // of fp16's losses
constexpr double kClip = 0.05;

// Blocks with a norm, which libtorch's kernel takes in fp32, and a gate, whose input the module casts. Every size is a
// multiple of 16: see docs/numerics.md.
struct Block : torch::nn::Module {
  Block()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        gate(register_module("gate", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = norm(x);
    const auto share = gate(y.to(gate->weight.scalar_type())).softmax(-1);
    return x + (up(y) * share.to(x.scalar_type()));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear gate, up;
};

struct Net : torch::nn::Module {
  Net()
      : blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        head(register_module("head", torch::nn::Linear(kWidth, kWidth))) {
    for (int i = 0; i < 2; ++i) blocks->push_back(std::make_shared<Block>());
    fill_parameters(*this, 7);
  }
  at::Tensor loss(const at::Tensor& inputs) {
    auto x = inputs;
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x)).to(at::kFloat).square().mean();
  }
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};

bool stays(const std::string& name) {
  return name.find("norm") != std::string::npos || name.find("gate") != std::string::npos;
}

constexpr const char* kKept = R"(, "libzero": {"keep_fp32": ["*norm.*", "*.gate.*"]})";

struct Case {
  std::string recipe = "bf16";
  int stage = 3;
  std::string zero = {}, keys = kKept;
  std::string load = {}, save = {};  // folders
  int first_step = 0;
  bool freeze = false;  // the last norm
  double clip = 0;
};

Options options_of(const Case& run) {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": )" +
                            std::to_string(run.clip) +
                            R"(, "optimizer": {"type": "AdamW", "params": )"
                            R"({"lr": 0.01, "weight_decay": 0.05}}, "zero_optimization": {"stage": )" +
                            std::to_string(run.stage) + run.zero + "}" +
                            (run.recipe == "fp16"   ? R"(, "fp16": {"enabled": true, "loss_scale": 64})"
                             : run.recipe == "bf16" ? R"(, "bf16": {"enabled": true})"
                                                    : "") +
                            run.keys + "}");
}

at::ScalarType type_of(const std::string& recipe) {
  return recipe == "fp16" ? at::kHalf : recipe == "bf16" ? at::kBFloat16 : at::kFloat;
}

at::Tensor inputs_of(int rank, int step, at::ScalarType type) {
  const auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * step + rank));
  return at::randn({kSamples, kWidth}, generator).to(type);
}

struct Result {
  std::map<std::string, at::Tensor> masters;
  std::vector<double> losses, norms;  // losses: of rank 0
  std::string hash;
  std::vector<std::string> units;
};

Result train_rank(const Case& run, const std::shared_ptr<Communicator>& comm) {
  at::set_num_threads(1);
  const auto net = std::make_shared<Net>();
  if (run.freeze) net->norm->weight.requires_grad_(false);
  Engine engine(net, options_of(run), comm);
  if (!run.load.empty()) engine.load_checkpoint(run.load);
  const auto type = type_of(run.recipe);
  if (run.keys.empty() || contains(run.keys, "*.gate.*"))
    for (const auto& item : net->named_parameters())
      require(item.value().scalar_type() == (stays(item.key()) && !run.keys.empty() ? at::kFloat : type),
              item.key() + " is " + c10::toString(item.value().scalar_type()));
  Result result;
  for (int step = run.first_step; step < run.first_step + kSteps; ++step) {
    const auto loss = net->loss(inputs_of(comm->rank(), step, net->head->weight.scalar_type()));
    result.losses.push_back(loss.item<double>());
    engine.backward(loss);
    result.norms.push_back(engine.step().grad_norm);
  }
  engine.flush();
  if (!run.save.empty()) engine.save_checkpoint(run.save, "t");
  result.hash = engine.state_hash();
  result.masters = engine.full_state_dict();
  for (const auto& [name, numel] : engine.units()) result.units.push_back(name);
  return result;
}

Result train(const Case& run, bool shared_memory = false) {
  Result first;
  std::mutex mutex;
  const auto body = [&](const std::shared_ptr<Communicator>& comm) {
    auto result = train_rank(run, comm);
    const std::lock_guard<std::mutex> lock(mutex);
    if (comm->rank() == 0) first = std::move(result);
  };
  if (shared_memory)
    with_shm_threads(kWorld, body);
  else
    run_ranks(kWorld, {}, body);
  return first;
}

// One process with a replica for each rank, without libzero.
Result train_plainly(const std::string& recipe, double clip = 0) {
  at::set_num_threads(1);
  const auto type = type_of(recipe);
  const double scale = recipe == "fp16" ? kScale : 1;
  std::vector<std::shared_ptr<Net>> replicas;
  for (int r = 0; r < kWorld; ++r) replicas.push_back(std::make_shared<Net>());
  const auto names = replicas[0]->named_parameters().keys();
  std::vector<at::Tensor> masters, exp_avg, exp_avg_sq, steps;
  for (const auto& p : replicas[0]->parameters()) {
    masters.push_back(p.detach().clone());
    exp_avg.push_back(at::zeros_like(masters.back()));
    exp_avg_sq.push_back(at::zeros_like(masters.back()));
    steps.push_back(at::zeros({}));
  }
  for (const auto& replica : replicas)
    for (const auto& item : replica->named_parameters())
      if (!stays(item.key())) item.value().set_data(item.value().detach().to(type));
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    for (int r = 0; r < kWorld; ++r) {
      const auto loss = replicas[static_cast<std::size_t>(r)]->loss(inputs_of(r, step, type));
      if (r == 0) result.losses.push_back(loss.item<double>());
      (loss * scale).backward();
    }
    const at::NoGradGuard no_grad;
    double squares = 0;
    std::vector<at::Tensor> gradients;
    for (std::size_t i = 0; i < names.size(); ++i) {
      at::Tensor sum;  // of two ranks in fp32, rounded once to the dtype of the gradient
      for (const auto& replica : replicas) {
        auto& grad = replica->parameters()[i].mutable_grad();
        sum = sum.defined() ? (sum + grad.to(at::kFloat)).to(grad.scalar_type()) : grad.to(at::kFloat);
        grad = at::Tensor();
      }
      gradients.push_back(sum.to(at::kFloat));
      squares += gradients.back().to(at::kDouble).square().sum().item<double>();
    }
    const double norm = std::sqrt(squares) / (scale * kWorld);
    const double factor = 1 / (scale * kWorld) / (clip > 0 ? std::max(1.0, (norm + 1e-6) / clip) : 1);
    for (std::size_t i = 0; i < names.size(); ++i) {
      auto& gradient = gradients[i];
      gradient.mul_(static_cast<float>(factor));
      steps[i] += 1;
      at::_fused_adamw_({masters[i]}, {gradient}, {exp_avg[i]}, {exp_avg_sq[i]}, {}, {steps[i]}, 0.01, 0.9, 0.999, 0.05,
                        1e-8, false, false);
      for (const auto& replica : replicas) replica->parameters()[i].detach().copy_(masters[i]);
    }
    result.norms.push_back(norm);
  }
  for (std::size_t i = 0; i < names.size(); ++i) result.masters[names[i]] = masters[i];
  return result;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(KeepFp32, EveryStageHasTheBitsOfAPlainLoop) {
  for (const char* recipe : {"bf16", "fp16"}) {
    const auto plain = train_plainly(recipe);
    for (int stage = 0; stage <= 3; ++stage)
      for (const bool shared_memory : {false, true}) {
        const auto run = train({.recipe = recipe, .stage = stage}, shared_memory);
        const auto label = base::join(recipe, " stage ", stage, shared_memory ? " by shared memory" : "");
        std::string first;
        EXPECT_TRUE(equal_bits(run.masters, plain.masters, &first)) << label << ", first different: " << first;
        EXPECT_EQ(run.losses, plain.losses) << label;
        for (std::size_t i = 0; i < plain.norms.size(); ++i)
          EXPECT_NEAR(run.norms[i], plain.norms[i], 1e-9 * plain.norms[i]) << label;
        EXPECT_EQ(run.units, (std::vector<std::string>{"root", "root (fp32)", "blocks.0", "blocks.0 (fp32)", "blocks.1",
                                                       "blocks.1 (fp32)"}));
      }
  }
}

TEST(KeepFp32, TiersAndAccumulationsKeepTheBits) {
  const TempFolder folder;
  const auto file = R"({"device": "nvme", "nvme_path": ")" + folder.text() + "\"";
  const auto expected = train({}).masters;
  for (const auto& zero : {
           R"(, "offload_optimizer": {"device": "cpu"})" + std::string(),
           R"(, "offload_optimizer": )" + file + R"(}, "offload_param": )" + file + R"(, "max_in_cpu": 0})",
           R"(, "offload_param": {"device": "cpu"})" + std::string(),
           R"(, "stage3_param_persistence_threshold": 64)" + std::string(),
           R"(, "stage3_prefetch_bucket_size": 0)" + std::string(),
       })
    EXPECT_TRUE(equal_bits(train({.zero = zero}).masters, expected)) << zero;
  const std::string delayed = R"(, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true, )"
                              R"("start_step": 1})";
  EXPECT_EQ(train({.stage = 3, .zero = delayed}).hash, train({.stage = 2, .zero = delayed}).hash);
  const auto summed = [](int stage, bool shared_memory) {
    const auto keys = std::string(kKept) + R"(, "gradient_accumulation_steps": 2)";
    return train({.stage = stage, .keys = keys}, shared_memory).hash;
  };
  EXPECT_EQ(summed(0, false), summed(1, true));
  EXPECT_EQ(summed(2, false), summed(3, true));
}

// A checkpoint has the values that forward reads: fp32 of what stays fp32, frozen or not.
TEST(KeepFp32, CheckpointsHaveWhatStaysInFp32) {
  const TempFolder folder;
  const auto at = [&](const char* name) { return folder.file(name); };
  const auto saved = train({.stage = 3, .save = at("a"), .freeze = true});
  const Case next{.stage = 3, .load = at("a"), .first_step = kSteps, .freeze = true};
  const auto resumed = train(next);
  Case elsewhere = next;
  elsewhere.stage = 1;
  EXPECT_EQ(train(elsewhere, /*shared_memory=*/true).hash, resumed.hash) << "at another stage";
  const auto& norm = resumed.masters.at("norm.weight");
  EXPECT_TRUE(norm.equal(saved.masters.at("norm.weight")));
  EXPECT_FALSE(norm.to(at::kBFloat16).to(at::kFloat).equal(norm)) << "values that bf16 holds show nothing";

  // What was trained has fp32 masters in any case. A frozen parameter would lose bits.
  train({.stage = 2, .save = at("c")});
  EXPECT_EQ(error_of([&] { train({.stage = 2, .keys = "", .load = at("c")}); }), "");
  const auto error = error_of([&] { train({.stage = 2, .keys = "", .load = at("a"), .freeze = true}); });
  for (const char* part : {"param of norm.weight: is F32 in the checkpoint, BF16 in the model", "libzero.keep_fp32"})
    EXPECT_TRUE(contains(error, part)) << error;
}

// Weights for other libraries have the dtypes that forward reads, and a check of the checkpoint knows them.
TEST(KeepFp32, ACheckpointWithWeightsForOthersIsUndamaged) {
  for (const char* keys : {kKept, R"(, "libzero": {"keep_fp32": "*norm.*"})"}) {
    const TempFolder folder;
    const Case run{.zero = R"(, "stage3_gather_16bit_weights_on_model_save": true)",
                   .keys = keys,
                   .save = folder.text(),
                   .freeze = true};
    run_ranks(kWorld, {}, [&](const std::shared_ptr<Communicator>& comm) {
      const auto net = std::make_shared<Net>();
      net->norm->weight.requires_grad_(false);
      Engine engine(net, options_of(run), comm);
      engine.save_checkpoint(run.save, "t");
    });
    EXPECT_EQ(error_of([&] { (void)inspect_checkpoint(folder.path(), "t", /*verify=*/true); }), "") << keys;
    EXPECT_TRUE(std::filesystem::exists(folder.path() / "t" / "model.safetensors"));
  }
}

// Keys that choose dtypes of gradients are for the others.
TEST(KeepFp32, DtypesOfGradientsAreThoseOfTheOthers) {
  const std::string all = R"(, "libzero": {"keep_fp32": "*"})", micro = R"(, "gradient_accumulation_steps": 2)";
  const std::string narrow = R"(, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"})";
  for (int stage = 0; stage <= 3; ++stage)
    EXPECT_EQ(train({.stage = stage, .keys = all + micro + narrow}).hash,
              train({.recipe = "fp32", .stage = stage, .keys = micro}).hash)
        << stage;
}

TEST(KeepFp32, ClippingCountsEveryGradientOnce) {
  const auto plain = train_plainly("bf16", kClip);
  EXPECT_GT(plain.norms[0], kClip) << "nothing is clipped";
  for (int stage = 0; stage <= 3; ++stage) {
    const auto run = train({.stage = stage, .clip = kClip});
    std::string first;
    EXPECT_TRUE(equal_bits(run.masters, plain.masters, &first)) << stage << ", first different: " << first;
    for (std::size_t i = 0; i < plain.norms.size(); ++i)
      EXPECT_NEAR(run.norms[i], plain.norms[i], 1e-9 * plain.norms[i]) << stage;
  }
}

// An overflow in the gradient of a parameter that stays fp32, alone, skips the step.
TEST(KeepFp32, AnOverflowOfOneGradientSkipsTheStep) {
  for (int stage = 0; stage <= 3; ++stage)
    run_ranks(kWorld, {}, [&](const std::shared_ptr<Communicator>& comm) {
      const auto net = std::make_shared<Net>();
      Engine engine(net, options_of({.recipe = "fp16", .stage = stage}), comm);
      const auto before = engine.full_state_dict();
      const auto step = [&](double slope) {
        auto loss = net->loss(inputs_of(comm->rank(), 0, at::kHalf));
        const auto& weight = net->norm->weight;  // the loss is what it was, its gradient is not
        if (comm->rank() == 1) loss = loss + (slope * (weight - weight.detach())).sum();
        engine.backward(loss);
        return engine.step();
      };
      const auto done = step(3e38);  // times the loss scale
      require(done.overflow && !done.updated, "an infinite gradient is not seen");
      require(equal_bits(engine.full_state_dict(), before), "an overflow changed parameters");
      require(step(1).updated, "the next step");
    });
}

// A head with the parameters of the first layer.
struct Tied : torch::nn::Module {
  Tied() : first(register_module("first", torch::nn::Linear(kWidth, kWidth))) {
    fill_parameters(*this, 5);
    register_module("head", first.ptr());
  }
  torch::nn::Linear first;
};

TEST(KeepFp32, AnyNameOfATiedParameterKeepsIt) {
  run_ranks(kWorld, {}, [&](const std::shared_ptr<Communicator>& comm) {
    const auto net = std::make_shared<Tied>();
    const auto initial = net->first->weight.detach().clone();
    Engine engine(net, options_of({.keys = R"(, "libzero": {"keep_fp32": "head.weight"})"}), comm);
    require(net->first->weight.scalar_type() == at::kFloat, "the weight is cast");
    require(net->first->bias.scalar_type() == at::kBFloat16, "the bias is not cast");
    const auto masters = engine.full_state_dict();  // on rank 0
    if (comm->rank() == 0) require(masters.at("first.weight").equal(initial), "the weight is rounded");
  });
}

// A frozen parameter that stays fp32 does so when it is trained, and the other way round.
TEST(KeepFp32, UnfreezingKeepsItInFp32) {
  std::string hash;
  for (int stage = 0; stage <= 3; ++stage)
    run_ranks(kWorld, {}, [&](const std::shared_ptr<Communicator>& comm) {
      const auto net = std::make_shared<Net>();
      net->norm->weight.requires_grad_(false);
      Engine engine(net, options_of({.stage = stage}), comm);
      const auto weight = [&] {
        const auto scope = engine.gathered_parameters(*net->norm);
        return net->norm->weight.detach().clone();
      };
      const auto initial = weight();
      const auto step = [&](int number) {
        engine.backward(net->loss(inputs_of(comm->rank(), number, at::kBFloat16)));
        engine.step();
      };
      step(0);
      require(weight().equal(initial), "a frozen parameter moved");
      net->norm->weight.requires_grad_(true);
      step(1);
      const auto trained = weight();
      require(trained.scalar_type() == at::kFloat, "another dtype");
      require(!trained.equal(initial) && !trained.to(at::kBFloat16).to(at::kFloat).equal(trained),
              "not trained in fp32");
      const auto now = engine.state_hash();
      if (comm->rank() != 0) return;
      if (hash.empty()) hash = now;
      require(now == hash, "another state at stage " + std::to_string(stage));
    });
}

// Weights alone, of a run with the key or without it, at another stage.
TEST(KeepFp32, WeightsAloneAreLoaded) {
  const TempFolder folder;
  const auto saved = train({.stage = 3, .save = folder.text()});
  for (const char* keys : {kKept, ""})
    run_ranks(kWorld, {}, [&](const std::shared_ptr<Communicator>& comm) {
      const auto net = std::make_shared<Net>();
      Engine engine(net, options_of({.stage = 1, .keys = keys}), comm);
      engine.load_checkpoint(folder.text(), "t", {.weights_only = true});
      const auto masters = engine.full_state_dict();
      if (comm->rank() == 0) require(equal_bits(masters, saved.masters), "other masters");
      for (const auto& item : net->named_parameters()) {
        const auto type = stays(item.key()) && *keys != 0 ? at::kFloat : at::kBFloat16;
        require(item.value().detach().equal(saved.masters.at(item.key()).to(type)), item.key());
      }
    });
}

// A resume with other patterns says so.
TEST(KeepFp32, AResumeWithOtherPatternsIsTold) {
  const TempFolder folder;
  train({.stage = 2, .save = folder.text()});
  const auto told = [&](const std::string& keys, const std::string& recipe = "bf16") {
    std::string text;
    std::mutex mutex;
    set_log_sink([&](LogLevel, std::string_view line) {
      const std::lock_guard<std::mutex> lock(mutex);
      text += std::string(line) + "\n";
    });
    train({.recipe = recipe, .stage = 2, .keys = keys, .load = folder.text(), .first_step = kSteps});
    set_log_sink(nullptr);
    return text;
  };
  EXPECT_FALSE(contains(told(kKept), "keep_fp32"));
  const auto text = told(R"(, "libzero": {"keep_fp32": "*norm.*"})");
  EXPECT_TRUE(contains(text, R"(was trained with libzero.keep_fp32 ["*norm.*", "*.gate.*"], this run has ["*norm.*"])"))
      << text;
  EXPECT_TRUE(contains(told(""), "this run has []"));
}

TEST(KeepFp32, ErrorsNameTheKey) {
  const auto nothing = error_of([] { train({.keys = R"(, "libzero": {"keep_fp32": "*.nrom.weight"})"}); });
  for (const char* part : {"libzero.keep_fp32: the pattern \"*.nrom.weight\" matches no parameter",
                           "similar names are blocks.0.norm.weight, blocks.1.norm.weight"})
    EXPECT_TRUE(contains(nothing, part)) << nothing;
  // In fp32 all parameters are fp32.
  EXPECT_EQ(train({.recipe = "fp32"}).hash, train({.recipe = "fp32", .keys = ""}).hash);

  run_ranks(1, {}, [](const std::shared_ptr<Communicator>& comm) {
    const auto net = std::make_shared<Net>();
    Engine engine(net, options_of({.keys = R"(, "libzero": {"keep_fp32": "head.*"})"}), comm);
    const auto wide = error_of([&] { (void)net->blocks->ptr(0)->as<Block>()->up(at::zeros({1, kWidth})); });
    const auto narrow = error_of([&] { (void)net->head(at::zeros({1, kWidth}, at::kBFloat16)); });
    for (const auto& [text, name, dtypes] : {std::tuple{wide, "blocks.0.up.", " of BFloat16 and a tensor of Float. "},
                                             std::tuple{narrow, "head.", " of Float and a tensor of BFloat16. "}})
      require(contains(text, "reads parameter " + std::string(name)) && contains(text, dtypes) &&
                  contains(text, "libzero.keep_fp32"),
              text);
  });
}

}  // namespace
}  // namespace zero::test::keep_fp32_test
