// Lifetimes of Engines: destroyed in any order and thread, replaced, failed during construction, with unsupported
// models and configurations.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "soundness/small_programs.h"
#include "support/folder.h"

namespace zero::test::engine_life_test {
namespace {

std::unique_ptr<Engine> make_engine(int stage = 2) {
  return std::make_unique<Engine>(small_model(), small_options(stage), Communicator::local());
}

void train_once(Engine& engine, torch::nn::SequentialImpl& model, int seed = 0) {
  engine.backward(model.forward(small_input(seed)).pow(2).mean());
  engine.step();
}

// Blocks of many sizes, so that one that was freed is used again.
void allocate_and_free() {
  std::vector<at::Tensor> kept;
  for (int i = 1; i < 200; ++i) kept.push_back(torch::ones({i * 7}));
  for (int i = 0; i < 200; ++i) torch::ones({8});
}

// The memory of a destroyed object must have been reused before it is accessed.
void take_freed_memory() {
  std::vector<std::unique_ptr<char[]>> blocks;
  for (std::size_t bytes = 16; bytes < 1024; bytes += 8)
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(std::make_unique<char[]>(bytes));
      std::fill_n(blocks.back().get(), bytes, '\x5a');
    }
  allocate_and_free();
}

TEST(EngineLife, EndsInAnyOrder) {
  std::vector<int> order = {0, 1, 2};
  do {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::unique_ptr<Engine>> engines;
      for (int i = 0; i < 3; ++i) engines.push_back(make_engine(i));
      for (const int i : order) {
        engines[static_cast<std::size_t>(i)].reset();
        take_freed_memory();
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(EngineLife, InAVectorDestroyedFromTheFront) {
  for (int round = 0; round < 20; ++round) {
    {
      std::vector<Engine> engines;
      engines.reserve(3);
      for (int i = 0; i < 3; ++i) engines.emplace_back(small_model(), small_options(i), Communicator::local());
      allocate_and_free();
    }
    take_freed_memory();
  }
}

TEST(EngineLife, ReplacedByAssignment) {
  auto model = small_model();
  auto engine = std::make_unique<Engine>(model, small_options(2), Communicator::local());
  for (int round = 0; round < 20; ++round) {
    train_once(*engine, *model);
    model = small_model();
    engine = std::make_unique<Engine>(model, small_options(2), Communicator::local());
    take_freed_memory();
  }
  engine.reset();
  take_freed_memory();
}

TEST(EngineLife, MadeAndEndedInDifferentThreads) {
  for (int round = 0; round < 20; ++round) {
    auto engine = make_engine();
    std::thread([&] { engine.reset(); }).join();
    take_freed_memory();
    std::thread([&] { engine = make_engine(); }).join();
    take_freed_memory();
    engine.reset();
    take_freed_memory();
    // A thread ends before the Engine that it created; another Engine was created meanwhile.
    std::unique_ptr<Engine> other;
    std::thread([&] {
      engine = make_engine();
      other = make_engine();
      std::thread([&] { engine.reset(); }).join();
      take_freed_memory();
    }).join();
    other.reset();
    take_freed_memory();
  }
}

// The newest Engine of the thread observes its allocations, whatever was destroyed before.
TEST(EngineLife, CountsActivationsOfTheYoungest) {
  auto first = make_engine(), second = make_engine(), third = make_engine();
  second.reset();
  const auto activations = [](const Engine& engine) {
    return engine.memory().current(MemoryReport::Tier::Device, MemoryReport::Purpose::Activations);
  };
  const auto before = activations(*third);
  auto kept = torch::ones({1000});
  EXPECT_EQ(activations(*third), before + 4000);
  kept = at::Tensor();
  third.reset();
  const auto before_first = activations(*first);
  kept = torch::ones({1000});
  EXPECT_EQ(activations(*first), before_first + 4000);
}

// --- a constructor that throws ----------------------------------------------------------------

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }

 private:
  const char* name_;
};

void check_usable_after_refusal(const std::function<void(std::shared_ptr<torch::nn::SequentialImpl>, int)>& refused) {
  for (const int stage : {0, 2, 3}) {
    SCOPED_TRACE(stage);
    auto model = small_model(), plain = small_model();
    refused(model, stage);
    take_freed_memory();
    const auto expected = plain->forward(small_input(1));
    EXPECT_TRUE(torch::equal(model->forward(small_input(1)), expected));
    model->forward(small_input(1)).sum().backward();
    for (auto& p : model->parameters()) p.mutable_grad() = at::Tensor();
    Engine engine(model, small_options(stage, stage == 3 ? kOffloadedParameters : ""), Communicator::local());
    EXPECT_TRUE(torch::equal(model->forward(small_input(1)), expected));
    train_once(engine, *model);
    EXPECT_FALSE(torch::equal(model->forward(small_input(1)), expected));
  }
}

TEST(EngineRefused, MissingFolderForActivations) {
  check_usable_after_refusal([](std::shared_ptr<torch::nn::SequentialImpl> model, int stage) {
    const auto error = message_of([&] {
      Engine(model,
             small_options(stage, stage == 3 ? kOffloadedParameters : "",
                           R"(, "libzero": {"activation_offload": {"device": "nvme", "nvme_path": "/nonexistent/x"}})"),
             Communicator::local());
    });
    EXPECT_TRUE(contains(error, "/nonexistent/x")) << error;
  });
}

TEST(EngineRefused, TraceThatCannotBeWritten) {
  check_usable_after_refusal([](std::shared_ptr<torch::nn::SequentialImpl> model, int stage) {
    const Environment trace("ZERO_TRACE", "/nonexistent/trace.json");
    const auto error = message_of(
        [&] { Engine(model, small_options(stage, stage == 3 ? kOffloadedParameters : ""), Communicator::local()); });
    EXPECT_TRUE(contains(error, "/nonexistent")) << error;
  });
  check_usable_after_refusal([](std::shared_ptr<torch::nn::SequentialImpl> model, int stage) {
    const Environment trace("ZERO_TRACE", "/tmp/zero-soundness-trace.json");
    const Environment steps("ZERO_TRACE_STEPS", "many");
    const auto error = message_of(
        [&] { Engine(model, small_options(stage, stage == 3 ? kOffloadedParameters : ""), Communicator::local()); });
    EXPECT_TRUE(contains(error, "ZERO_TRACE_STEPS")) << error;
  });
}

// If construction fails on one rank, it fails on all, and the models of all ranks are unchanged.
TEST(EngineRefused, OnOneRankOnly) {
  const TempFolder temporary;
  const auto& folder = temporary.path();
  std::filesystem::create_directories(folder / "trace.json.rank-1.json");  // where a file should be
  for (const int stage : {1, 3}) {
    SCOPED_TRACE(stage);
    std::vector<std::shared_ptr<torch::nn::SequentialImpl>> models = {small_model(), small_model()};
    const auto expected = small_model()->forward(small_input(1));
    const auto model_of = [&](const Communicator& comm) { return models[static_cast<std::size_t>(comm.rank())]; };
    {
      const Environment trace("ZERO_TRACE", (folder / "trace.json").c_str());
      for (const auto& error : errors_of_ranks(
               2, [&](std::shared_ptr<Communicator> comm) { Engine(model_of(*comm), small_options(stage), comm); }))
        EXPECT_TRUE(contains(error, "rank-1.json")) << error;
    }
    for (const auto& model : models) EXPECT_TRUE(torch::equal(model->forward(small_input(1)), expected));
    for (const auto& error : errors_of_ranks(2, [&](std::shared_ptr<Communicator> comm) {
           const auto model = model_of(*comm);
           Engine engine(model, small_options(stage), comm);
           EXPECT_TRUE(torch::equal(model->forward(small_input(1)), expected));
           train_once(engine, *model);
         }))
      EXPECT_EQ(error, "");
  }
}

// --- models that an Engine cannot take, or can no longer --------------------------------------

TEST(EngineModels, HeldByAnotherEngine) {
  for (const int stage : {0, 3}) {
    auto model = small_model();
    auto first = std::make_unique<Engine>(model, small_options(stage, stage == 3 ? kOffloadedParameters : ""),
                                          Communicator::local());
    const auto error = message_of([&] { Engine(model, small_options(stage), Communicator::local()); });
    EXPECT_TRUE(contains(error, "0.weight")) << error;
    EXPECT_TRUE(contains(error, "held by another Engine")) << error;
    EXPECT_TRUE(contains(error, "Hint: end")) << error;
    train_once(*first, *model);  // continues as if nothing had happened
    if (stage != 0) continue;
    first.reset();
    Engine second(model, small_options(stage), Communicator::local());
    train_once(second, *model);
  }
}

// A view created once, as in an autoencoder with tied weights, follows its parameter.
struct TiedByAView : torch::nn::Module {
  TiedByAView() {
    weight = register_parameter("weight", (torch::arange(128, torch::kFloat).view({16, 8}) * 0.37).sin());
    transposed = weight.t();
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(at::tanh(at::linear(x, weight)), transposed); }
  at::Tensor weight, transposed;
};

TEST(EngineModels, ViewsThatTheProgramHolds) {
  const auto loss = [](TiedByAView& model) {
    const auto x = small_input(1);
    return (model.forward(x) - x).pow(2).mean();
  };
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int world : {1, 2}) {
      SCOPED_TRACE(std::to_string(stage) + " at " + std::to_string(world));
      TiedByAView plain;
      torch::optim::SGD optimizer(plain.parameters(), 0.5);
      const auto errors = errors_of_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = std::make_shared<TiedByAView>();
        Engine engine(
            model,
            Options::from_json(
                R"({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "optimizer": {"type": "SGD", )"
                R"("params": {"lr": 0.5}}, "zero_optimization": {"stage": )" +
                std::to_string(stage) + "}}"),
            comm);
        for (int step = 0; step < 20; ++step) {
          engine.backward(loss(*model));
          engine.step();
        }
        const auto masters = engine.full_state_dict();
        if (comm->rank() != 0) return;
        for (int step = 0; step < 20; ++step) {
          optimizer.zero_grad();
          loss(plain).backward();
          optimizer.step();
        }
        EXPECT_TRUE(torch::allclose(masters.at("weight"), plain.weight, 1e-5, 1e-6));
      });
      // A sharded parameter has no values between its uses, and a view does not say when it is used.
      const bool sharded = stage == 3 && world > 1;
      EXPECT_EQ(contains(errors[0], "weight (group root) was read past the dispatcher"), sharded) << errors[0];
      if (!sharded) EXPECT_EQ(errors[0], "");
    }
  }
}

