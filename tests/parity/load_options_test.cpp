// Loading a part of a checkpoint: the weights alone, with another optimizer, at any number of ranks and any stage;
// models of which some parameters are left out. Saving weights alone. What a load verifies. Weights for other libraries
// among the files of a checkpoint.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include <zero/checkpoint_tools.h>

#include "parity/training.h"
#include "support/file_text.h"
#include "support/folder.h"
#include "support/on_ranks.h"
#include "support/process.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::load_options_test {
namespace {
namespace fs = std::filesystem;

using Values = std::map<std::string, at::Tensor>;
constexpr const char* kSgd = R"({"type": "SGD", "params": {"lr": 0.01}})";
constexpr const char* kLion = R"({"type": "Lion", "params": {"lr": 0.01}})";
constexpr const char* kAdamW = R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.05}})";

struct Trial {
  std::shared_ptr<torch::nn::Module> module;
  Engine engine;
  const Training& setup;
  Trial(const Training& setup, const std::shared_ptr<Communicator>& comm)
      : module(make_module(problem(setup.problem))),
        engine(module, Options::from_json(json_of(setup)), comm),
        setup(setup) {}

  // The mean loss over ranks of each step.
  std::vector<double> train(int begin, int end) {
    std::vector<double> losses;
    for (int step = begin; step < end; ++step) {
      const auto loss = loss_of(problem(setup.problem), *module, engine.communicator().rank(), step, dtype_of(setup));
      double sum = 0;
      const auto mine = loss.item<double>();
      for (const auto& text :
           engine.communicator().all_gather_bytes({reinterpret_cast<const char*>(&mine), sizeof mine})) {
        double theirs = 0;
        std::memcpy(&theirs, text.data(), sizeof theirs);
        sum += theirs;
      }
      losses.push_back(sum / engine.communicator().size());
      engine.backward(loss);
      engine.step();
    }
    return losses;
  }
  // [collective]
  Values masters() { return states("master"); }
  Values states(const std::string& state) {
    Values all;
    for (const auto& item : module->named_parameters())
      if (state == "master" || item.value().requires_grad())
        all[item.key()] = engine.parameter_state(item.key(), state).clone();
    return all;
  }
};

Training setup_of(const std::string& problem, int world, int stage, const char* optimizer = kAdamW) {
  Training setup;
  setup.problem = problem;
  setup.world = world;
  setup.stage = stage;
  setup.optimizer = optimizer;
  return setup;
}

// Trains, and saves everything as "all" and the weights as "weights"; returns the masters.
Values saved(const Training& setup, const fs::path& folder) {
  Values masters;
  on_ranks(setup.world, [&](const auto& comm) {
    Trial run(setup, comm);
    run.train(0, 3);
    run.engine.save_checkpoint(folder, "all");
    run.engine.save_checkpoint(folder, "weights", {.weights_only = true});
    run.engine.finish_checkpoint();
    auto found = run.masters();
    if (comm->rank() == 0) masters = std::move(found);
  });
  return masters;
}

// Losses of a loop without libzero that starts from these values: a replica per rank, the mean of the gradients, AdamW
// of libtorch.
std::vector<double> plain_losses(const Training& setup, const Values& begin, int first, int last) {
  at::set_num_threads(1);
  const auto& task = problem(setup.problem);
  std::vector<std::shared_ptr<torch::nn::Module>> replicas;
  for (int r = 0; r < setup.world; ++r) {
    replicas.push_back(make_module(task));
    const at::NoGradGuard no_grad;
    for (auto& item : replicas.back()->named_parameters()) item.value().copy_(begin.at(item.key()));
  }
  struct State {
    at::Tensor exp_avg, exp_avg_sq, steps;
  };
  std::map<std::string, State> states;
  std::vector<double> losses;
  for (int step = first; step < last; ++step) {
    double sum = 0;
    for (int r = 0; r < setup.world; ++r) {
      auto loss = loss_of(task, *replicas[static_cast<std::size_t>(r)], r, step, at::kFloat);
      sum += loss.item<double>();
      loss.backward();
    }
    losses.push_back(sum / setup.world);
    const at::NoGradGuard no_grad;
    for (auto& item : replicas[0]->named_parameters()) {
      at::Tensor total;
      for (auto& replica : replicas) {
        auto parameter = replica->named_parameters()[item.key()];
        if (!parameter.grad().defined()) continue;
        total = total.defined() ? total + parameter.grad() : parameter.grad().clone();
        parameter.mutable_grad() = at::Tensor();
      }
      if (!total.defined()) continue;
      auto& state = states[item.key()];
      if (!state.steps.defined()) state = {at::zeros_like(item.value()), at::zeros_like(item.value()), at::zeros({})};
      state.steps += 1;
      at::_fused_adamw_({item.value()}, {total / setup.world}, {state.exp_avg}, {state.exp_avg_sq}, {}, {state.steps},
                        0.01, 0.9, 0.999, 0.05, 1e-8, false, false);
      for (auto& replica : replicas) replica->named_parameters()[item.key()].copy_(item.value());
    }
  }
  return losses;
}

