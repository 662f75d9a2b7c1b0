// On a mesh: an overflow that only one rank sees, and micro-batches that fail and are discarded.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "parity/mesh_problems.h"
#include "support/nightly.h"
#include "support/require.h"

namespace zero::test::mesh_failures_test {
namespace {

using namespace zero::test::mesh;
using Comm = std::shared_ptr<Communicator>;

// Identity, whose backward throws, or returns infinities.
struct Fuse : torch::autograd::Function<Fuse> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const std::string& what) {
    context->saved_data["what"] = what;
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto what = context->saved_data["what"].toStringRef();
    if (what == "backward") throw std::runtime_error("the fuse blew");
    if (what == "infinite") gradients[0] = gradients[0].sign() * std::numeric_limits<float>::infinity();
    return {gradients[0], at::Tensor()};
  }
};

// Two MLPs, which draw random numbers between their column and their row product, and after it.
struct MlpsImpl : torch::nn::Module {
  torch::nn::ModuleList ups, downs;
  std::string fault;  // where the first MLP fails: "", "forward", "backward", "again" (its recomputation), "infinite"
  bool segments = false, draws = true;

  MlpsImpl() {
    register_module("ups", ups);
    register_module("downs", downs);
    for (int i = 0; i < 2; ++i) {
      ups->push_back(torch::nn::Linear(6, 8));
      downs->push_back(torch::nn::Linear(8, 6));
    }
    fill(*this);
  }
  at::Tensor mask(const at::Tensor& x) const { return draws ? at::bernoulli(at::full_like(x, 0.7)) : at::ones_like(x); }
  at::Tensor layer(std::size_t i, const at::Tensor& x) {
    auto y = torch::tanh(ups[i]->as<torch::nn::Linear>()->forward(x));
    y = y * mask(y);
    if (i == 0 && !fault.empty()) {
      const bool again = torch::autograd::get_current_graph_task_id() != -1;
      if (fault == "forward" || (fault == "again" && again)) throw std::runtime_error("the fuse blew");
      y = Fuse::apply(y, fault);
    }
    y = downs[i]->as<torch::nn::Linear>()->forward(y);
    return y * mask(y);
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < 2; ++i)
      x = segments ? activation_checkpoint([this, i](const at::Tensor& in) { return layer(i, in); }, x) : layer(i, x);
    return x;
  }
};

// more: further keys, with a comma.
Options options_with(int t, int u, int stage, const std::string& more, const std::string& of_zero = "") {
  return Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.001}}, "zero_optimization": {"stage": )" +
      std::to_string(stage) + of_zero + R"(}, "sequence_parallel_size": )" + std::to_string(u) +
      R"(, "tensor_parallel": {"autotp_size": )" + std::to_string(t) +
      R"(, "partition_config": {"use_default_specs": false, "layer_specs": [
        {"patterns": ["ups"], "partition_type": "column"}, {"patterns": ["downs"], "partition_type": "row"}]}})" +
      more + "}");
}

at::ScalarType dtype_of(const MlpsImpl& module) { return module.parameters().front().scalar_type(); }

at::Tensor loss_of(MlpsImpl& module, std::uint64_t seed) {
  return module.forward(draw({4, 6}, seed).to(dtype_of(module))).to(at::kFloat).pow(2).mean();
}

// --- an overflow --------------------------------------------------------------------------------

// [collective] This rank's parameters, masters and moments.
std::vector<at::Tensor> own_state(Engine& engine, const MlpsImpl& module) {
  std::vector<at::Tensor> all;
  {
    const auto scope = engine.gathered_parameters();
    for (const auto& parameter : module.parameters()) all.push_back(parameter.detach().clone());
  }
  for (const auto& item : module.named_parameters())
    for (const char* state : {"master", "exp_avg", "exp_avg_sq"})
      all.push_back(engine.own_parameter_state(item.key(), state).values.clone());
  return all;
}

