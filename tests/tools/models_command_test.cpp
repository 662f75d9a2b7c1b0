// `zero models`: the list, and a config.json that is read as the same model again.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/process.h"

namespace zero::test::models_command_test {
namespace {

using Json = nlohmann::json;

struct Said {
  int code;
  std::string out, err;
};

Said models(std::vector<std::string> words) {
  Process::Settings settings;
  settings.arguments = {ZERO_BINARY_DIR "/bin/zero", "models"};
  settings.arguments.insert(settings.arguments.end(), words.begin(), words.end());
  Process p(settings);
  const int code = p.wait(60);
  return {code, p.out, p.err};
}

}  // namespace

// Parameters as published: GPT-2 (Radford et al., 2019, as counted by transformers, tied), BERT's encoders (Devlin et
// al., 2019), T5 (Raffel et al., 2020), Llama 2 (Touvron et al., 2023).
TEST(Models, ListsNamesWithTheirPublishedSizes) {
  const auto said = models({"--json"});
  ASSERT_EQ(said.code, 0) << said.err;
  const auto document = Json::parse(said.out);
  EXPECT_EQ(document["schema"], "zero.models/1");
  std::map<std::string, double> millions;
  for (const auto& model : document["models"])
    millions[model["name"]] = std::round(model["parameters"].get<double>() / 1e5) / 10;
  EXPECT_EQ(millions["gpt2"], 124.4);
  EXPECT_EQ(millions["gpt2-xl"], 1557.6);
  EXPECT_EQ(millions["t5-small"], 60.5);
  EXPECT_EQ(millions["llama-2-7b"], 6738.4);
  EXPECT_EQ(millions["llama-110m"], 109.5);
  const auto table = models({});
  EXPECT_EQ(table.code, 0);
  for (const auto& [name, size] : millions) EXPECT_NE(table.out.find("\n" + name + " "), std::string::npos) << name;
}

TEST(Models, AConfigOfANameIsReadAsTheSameModel) {
  const TempFolder folder;
  for (const char* name : {"gpt2", "llama-110m", "llama-3.2-1b", "bert-tiny", "t5-v1.1-small", "vit-tiny"}) {
    const auto written = models({name});
    ASSERT_EQ(written.code, 0) << written.err;
    std::ofstream(folder.path() / "config.json") << written.out;
    const auto read = models({folder.text()});
    EXPECT_EQ(read.code, 0) << read.err;
    EXPECT_EQ(Json::parse(read.out), Json::parse(written.out)) << name;
  }
}

TEST(Models, RefusesWhatItDoesNotKnow) {
  const TempFolder folder;
  const auto unknown = models({"llama-9b"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("llama-9b"), std::string::npos) << unknown.err;
  EXPECT_NE(unknown.err.find("llama-110m"), std::string::npos) << "the names that there are: " << unknown.err;
  std::ofstream(folder.path() / "config.json") << R"({"model_type": "mamba"})";
  const auto other = models({folder.text()});
  EXPECT_EQ(other.code, 2);
  EXPECT_NE(other.err.find("mamba"), std::string::npos) << other.err;
}

}  // namespace zero::test::models_command_test
