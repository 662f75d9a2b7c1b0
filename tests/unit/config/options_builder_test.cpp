// Options built in code equal those parsed from JSON: the same digest, the same values, the same faults.
#include <gtest/gtest.h>
#include <zero/errors.h>
#include <zero/options_builder.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace zero::options_builder_test {
namespace {

struct Case {
  const char* call;
  std::function<void(OptionsBuilder&)> build;
  std::string json;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"nothing", [](auto&) {}, "{}"},
      {"stage", [](auto& b) { b.stage(3); }, R"({"zero_optimization": {"stage": 3}})"},
      {"fp32", [](auto& b) { b.fp32(); }, "{}"},
      {"fp16, then fp32", [](auto& b) { b.fp16({.loss_scale = 8}).fp32(); }, "{}"},
      {"bf16", [](auto& b) { b.bf16(); }, R"({"bf16": {"enabled": true}})"},
      {"fp16", [](auto& b) { b.fp16(); }, R"({"fp16": {"enabled": true}})"},
      {"fp16, static", [](auto& b) { b.fp16({.loss_scale = 128}); },
       R"({"fp16": {"enabled": true, "loss_scale": 128}})"},
      {"fp16, dynamic",
       [](auto& b) {
         b.fp16({.initial_scale_power = 12, .loss_scale_window = 500, .hysteresis = 3, .min_loss_scale = 2});
       },
       R"({"fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
           "min_loss_scale": 2}})"},
      {"adam", [](auto& b) { b.adam({.lr = 2e-4, .adam_w_mode = false}); },
       R"({"optimizer": {"type": "Adam", "params": {"lr": 2e-4, "adam_w_mode": false}}})"},
      {"adamw",
       [](auto& b) {
         b.adamw({.lr = 1e-3, .weight_decay = 0.01, .betas = {{0.9, 0.95}}, .eps = 1e-6, .bias_correction = false});
       },
       R"({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.95], "eps": 1e-6,
           "bias_correction": false}}})"},
      {"adamw, defaults", [](auto& b) { b.adamw(); }, R"({"optimizer": {"type": "AdamW"}})"},
      {"sgd",
       [](auto& b) { b.sgd({.lr = 0.1, .weight_decay = 1e-4, .momentum = 0.9, .dampening = 0, .nesterov = true}); },
       R"({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 1e-4, "momentum": 0.9, "dampening": 0,
           "nesterov": true}}})"},
      {"lion",
       [](auto& b) {
         b.lion({.lr = 1e-4, .weight_decay = 0.1, .betas = {{0.95, 0.98}}});
       },
       R"({"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.95, 0.98]}}})"},
      {"adagrad",
       [](auto& b) {
         b.adagrad({.lr = 0.05, .weight_decay = 0.1, .eps = 1e-9, .lr_decay = 0.01, .initial_accumulator_value = 0.1});
       },
       R"({"optimizer": {"type": "Adagrad", "params": {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-9, "lr_decay": 0.01,
           "initial_accumulator_value": 0.1}}})"},
      {"adagrad, defaults", [](auto& b) { b.adagrad(); }, R"({"optimizer": {"type": "Adagrad"}})"},
      {"the last optimizer counts",
       [](auto& b) {
         b.adamw({.betas = {{0.8, 0.9}}}).sgd({.lr = 0.1});
       },
       R"({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})"},
      {"warmup_lr",
       [](auto& b) {
         b.warmup_lr({.warmup_min_lr = 1e-6, .warmup_max_lr = 1e-3, .warmup_num_steps = 10, .warmup_type = "linear"});
       },
       R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-3,
           "warmup_num_steps": 10, "warmup_type": "linear"}}})"},
      {"warmup_decay_lr", [](auto& b) { b.warmup_decay_lr({.warmup_num_steps = 10, .total_num_steps = 2000}); },
       R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 2000}}})"},
      {"train_batch_size", [](auto& b) { b.train_batch_size(32); }, R"({"train_batch_size": 32})"},
      {"train_micro_batch_size", [](auto& b) { b.train_micro_batch_size(8); },
       R"({"train_micro_batch_size_per_gpu": 8})"},
      {"gradient_accumulation_steps", [](auto& b) { b.gradient_accumulation_steps(2); },
       R"({"gradient_accumulation_steps": 2})"},
      {"gradient_clipping", [](auto& b) { b.gradient_clipping(0.5); }, R"({"gradient_clipping": 0.5})"},
      {"offload_optimizer", [](auto& b) { b.stage(2).offload_optimizer(Tier::Host); },
       R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})"},
      {"offload_optimizer, file",
       [](auto& b) { b.stage(1).offload_optimizer(Tier::Host).offload_optimizer(Tier::File, "/tmp/a \"b\""); },
       R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/a \"b\""}}})"},
      {"offload_optimizer, none",
       [](auto& b) { b.offload_optimizer(Tier::File, "/tmp").offload_optimizer(Tier::Device); }, "{}"},
      {"offload_parameters", [](auto& b) { b.stage(3).offload_parameters(Tier::File, "/tmp"); },
       R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}})"},
      {"overlap_comm", [](auto& b) { b.overlap_comm(false); }, R"({"zero_optimization": {"overlap_comm": false}})"},
      {"set, a word", [](auto& b) { b.set("communication_data_type", "fp32"); },
       R"({"communication_data_type": "fp32"})"},
      {"set, JSON", [](auto& b) { b.set("libzero.units", R"(["layers.0", "layers.1"])").set("seed", "7"); },
       R"({"libzero": {"units": ["layers.0", "layers.1"]}, "seed": 7})"},
  };
  return all;
}

