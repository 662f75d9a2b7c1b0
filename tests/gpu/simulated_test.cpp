// The engine on a GPU in software (gpu/simulated_gpu.h): every stage, recipe and tier has the CPU's bits, and no access
// to memory is left to chance, between streams, with the host, or by taking freed memory again.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "gpu/happens_before.h"
#include "gpu/plugin.h"
#include "gpu/simulated_gpu.h"
#include "gpu/streams.h"
#include "parity/training.h"
#include "support/folder.h"
#include "support/nightly.h"

namespace zero::test::simulated_test {
namespace {

const at::Device kGpu(at::kCUDA, 0);

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += "\n  " + line;
  return text;
}

std::vector<std::string> faults() {
  auto found = simulated_gpu::take_faults();
  gpu::synchronize(kGpu);  // what comes next has no part in it
  return found;
}

#define EXPECT_ORDERED(what) \
  if (const auto found = faults(); !found.empty()) ADD_FAILURE() << (what) << ":" << joined(found)

// --- the checker itself ---------------------------------------------------------------------------

TEST(HappensBefore, AnotherStreamMustWaitForAnEvent) {
  HappensBefore order;
  order.operation(0, "fills", {{100, 10, true}});
  order.operation(1, "adds", {{105, 2, false}});
  EXPECT_EQ(order.take_faults(),
            std::vector<std::string>{"stream 1: adds reads what stream 0's fills writes, and is not ordered after it"});
  order.stream_waits(1, order.recorded(0));
  order.operation(1, "adds", {{105, 2, false}, {110, 5, true}});
  EXPECT_EQ(order.take_faults(), std::vector<std::string>{});
  order.operation(0, "scales", {{100, 10, true}});  // overwrites what stream 1 may still read
  EXPECT_EQ(
      order.take_faults(),
      std::vector<std::string>{"stream 0: scales writes what stream 1's adds reads, and is not ordered after it"});
}

TEST(HappensBefore, OrderPassesThroughAThirdStreamAndTheHost) {
  HappensBefore order;
  order.operation(0, "a", {{0, 4, true}});
  order.stream_waits(1, order.recorded(0));
  order.operation(1, "b", {});
  order.stream_waits(2, order.recorded(1));
  order.operation(2, "c", {{0, 4, true}});
  order.host_waits(order.recorded(2));
  order.operation(3, "d", {{0, 4, true}});
  EXPECT_EQ(order.take_faults(), std::vector<std::string>{});
  EXPECT_TRUE(order.in_use(0, false));
  order.host_access("reads", {0, 4, false});
  EXPECT_EQ(order.take_faults(),
            std::vector<std::string>{"the host: reads reads what stream 3's d writes, and is not ordered after it"});
}

TEST(HappensBefore, AnEventIsWhatWasEnqueuedBeforeItsRecord) {
  HappensBefore order;
  order.operation(0, "early", {{0, 4, true}});
  const auto event = order.recorded(0);
  order.operation(0, "late", {{4, 4, true}});
  order.host_waits(event);
  EXPECT_TRUE(order.host_knows(event));
  EXPECT_FALSE(order.in_use(std::uintptr_t{0}, std::size_t{4}));
  EXPECT_TRUE(order.in_use(std::uintptr_t{0}, std::size_t{8}));
}

// --- the device -----------------------------------------------------------------------------------

TEST(SimulatedGpu, ComputesAndOrders) {
  const auto host = at::randn({5, 7});
  const auto a = host.to(kGpu);
  const auto b = (a.t().matmul(a) + 1).relu();
  EXPECT_TRUE(at::equal(b.cpu(), (host.t().matmul(host) + 1).relu()));
  EXPECT_EQ(b.sum().item<float>(), (host.t().matmul(host) + 1).relu().sum().item<float>());
  EXPECT_ORDERED("one stream");
  auto c = a + 1;
  const gpu::SideStream side(kGpu, true);
  {
    const gpu::SideStream::Scope scope(side, /*after_current=*/false);
    c.add_(1);
  }
  EXPECT_EQ(faults().size(), 2u) << "the addition reads and writes what the other stream may still be writing";
}

TEST(SimulatedGpu, FreedMemoryOfAnotherStreamIsAFault) {
  const gpu::SideStream side(kGpu, true);
  auto out = at::empty({64}, at::TensorOptions().device(kGpu));
  gpu::Mark done;
  {
    auto shard = at::ones({64}, at::TensorOptions().device(kGpu));
    const gpu::SideStream::Scope scope(side);
    out.copy_(shard);
    done.set(kGpu);
  }
  auto next = at::empty({64}, at::TensorOptions().device(kGpu));
  next.fill_(3);  // the shard's memory, which the side stream may still read
  const auto found = simulated_gpu::take_faults();
  ASSERT_EQ(found.size(), 1u) << joined(found);
  EXPECT_NE(found[0].find("aten::copy_ reads, and is not ordered after it"), std::string::npos) << found[0];
  done.hold();
  EXPECT_EQ(out.sum().item<float>(), 64);
  next.fill_(4);
  EXPECT_ORDERED("after the mark");
}

TEST(SimulatedGpu, MemoryThatWasFreedIsNotUsed) {
  const auto options = at::TensorOptions().device(kGpu);
  auto out = at::zeros({64}, options);
  const auto place = cuda::Place{0, nullptr};
  const void* freed = nullptr;
  {
    const auto in = at::ones({64}, options);
    freed = in.const_data_ptr();
  }
  cuda::interface("[test]").accumulate(place, out.mutable_data_ptr(), kernels::Dtype::F32, freed, kernels::Dtype::F32,
                                       64);
  EXPECT_EQ(faults(), std::vector<std::string>{"zero::accumulate reads memory that was freed before it was enqueued"});
}

TEST(SimulatedGpu, PinnedMemoryIsClosedUntilItsCopyIsComplete) {
  const auto there = at::ones({10}, at::TensorOptions().device(kGpu));
  auto host = at::empty({10}, at::TensorOptions().pinned_memory(true));
  host.copy_(there, /*non_blocking=*/true);
  volatile float first = *host.const_data_ptr<float>();
  EXPECT_EQ(faults().size(), 1u) << first;
  host.copy_(there, true);
  gpu::Mark mark;
  mark.set(kGpu);
  mark.wait();
  first = *host.const_data_ptr<float>();
  EXPECT_ORDERED("after the wait");
  EXPECT_EQ(first, 1);
  volatile float stolen = *static_cast<float*>(there.data_ptr());
  EXPECT_EQ(faults().size(), 1u) << "the host reads device memory: " << stolen;
}

TEST(SimulatedGpu, BackwardRunsOnIt) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::Linear(8, 2));
  const auto in = at::randn({3, 4});
  model->forward(in).sum().backward();
  const auto expected = model->parameters()[0].grad().clone();
  model->zero_grad();
  model->to(kGpu);
  model->forward(in.to(kGpu)).sum().backward();
  EXPECT_TRUE(at::equal(model->parameters()[0].grad().cpu(), expected));
  EXPECT_ORDERED("backward");
}