struct Grid {
  int t, u, d;
};

// Of 4 ranks only the last of its tensor- and sequence-parallel groups has infinite gradients, and only of the first
// layer.
void check_overflow(const Comm& comm, const Grid& grid, int stage, const std::string& of_zero) {
  const auto label = "t " + std::to_string(grid.t) + " u " + std::to_string(grid.u) + " stage " +
                     std::to_string(stage) + of_zero + ": ";
  const auto run = [&](bool overflows, int power) {
    const auto module = std::make_shared<MlpsImpl>();
    module->draws = false;  // ranks may be threads
    Engine engine(std::static_pointer_cast<torch::nn::Module>(module),
                  options_with(grid.t, grid.u, stage,
                               R"(, "fp16": {"enabled": true, "hysteresis": 1, "initial_scale_power": )" +
                                   std::to_string(power) + "}",
                               of_zero),
                  comm);
    const auto& mesh = engine.mesh();
    const bool bad = mesh.rank("tp") == grid.t - 1 && mesh.rank("sp") == grid.u - 1 && mesh.rank("dp") == 0;
    for (int step = 0; step < 4; ++step) {
      if (step == 2 && !overflows) continue;
      module->fault = step == 2 && bad ? "infinite" : "";
      const auto before = own_state(engine, *module);
      const double scale = engine.loss_scale();
      engine.backward(loss_of(*module, static_cast<std::uint64_t>(10 * step + mesh.rank("dp_sp"))));
      const auto result = engine.step();
      const auto after = own_state(engine, *module);
      bool same = true;
      for (std::size_t i = 0; i < before.size(); ++i) same = same && after[i].equal(before[i]);
      require(result.overflow == (step == 2) && result.updated == (step != 2), label + "whether the step is skipped");
      require(engine.loss_scale() == (step == 2 ? scale / 2 : scale), label + "the loss scale");
      require(same == (step == 2), label + (same ? "nothing changed" : "a skipped step changed the state"));
      require(engine.skipped_steps() == (overflows && step >= 2 ? 1 : 0), label + "the number of skipped steps");
    }
    return engine.state_hash();
  };
  // The scale does not change the bits of an update, as it is a power of two.
  require(run(true, 10) == run(false, 9), label + "another state than without the skipped step");
}

TEST(MeshFailures, AnOverflowOnOneRankSkipsTheStepOnAll) {
  for (const char* transport : {"shm", "delayed"})
    expect_passed({transport, 4}, [](const auto& comm) {
      OneIn part(4);
      for (const Grid grid : {Grid{2, 1, 2}, {1, 2, 2}, {2, 2, 1}, {4, 1, 1}, {1, 4, 1}})
        for (int stage = 0; stage <= 3; ++stage)
          for (const char* of_zero : {"", R"(, "offload_optimizer": {"device": "cpu"})"})
            if ((stage > 0 || !*of_zero) && part.take()) check_overflow(comm, grid, stage, of_zero);
    });
}

// --- micro-batches that are discarded -----------------------------------------------------------

void require_same_generators(const Engine& engine, const std::string& what) {
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  const auto all =
      engine.mesh().group("tp")->all_gather_bytes({static_cast<const char*>(state.const_data_ptr()), state.nbytes()});
  for (const auto& one : all) require(one == all[0], what + ": the generators of a tensor-parallel group differ");
}

