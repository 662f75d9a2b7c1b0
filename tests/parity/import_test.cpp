// Checkpoints of DeepSpeed, imported: they load on any number of ranks with equal bits, and training continues as
// DeepSpeed's does. The model and tokens are those of script/make-interchange-fixtures.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>

#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>

#include <zero/checkpoint_tools.h>

#include "formats/safetensors.h"
#include "parity/training.h"
#include "support/file_text.h"
#include "support/folder.h"
#include "support/on_ranks.h"
#include "support/process.h"

namespace zero::test::import_test {
namespace {

struct Output : torch::nn::Module {
  explicit Output(const at::Tensor& shared) { weight = register_parameter("weight", shared); }
  at::Tensor weight;
};

struct Model : torch::nn::Module {
  Model() {
    scale = register_parameter("scale", at::ones({1}));
    unused = register_parameter("unused", at::zeros({3}));
    register_buffer("positions", at::arange(5));
    average = register_buffer("average", at::zeros({7}));
    embedding = register_module("embedding", torch::nn::Embedding(13, 6));
    frozen = register_module("frozen", torch::nn::Linear(6, 5));
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    up = register_module("up", torch::nn::Linear(6, 7));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(7, 6).bias(false)));
    output = register_module("output", std::make_shared<Output>(embedding->weight));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto hidden = embedding(tokens);
    hidden = hidden + frozen(hidden).mean();
    hidden = down(torch::relu(norm(up(hidden)))) * scale;
    return torch::linear(hidden, output->weight);
  }
  at::Tensor scale, unused, average;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear frozen{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::shared_ptr<Output> output;
};

at::Tensor tokens_of(int rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * step + rank));
  return at::randint(0, 13, {8}, generator, at::kLong);
}

std::string config_of(int stage, const std::string& recipe) {
  return R"({"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "bf16": {"enabled": )" +
         std::string(recipe == "bf16" ? "true" : "false") + R"(}, "zero_optimization": {"stage": )" +
         std::to_string(stage) +
         R"(}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8,
         "weight_decay": 0.1}}, "libzero": {"parameter_groups": [{"pattern": "*bias", "weight_decay": 0},
         {"pattern": "norm*", "weight_decay": 0}, {"pattern": "scale", "weight_decay": 0},
         {"pattern": "unused", "weight_decay": 0}]}})";
}

struct Expected {
  std::map<std::string, at::Tensor> tensors;  // fp32
  std::vector<std::vector<double>> losses;    // by rank
};

Expected expected_of(const std::string& path) {
  const auto file = file_text(path);
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const auto header = formats::parse_header(std::string_view(file).substr(8, length), file.size() - 8 - length, path);
  Expected expected;
  for (const auto& entry : header.tensors)
    if (entry.dtype == "F32") {
      auto values = at::empty(entry.shape);
      std::memcpy(values.mutable_data_ptr(), file.data() + 8 + length + entry.begin, values.nbytes());
      expected.tensors[entry.key] = values;
    }
  for (const auto& rank : nlohmann::json::parse(header.metadata.at("losses")))
    expected.losses.push_back(rank.get<std::vector<double>>());
  return expected;
}

TEST(ImportDeepSpeed, ALoadOfTheirsSaysHow) {
  for (const auto& [name, what] :
       std::map<std::string, std::string>{{"deepspeed-2-fp32", "deepspeed-2-fp32"}, {"dcp/step3", "step3"}})
    on_ranks(2, [&](const auto& comm) {
      Engine engine(std::static_pointer_cast<torch::nn::Module>(std::make_shared<Model>()),
                    Options::from_json(config_of(1, "fp32")), comm);
      try {
        engine.load_checkpoint(std::string(ZERO_SOURCE_DIR) + "/tests/golden/interchange/" + name);
        ADD_FAILURE() << name;
      } catch (const IoError& e) {
        EXPECT_EQ(e.code(), ExitCode::kCheckpoint);
        EXPECT_NE(std::string(e.what()).find("Hint: it is of another program: zero checkpoint import "),
                  std::string::npos)
            << e.what();
        EXPECT_NE(std::string(e.what()).find(what + " --into DIR"), std::string::npos) << e.what();
      }
    });
}