// --- the engine -----------------------------------------------------------------------------------

Training of(const std::string& problem, const std::string& recipe, int stage, int accumulation = 1) {
  return {.problem = problem,
          .world = 1,
          .stage = stage,
          .steps = 3,
          .accumulation = accumulation,
          .recipe = recipe,
          .clip = 0.5};
}

std::string name_of(const Training& setup) {
  return setup.problem + " " + setup.recipe + ", stage " + std::to_string(setup.stage) + ", accumulation " +
         std::to_string(setup.accumulation) + setup.zero;
}

Outcome train_on(at::Device device, Training setup) {
  setup.device = device;
  return train_rank(setup, Communicator::local());
}

void expect_the_cpus_bits(const Training& setup) {
  SCOPED_TRACE(name_of(setup));
  const auto here = train_on(at::kCPU, setup);
  const auto there = train_on(kGpu, setup);
  std::string first;
  EXPECT_TRUE(equal_bits(there.masters, here.masters, &first)) << first;
  EXPECT_EQ(there.norms, here.norms);
  EXPECT_EQ(there.losses, here.losses);
  EXPECT_ORDERED("order");
}

class OnSimulatedGpu : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    simulated_gpu::answer_queries_with(GetParam());
    simulated_gpu::take_faults();
  }
};