TEST(EngineModels, OfAStage3EngineThatHasEnded) {
  auto model = small_model();
  { Engine engine(model, small_options(3, kOffloadedParameters), Communicator::local()); }
  const auto error = message_of([&] { Engine(model, small_options(3), Communicator::local()); });
  EXPECT_TRUE(contains(error, "0.weight: has no values")) << error;
  EXPECT_TRUE(contains(error, "Hint: save a checkpoint")) << error;
  EXPECT_TRUE(contains(message_of([&] { (void)model->forward(small_input(1)); }), "its Engine has ended"));
}

TEST(EngineModels, RatesOfGroupsThatAreNone) {
  auto model = small_model();
  Engine engine(model, small_options(1), Communicator::local());
  EXPECT_TRUE(contains(message_of([&] { (void)engine.lr(7); }), "got parameter group 7, expected 0 to 0"));
  EXPECT_TRUE(contains(message_of([&] { (void)engine.lr(-1); }), "got parameter group -1"));
  EXPECT_GT(engine.lr(0), 0);
}

TEST(EngineModels, WiderThanTheMasters) {
  for (const auto dtype : {at::kDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    auto model = small_model();
    model->ptr(1)->as<torch::nn::Linear>()->weight.set_data(
        model->ptr(1)->as<torch::nn::Linear>()->weight.detach().to(dtype));
    const auto error = message_of([&] { Engine(model, small_options(2), Communicator::local()); });
    EXPECT_TRUE(contains(error, "1.weight")) << error;
    EXPECT_TRUE(contains(error, c10::toString(dtype))) << error;
    EXPECT_TRUE(contains(error, "model->to(torch::kFloat)")) << error;
  }
}

TEST(EngineModels, ParametersRegisteredLater) {
  for (const int stage : {0, 3}) {
    auto model = small_model();
    Engine engine(model, small_options(stage), Communicator::local());
    train_once(engine, *model);
    model->push_back("head", torch::nn::Linear(8, 8));
    const auto error = message_of([&] { train_once(engine, *model); });
    EXPECT_TRUE(contains(error, "head.weight")) << error;
    EXPECT_TRUE(contains(error, "before")) << error;
  }
  // Of equal number: one module takes another's place.
  struct Pair : torch::nn::Module {
    Pair()
        : body(register_module("body", torch::nn::Linear(8, 8))),
          head(register_module("head", torch::nn::Linear(8, 8))) {}
    at::Tensor forward(const at::Tensor& x) { return head->forward(body->forward(x)); }
    torch::nn::Linear body, head;
  };
  auto model = std::make_shared<Pair>();
  Engine engine(model, small_options(1), Communicator::local());
  model->head = model->replace_module("head", torch::nn::Linear(8, 8));
  const auto error = message_of([&] {
    engine.backward(model->forward(small_input(0)).pow(2).mean());
    engine.step();
  });
  EXPECT_TRUE(contains(error, "head.weight")) << error;
}

TEST(EngineModels, PatternsThatMatchNothing) {
  const auto groups = [](const std::string& list) { return R"(, "libzero": {"parameter_groups": [)" + list + "]}"; };
  const auto error = message_of([&] {
    Engine(small_model(),
           small_options(2, "", groups(R"({"pattern": "*.bais", "lr": 0}, {"pattern": "*.bias", "lr": 0.1},
                                          {"pattern": "head*", "weight_decay": 0})")),
           Communicator::local());
  });
  EXPECT_TRUE(contains(error, "*.bais")) << error;
  EXPECT_TRUE(contains(error, "head*")) << error;
  EXPECT_FALSE(contains(error, "\"*.bias\"")) << error;
}

// A tied parameter is matched by any of its names.
TEST(EngineModels, PatternsMatchAliases) {
  struct Tied : torch::nn::Module {
    Tied() : tokens(register_module("tokens", torch::nn::Linear(8, 8))) {
      head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
      head->register_parameter("tied", tokens->weight);
    }
    at::Tensor forward(const at::Tensor& x) { return head->forward(tokens->forward(x)); }
    torch::nn::Linear tokens, head{nullptr};
  };
  auto model = std::make_shared<Tied>();
  fill(*model);
  const auto before = model->tokens->weight.detach().clone();
  Engine engine(model, small_options(0, "", R"(, "libzero": {"parameter_groups": [{"pattern": "head.t*", "lr": 0.0,
                                        "weight_decay": 0.0}]})"),
                Communicator::local());
  engine.backward(model->forward(small_input(0)).pow(2).mean());
  engine.step();
  EXPECT_TRUE(torch::equal(model->tokens->weight.detach(), before));
}

