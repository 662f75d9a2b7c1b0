// Parameters that stay fp32 in a run in 16 bits (libzero.keep_fp32): the bits of a plain loop whose parameters have
// these dtypes, at every stage and tier, and in checkpoints.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <zero/library.h>

#include <cmath>
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
};

Options options_of(const Case& run) {
  return Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": )"
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
  for (const auto& item : net->named_parameters())
    require(item.value().scalar_type() == (stays(item.key()) && !run.keys.empty() ? at::kFloat : type),
            item.key() + " is " + c10::toString(item.value().scalar_type()));
  Result result;
  for (int step = run.first_step; step < run.first_step + kSteps; ++step) {
    const auto loss = net->loss(inputs_of(comm->rank(), step, type));
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
Result train_plainly(const std::string& recipe) {
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
    for (std::size_t i = 0; i < names.size(); ++i) {
      at::Tensor sum;  // of two ranks in fp32, rounded once to the dtype of the gradient
      for (const auto& replica : replicas) {
        auto& grad = replica->parameters()[i].mutable_grad();
        sum = sum.defined() ? (sum + grad.to(at::kFloat)).to(grad.scalar_type()) : grad.to(at::kFloat);
        grad = at::Tensor();
      }
      auto gradient = sum.to(at::kFloat);
      squares += gradient.to(at::kDouble).square().sum().item<double>();
      gradient.mul_(static_cast<float>(1 / (scale * kWorld)));
      steps[i] += 1;
      at::_fused_adamw_({masters[i]}, {gradient}, {exp_avg[i]}, {exp_avg_sq[i]}, {}, {steps[i]}, 0.01, 0.9, 0.999, 0.05,
                        1e-8, false, false);
      for (const auto& replica : replicas) replica->parameters()[i].detach().copy_(masters[i]);
    }
    result.norms.push_back(std::sqrt(squares) / (scale * kWorld));
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