TEST_P(OnSimulatedGpu, EveryStageAndRecipeHasTheCpusBits) {
  for (const char* problem : {"mlp", "tiny", "frozen", "branches", "reused"})
    for (const char* recipe : {"fp32", "bf16", "fp16"})
      for (const int accumulation : {1, 2})
        for (const int stage : {0, 1, 2, 3}) expect_the_cpus_bits(of(problem, recipe, stage, accumulation));
}

// Where states and parameters rest changes no bit, and no copy is waited for too little.
TEST_P(OnSimulatedGpu, EveryTierHasTheCpusBits) {
  const TempFolder folder;
  const std::string nvme = R"({"device": "nvme", "nvme_path": ")" + folder.text() + "\"}";
  const std::string cpu = R"({"device": "cpu"})", pinned = R"({"device": "cpu", "pin_memory": true})";
  OneIn part(5);
  const auto check = [&](const auto& setup) {
    if (part.take()) expect_the_cpus_bits(setup);
  };
  for (const char* problem : {"mlp", "branches", "reused"})
    for (const char* recipe : {"fp32", "bf16"})
      for (const int accumulation : {1, 2})
        for (const int stage : {1, 2, 3})
          for (const auto& optimizer : {cpu, pinned, nvme}) {
            auto setup = of(problem, recipe, stage, accumulation);
            setup.zero = ", \"offload_optimizer\": " + optimizer;
            check(setup);
            if (stage < 3) continue;
            for (const auto& param : {cpu, pinned, nvme}) {
              setup.zero = ", \"offload_optimizer\": " + optimizer + ", \"offload_param\": " + param;
              check(setup);
            }
          }
}

// Parameters in host memory or a file, states on the GPU, whose update writes the parameters where they are.
TEST_P(OnSimulatedGpu, ParametersAloneInHostMemory) {
  for (const char* recipe : {"fp32", "bf16"})
    for (const int accumulation : {1, 2})
      for (const char* pin : {"false", "true"}) {
        auto setup = of("mlp", recipe, 3, accumulation);
        setup.zero = std::string(R"(, "offload_param": {"device": "cpu", "pin_memory": )") + pin + "}";
        expect_the_cpus_bits(setup);
      }
}

TEST_P(OnSimulatedGpu, ADelayedUpdateHasTheCpusBits) {
  OneIn part(5);
  for (const char* recipe : {"fp32", "bf16", "fp16"})
    for (const int accumulation : {1, 2})
      for (const int stage : {1, 2, 3})
        for (const char* pin : {"false", "true"}) {
          if (!part.take()) continue;
          auto setup = of("mlp", recipe, stage, accumulation);
          setup.steps = 5;
          setup.zero = std::string(R"(, "offload_optimizer": {"device": "cpu", "pin_memory": )") + pin +
                       R"(}, "delayed_update": {"enabled": true})";
          expect_the_cpus_bits(setup);
        }
}

// Infinite gradients in one step: the GPU skips the update before the host knows, and the step does not count in bias
// correction.
TEST_P(OnSimulatedGpu, AStepWithoutFiniteGradientsIsSkipped) {
  const auto train = [](at::Device device, const std::string& recipe, int stage) {
    torch::manual_seed(2);
    torch::nn::Sequential module(torch::nn::Linear(6, 9), torch::nn::Linear(9, 3));
    module->to(device);
    const auto setup = of("", recipe, stage);
    Engine engine(module.ptr(), Options::from_json(json_of(setup)), Communicator::local());
    std::vector<double> told;
    for (int step = 0; step < 5; ++step) {
      const auto in = (at::ones({4, 6}) * (step + 1)).to(device, dtype_of(setup));
      auto loss = module->forward(in).to(at::kFloat).square().mean();
      if (step == 1 || step == 3) loss = loss * std::numeric_limits<float>::infinity();
      engine.backward(loss);
      const auto result = engine.step();
      for (const double value : {static_cast<double>(result.updated), static_cast<double>(result.overflow),
                                 result.grad_norm, result.loss_scale, result.lr})
        told.push_back(value);
      EXPECT_EQ(result.updated, step != 1 && step != 3) << step;
    }
    return std::pair{told, engine.full_state_dict()};
  };
  for (const char* recipe : {"fp32", "bf16", "fp16"})
    for (const int stage : {0, 2, 3}) {
      SCOPED_TRACE(std::string(recipe) + ", stage " + std::to_string(stage));
      const auto here = train(at::kCPU, recipe, stage), there = train(kGpu, recipe, stage);
      EXPECT_EQ(there.first, here.first);
      EXPECT_TRUE(equal_bits(there.second, here.second));
      EXPECT_ORDERED("order");
    }
}

