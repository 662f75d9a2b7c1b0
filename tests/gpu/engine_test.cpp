// The engine on one GPU: all stages bit for bit, compared with the CPU's engine within bounds, memory, checkpoints, and
// stream order. Skipped without a GPU, except the errors for mixed devices.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "gpu/device.h"
#include "gpu/streams.h"
#include "parity/training.h"
#include "support/folder.h"

namespace zero::test::engine_test {
namespace {

const at::Device kGpu(at::kCUDA, 0);

// The same bits from run to run, and fp32 that is fp32.
void be_deterministic() {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
}

Training on_gpu(const std::string& problem, const std::string& recipe, int stage) {
  return {.problem = problem, .world = 1, .stage = stage, .steps = 10, .recipe = recipe, .clip = 0.5, .device = kGpu};
}

Outcome train(const Training& setup) { return train_rank(setup, Communicator::local()); }

TEST(GpuEngine, EveryStageHasTheSameBits) {
  ZERO_NEEDS_GPU();
  be_deterministic();
  for (const char* problem : {"gpt", "mlp", "tiny", "frozen", "branches", "reused"})
    for (const char* recipe : {"fp32", "bf16", "fp16"})
      for (const int accumulation : {1, 2}) {
        auto setup = on_gpu(problem, recipe, 0);
        setup.accumulation = accumulation;
        Outcome first;
        for (const int stage : {0, 1, 2, 3}) {
          setup.stage = stage;
          auto run = train(setup);
          // With accumulation, stages 2 and 3 reduce, and round, every micro-batch.
          if (stage == 0 || (stage == 2 && accumulation > 1)) first = run;
          EXPECT_EQ(run.hash, first.hash) << problem << " " << recipe << " stage " << stage;
          EXPECT_EQ(run.norms, first.norms) << problem << " " << recipe << " stage " << stage;
        }
      }
}

// cuBLAS and the CPU's library add in different orders, so a step differs in the last places of fp32; ten steps of
// SGD stay within 1e-3 of the parameters, and of the losses. AdamW divides by the gradient's size, so a gradient that
// is only rounding error moves a parameter as much as any other; there only the losses are compared.
TEST(GpuEngine, Fp32StaysNearTheCpusEngine) {
  ZERO_NEEDS_GPU();
  be_deterministic();
  for (const char* problem : {"gpt", "mlp", "convolution", "batch_norm", "recurrent", "attention", "transformer",
                              "containers", "reused", "frozen", "branches", "tiny"}) {
    if (simulated_faults && std::string(problem) == "recurrent") continue;  // libtorch has no such cell for the CPU
    auto setup = on_gpu(problem, "fp32", 2);
    setup.optimizer = R"({"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}})";
    const auto there = train(setup);
    setup.device = at::kCPU;
    const auto here = train(setup);
    EXPECT_LT(distance(there.masters, here.masters, 0.1), 1e-3) << problem;
    for (std::size_t i = 0; i < here.losses.size(); ++i)
      EXPECT_NEAR(there.losses[i], here.losses[i], 1e-3 * (std::abs(here.losses[i]) + 1e-2))
          << problem << " step " << i;
    for (std::size_t i = 0; i < here.norms.size(); ++i)
      EXPECT_NEAR(there.norms[i], here.norms[i], 1e-3 * (here.norms[i] + 1e-2)) << problem << " step " << i;
  }
  auto setup = on_gpu("gpt", "fp32", 2);
  const auto there = train(setup);
  setup.device = at::kCPU;
  const auto here = train(setup);
  for (std::size_t i = 0; i < here.losses.size(); ++i)
    EXPECT_NEAR(there.losses[i], here.losses[i], 1e-2 * here.losses[i]) << "AdamW, step " << i;
}

// 16 bits round each product to 2^-9 (bf16) or 2^-12 (fp16) of its size: losses within 5 % and 2 %.
TEST(GpuEngine, SixteenBitsStayNearTheCpusEngine) {
  ZERO_NEEDS_GPU();
  be_deterministic();
  for (const auto& [recipe, bound] : {std::pair{"bf16", 0.05}, {"fp16", 0.02}}) {
    auto setup = on_gpu("gpt", recipe, 1);
    const auto there = train(setup);
    setup.device = at::kCPU;
    const auto here = train(setup);
    EXPECT_EQ(there.overflows, here.overflows);
    for (std::size_t i = 0; i < here.losses.size(); ++i)
      EXPECT_NEAR(there.losses[i], here.losses[i], bound * here.losses[i]) << recipe << " step " << i;
  }
}