TEST(OptionsBuilder, EveryCallIsItsJson) {
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.call);
    auto builder = Options::build();
    c.build(builder);
    const Options built = builder, read = Options::from_json(c.json);
    EXPECT_EQ(built.effective(), read.effective());
    EXPECT_EQ(built.digest(), read.digest());
    if (c.json != "{}") {
      EXPECT_NE(built.digest(), Options().digest()) << "the case shows nothing";
    }
  }
}

TEST(OptionsBuilder, AChainIsOptions) {
  const Options built = Options::build()
                            .stage(3)
                            .bf16()
                            .adamw({.lr = 1e-3, .weight_decay = 0.01})
                            .train_micro_batch_size(8)
                            .gradient_accumulation_steps(2)
                            .gradient_clipping(1.0)
                            .offload_optimizer(Tier::Host)
                            .set("zero_optimization.stage3_prefetch_bucket_size", "0");
  EXPECT_EQ(built.digest(),
            Options::from_json(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
      "stage3_prefetch_bucket_size": 0}, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001,
      "weight_decay": 0.01}}, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
      "gradient_clipping": 1.0})")
                .digest());
}

TEST(OptionsBuilder, AllFaultsAtOnceEachWithItsCall) {
  std::string text;
  try {
    (void)Options::build()
        .stage(4)
        .bf16()
        .fp16()
        .adamw({.lr = -1, .betas = {{0.9, 1.5}}})
        .train_micro_batch_size(0)
        .offload_parameters(Tier::File)
        .set("gradient_cliping", "1")
        .options();
  } catch (const ConfigError& e) {
    text = e.what();
  }
  for (const char* part : {"Options::stage:1:", "/zero_optimization/stage: got 4, expected at least 0 and at most 3",
                           "Options::adamw:1:", "/optimizer/params/lr: got -1", "/optimizer/params/betas: got 1.5",
                           "Options::train_micro_batch_size:1:", "/train_micro_batch_size_per_gpu: got 0",
                           "Options::set:1:1: error: /gradient_cliping: unknown key",
                           "did you mean \"gradient_clipping\"?", "got fp16 and bf16 enabled",
                           "Options::offload_parameters:1:", "got \"nvme\" without nvme_path", "in Options::build"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

TEST(OptionsBuilder, ExplainNamesTheCall) {
  const auto text = Options(Options::build().stage(2).train_micro_batch_size(4)).explain();
  EXPECT_NE(text.find("Options::stage"), std::string::npos) << text;
  EXPECT_NE(text.find("Options::train_micro_batch_size"), std::string::npos) << text;
}

TEST(OptionsBuilder, NumbersThatAreNone) {
  for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    try {
      (void)Options::build().gradient_clipping(value).options();
      ADD_FAILURE() << value << " was taken";
    } catch (const ConfigError& e) {
      EXPECT_NE(std::string(e.what()).find("Options::gradient_clipping"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace zero::options_builder_test