// Segments that are computed again, and activations that leave.
struct Segments : torch::nn::Module {
  explicit Segments(bool checkpoint) : checkpoint(checkpoint) {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(24, 24)));
    torch::NoGradGuard no_grad;
    int seed = 0;
    for (auto& parameter : parameters())
      parameter.copy_(at::rand(parameter.sizes(), at::detail::createCPUGenerator(static_cast<std::uint64_t>(++seed))) -
                      0.5);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      const auto run = [&](const at::Tensor& in) { return at::gelu(layer->forward(in)).square(); };
      x = checkpoint ? activation_checkpoint(run, x) : run(x);
    }
    return x.mean();
  }
  std::vector<torch::nn::Linear> layers;
  bool checkpoint;
};

TEST_P(OnSimulatedGpu, ActivationsComeBackAsTheyWere) {
  const TempFolder folder;
  const auto train = [](at::Device device, bool checkpoint, const std::string& keys) {
    const auto net = std::make_shared<Segments>(checkpoint);
    net->to(device);
    Training setup = of("", "fp32", 3);
    setup.extra = keys;
    Engine engine(net, Options::from_json(json_of(setup)), Communicator::local());
    std::vector<at::Tensor> losses;
    for (int step = 0; step < 4; ++step) {
      const auto in = at::rand({8, 24}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(step))).to(device);
      losses.push_back(net->forward(in));
      engine.backward(losses.back());
      engine.step();
    }
    std::vector<double> values;
    for (const auto& loss : losses) values.push_back(loss.item<double>());
    return std::pair{values, engine.full_state_dict()};
  };
  const auto plain = train(at::kCPU, false, "");
  const auto file = folder.text();
  for (const auto& [checkpoint, keys] : std::vector<std::pair<bool, std::string>>{
           {false, ""},
           {true, ""},
           {true, R"(, "activation_checkpointing": {"cpu_checkpointing": true})"},
           {true, R"(, "activation_checkpointing": {"contiguous_memory_optimization": true, "number_checkpoints": 4})"},
           {true, R"(, "activation_checkpointing": {"contiguous_memory_optimization": true, "number_checkpoints": 4,
                      "cpu_checkpointing": true, "synchronize_checkpoint_boundary": true})"},
           {true, R"(, "libzero": {"activation_file_path": ")" + file + R"("})"},
           {false, R"(, "libzero": {"activation_offload": {"device": "cpu", "min_bytes": 256}})"},
           {true, R"(, "libzero": {"activation_offload": {"device": "cpu", "min_bytes": 256}})"},
           {false, R"(, "libzero": {"activation_offload": {"device": "nvme", "min_bytes": 256, "nvme_path": ")" + file +
                       R"("}})"}}) {
    SCOPED_TRACE(keys);
    const auto run = train(kGpu, checkpoint, keys);
    EXPECT_EQ(run.first, plain.first);
    EXPECT_TRUE(equal_bits(run.second, plain.second));
    EXPECT_ORDERED("order");
  }
}

struct Stack : torch::nn::Module {
  Stack() {
    for (int layer = 0; layer < 6; ++layer) layers->push_back(torch::nn::Linear(64, 64));
    register_module("layers", layers);
    register_buffer("offset", torch::full({64}, 0.25));
    torch::NoGradGuard no_grad;
    register_parameter("scale", layers[2]->as<torch::nn::Linear>()->weight.mean().reshape({1}) + 2);  // reads
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x) + offset());
    return x * named_parameters()["scale"];
  }
  at::Tensor offset() { return named_buffers()["offset"]; }
  torch::nn::ModuleList layers;
};