TEST(ImportDeepSpeed, LoadsOnAnyRanksAndContinuesLikeDeepSpeed) {
  for (int stage = 0; stage <= 3; ++stage)
    for (const char* const recipe : {"fp32", "bf16"}) {
      const auto name = "deepspeed-" + std::to_string(stage) + "-" + recipe;
      const auto source = std::string(ZERO_SOURCE_DIR) + "/tests/golden/interchange/" + name;
      const auto expected = expected_of(source + "/expected.safetensors");
      const TempFolder folder;
      const auto report = import_checkpoint(source, folder.path(), "imported");
      EXPECT_EQ(report.masters, 8);
      EXPECT_EQ(report.states, 16);
      EXPECT_EQ(report.optimizer, "AdamW");
      for (const int world : {1, 2, 3})
        on_ranks(world, [&](const auto& comm) {
          auto module = std::make_shared<Model>();
          Engine engine(std::static_pointer_cast<torch::nn::Module>(module),
                        Options::from_json(config_of(3 - stage, recipe)), comm);
          EXPECT_EQ(engine.load_checkpoint(folder.path()), "imported");
          EXPECT_EQ(engine.global_step(), report.global_steps);
          int compared = 0;
          for (const auto& [key, values] : expected.tensors) {
            const auto slash = key.find('/');
            const auto kind = key.substr(0, slash), of = key.substr(slash + 1);
            if (kind == "buffer" || kind == "param") continue;
            ++compared;
            EXPECT_TRUE(engine.parameter_state(of, kind == "master" ? kind : kind.substr(4)).equal(values))
                << name << ", " << world << " ranks: " << key;
          }
          EXPECT_EQ(compared, 24);
          if (world != 2 || recipe != std::string("fp32")) return;
          const auto rank = static_cast<std::size_t>(comm->rank());
          for (int step = 3; step < 13; ++step) {
            const auto logits = module->forward(tokens_of(comm->rank(), step)).to(at::kFloat);
            const auto loss = torch::nn::functional::cross_entropy(logits, tokens_of(comm->rank(), step + 1));
            const auto wanted = expected.losses[rank][static_cast<std::size_t>(step - 3)];
            EXPECT_LT(std::abs(loss.template item<double>() - wanted), 1e-4 * wanted) << name << ", step " << step;
            engine.backward(loss);
            engine.step();
          }
        });
    }
}

// The configuration's are used; each that differs from the files' is named once, with both values.
TEST(ImportDeepSpeed, OtherHyperparametersAreNamed) {
  using Lines = std::vector<std::string>;
  const auto line = [](const std::string& name, const std::string& files, const std::string& run) {
    return "import: " + name + " is " + files + " in the files and " + run + " in the configuration, which is used";
  };
  std::string other = config_of(2, "fp32");
  const auto replace = [&](const std::string& from, const std::string& to) {
    other.replace(other.find(from), from.size(), to);
  };
  replace("3e-3", "5e-3");
  replace("[0.9, 0.95]", "[0.8, 0.98]");
  replace("1e-8", "1e-6");
  replace("0.1}", "0.2}");
  const Lines all{line("beta1", "0.9", "0.8"), line("beta2", "0.95", "0.98"), line("eps", "1e-08", "1e-06"),
                  line("lr", "0.003", "0.005"), line("weight_decay", "0, 0.1", "0, 0.2")};
  for (const char* const name :
       {"deepspeed-0-fp32", "deepspeed-1-bf16", "deepspeed-2-fp32", "deepspeed-3-bf16", "universal-2", "universal-3"})
    for (const bool differs : {false, true}) {
      Lines told;
      std::mutex mutex;
      set_log_sink([&](LogLevel level, std::string_view text) {
        const std::lock_guard lock(mutex);
        if (level == LogLevel::Warning) told.emplace_back(text);
      });
      on_ranks(2, [&](const auto& comm) {
        Engine engine(std::static_pointer_cast<torch::nn::Module>(std::make_shared<Model>()),
                      Options::from_json(differs ? other : config_of(2, "fp32")), comm);
        ImportOptions options;
        options.optimizer = true;
        (void)engine.import_weights(std::string(ZERO_SOURCE_DIR) + "/tests/golden/interchange/" + name, options);
      });
      set_log_sink(nullptr);
      EXPECT_EQ(told, differs ? all : Lines()) << name;
    }
}