// Persistent bytes equal the formulas, and libtorch's allocator has allocated them.
TEST(GpuEngine, MemoryIsBookedAndCounted) {
  ZERO_NEEDS_GPU();
  using Tier = MemoryReport::Tier;
  using Purpose = MemoryReport::Purpose;
  for (const char* recipe : {"fp32", "bf16"}) {
    auto setup = on_gpu("padded_free_gpt", recipe, 2);
    const auto& task = problem(setup.problem);
    auto module = make_module(task);
    module->to(kGpu);
    Engine engine(module, Options::from_json(json_of(setup)), Communicator::local());
    std::uint64_t numel = 0;
    for (const auto& group : engine.units()) numel += static_cast<std::uint64_t>(group.second);
    const auto report = engine.memory();
    const bool fp32 = std::string(recipe) == "fp32";
    EXPECT_EQ(report.current(Tier::Device, Purpose::Parameters), numel * (fp32 ? 4 : 2));
    EXPECT_EQ(report.current(Tier::Device, Purpose::OptimizerStates), numel * 8);
    EXPECT_EQ(report.current(Tier::Device, Purpose::MasterParameters), fp32 ? 0 : numel * 4);
    ASSERT_TRUE(report.allocator.has_value());
    EXPECT_GE(report.allocator->allocated, report.current(Tier::Device));
    EXPECT_GE(report.allocator->reserved, report.allocator->allocated);
    EXPECT_NE(report.table().find("CUDA allocator"), std::string::npos);
    engine.reset_peak_memory();
    engine.backward(loss_of(task, *module, 0, 0, dtype_of(setup)));
    EXPECT_GT(engine.memory().current(Tier::Device, Purpose::Gradients), 0u);
    engine.step();
    const auto after = engine.memory();
    EXPECT_EQ(after.current(Tier::Device, Purpose::Gradients), 0u);
    EXPECT_GE(after.allocator->allocated_peak, after.allocator->allocated);
  }
}

TEST(GpuEngine, ACheckpointGoesFromGpuToCpuAndBack) {
  ZERO_NEEDS_GPU();
  be_deterministic();
  const TempFolder temporary;
  const auto& folder = temporary.path();
  // Without padding, which the two align differently, the digests of states compare.
  const auto& task = problem("padded_free_gpt");
  const auto setup = on_gpu("padded_free_gpt", "bf16", 2);
  const auto options = Options::from_json(json_of(setup));
  const auto comm = Communicator::local();
  auto there = make_module(task);
  there->to(kGpu);
  Engine first(there, options, comm);
  const auto go = [&](torch::nn::Module& module, Engine& engine, int step) {
    engine.backward(loss_of(task, module, 0, step, at::kBFloat16));
    engine.step();
  };
  for (int step = 0; step < 3; ++step) go(*there, first, step);
  first.save_checkpoint(folder, "a");
  const auto hash = first.state_hash();
  {
    auto here = make_module(task);
    Engine on_cpu(here, options, comm);
    on_cpu.load_checkpoint(folder, "a");
    EXPECT_EQ(on_cpu.state_hash(), hash);
    on_cpu.save_checkpoint(folder, "b");
  }
  go(*there, first, 3);
  const auto further = first.state_hash();
  auto again = make_module(task);
  again->to(kGpu);
  Engine second(again, options, comm);
  second.load_checkpoint(folder, "b");
  EXPECT_EQ(second.state_hash(), hash);
  go(*again, second, 3);
  EXPECT_EQ(second.state_hash(), further);
}

// Gradients so large that their copies to the host are still under way when memory is reused; in fp32 more of them than
// the engine keeps for the copies (256 MiB).
TEST(GpuEngine, OffloadedGradientsLeaveDuringBackwardUnharmed) {
  ZERO_NEEDS_GPU();
  be_deterministic();
  const std::int64_t kWidth = simulated_faults ? 64 : 2048;
  const auto train_wide = [&](const std::string& recipe, int accumulation, const std::string& zero) {
    torch::manual_seed(3);
    torch::nn::Sequential module;
    for (int layer = 0; layer < 20; ++layer) module->push_back(torch::nn::Linear(kWidth, kWidth));
    module->to(kGpu);
    Training setup = on_gpu("mlp", recipe, 2);
    setup.accumulation = accumulation;
    setup.zero = zero;
    Engine engine(module.ptr(), Options::from_json(json_of(setup)), Communicator::local());
    const auto input = torch::randn({64, kWidth}).to(kGpu, dtype_of(setup));
    std::vector<double> norms;
    for (int step = 0; step < 4 * accumulation; ++step) {
      engine.backward((module->forward(input * (step + 1)).to(at::kFloat)).square().mean());
      norms.push_back(engine.step().grad_norm);
    }
    return std::pair{engine.state_hash(), norms};
  };
  for (const char* recipe : {"bf16", "fp32"})
    for (const int accumulation : {1, 2}) {
      const auto there = train_wide(recipe, accumulation, "");
      for (const char* pinned : {"false", "true"})
        EXPECT_EQ(train_wide(recipe, accumulation,
                             std::string(R"(, "offload_optimizer": {"device": "cpu", "pin_memory": )") + pinned + "}"),
                  there)
            << recipe << ", accumulation " << accumulation << ", pinned " << pinned;
      const std::string delayed = R"(, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true})";
      EXPECT_EQ(train_wide(recipe, accumulation, delayed), train_wide(recipe, accumulation, delayed))
          << recipe << ", accumulation " << accumulation << ", delayed";
    }
}