struct OwnHook : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable&) override {}
};

TEST(EngineModels, HooksInTheEnginesPlace) {
  const auto set_own = [](const at::Tensor& parameter) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<OwnHook>());
  };
  {
    auto model = small_model();
    set_own(model->parameters()[2]);
    const auto error = message_of([&] { Engine(model, small_options(0), Communicator::local()); });
    EXPECT_TRUE(contains(error, "1.weight")) << error;
    EXPECT_TRUE(contains(error, "hook")) << error;
  }
  auto model = small_model();
  Engine engine(model, small_options(0), Communicator::local());
  train_once(engine, *model);
  set_own(model->parameters()[2]);
  const auto error = message_of([&] { train_once(engine, *model); });
  EXPECT_TRUE(contains(error, "1.weight")) << error;
  EXPECT_TRUE(contains(error, "hook")) << error;
}

TEST(EngineModels, MadeInInferenceMode) {
  auto model = small_model();
  std::string error;
  {
    const c10::InferenceMode inference;
    error = message_of([&] { Engine(model, small_options(2), Communicator::local()); });
  }
  EXPECT_TRUE(contains(error, "InferenceMode")) << error;
  {
    const c10::InferenceMode inference;
    model = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(4, 4));
  }
  error = message_of([&] { Engine(model, small_options(2), Communicator::local()); });
  EXPECT_TRUE(contains(error, "0.weight")) << error;
  EXPECT_TRUE(contains(error, "InferenceMode")) << error;
}

