// The delayed parameter update (ZeRO-Offload, arXiv:2101.06840, section 5.2) against a loop that keeps one gradient
// back: step i's gradients are taken with the parameters after g_(i-2) and applied while step i + 1 runs. Bit for bit,
// with clipping, skipped steps, schedules, flushes and checkpoints in the middle.
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>
#include <optional>
#include <set>

#include "parity/training.h"
#include "support/folder.h"

namespace zero::test::delayed_test {
namespace {

std::string folder() {
  static const std::string path = temporary_folder();
  return path;
}

std::string offload(const std::string& device, int start) {
  return R"(, "offload_optimizer": {"device": ")" + device + R"(", "nvme_path": ")" + folder() + "\"}" +
         (start < 0 ? "" : R"(, "delayed_update": {"enabled": true, "start_step": )" + std::to_string(start) + "}");
}

struct Row {
  double loss, norm, lr, scale;
  bool updated, overflow;
  bool operator==(const Row&) const = default;
};

// One step's number of rank 0, whose forward used the parameters as they were.
struct Seen {
  std::vector<Row> rows;
  std::vector<std::string> hashes;  // after a flush, if requested
  std::string last;
};

struct Plan {
  Training setup;
  std::set<int> flush_after;  // steps
  float poison = 0;           // the loss of step 6 is multiplied by it, if not 0
};

Seen train(const Plan& plan) {
  Seen run;
  std::mutex mutex;
  run_ranks(plan.setup.world, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    const auto& task = problem(plan.setup.problem);
    auto module = make_module(task);
    Engine engine(module, Options::from_json(json_of(plan.setup)), comm);
    Seen mine;
    for (int step = 0; step < plan.setup.steps; ++step) {
      double sum = 0;
      StepResult result;
      for (int micro = 0; micro < plan.setup.accumulation; ++micro) {
        auto loss = loss_of(task, *module, comm->rank(), step * plan.setup.accumulation + micro, dtype_of(plan.setup));
        if (plan.poison != 0 && step == 6) loss = loss * plan.poison;
        engine.backward(loss);
        sum += loss.item<double>();
        result = engine.step();
      }
      mine.rows.push_back({sum, result.grad_norm, result.lr, result.loss_scale, result.updated, result.overflow});
      if (plan.flush_after.contains(step)) {
        engine.flush();
        mine.hashes.push_back(engine.state_hash());
      }
    }
    engine.flush();
    mine.last = engine.state_hash();
    std::lock_guard lock(mutex);
    if (comm->rank() == 0) run = std::move(mine);
  });
  return run;
}

// The parameters with which each step's gradient is computed, for a scalar w with gradient a * w - b and plain SGD, by
// the table of docs/offload.md.
std::vector<float> scalar_oracle(int steps, int start, float lr, float a, float b, float w) {
  std::vector<float> seen;
  std::optional<float> kept_back;
  for (int i = 0; i < steps; ++i) {
    seen.push_back(w);
    const float g = a * w - b;
    if (i < start) {
      w = w - lr * g;
      continue;
    }
    if (kept_back) w = w - lr * *kept_back;
    kept_back = g;
  }
  return seen;
}

struct ScalarImpl : torch::nn::Module {
  at::Tensor w;
  ScalarImpl() { w = register_parameter("w", torch::full({1}, 3.0f)); }
  at::Tensor forward(float a, float b) { return (0.5 * a * w * w - b * w).sum(); }
};

TEST(Delayed, AScalarFollowsTheTable) {
  for (const int start : {1, 2, 5, 100}) {
    auto module = std::make_shared<ScalarImpl>();
    Engine engine(module,
                  Options::from_json(R"({"train_batch_size": 1, "gradient_clipping": 0,
                     "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
                     "zero_optimization": {"stage": 1)" +
                                     offload("cpu", start) + "}}"),
                  Communicator::local());
    std::vector<float> seen;
    for (int i = 0; i < 12; ++i) {
      seen.push_back(module->w.item<float>());
      engine.backward(module->forward(0.5f, 1.0f));
      const auto result = engine.step();
      EXPECT_EQ(result.updated, i != start) << "step " << i << ", start " << start;
    }
    EXPECT_EQ(seen, scalar_oracle(12, start, 0.25f, 0.5f, 1.0f, 3.0f)) << "start " << start;
  }
}

// The same one-step delay on every tier.
TEST(Delayed, TiersAndStagesAgree) {
  for (const int world : {1, 2}) {
    for (const char* recipe : {"fp32", "bf16", "fp16"}) {
      std::optional<Seen> first;
      for (const int stage : {1, 2, 3}) {
        for (const char* device : {"cpu", "nvme"}) {
          for (const char* parameters : {"none", "cpu", "nvme"}) {
            if (stage < 3 && std::string(parameters) != "none") continue;
            Plan plan;
            plan.setup.stage = stage;
            plan.setup.world = world;
            plan.setup.steps = 9;
            plan.setup.recipe = recipe;
            plan.setup.clip = 0.1;
            plan.setup.zero = offload(device, 2) + R"(, "offload_param": {"device": ")" + parameters +
                              R"(", "nvme_path": ")" + folder() + R"(", "max_in_cpu": 0})";
            if (stage < 3) plan.setup.zero = offload(device, 2);
            plan.flush_after = {4};
            if (std::string(recipe) == "fp16") plan.poison = 1e8f;
            const auto run = train(plan);
            if (!first) first = run;
            const auto text = "world " + std::to_string(world) + " " + recipe + " stage " + std::to_string(stage) +
                              " optimizer " + device + " parameters " + parameters;
            EXPECT_EQ(run.rows, first->rows) << text;
            EXPECT_EQ(run.hashes, first->hashes) << text;
            EXPECT_EQ(run.last, first->last) << text;
          }
        }
      }
    }
  }
}

