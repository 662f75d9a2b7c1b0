// config.json of exports against those that transformers wrote of the same models (script/make-hf-fixtures).
#include <gtest/gtest.h>

#include <zero/checkpoint_tools.h>

#include "support/folder.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::model_config_test {
namespace {

ExportOptions options_of(const std::string& names, std::int64_t heads = 0, std::vector<std::string> fields = {}) {
  ExportOptions options;
  options.dtype = "";
  options.names = names;
  options.heads = heads;
  options.config = std::move(fields);
  return options;
}

struct Exported {
  nlohmann::json config;
  std::string remarks, error;
};

Exported exported(const std::string& model, const ExportOptions& options) {
  const TempFolder folder(TempFolder::On::Memory);
  Exported result;
  try {
    for (const auto& remark : export_checkpoint(hf_model(model), folder.path() / "out", options).remarks)
      result.remarks += remark + "\n";
  } catch (const ConfigError& error) {
    result.error = error.what();
    return result;
  }
  const auto path = folder.path() / "out" / "config.json";
  if (std::filesystem::exists(path)) result.config = nlohmann::json::parse(file_text(path));
  return result;
}

TEST(ModelConfig, IsThatOfTransformers) {
  const std::vector<std::string> length{"max_position_embeddings=16"};
  const std::vector<std::tuple<std::string, std::string, ExportOptions>> models{
      {"hf-llama", "16", options_of("llama", 2, length)},
      {"hf-llama-tied", "16", options_of("llama", 2, length)},
      {"hf-bert", "12", options_of("bert", 2)},
      {"hf-t5", "18", options_of("t5")}};
  for (const auto& [name, least, options] : models) {
    const auto ours = exported(name, options);
    ASSERT_FALSE(ours.config.is_null()) << name << ours.error << ours.remarks;
    const auto theirs = nlohmann::json::parse(file_text(hf_model(name) / "config.json"));
    std::size_t compared = 0;
    for (const auto& [key, value] : ours.config.items()) {
      EXPECT_EQ(value, theirs.value(key, nlohmann::json("missing"))) << name << " " << key;
      ++compared;
    }
    EXPECT_GE(compared, std::stoul(least) - 4) << name;
    EXPECT_NE(ours.remarks.find("transformers' defaults"), std::string::npos) << ours.remarks;
  }
}

TEST(ModelConfig, HeadsAndFieldsThatContradictTheTensors) {
  EXPECT_TRUE(exported("hf-llama", options_of("llama")).config.is_null());
  EXPECT_NE(exported("hf-llama", options_of("llama")).remarks.find("Hint: --heads N"), std::string::npos);
  EXPECT_NE(exported("hf-llama", options_of("llama", 3)).error.find("heads: got 3, expected a divisor"),
            std::string::npos);
  EXPECT_NE(exported("hf-llama", options_of("llama", 8)).error.find("heads of 1 rows"), std::string::npos);
  EXPECT_NE(exported("hf-bert", options_of("bert", 5)).error.find("heads: got 5"), std::string::npos);
  EXPECT_NE(exported("hf-t5", options_of("t5", 4)).error.find("expected the 2 that"), std::string::npos);
  EXPECT_NE(exported("hf-t5", options_of("t5", 0, {"d_model=9"})).error.find("got d_model=9, expected 8"),
            std::string::npos);
  EXPECT_NE(exported("hf-t5", options_of("t5", 0, {"d_model"})).error.find("expected KEY=VALUE"), std::string::npos);
  // One is no error if it is what the tensors have.
  EXPECT_EQ(exported("hf-t5", options_of("t5", 2, {"d_model=8"})).error, "");
}

TEST(ModelConfig, GivenFieldsReplaceDefaults) {
  const auto llama = exported("hf-llama", options_of("llama", 4,
                                                     {"rms_norm_eps=1e-5", "rope_theta=500000.0", "hidden_act=gelu",
                                                      "eos_token_id=[1,2]", "extra={\"a\": 1}"}));
  const auto& config = llama.config;
  EXPECT_EQ(config["num_attention_heads"], 4);
  EXPECT_EQ(config["head_dim"], 2);
  EXPECT_EQ(config["num_key_value_heads"], 2);
  EXPECT_EQ(config["rms_norm_eps"], 1e-5);
  EXPECT_EQ(config["rope_theta"], 500000.0);
  EXPECT_EQ(config["rope_parameters"]["rope_theta"], 500000.0);
  EXPECT_EQ(config["hidden_act"], "gelu");
  EXPECT_EQ(config["eos_token_id"], (nlohmann::json{1, 2}));
  EXPECT_EQ(config["extra"]["a"], 1);
  EXPECT_EQ(llama.remarks.find("rms_norm_eps"), std::string::npos) << "what is given is not assumed";
}

// Other heads on the same body have other classes, which names do not tell.
TEST(ModelConfig, OtherModelsHaveNone) {
  EXPECT_TRUE(exported("hf-bert", options_of("llama", 2)).config.is_null());
  EXPECT_TRUE(exported("hf-llama", options_of("t5", 2)).config.is_null());
  auto options = options_of("bert", 2);
  options.prefix = "p.";
  EXPECT_NE(exported("hf-bert", options).remarks.find("the names have a prefix"), std::string::npos);
}

}  // namespace
}  // namespace zero::test::model_config_test