std::string error_of(const std::function<void()>& call, ExitCode code) {
  std::string text;
  EXPECT_EQ(code_of(call, &text), static_cast<int>(code)) << text;
  return text;
}

// --- weights alone --------------------------------------------------------------------------------

TEST(LoadOptions, WeightsAloneBeginAsAPlainLoopDoes) {
  struct Layouts {
    const char* problem;
    int from, from_stage, to, to_stage;
  };
  int count = 0;
  for (const auto& [name, from, from_stage, to, to_stage] :
       std::vector<Layouts>{{"gpt", 2, 1, 3, 3}, {"gpt", 3, 3, 1, 0}, {"tiny", 1, 0, 2, 2}, {"frozen", 4, 3, 2, 1}}) {
    const TempFolder folder;
    // States of the optimizer differ in number and meaning from those of AdamW.
    const auto wanted = saved(setup_of(name, from, from_stage, count % 2 == 0 ? kSgd : kLion), folder.path());
    const auto setup = setup_of(name, to, to_stage);
    const auto label = std::string(name) + " from " + std::to_string(from) + " to " + std::to_string(to);
    const auto plain = plain_losses(setup, wanted, 20, 30);
    for (const char* tag : {"all", "weights"})
      on_ranks(to, [&](const auto& comm) {
        Trial run(setup, comm);
        if (count % 2 == 1) run.train(50, 53);  // an engine that has trained
        run.engine.set_user_state("mine");
        EXPECT_EQ(run.engine.load_checkpoint(folder.path(), tag, {.weights_only = true}), tag);
        EXPECT_EQ(run.engine.global_step(), 0) << label;
        EXPECT_EQ(run.engine.global_samples(), 0) << label;
        EXPECT_EQ(run.engine.skipped_steps(), 0) << label;
        EXPECT_EQ(run.engine.user_state(), "mine") << label;
        std::string first;
        EXPECT_TRUE(equal_bits(run.masters(), wanted, &first)) << label << ": " << first;
        for (const char* slot : {"exp_avg", "exp_avg_sq"})
          for (const auto& [parameter, values] : run.states(slot))
            EXPECT_EQ(values.count_nonzero().template item<std::int64_t>(), 0)
                << label << ": " << slot << " of " << parameter;
        const auto losses = run.train(20, 30);
        for (std::size_t i = 0; i < losses.size(); ++i)
          EXPECT_NEAR(losses[i], plain[i], 1e-5 * std::abs(plain[i])) << label << ", step " << i;
      });
    ++count;
  }
}