TEST(GpuEngine, MixedDevicesAreNamed) {
  ZERO_NEEDS_GPU();
  auto module = make_module(problem("mlp"));
  module->parameters()[1].set_data(module->parameters()[1].to(kGpu));
  try {
    Engine engine(module, Options::from_json(json_of(on_gpu("mlp", "fp32", 1))), Communicator::local());
    FAIL() << "two devices";
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("parameter layers.0.bias: lies on cuda:0 and layers.0.weight on cpu, expected one device"),
              std::string::npos)
        << text;
  }
}

struct Elsewhere : torch::nn::Module {
  Elsewhere() {
    register_parameter("here", torch::ones({3}));
    register_parameter("there", torch::empty({4}, torch::device(torch::kMeta)));
  }
};

// On any machine, and on every rank.
TEST(Devices, AParameterElsewhereIsNamed) {
  std::string text;
  try {
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Engine engine(std::make_shared<Elsewhere>(), Options::from_json(json_of(Training{})), comm);
    });
    FAIL() << "a parameter without a place";
  } catch (const ConfigError& error) {
    text = error.what();
  }
  EXPECT_NE(text.find("parameter there: lies on meta, expected the CPU or a GPU (cuda)"), std::string::npos) << text;
}

// A long kernel on one stream, and operations on other streams that wait for it.
TEST(GpuStreams, MarksAndSideStreamsKeepTheOrder) {
  ZERO_NEEDS_GPU();
  const gpu::SideStream gather(kGpu, true), reduce(kGpu, false);
  const auto options = at::TensorOptions().device(kGpu).dtype(at::kFloat);
  const std::int64_t size = simulated_faults ? 64 : 4096, rows = size / 16, numel = rows * size;
  const auto big = at::ones({size, size}, options) / size;
  auto value = at::zeros({numel}, options);
  for (int round = 0; round < 20; ++round) {
    gpu::Mark ready, read;
    {
      const gpu::SideStream::Scope scope(gather);
      auto product = big;
      for (int i = 0; i < 10; ++i) product = at::mm(product, product);  // stays 1/size everywhere
      value.fill_(static_cast<float>(round + 1)).add_(product.narrow(0, 0, rows).reshape({-1}), 0.0);
      ready.set(kGpu);
    }
    ready.hold();
    auto sum = value.sum(at::kDouble);
    read.set(kGpu);
    {
      const gpu::SideStream::Scope scope(reduce, /*after_current=*/false);
      read.hold();
      value.zero_();  // only after it was read
      ready.set(kGpu);
    }
    EXPECT_EQ(sum.item<double>(), (round + 1.0) * static_cast<double>(numel));
    ready.wait();
    EXPECT_TRUE(ready.reached());
    EXPECT_EQ(value.abs().max().item<float>(), 0);
  }
}

TEST(GpuStreams, HostSlotsArePinnedAndUsedInTurn) {
  ZERO_NEEDS_GPU();
  gpu::HostSlots slots(kGpu, 4 << 20, 3);
  const auto options = at::TensorOptions().device(kGpu).dtype(at::kFloat);
  std::vector<at::Tensor> arrived;
  for (int i = 0; i < 12; ++i) {
    auto slot = slots.take(4 << 20).view(at::kFloat);
    EXPECT_TRUE(slot.is_pinned());
    slot.fill_(static_cast<float>(i));
    arrived.push_back(at::empty({1 << 20}, options));
    arrived.back().copy_(slot, /*non_blocking=*/true);
    slots.used();
  }
  for (int i = 0; i < 12; ++i) EXPECT_TRUE(arrived[static_cast<std::size_t>(i)].eq(i).all().item<bool>()) << i;
}

// Before any library reads them: cuBLAS is deterministic with a fixed work space.
const bool kEnvironment = setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0) == 0;

}  // namespace
}  // namespace zero::test::engine_test