// A loop with a queue of one gradient: an engine without delay that is fed gradients taken elsewhere. The loss
// sum(p * g) has the gradient g, so the queue's owner applies any gradient it likes.
TEST(Delayed, AQueueOfOneGradientGivesTheSameBits) {
  for (const char* recipe : {"fp32", "bf16"}) {
    const auto& task = problem("mlp");
    const int steps = 8, start = 3;
    const auto setup = [&](const std::string& zero) {
      Training s;
      s.problem = "mlp";
      s.stage = 2;
      s.world = 1;
      s.recipe = recipe;
      s.clip = 0.05;
      s.zero = zero;
      s.extra = R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}})";
      return s;
    };
    const auto dtype = dtype_of(setup(""));
    // Under test.
    auto module = make_module(task);
    Engine engine(module, Options::from_json(json_of(setup(offload("cpu", start)))), Communicator::local());
    std::vector<double> losses;
    std::vector<std::vector<at::Tensor>> seen;
    for (int i = 0; i < steps; ++i) {
      std::vector<at::Tensor> now;
      for (const auto& p : module->parameters()) now.push_back(p.detach().clone());
      seen.push_back(std::move(now));
      auto loss = loss_of(task, *module, 0, i, dtype);
      losses.push_back(loss.item<double>());
      engine.backward(loss);
      engine.step();
    }
    engine.flush();
    // The queue.
    auto applied = make_module(task);
    Engine applier(applied, Options::from_json(json_of(setup(""))), Communicator::local());
    std::optional<std::vector<at::Tensor>> queue;
    const auto apply = [&](const std::vector<at::Tensor>& gradients) {
      at::Tensor sum = torch::zeros({});
      const auto parameters = applied->parameters();
      for (std::size_t k = 0; k < parameters.size(); ++k)
        sum = sum + (parameters[k].to(at::kFloat) * gradients[k].to(at::kFloat)).sum();
      applier.backward(sum);
      applier.step();
    };
    for (int i = 0; i < steps; ++i) {
      const auto parameters = applied->parameters();
      for (std::size_t k = 0; k < parameters.size(); ++k)
        EXPECT_TRUE(at::equal(parameters[k], seen[static_cast<std::size_t>(i)][k]))
            << recipe << " step " << i << " parameter " << k;
      // Gradients of batch i with these parameters, by autograd alone.
      auto plain = make_module(task);
      {
        at::NoGradGuard no_grad;
        auto to = plain->parameters();
        for (std::size_t k = 0; k < to.size(); ++k) to[k].set_data(parameters[k].detach().clone());
      }
      auto loss = loss_of(task, *plain, 0, i, dtype);
      EXPECT_EQ(loss.item<double>(), losses[static_cast<std::size_t>(i)]) << recipe << " step " << i;
      loss.backward();
      std::vector<at::Tensor> gradients;
      for (const auto& p : plain->parameters())
        gradients.push_back(p.grad().defined() ? p.grad() : torch::zeros_like(p));
      if (i < start) {
        apply(gradients);
        continue;
      }
      if (queue) apply(*queue);
      queue = std::move(gradients);
    }
    apply(*queue);
    EXPECT_EQ(engine.state_hash(), applier.state_hash()) << recipe;
  }
}

// A checkpoint during a pending update contains all updates, and a run resumed from it equals one that flushed there.
TEST(Delayed, ACheckpointFlushes) {
  for (const char* device : {"cpu", "nvme"}) {
    Plan plan;
    plan.setup.stage = 3;
    plan.setup.recipe = "bf16";
    plan.setup.steps = 8;
    plan.setup.zero = offload(device, 2);
    plan.flush_after = {4};
    const auto flushed = train(plan);
    std::string resumed, saved;
    std::mutex mutex;
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      at::set_num_threads(1);
      const auto& task = problem(plan.setup.problem);
      std::string at_save;
      {
        auto module = make_module(task);
        Engine engine(module, Options::from_json(json_of(plan.setup)), comm);
        for (int step = 0; step < 5; ++step) {
          engine.backward(loss_of(task, *module, comm->rank(), step, at::kBFloat16));
          engine.step();
        }
        engine.save_checkpoint(folder() + "/checkpoints", device);
        at_save = engine.state_hash();
        // Continues; an update is in flight when the state is replaced by the older one.
        for (int step = 5; step < 7; ++step) {
          engine.backward(loss_of(task, *module, comm->rank(), step, at::kBFloat16));
          engine.step();
        }
        engine.load_checkpoint(folder() + "/checkpoints", device);
        EXPECT_EQ(engine.state_hash(), at_save);
      }
      auto module = make_module(task);
      Engine engine(module, Options::from_json(json_of(plan.setup)), comm);
      engine.load_checkpoint(folder() + "/checkpoints", device);
      for (int step = 5; step < 8; ++step) {
        engine.backward(loss_of(task, *module, comm->rank(), step, at::kBFloat16));
        engine.step();
      }
      const auto last = engine.state_hash();
      std::lock_guard lock(mutex);
      if (comm->rank() == 0) saved = at_save, resumed = last;
    });
    EXPECT_EQ(saved, flushed.hashes.at(0)) << device;
    EXPECT_EQ(resumed, flushed.last) << device;
  }
}

TEST(Delayed, NeedsAnOffloadedOptimizer) {
  auto module = std::make_shared<ScalarImpl>();
  EXPECT_THROW(Engine(module, Options::from_json(R"({"train_batch_size": 1, "optimizer": {"type": "SGD"},
                 "zero_optimization": {"stage": 1, "delayed_update": {"enabled": true}}})"),
                      Communicator::local()),
               ConfigError);
}

}  // namespace
}  // namespace zero::test::delayed_test
