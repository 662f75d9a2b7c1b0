// The configuration: strictness, positions, sources and defaults.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include <zero/config_tools.h>
#include <zero/errors.h>

#include "config/batch.h"
#include "config/document.h"
#include "config/json_reader.h"
#include "support/folder.h"
#include "unit/config/bad_configs.h"

namespace zero::config_test {
namespace {

std::vector<ConfigFault> faults_of(const std::string& text) {
  config::Faults faults;
  config::read_document(std::make_shared<config::Source>(config::Source{"ds.json", text}), {}, faults);
  return faults.sorted();
}

std::string error_of(const std::string& text, const std::vector<Setting>& settings = {}) {
  try {
    Options::from_json(text, "ds.json", settings);
  } catch (const ConfigError& e) {
    EXPECT_EQ(e.code(), ExitCode::kConfig);
    return e.what();
  }
  return {};
}

TEST(BadConfigs, EachIsRefusedAtItsPlaceWithAHint) {
  ASSERT_GE(test::bad_configs().size(), 100u);
  for (const auto& bad : test::bad_configs()) {
    SCOPED_TRACE(bad.text);
    EXPECT_FALSE(error_of(bad.text).empty());
    bool found = false;
    std::string all;
    for (const auto& fault : faults_of(bad.text)) {
      if (fault.severity != ConfigFault::Severity::Error) continue;
      all += fault.id + " at " + std::to_string(fault.line) + ":" + std::to_string(fault.column) + " " + fault.message +
             " | " + fault.hint + "\n";
      std::string related;
      for (const auto& place : fault.related) related += place;
      found |= fault.id == bad.id && fault.line == bad.line && fault.column == bad.column &&
               (fault.message + fault.hint + fault.pointer + related).find(bad.says) != std::string::npos;
    }
    EXPECT_TRUE(found) << "expected " << bad.id << " at " << bad.line << ":" << bad.column << " saying " << bad.says
                       << ", got\n"
                       << all;
  }
}

TEST(BadConfigs, AllFaultsAtOnceInFileOrderWithCaret) {
  const std::string text =
      error_of("{\n  \"zero_optimization\": {\n    \"stge\": 2,\n    \"overlap_comm\": 1\n  },\n  \"seed\": -4\n}");
  const auto first = text.find(
      "ds.json:3:5: error: /zero_optimization/stge: unknown key [unknown-key]\n     3 |     \"stge\": 2,\n       |     "
      "^~~~~~\n  hint: did you mean \"stage\"?\n");
  const auto second = text.find("ds.json:4:21: error: /zero_optimization/overlap_comm");
  const auto third = text.find("ds.json:6:11: error: /seed");
  EXPECT_NE(first, std::string::npos) << text;
  EXPECT_LT(first, second);
  EXPECT_LT(second, third);
  EXPECT_NE(text.find("3 errors, 0 notices in ds.json"), std::string::npos) << text;
}

// Of ranks: every fault that does not follow from another.
TEST(BadConfigs, AllFaultsOfRanksAtOnce) {
  const auto file = test::temporary_folder() + "/ds.json";
  const auto faults_of = [&](const std::string& keys, std::optional<int> world) {
    std::ofstream(file) << "{" + keys + "}";
    std::string text;
    for (const auto& fault : check_config(file, {}, world))
      if (fault.severity == ConfigFault::Severity::Error) text += fault.pointer + " " + fault.id + "; ";
    return text;
  };
  const std::string mesh = R"("sequence_parallel_size": 2)", data = R"("data_parallel_size": 4)";
  const std::string batch = R"("train_batch_size": 8, "train_micro_batch_size_per_gpu": 4)";
  const std::string no_batch = "/train_batch_size missing; ", no_mesh = "/sequence_parallel_size conflict; ",
                    no_data = "/data_parallel_size conflict; ", no_product = "/train_batch_size conflict; ";
  const auto sorted = [](const std::string& a, const std::string& b) { return std::pair{a + b, b + a}; };
  const auto expect_both = [&](const std::string& text, const std::string& a, const std::string& b) {
    EXPECT_TRUE(text == sorted(a, b).first || text == sorted(a, b).second) << text;
  };
  expect_both(faults_of(mesh, 3), no_mesh, no_batch);
  expect_both(faults_of(mesh + ", " + data, 4), no_data, no_batch);
  expect_both(faults_of(mesh + ", " + data + ", " + batch, 6), no_data, no_product);
  EXPECT_EQ(faults_of(mesh + ", " + data + ", " + batch, 3), no_mesh);  // the number of ranks decides the others
  EXPECT_EQ(faults_of(mesh + ", " + batch, 6), no_product);
  EXPECT_EQ(faults_of(mesh + ", " + data, {}), no_batch);
  EXPECT_EQ(faults_of(mesh + ", " + batch, {}), "");
  EXPECT_EQ(faults_of(mesh + ", " + batch, 4), "");
}

TEST(BadConfigs, AfterAHundredTheRestIsCounted) {
  std::string text = "{";
  for (int i = 0; i < 130; ++i) text += (i ? ", " : "") + ("\"nonsense" + std::to_string(i)) + "\": 1";
  const auto message = error_of(text + "}");
  EXPECT_NE(message.find("30 more errors not shown"), std::string::npos);
  EXPECT_NE(message.find("130 errors"), std::string::npos);
}

TEST(BadConfigs, LargeTextsAreRefused) {
  EXPECT_NE(error_of("{\"log_level\": \"" + std::string(5000, 'a') + "\"}").find("too-large"), std::string::npos);
  EXPECT_NE(error_of("{" + std::string((1 << 20) + 1, ' ') + "}").find("too-large"), std::string::npos);
  std::string list = "[0";
  for (int i = 0; i < 5000; ++i) list += ",0";
  EXPECT_NE(error_of("{\"libzero\": {\"units\": " + list + "]}}").find("too-large"), std::string::npos);
}

TEST(Reader, TakesCommentsTrailingCommaAndByteOrderMark) {
  const auto o = Options::from_json(
      "\xEF\xBB\xBF// head\n{ # one\n \"seed\": /* two */ 7, \"libzero\": {\"units\": [\"a\", ],},}");
  EXPECT_EQ(o.settings().seed, 7u);
  EXPECT_EQ(o.settings().units, std::vector<std::string>{"a"});
}

TEST(Reader, WholeNumbersAreDecidedOnTheirText) {
  using config::whole_number;
  EXPECT_EQ(whole_number("16"), 16);
  EXPECT_EQ(whole_number("16.0"), 16);
  EXPECT_EQ(whole_number("5e8"), 500000000);
  EXPECT_EQ(whole_number("1.000000e+10"), 10000000000);
  EXPECT_EQ(whole_number("120e-1"), 12);
  EXPECT_EQ(whole_number("0e999999999999"), 0);
  EXPECT_EQ(whole_number("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(whole_number("-9223372036854775808"), std::numeric_limits<std::int64_t>::min());
  EXPECT_FALSE(whole_number("1.5"));
  EXPECT_FALSE(whole_number("1e-1"));
  bool large = false;
  EXPECT_FALSE(whole_number("9223372036854775808", &large));
  EXPECT_TRUE(large);
  EXPECT_FALSE(whole_number("1e999999999999999999999", &large));
  EXPECT_TRUE(large);
}

TEST(Batch, Vectors) {
  struct Row {
    int world;
    const char *t, *m, *a;
    std::int64_t train, micro, accumulation;  // train 0: refused
  };
  const Row rows[] = {{2, "32", "16", "1", 32, 16, 1}, {2, "32", "8", "2", 32, 8, 2},  {2, "33", "17", "2", 0, 0, 0},
                      {2, "32", "18", "1", 0, 0, 0},   {2, "32", "16", "", 32, 16, 1}, {2, "32", "", "2", 32, 8, 2},
                      {2, "", "8", "2", 32, 8, 2},     {2, "33", "", "", 0, 0, 0},     {2, "", "16", "", 32, 16, 1},
                      {2, "", "", "4", 0, 0, 0},       {4, "16", "", "1", 16, 4, 1},   {1, "16", "", "1", 16, 16, 1},
                      {3, "16", "", "1", 0, 0, 0},     {32, "16", "", "1", 0, 0, 0},   {2, "", "", "", 0, 0, 0}};
  for (const auto& row : rows) {
    std::string text;
    const auto add = [&](const char* key, const char* value) {
      if (*value) text += (text.empty() ? "\"" : ", \"") + std::string(key) + "\": " + value;
    };
    add("train_batch_size", row.t);
    add("train_micro_batch_size_per_gpu", row.m);
    add("gradient_accumulation_steps", row.a);
    SCOPED_TRACE(text + " world " + std::to_string(row.world));
    std::string error;
    try {
      const auto b = config::resolve_batch(Options::from_json("{" + text + "}", "ds.json"), row.world);
      EXPECT_EQ(b.train, row.train);
      EXPECT_EQ(b.micro, row.micro);
      EXPECT_EQ(b.accumulation, row.accumulation);
    } catch (const ConfigError& e) {
      error = e.what();
    }
    EXPECT_EQ(error.empty(), row.train != 0) << error;
  }
  try {
    config::resolve_batch(
        Options::from_json(
            "{\"train_batch_size\": 68, \"train_micro_batch_size_per_gpu\": 17, \"gradient_accumulation_steps\": 2}",
            "ds.json"),
        4);
    FAIL();
  } catch (const ConfigError& e) {
    const std::string text = e.what();
    for (const char* part :
         {"68 is not 17 (micro", "x 2 (accumulation", "x 4 (ranks) = 136", "set it to 136", "ds.json:1:22"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

// The rule that restarts follow is what the checks at the start of a run accept.
TEST(Batch, TheRuleOfRanksIsThatOfTheChecks) {
  int allowed = 0, refused = 0;
  for (const int total : {0, 1, 6, 8, 12, 24})
    for (const int micro : {0, 1, 2, 3})
      for (const int steps : {0, 1, 2, 4})
        for (const int tensor : {1, 2})
          for (const int sequence : {1, 2})
            for (const int experts : {0, 2})
              for (const int data : {0, 2}) {
                if (total == 0 && micro == 0) continue;
                if (total != 0 && total % (std::max(1, micro) * std::max(1, steps)) != 0) continue;
                if (data != 0 && micro != 0 && steps != 0) continue;  // two rules for one number
                if (experts != 0 && tensor > 1) continue;             // not built together
                std::string text = "{\"sequence_parallel_size\": " + std::to_string(sequence) +
                                   ", \"tensor_parallel\": {\"autotp_size\": " + std::to_string(tensor) +
                                   ", \"preset_model\": \"gpt\"}";
                const auto add = [&](const char* key, int value) {
                  if (value != 0) text += ", \"" + std::string(key) + "\": " + std::to_string(value);
                };
                add("train_batch_size", total);
                add("train_micro_batch_size_per_gpu", micro);
                add("gradient_accumulation_steps", steps);
                add("data_parallel_size", data);
                if (experts != 0)
                  text += R"(, "libzero": {"model": {"size": "gpt-1m", "experts": {"num_experts": 4, "ep_size": 2}}})";
                const auto options = Options::from_json(text + "}", "ds.json");
                const auto rule = config::world_rule(options);
                for (int world = 1; world <= 24; ++world) {
                  bool accepted = true;
                  try {
                    (void)config::resolve_batch(options, world);
                    config::require_expert_ranks(options, world);
                  } catch (const ConfigError&) {
                    accepted = false;
                  }
                  EXPECT_EQ(rule.allows(world), accepted) << text << " world " << world;
                  ++(accepted ? allowed : refused);
                }
              }
  EXPECT_GT(allowed, 500);
  EXPECT_GT(refused, 500);
}

TEST(Batch, AnErrorNamesTheNearestNumbersOfRanks) {
  const auto failure = [](const std::string& text, int world) -> std::string {
    try {
      (void)config::resolve_batch(Options::from_json(text, "ds.json"), world);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "none";
  };
  const auto ends = [](const std::string& text, const std::string& end) { return text.ends_with(end); };
  const std::string batch = R"({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2)";
  EXPECT_TRUE(ends(failure(batch + "}", 3), "set it to 12 or 18, or start 2 or 4 ranks.")) << failure(batch + "}", 3);
  EXPECT_TRUE(ends(failure(batch + "}", 9), ", or start 8 ranks.")) << failure(batch + "}", 9);
  const auto fixed = failure(batch + R"(, "gradient_accumulation_steps": 4})", 3);
  EXPECT_TRUE(ends(fixed, "leave one of the three out, or start 2 ranks.")) << fixed;
}

// Samples belong to data-parallel ranks: tensor- and sequence-parallel ranks compute on the same ones.
TEST(Batch, CountsDataParallelRanks) {
  const auto options = [](int tensor, int sequence, const std::string& batch) {
    return Options::from_json("{\"tensor_parallel\": {\"autotp_size\": " + std::to_string(tensor) +
                                  ", \"preset_model\": \"gpt\"}, \"sequence_parallel_size\": " +
                                  std::to_string(sequence) + ", " + batch + "}",
                              "ds.json");
  };
  const auto failure = [&](const Options& o, int world) -> std::string {
    try {
      config::resolve_batch(o, world);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "none";
  };
  const std::string micro = "\"train_micro_batch_size_per_gpu\"", steps = "\"gradient_accumulation_steps\"";
  const auto one = options(2, 1, "\"train_batch_size\": 32, " + micro + ": 8, " + steps + ": 1");
  EXPECT_EQ(config::resolve_batch(one, 8).train, 32);
  EXPECT_EQ(config::resolve_batch(options(2, 2, micro + ": 4, " + steps + ": 2"), 8).train, 16);
  const auto odd = failure(options(4, 1, "\"train_batch_size\": 33"), 8);
  EXPECT_NE(odd.find("33 cannot be divided by 2 = 1 (accumulation) x 2 (data-parallel ranks)"), std::string::npos)
      << odd;
  const auto six = failure(options(4, 1, micro + ": 1"), 6);
  EXPECT_NE(six.find("6 ranks are no multiple of tensor_parallel.autotp_size 4 x sequence_parallel_size 1"),
            std::string::npos)
      << six;
  const auto given = failure(options(2, 1, micro + ": 1, \"data_parallel_size\": 8"), 8);
  EXPECT_NE(given.find("got 8, expected 4 (8 ranks / (tensor_parallel.autotp_size 2"), std::string::npos) << given;
  const auto told = options(2, 2, micro + ": 4").explain(8, false);
  EXPECT_NE(told.find("rule: 4 x 1 x 2 data-parallel ranks"), std::string::npos) << told;
  EXPECT_NE(one.explain(8, false).find("32"), std::string::npos);
}

TEST(Options, EveryFileOfTheSeedsParses) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(ZERO_SOURCE_DIR) + "/configs/deepspeed-examples")) {
    SCOPED_TRACE(entry.path().string());
    const auto options = Options::from_file(entry.path());
    EXPECT_NO_THROW(config::require_built(options));
    ++files;
  }
  EXPECT_GE(files, 10);
}

// Of DeepSpeed's keys for meshes, those that do nothing here say so, and the others are refused.
TEST(Options, KeysOfMeshes) {
  const std::string divided = "\"autotp_size\": 2, \"preset_model\": \"gpt\"";
  const auto tp = [&](const std::string& more) { return "{\"tensor_parallel\": {" + divided + ", " + more + "}}"; };
  const std::pair<std::string, std::string> without_effect[] = {
      {tp("\"tp_overlap_comm\": true"), "sums of split products are waited for"},
      {tp("\"dtype\": \"bf16\""), "bf16 and fp16 select the dtype"},
      {tp("\"keep_module_on_host\": true"), "deferred initialisation builds each part where it stays"},
      {tp("\"tp\": {\"tp_size\": 2}"), "autotp_size decides"},
      {tp("\"tp\": {\"tp_grain_size\": 64}"), "\"multiple\" of a layer_specs entry decides"},
      {tp("\"tensor_parallel\": {\"tp_grain_size\": 64}"), "\"multiple\" of a layer_specs entry decides"},
      {tp("\"replace_with_kernel_inject\": false"), "the value requests nothing"},
      {"{\"activation_checkpointing\": {\"partition_activations\": true}}",
       "tensor_parallel.autotp_size is not above 1"},
      {"{\"tensor_parallel\": {\"preset_model\": \"gpt\"}}", "tensor_parallel.autotp_size is not above 1"},
      {"{\"tensor_parallel\": {\"autotp_size\": 1, \"partition_config\": {}}}",
       "tensor_parallel.autotp_size is not above 1"},
      {"{\"tensor_parallel\": {\"vocab_parallel_lm_head\": true}}", "tensor_parallel.autotp_size is not above 1"},
      {"{\"expert_parallel\": {\"enabled\": false}}", "the value requests nothing"},
      {"{\"pipeline\": {\"stages\": 1}}", "the value requests nothing"},
  };
  for (const auto& [text, reason] : without_effect) {
    SCOPED_TRACE(text);
    const auto options = Options::from_json(text, "ds.json");
    ASSERT_EQ(options.notices().size(), 1u);
    EXPECT_NE(options.notices()[0].find("no effect: " + reason), std::string::npos) << options.notices()[0];
    EXPECT_NO_THROW(config::require_built(options));
  }
  EXPECT_TRUE(
      Options::from_json(tp("\"vocab_parallel_lm_head\": true, \"partition_config\": {}"), "x").notices().empty());
  const std::pair<std::string, std::string> refused[] = {
      {tp("\"replace_with_kernel_inject\": true"), "modules are not replaced"},
      {tp("\"injection_policy_tuple\": [[\"Block\", \"attention\"]]"), "use partition_config"},
      {"{\"pipeline\": {\"stages\": 2}}", "Use stage 3, or tensor_parallel.autotp_size"},
      {"{\"expert_parallel\": {\"enabled\": true}}", "it rewrites Hugging Face models"},
  };
  for (const auto& [text, reason] : refused) {
    const auto error = error_of(text);
    EXPECT_NE(error.find("which is refused"), std::string::npos) << text << error;
    EXPECT_NE(error.find(reason), std::string::npos) << text << error;
  }
  EXPECT_NO_THROW(config::require_built(Options::from_json("{\"seq_parallel_communication_data_type\": null}", "x")));
  try {
    config::require_built(Options::from_json("{\"seq_parallel_communication_data_type\": \"bf16\"}", "x"));
    ADD_FAILURE() << "a dtype of sequence-parallel communication";
  } catch (const ConfigError& e) {
    EXPECT_NE(std::string(e.what()).find("exchange activations in their own dtype"), std::string::npos) << e.what();
  }
}

TEST(Options, NotBuiltNamesEveryKey) {
  const auto options = Options::from_json(
      R"({"zero_optimization": {"stage": 3, "leaf_module": {"names": ["layers.0"]}}, "comms_logger": {"enabled": true}})",
      "ds.json");
  try {
    config::require_built(options);
    FAIL();
  } catch (const ConfigError& e) {
    const std::string text = e.what();
    for (const char* part : {"/zero_optimization/leaf_module/names", "/comms_logger/enabled",
                             "not available in this version", "[not-built]", "ds.json:1:61"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(Options, OldNamesMeanTheNewOnesAndAreReported) {
  const auto o = Options::from_json(
      R"({"bfloat16": {"enabled": true}, "zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}})");
  EXPECT_EQ(o.settings().precision, config::Precision::Bf16);
  EXPECT_EQ(o.settings().zero.prefetch_bucket_size, 7);
  ASSERT_EQ(o.notices().size(), 1u);  // the second is a plain second name
  EXPECT_NE(o.notices()[0].find("old name of bf16"), std::string::npos);
  EXPECT_EQ(Options::from_json("{\"zero_optimization\": true}").settings().zero.stage, 1);
  EXPECT_EQ(Options::from_json("{\"zero_optimization\": false}").settings().zero.stage, 0);
  EXPECT_EQ(Options::from_json("{\"fp32_allreduce\": true}").settings().communication_dtype, config::Precision::Fp32);
  using config::OffloadDevice;
  EXPECT_EQ(
      Options::from_json("{\"zero_optimization\": {\"cpu_offload\": false}}").settings().zero.offload_optimizer.device,
      OffloadDevice::None);
  EXPECT_EQ(Options::from_json("{\"zero_optimization\": {\"stage\": 1, \"cpu_offload\": true}}")
                .settings()
                .zero.offload_optimizer.device,
            OffloadDevice::Cpu);
}

TEST(Options, LaterSourcesWinAndExplainSaysSo) {
  const auto file = Options::from_json("{\n \"seed\": 5, \"zero_optimization\": {\"stage\": 1}\n}", "ds.json");
  const auto o = file.with({{"zero_optimization.stage", "2", "env ZERO_STAGE"},
                            {"zero_optimization.stage", "3", "CLI"},
                            {"log_level", "debug", "CLI"}});
  EXPECT_EQ(o.settings().zero.stage, 3);
  EXPECT_EQ(o.settings().log_level, "debug");
  EXPECT_EQ(file.settings().zero.stage, 1) << "the first object is a value";
  const auto text = o.explain(4, false);
  EXPECT_NE(text.find("CLI (overrides env ZERO_STAGE)"), std::string::npos) << text;
  EXPECT_NE(text.find("ds.json:2:10"), std::string::npos) << text;
  EXPECT_NE(error_of("{}", {{"zero_optimization.stage", "9", "CLI"}}).find("--set:1:"), std::string::npos);
  EXPECT_NE(error_of("{}", {{"zero_optimization.stagge", "1", "CLI"}}).find("stage"), std::string::npos);
  EXPECT_EQ(Options::from_json("{\"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"cpu\"}}}")
                .with("zero_optimization.offload_param", "null")
                .document()
                .not_built.size(),
            0u);
}

TEST(Options, AutoIsFilledOrTakesItsRule) {
  const std::string text =
      R"({"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}}, "fp16": {"enabled": "auto", "loss_scale": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})";
  const auto o = Options::from_json(text, "x",
                                    {{"scheduler.params.total_num_steps", "2000", "CLI", true},
                                     {"optimizer.params.lr", "0.5", "CLI", true},
                                     {"seed", "8", "CLI", true}});
  EXPECT_EQ(o.settings().schedule.total_num_steps, 2000);
  EXPECT_EQ(o.settings().optimizer.lr, 0.5);
  EXPECT_EQ(o.settings().seed, 1234u) << "only where the file says auto";
  EXPECT_EQ(o.settings().precision, config::Precision::Fp32);
}

TEST(Options, DefaultsOfAdagradAndOfTheDecaySchedule) {
  const auto o = Options::from_json(
      R"({"optimizer": {"type": "adagrad"}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}})");
  EXPECT_EQ(o.settings().optimizer.type, config::OptimizerType::Adagrad);
  EXPECT_EQ(o.settings().optimizer.lr, 0.01);
  EXPECT_EQ(o.settings().optimizer.eps, 1e-10);
  EXPECT_EQ(o.settings().schedule.warmup_max_lr, config::PerGroup{1e-3});
}

TEST(Options, DigestFollowsValuesNotSpelling) {
  const auto a = Options::from_json("{\"seed\": 7, \"prescale_gradients\": false}");
  const auto b = Options::from_json("// c\n{\"prescale_gradients\": false,\n \"seed\": 7.0}");
  const auto c = Options::from_json("{\"seed\": 8}");
  EXPECT_EQ(a.digest(), b.digest());
  EXPECT_NE(a.digest(), c.digest());
  EXPECT_EQ(a.digest().size(), 32u);
}

TEST(Options, ExplainAsJson) {
  const auto j = nlohmann::json::parse(explain_json(
      Options::from_json("{\"train_batch_size\": 16, \"wandb\": {\"enabled\": true}}", "ds.json"), 4, true));
  EXPECT_EQ(j.at("schema"), "zero.config.explain/1");
  EXPECT_EQ(j.at("values").at("train_micro_batch_size_per_gpu").at("value"), 4);
  EXPECT_EQ(j.at("values").at("train_micro_batch_size_per_gpu").at("source"), "rule: 16 / (1 x 4 ranks)");
  EXPECT_EQ(j.at("notices").size(), 1u);
}

TEST(Options, UnreadableFileIsNamed) {
  try {
    Options::from_file("/nowhere/ds.json");
    FAIL();
  } catch (const IoError& e) {
    EXPECT_NE(std::string(e.what()).find("/nowhere/ds.json"), std::string::npos);
    EXPECT_EQ(e.code(), ExitCode::kConfig);
  }
}

TEST(NearestName, IgnoresCaseAndTakesTheFirstOfEquals) {
  EXPECT_EQ(nearest_name("STGE", {"stage", "state"}), "stage");
  EXPECT_EQ(nearest_name("satge", {"stage"}), "stage");
  EXPECT_EQ(nearest_name("zzzzzz", {"stage"}), "");
  EXPECT_EQ(nearest_name("a", {"bc"}), "");
}

}  // namespace
}  // namespace zero::config_test