// fault: "" (none), where a pass fails, or "retained" (nothing fails).
std::string train_with(const Comm& comm, int t, int stage, const std::string& recipe, const std::string& fault,
                       bool segments) {
  const auto module = std::make_shared<MlpsImpl>();
  module->segments = segments;
  Engine engine(std::static_pointer_cast<torch::nn::Module>(module),
                options_with(t, 1, stage,
                             R"(, "gradient_accumulation_steps": 3)" +
                                 (recipe == "fp32" ? "" : ", \"" + recipe + R"(": {"enabled": true})")),
                comm);
  const int data_rank = engine.mesh().rank("dp");
  const auto label = fault + " at stage " + std::to_string(stage) + ", " + recipe;
  for (int micro = 0; micro < 9; ++micro) {
    if (!fault.empty() && (micro == 3 || micro == 7)) {  // a step's first and second
      torch::manual_seed(static_cast<std::uint64_t>(500 + micro + data_rank));
      std::string text = "nothing";
      try {
        module->fault = fault;
        const auto loss = loss_of(*module, static_cast<std::uint64_t>(90 + micro));
        engine.backward(loss, {.retain_graph = fault == "retained", .recoverable = true});
      } catch (const std::exception& e) {
        text = e.what();
      }
      module->fault.clear();
      require(contains(text, fault == "retained" ? "nothing" : "the fuse blew"), label + ": " + text);
      require(engine.discard_micro_batch() == micro % 3, label + ": micro-batches that are left");
      require_same_generators(engine, label);
    }
    torch::manual_seed(static_cast<std::uint64_t>(100 * micro + data_rank));
    engine.backward(loss_of(*module, static_cast<std::uint64_t>(10 * micro + data_rank)), {.recoverable = true});
    engine.step();
  }
  require_same_generators(engine, label);
  return engine.state_hash();
}

TEST(MeshFailures, ADiscardedMicroBatchLeavesNoTrace) {
  for (const Place place : {Place{"shm", 4}, {"shm", 3}})  // t 2 x D 2; t 3 with parts of 2, 3 and 3
    expect_passed(place, [](const auto& comm) {
      const int t = comm->size() == 3 ? 3 : 2;
      OneIn part(7);
      for (const char* recipe : {"fp32", "bf16", "fp16"})
        for (int stage = 0; stage <= 3; ++stage)
          for (const bool segments : {false, true}) {
            if (!part.take()) continue;
            const auto wanted = train_with(comm, t, stage, recipe, "", segments);
            for (const char* fault : {"forward", "backward", "again", "retained"}) {
              if (std::string(fault) == "again" && !segments) continue;
              require(train_with(comm, t, stage, recipe, fault, segments) == wanted,
                      std::string(fault) + ", stage " + std::to_string(stage) + ", " + recipe +
                          (segments ? " with segments" : "") + ": another state");
            }
          }
    });
}

// Only one rank of a tensor-parallel group fails, and leaves: no other rank waits for it, in any group.
TEST(MeshFailures, OneRankOfAGroupFails) {
  OneIn part(5);
  for (const auto& [transport, stage] : {std::pair{"shm", 1}, {"shm", 3}, {"gloo", 3}})
    for (const char* fault : {"forward", "backward"}) {
      if (!part.take()) continue;
      const auto text = run_at({transport, 4}, [fault, at = stage](const auto& comm) {
        const auto module = std::make_shared<MlpsImpl>();
        Engine engine(std::static_pointer_cast<torch::nn::Module>(module), options_with(2, 1, at, ""), comm);
        for (int step = 0; step < 3; ++step) {
          if (step == 1 && comm->rank() == 1) module->fault = fault;
          engine.backward(loss_of(*module, static_cast<std::uint64_t>(10 * step + engine.mesh().rank("dp"))));
          engine.step();
        }
      });
      EXPECT_NE(text.find("rank 1 failed: the fuse blew"), std::string::npos) << text;
      for (const char* rank : {"0", "2", "3"}) {
        const auto of = text.find(std::string("rank ") + rank + " failed: [");
        ASSERT_NE(of, std::string::npos) << text;
        const auto line = text.substr(of, text.find('\n', of) - of);
        EXPECT_TRUE(contains(line.substr(8), "rank 1")) << line;
        EXPECT_FALSE(contains(line, "within")) << line;
      }
    }
}

}  // namespace
}  // namespace zero::test::mesh_failures_test