TEST(LoadOptions, OtherStatesNameTheRemedy) {
  const TempFolder folder;
  saved(setup_of("tiny", 2, 1), folder.path());
  const auto setup = setup_of("tiny", 2, 1, kLion);
  on_ranks(2, [&](const auto& comm) {
    Trial run(setup, comm);
    run.train(0, 1);
    const auto before = run.engine.state_hash();
    auto text = error_of([&] { run.engine.load_checkpoint(folder.path(), "all"); }, ExitCode::kConfig);
    for (const char* part : {"exp_avg_sq", "Lion", "weights_only", "--weights-only"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
    text = error_of([&] { run.engine.load_checkpoint(folder.path(), "weights"); }, ExitCode::kConfig);
    for (const char* part : {"/weights holds weights only", "weights_only", "--weights-only"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
    // Nothing has changed, and ranks must agree.
    EXPECT_EQ(run.engine.state_hash(), before);
    text = error_of([&] { run.engine.load_checkpoint(folder.path(), "all", {.weights_only = comm->rank() == 1}); },
                    ExitCode::kConfig);
    EXPECT_NE(text.find("[load_checkpoint] the options"), std::string::npos) << text;
    run.engine.load_checkpoint(folder.path(), "all", {.weights_only = true});
    run.train(0, 1);
  });
}

TEST(LoadOptions, SavedAloneTheyAreAThirdAndNeverResumed) {
  for (const bool background : {false, true}) {
    const TempFolder folder;
    auto setup = setup_of("batch_norm", 2, 2);
    if (background) setup.extra = R"(, "checkpoint": {"writer": {"decoupled": true}})";
    const auto wanted = saved(setup, folder.path());
    const auto all = inspect_checkpoint(folder.path(), "all"),
               weights = inspect_checkpoint(folder.path(), "weights", true);
    EXPECT_FALSE(all.weights_only);
    EXPECT_TRUE(weights.weights_only);
    EXPECT_EQ(weights.global_steps, 3);
    const auto bytes_of = [](const CheckpointInfo& info, const std::string& kind) {
      std::int64_t bytes = 0;
      for (const auto& tensor : info.tensors)
        if (tensor.kind.starts_with(kind)) bytes += tensor.bytes;
      return bytes;
    };
    EXPECT_EQ(bytes_of(weights, "master"), bytes_of(all, "master"));
    EXPECT_EQ(bytes_of(weights, "buffer"), bytes_of(all, "buffer"));
    EXPECT_EQ(bytes_of(weights, "opt.") + bytes_of(weights, "rank"), 0);
    EXPECT_GT(bytes_of(weights, "buffer"), 0);
    for (const int world : {1, 2, 3})
      on_ranks(world, [&](const auto& comm) {
        const auto other = setup_of("batch_norm", world, 3 - world);
        Trial run(other, comm);
        EXPECT_EQ(run.engine.load_checkpoint(folder.path(), ""), "all");
        EXPECT_EQ(run.engine.global_step(), 3);
        EXPECT_EQ(run.engine.load_checkpoint(folder.path(), "", {.weights_only = true}), "weights");
        EXPECT_EQ(run.engine.global_step(), 0);
        EXPECT_TRUE(equal_bits(run.masters(), wanted));
      });
    // A directory with nothing else.
    fs::remove_all(folder.path() / "all");
    on_ranks(1, [&](const auto& comm) {
      const auto other = setup_of("batch_norm", 1, 0);
      Trial run(other, comm);
      const auto text = error_of([&] { run.engine.load_checkpoint(folder.path()); }, ExitCode::kCheckpoint);
      EXPECT_NE(text.find("weights holds weights only"), std::string::npos) << text;
      EXPECT_NE(text.find("--weights-only"), std::string::npos) << text;
    });
  }
}

// --- a part of the model --------------------------------------------------------------------------

struct Headed : torch::nn::Module {
  torch::nn::Linear body{nullptr}, head{nullptr}, extra{nullptr};
  Headed(std::int64_t classes, bool with_extra, double value) {
    body = register_module("body", torch::nn::Linear(6, 8));
    head = register_module("head", torch::nn::Linear(8, classes));
    if (with_extra) extra = register_module("extra", torch::nn::Linear(8, 8));
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(value);
  }
  at::Tensor loss(int seed) {
    auto x = torch::tanh(body(at::arange(6, at::kFloat).view({1, 6}) * 0.1 + seed));
    if (!extra.is_empty()) x = x + extra(x);
    return head(x).pow(2).mean();
  }
};

Options headed_options(int stage) {
  return Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
      "zero_optimization": {"stage": )" +
      std::to_string(stage) + "}}");
}

TEST(LoadOptions, PartialLeavesWhatMatchesAsItWas) {
  const TempFolder folder;
  Values wanted;
  on_ranks(2, [&](const auto& comm) {
    const auto module = std::make_shared<Headed>(3, false, 0.1);
    Engine engine(module, headed_options(1), comm);
    for (int step = 0; step < 4; ++step) {
      engine.backward(module->loss(step));
      engine.step();
    }
    engine.save_checkpoint(folder.path(), "t");
    for (const char* name : {"body.weight", "body.bias"})
      for (const char* state : {"master", "exp_avg", "exp_avg_sq"}) {
        const auto values = engine.parameter_state(name, state).clone();
        if (comm->rank() == 0) wanted[std::string(state) + name] = values;
      }
  });
  for (const bool stepped : {false, true})
    on_ranks(3, [&](const auto& comm) {
      // Another number of classes, and a module that is new.
      const auto module = std::make_shared<Headed>(5, true, 0.25);
      Engine engine(module, headed_options(3), comm);
      if (stepped) {
        engine.backward(module->loss(1));
        engine.step();
      }
      const auto head = engine.parameter_state("head.weight").clone();
      const auto before = engine.state_hash();
      // All that differs and was not named, in one error.
      const auto text =
          error_of([&] { engine.load_checkpoint(folder.path(), "", {.partial = {"extra.bias"}}); }, ExitCode::kConfig);
      for (const char* part :
           {"master of extra.weight: not in the checkpoint", "exp_avg of head.weight: has the shape [3, 8]",
            "master of head.bias: has the shape [3] in the checkpoint, [5] in the model"})
        EXPECT_NE(text.find(part), std::string::npos) << part << ": " << text;
      EXPECT_EQ(text.find("of extra.bias"), std::string::npos) << text;
      EXPECT_EQ(engine.state_hash(), before);
      EXPECT_EQ(engine.load_checkpoint(folder.path(), "", {.partial = {"extra.*", "head.*"}}), "t");
      EXPECT_EQ(engine.global_step(), 4);
      for (const auto& [key, values] : wanted) {
        const auto at = key.find("body");
        EXPECT_TRUE(engine.parameter_state(key.substr(at), key.substr(0, at)).equal(values)) << key;
      }
      EXPECT_TRUE(engine.parameter_state("head.weight").equal(head));
      EXPECT_EQ(engine.parameter_state("head.weight", "exp_avg").count_nonzero().template item<std::int64_t>(), 0);
      // What was left out is updated for the first time: by the learning rate, whatever the gradient.
      const auto bias = engine.parameter_state("head.bias").clone();
      engine.backward(module->loss(2));
      engine.step();
      const auto change = (engine.parameter_state("head.bias") - bias).abs();
      EXPECT_TRUE(at::allclose(change, at::full_like(change, 0.01), 1e-3, 1e-5)) << change;
    });
  // A name that the model has lost.
  on_ranks(1, [&](const auto& comm) {
    struct Bare : torch::nn::Module {
      torch::nn::Linear body{nullptr};
      Bare() { body = register_module("body", torch::nn::Linear(6, 8)); }
    };
    Engine engine(std::make_shared<Bare>(), headed_options(0), comm);
    const auto text = error_of([&] { engine.load_checkpoint(folder.path()); }, ExitCode::kConfig);
    EXPECT_NE(text.find("master of head.weight: in the checkpoint, not in the model"), std::string::npos) << text;
    engine.load_checkpoint(folder.path(), "", {.partial = {"head.*"}});
    EXPECT_TRUE(engine.parameter_state("body.weight").equal(wanted.at("masterbody.weight")));
  });
  // A pattern for everything does not hide that nothing fits.
  on_ranks(1, [&](const auto& comm) {
    struct Other : torch::nn::Module {
      torch::nn::Linear other{nullptr};
      Other() { other = register_module("other", torch::nn::Linear(2, 2)); }
    };
    Engine engine(std::make_shared<Other>(), headed_options(0), comm);
    const auto text =
        error_of([&] { engine.load_checkpoint(folder.path(), "", {.partial = {"*"}}); }, ExitCode::kConfig);
    EXPECT_NE(text.find("has nothing that the model has"), std::string::npos) << text;
  });
}

// Weights that were trained become those of a frozen part, rounded to the dtype that it computes in.
TEST(LoadOptions, TrainedWeightsOfAFrozenPart) {
  const TempFolder folder;
  at::Tensor master;
  on_ranks(2, [&](const auto& comm) {
    const auto module = std::make_shared<Headed>(3, false, 0.1);
    Engine engine(module, headed_options(2), comm);
    engine.backward(module->loss(1));
    engine.step();
    engine.save_checkpoint(folder.path(), "t");
    const auto values = engine.parameter_state("body.weight").clone();
    if (comm->rank() == 0) master = values;
  });
  on_ranks(3, [&](const auto& comm) {
    const auto module = std::make_shared<Headed>(3, false, 0.5);
    for (auto& parameter : module->body->parameters()) parameter.requires_grad_(false);
    Engine engine(module, headed_options(3).with({{"bf16.enabled", "true", "test"}}), comm);
    const auto text = error_of([&] { engine.load_checkpoint(folder.path()); }, ExitCode::kConfig);
    EXPECT_NE(text.find("body.weight: frozen in the model, trained in the checkpoint"), std::string::npos) << text;
    engine.load_checkpoint(folder.path(), "", {.weights_only = true});
    EXPECT_TRUE(engine.parameter_state("body.weight").to(at::kBFloat16).equal(master.to(at::kBFloat16)));
  });
}

// --- what a load verifies -------------------------------------------------------------------------

std::string verify_rule(const char* rule) { return std::string(R"(, "libzero": {"verify_on_load": ")") + rule + "\"}"; }

TEST(LoadOptions, VerifyOnLoad) {
  const TempFolder folder;
  auto setup = setup_of("tiny", 3, 3);
  setup.zero = R"(, "stage3_gather_16bit_weights_on_model_save": true)";
  saved(setup, folder.path());
  const auto flip = [&](const std::string& name) {
    const auto path = folder.path() / "all" / name;
    auto bytes = file_text(path);
    bytes[bytes.size() - 3] = static_cast<char>(bytes[bytes.size() - 3] ^ 1);
    write_all(path, bytes);
  };
  const auto load = [&](const char* rule, int world) {
    std::string text;
    int code = 0;
    on_ranks(world, [&](const auto& comm) {
      auto other = setup_of("tiny", world, 1);
      other.extra = verify_rule(rule);
      Trial run(other, comm);
      std::string mine;
      const int own = code_of([&] { run.engine.load_checkpoint(folder.path(), "all"); }, &mine);
      if (comm->rank() == 0) text = mine, code = own;
    });
    return std::make_pair(code, text);
  };
  for (const char* rule : {"used", "full", "sizes"}) EXPECT_EQ(load(rule, 2).first, 0) << rule;
  // Nobody reads what is for other libraries, unless everything is verified.
  flip("model.safetensors");
  EXPECT_EQ(load("used", 2).first, 0);
  for (const int world : {1, 2, 4}) {
    const auto [code, text] = load("full", world);
    EXPECT_EQ(code, kDamaged) << text;
    EXPECT_NE(text.find("/all/model.safetensors: the block at offset 0"), std::string::npos) << text;
  }
  flip("model.safetensors");
  flip("rank-00001.safetensors");
  for (const char* rule : {"used", "full"}) {
    const auto [code, text] = load(rule, 2);
    EXPECT_EQ(code, kDamaged) << rule;
    EXPECT_NE(text.find("rank-00001.safetensors"), std::string::npos) << text;
  }
  EXPECT_EQ(load("sizes", 2).first, 0);
  fs::resize_file(folder.path() / "all" / "rank-00001.safetensors", 100);
  EXPECT_EQ(load("sizes", 2).first, kDamaged);
}

// --- weights for other libraries ------------------------------------------------------------------

at::Tensor values_of(const PlainTensor& plain, at::ScalarType type) {
  auto values = at::empty(plain.shape, type);
  std::memcpy(values.mutable_data_ptr(), plain.bytes.data(), plain.bytes.size());
  return values;
}

TEST(LoadOptions, EachSaveHasWeightsForOtherLibraries) {
  for (const char* recipe : {"bf16", "fp32"})
    for (const bool background : {false, true}) {
      const TempFolder folder;
      auto setup = setup_of("frozen", 3, 3);
      setup.recipe = recipe;
      setup.zero = R"(, "stage3_gather_16bit_weights_on_model_save": true)";
      if (background) setup.extra = R"(, "checkpoint": {"writer": {"decoupled": true}})";
      const auto wanted = saved(setup, folder.path());
      const auto type = std::string(recipe) == "bf16" ? at::kBFloat16 : at::kFloat;
      for (const char* tag : {"all", "weights"}) {
        const auto plain = plain_tensors(folder.path() / tag / "model.safetensors");
        EXPECT_EQ(plain.size(), wanted.size());
        for (const auto& [name, values] : wanted) {
          ASSERT_TRUE(plain.contains(name)) << name;
          EXPECT_EQ(plain.at(name).dtype, type == at::kFloat ? "F32" : "BF16");
          EXPECT_TRUE(values_of(plain.at(name), type).equal(values.to(type))) << name;
        }
        const auto info = inspect_checkpoint(folder.path(), tag, true);
        EXPECT_TRUE(std::any_of(info.files.begin(), info.files.end(),
                                [](const auto& file) { return file.name == "model.safetensors"; }));
      }
      on_ranks(2, [&](const auto& comm) {
        const auto other = setup_of("frozen", 2, 0);
        Trial run(other, comm);
        EXPECT_EQ(run.engine.load_checkpoint(folder.path()), "all");
      });
      EXPECT_EQ(fs::exists(folder.path() / "all" / "frozen-00000.safetensors"), true);
    }
  // Below stage 3 the key does nothing, as in DeepSpeed.
  const TempFolder folder;
  auto setup = setup_of("tiny", 2, 2);
  setup.zero = R"(, "stage3_gather_16bit_weights_on_model_save": true)";
  saved(setup, folder.path());
  EXPECT_FALSE(fs::exists(folder.path() / "all" / "model.safetensors"));
}

TEST(LoadOptions, A16BitModelReplacesTheOneBefore) {
  const TempFolder folder;
  for (const int stage : {1, 3})
    on_ranks(2, [&](const auto& comm) {
      auto setup = setup_of("frozen", 2, stage);
      setup.recipe = "bf16";
      Trial run(setup, comm);
      for (int save = 0; save < 2; ++save) {
        run.train(save, save + 1);
        const auto report = run.engine.save_16bit_model(folder.path() / "out");
        EXPECT_EQ(report.tensors, static_cast<std::int64_t>(run.module->named_parameters().size()));
        const auto wanted = run.masters();
        // Read by the reader of files of torch.
        Trial other(setup, comm);
        other.engine.import_weights(folder.path() / "out" / "pytorch_model.bin");
        for (const auto& [name, values] : other.masters())
          EXPECT_TRUE(values.equal(wanted.at(name).to(at::kBFloat16).to(at::kFloat))) << name;
      }
      run.engine.save_16bit_model(folder.path() / "out", "trained.bin", /*exclude_frozen_parameters=*/true);
      const auto info = inspect_source(folder.path() / "out" / "trained.bin");
      for (const auto& tensor : info.tensors)
        EXPECT_TRUE(run.module->named_parameters()[tensor.name].requires_grad()) << tensor.name;
      EXPECT_NE(error_of([&] { run.engine.save_16bit_model(folder.path(), "a/b"); }, ExitCode::kConfig)
                    .find("expected a directory and a plain name"),
                std::string::npos);
      comm->barrier();
    });
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path() / "out"), fs::directory_iterator()), 2);
}