// A buffer that checkpoints do not support is reported at the start; a program that never saves runs.
TEST(EngineModels, BuffersThatCheckpointsCannotHold) {
  std::mutex mutex;
  std::string warnings;
  set_log_sink([&](LogLevel level, std::string_view text) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (level == LogLevel::Warning) warnings += text;
  });
  auto model = small_model();
  model->register_buffer("table", torch::zeros({4}, torch::kComplexDouble));
  Engine engine(model, small_options(1), Communicator::local());
  set_log_sink({});
  EXPECT_TRUE(contains(warnings, "table")) << warnings;
  EXPECT_TRUE(contains(warnings, "ComplexDouble")) << warnings;
  train_once(engine, *model);
  const auto error = message_of([&] { engine.save_checkpoint("/tmp/zero-soundness-never", "t"); });
  EXPECT_TRUE(contains(error, "table")) << error;
  EXPECT_TRUE(contains(error, "cannot hold")) << error;
}

// --- the middle of a step ---------------------------------------------------------------------

std::ptrdiff_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

// Between backward() and step() gradients are the Engine's, and the program may keep tensors that it counted: neither
// holds the files of an Engine that has ended.
TEST(EngineLife, EndedBetweenBackwardAndStepItHoldsNothing) {
  const TempFolder folder;
  const auto files = R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.text() + "\"}";
  for (const int round : {0, 1})  // the first opens descriptors that the process keeps
    for (const int stage : {1, 2, 3}) {
      const auto before = open_files();
      at::Tensor loss;
      {
        auto model = small_model();
        Engine engine(model, small_options(stage, files), Communicator::local());
        loss = model->forward(small_input(0)).pow(2).mean();
        engine.backward(loss);
      }
      if (round == 1) {
        EXPECT_EQ(open_files(), before) << "stage " << stage;
      }
    }
}