// zero::build with a device: the values of a model that is built in host memory and moved; the GPU never holds all of
// it.
TEST_P(OnSimulatedGpu, AModelIsBuiltOntoTheGpu) {
  const auto train = [](const std::shared_ptr<Stack>& model, at::Device device, int stage, const std::string& recipe) {
    auto setup = of("", recipe, stage);
    Engine engine(model, Options::from_json(json_of(setup)), Communicator::local());
    for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.device(), device);
    EXPECT_EQ(model->offset().device(), device);
    auto in = at::ones({4, 64}).to(device, dtype_of(setup));
    if (recipe != "fp32") model->offset().set_data(model->offset().to(dtype_of(setup)));
    for (int step = 0; step < 3; ++step) {
      engine.backward(model->forward(in).to(at::kFloat).square().mean());
      engine.step();
    }
    return engine.full_state_dict();
  };
  for (const char* recipe : {"fp32", "bf16"})
    for (const int stage : {0, 1, 3}) {
      SCOPED_TRACE(std::string(recipe) + ", stage " + std::to_string(stage));
      torch::manual_seed(11);
      const auto eager = train(std::make_shared<Stack>(), at::kCPU, stage, recipe);
      torch::manual_seed(11);
      const auto to = stage == 0 ? at::Device(at::kCUDA) : kGpu;  // the current one
      const auto built = train(build([] { return std::make_shared<Stack>(); }, to), kGpu, stage, recipe);
      std::string first;
      EXPECT_TRUE(equal_bits(built, eager, &first)) << first;
      EXPECT_ORDERED("order");
    }
  EXPECT_THROW(build([] { return std::make_shared<Stack>(); }, at::kMeta), ConfigError);
  // fp32: parameters and two optimizer states rest on the GPU; beyond them at most one unit's parameters at a time.
  torch::manual_seed(11);
  const auto model = build([] { return std::make_shared<Stack>(); }, kGpu);
  at::accelerator::resetPeakStats(0);
  const auto before = at::accelerator::getDeviceStats(0).allocated_bytes[0].current;
  Engine engine(model, Options::from_json(json_of(of("", "fp32", 3))), Communicator::local());
  const std::int64_t layer = (64 * 64 + 64) * 4, rests = 3 * (6 * layer + 4);
  const auto peak = at::accelerator::getDeviceStats(0).allocated_bytes[0].peak - before;
  EXPECT_GE(peak, rests);
  EXPECT_LE(peak, rests + layer + 32 * 1024) << "alignment and small blocks take little";
}

// The steps of a model of 14 units, 13 of them layers: libzero's launches, and where the host waits for the device.
TEST_P(OnSimulatedGpu, AStepHasFewLaunchesAndTheHostWaitsAfterThem) {
  for (const char* recipe : {"fp32", "bf16", "fp16"})
    for (const int stage : {0, 1, 2, 3}) {
      torch::nn::Sequential module;
      for (int layer = 0; layer < 13; ++layer) module->push_back(torch::nn::Linear(16, 16));
      module->to(kGpu);
      auto setup = of("", recipe, stage);
      Engine engine(module.ptr(), Options::from_json(json_of(setup)), Communicator::local());
      for (int step = 0; step < 3; ++step) {
        engine.backward(module->forward(at::ones({2, 16}).to(kGpu, dtype_of(setup))).to(at::kFloat).square().mean());
        simulated_gpu::take_operations();
        EXPECT_TRUE(engine.step().updated);
        auto names = simulated_gpu::take_operations();
        if (step == 0) std::erase(names, "0 aten::zero_");  // memory is made
        EXPECT_EQ(names, (std::vector<std::string>{"0 zero::sums_of_squares", "0 zero::add_sums", "0 zero::step_norm",
                                                   "0 aten::copy_", "0 zero::update", "host waits"}))
            << recipe << ", stage " << stage << joined(names);
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Queries, OnSimulatedGpu, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Reached" : "NotReached"; });

}  // namespace
}  // namespace zero::test::simulated_test