TEST(LoadOptions, FrozenParametersOfABaseModelCanBeLeftOut) {
  for (const int stage : {1, 3})
    for (const char* writer : {"", R"(, "checkpoint": {"writer": {"decoupled": true}})"}) {
      const TempFolder folder;
      auto setup = setup_of("frozen", 2, stage);
      setup.extra = writer;
      on_ranks(2, [&](const auto& comm) {
        Trial run(setup, comm);
        std::vector<std::string> frozen;
        for (const auto& item : run.module->named_parameters())
          if (!item.value().requires_grad()) frozen.push_back(item.key());
        ASSERT_FALSE(frozen.empty());
        run.train(0, 3);
        run.engine.save_checkpoint(folder.path(), "adapter", {.exclude_frozen = true});
        run.engine.finish_checkpoint();
        EXPECT_FALSE(fs::exists(folder.path() / "adapter" / "frozen-00000.safetensors"));
        run.train(3, 5);
        Trial other(setup, comm);
        const auto before = other.masters().at(frozen[0]);
        EXPECT_THROW(other.engine.load_checkpoint(folder.path()), ConfigError);
        other.engine.load_checkpoint(folder.path(), "", {.partial = frozen});
        EXPECT_TRUE(other.masters().at(frozen[0]).equal(before));
        other.train(3, 5);
        const auto wanted = run.masters();
        for (const auto& [name, values] : other.masters()) EXPECT_TRUE(values.equal(wanted.at(name))) << name;
        comm->barrier();
      });
    }
}

}  // namespace
}  // namespace zero::test::load_options_test