// Two parameters, whose gradients are all the loss scale x 2^-16.
struct Sum : torch::nn::Module {
  Sum() {
    weight = register_parameter("weight", at::zeros({2, 3}));
    bias = register_parameter("bias", at::zeros({4}));
  }
  at::Tensor loss() const { return (weight.to(at::kFloat).sum() + bias.to(at::kFloat).sum()) * std::ldexp(1.0, -16); }
  at::Tensor weight, bias;
};

std::string fp16_config(int stage, const nlohmann::json& scaler) {
  const nlohmann::json fp16{{"enabled", true},
                            {"loss_scale_window", scaler["window"]},
                            {"hysteresis", scaler["hysteresis"]},
                            {"consecutive_hysteresis", scaler["consecutive"]}};
  return nlohmann::json{{"train_micro_batch_size_per_gpu", 1},
                        {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0}, {"weight_decay", 0}}}}},
                        {"fp16", fp16},
                        {"zero_optimization", {{"stage", stage}}}}
      .dump();
}

TEST(ImportDeepSpeed, LossScalesContinueLikeDeepSpeeds) {
  const auto folder_of = std::string(ZERO_SOURCE_DIR) + "/tests/golden/interchange/deepspeed-fp16/";
  const auto scalers = nlohmann::json::parse(file_text(folder_of + "scalers.json"));
  for (const auto& [name, scaler] : scalers.items()) {
    if (scaler["static"]) continue;
    const TempFolder folder;
    (void)import_checkpoint(folder_of + name, folder.path(), "imported");
    for (const int world : {1, 2})
      on_ranks(world, [&, &name = name, &scaler = scaler](const auto& comm) {
        for (const bool whole : {true, false}) {
          const auto module = std::make_shared<Sum>();
          Engine engine(std::static_pointer_cast<torch::nn::Module>(module), Options::from_json(fp16_config(2, scaler)),
                        comm);
          EXPECT_EQ(engine.loss_scale(), 65536);
          ImportOptions options;
          options.optimizer = true;
          if (whole)
            (void)engine.load_checkpoint(folder.path(), "imported");
          else
            (void)engine.import_weights(folder_of + name, options);
          EXPECT_EQ(engine.loss_scale(), scaler["scale"]) << name;
          EXPECT_TRUE(engine.parameter_state("bias", "master").equal(at::arange(6, 10, at::kFloat) / 8));
          for (std::size_t step = 0; step < scaler["clean"].size(); ++step) {
            engine.backward(module->loss());
            EXPECT_FALSE(engine.step().overflow);
            EXPECT_EQ(engine.loss_scale(), scaler["clean"][step]) << name << ", step " << step;
          }
        }
        // A run in another type has its own scale, and so has one in fp16 that loads the checkpoint of such a run.
        const auto module = std::make_shared<Sum>();
        auto config = nlohmann::json::parse(fp16_config(1, scaler));
        config["bf16"]["enabled"] = true;
        config.erase("fp16");
        Engine engine(std::static_pointer_cast<torch::nn::Module>(module), Options::from_json(config.dump()), comm);
        (void)engine.load_checkpoint(folder.path(), "imported");
        EXPECT_EQ(engine.loss_scale(), 1);
        engine.save_checkpoint(folder.path(), "bf16");
        const auto other = std::make_shared<Sum>();
        Engine half(std::static_pointer_cast<torch::nn::Module>(other), Options::from_json(fp16_config(2, scaler)),
                    comm);
        (void)half.load_checkpoint(folder.path(), "bf16");
        EXPECT_EQ(half.loss_scale(), 65536) << "and not 1";
      });
  }
}

}  // namespace
}  // namespace zero::test::import_test