struct Blow : torch::autograd::Function<Blow> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("blown");
  }
};

// A parameter whose only gradient of a step came in a pass that failed is in no norm.
TEST(EngineLife, APassThatFailedIsInNoNorm) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto norm = [&](bool fails) {
      auto model = small_model(2);
      auto& first = *model->ptr(0)->as<torch::nn::Linear>();
      auto& second = *model->ptr(1)->as<torch::nn::Linear>();
      Engine engine(model, small_options(stage, "", R"(, "gradient_accumulation_steps": 2)"), Communicator::local());
      engine.backward(first.forward(small_input(0)).pow(2).mean());
      if (fails) {
        const auto loss = second.forward(Blow::apply(first.forward(small_input(1)))).pow(2).mean() * 1000;
        EXPECT_NE(message_of([&] { engine.backward(loss, {.recoverable = true}); }), "");
        EXPECT_EQ(engine.micro_batches(), 1);
      }
      engine.backward(first.forward(small_input(2)).pow(2).mean());
      return engine.step().grad_norm;
    };
    EXPECT_GT(norm(false), 0);
    EXPECT_EQ(norm(true), norm(false)) << "stage " << stage;
  }
}

// Other memory temporarily fills the budget, so a reduction is refused. Failed attempts change nothing, and the step
// succeeds when there is room again.
TEST(EngineLife, ARefusedReductionLeavesNothingBooked) {
  constexpr std::int64_t kWidth = 256, kGradient = kWidth * (kWidth + 1) * 4;
  auto model = small_model(1, kWidth);
  const std::string keys =
      R"(, "gradient_predivide_factor": 4.0, "memory": {"device": 8000000, "activations": 6000000})";
  Engine engine(model, small_options(2, "", keys), Communicator::local());
  const auto backward = [&] { engine.backward(model->forward(small_input(0, kWidth)).pow(2).mean()); };
  const auto held = [&] { return static_cast<std::int64_t>(engine.memory().current(MemoryReport::Tier::Device)); };
  {
    // Room for the gradients that arrive, but not for the vector in which they are reduced.
    const auto others = torch::empty({8000000 - held() - kGradient * 3 / 2}, torch::kByte);
    std::int64_t after_first = 0;
    for (int attempt = 0; attempt < 4; ++attempt) {
      const auto text = message_of(backward);
      EXPECT_NE(text.find("memory.device"), std::string::npos) << attempt << ": " << text;
      EXPECT_NE(text.find("reduce"), std::string::npos) << attempt << ": " << text;
      if (attempt == 0) after_first = held();
      EXPECT_EQ(held(), after_first) << attempt;
    }
  }
  backward();
  EXPECT_TRUE(engine.step().updated);
}

}  // namespace
}  // namespace zero::test::engine_life_test
