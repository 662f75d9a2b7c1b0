// Which parameters patterns of libzero.keep_fp32 name, and what is said of a pattern that names none.
#include "sharding/kept_fp32.h"

#include <gtest/gtest.h>

namespace zero::sharding::kept_fp32_test {
namespace {

using Kept = std::vector<bool>;

const std::vector<ParameterNames> kNames = {
    {"embedding.weight", {"head.weight"}}, {"blocks.0.norm.weight"}, {"blocks.0.up.weight"}, {"blocks.1.norm.weight"}};

KeptFp32 kept(const std::vector<std::string>& patterns, config::Precision precision = config::Precision::Bf16) {
  config::Settings settings;
  settings.keep_fp32 = patterns;
  settings.precision = precision;
  return kept_fp32(settings, kNames);
}

TEST(KeptFp32, ByPatternsOfAllNames) {
  EXPECT_EQ(kept({}).kept, (Kept{false, false, false, false}));
  EXPECT_EQ(kept({"*.norm.*"}).kept, (Kept{false, true, false, true}));
  EXPECT_EQ(kept({"blocks.?.up.weight", "head.*"}).kept, (Kept{true, false, true, false}));
  EXPECT_EQ(kept({"norm.weight", "*.norm.*"}).kept, (Kept{false, true, false, true}));
  EXPECT_TRUE(kept({"*"}, config::Precision::Fp16).faults.empty());
}

TEST(KeptFp32, InFp32ThereIsNothingToKeep) {
  const auto all = kept({"*", "*.nrom.weight"}, config::Precision::Fp32);
  EXPECT_EQ(all.kept, (Kept{false, false, false, false}));
  EXPECT_EQ(all.faults.size(), 1u) << "a pattern that matches nothing is a mistake in any precision";
}

TEST(KeptFp32, APatternWithoutAMatchNamesSimilarOnes) {
  const auto fault = [](const std::string& pattern) { return kept({pattern}).faults.at(0); };
  EXPECT_EQ(fault("*.nrom.weight"),
            "libzero.keep_fp32: the pattern \"*.nrom.weight\" matches no parameter; similar names are "
            "blocks.0.norm.weight, blocks.1.norm.weight");
  EXPECT_EQ(fault("hed.weight"),
            "libzero.keep_fp32: the pattern \"hed.weight\" matches no parameter; similar names are head.weight");
  EXPECT_EQ(fault("layers.*"),
            "libzero.keep_fp32: the pattern \"layers.*\" matches no parameter; names are such as embedding.weight, "
            "head.weight, blocks.0.norm.weight and 2 more");
}

TEST(KeptFp32, APatternOfABufferSaysSo) {
  config::Settings settings;
  settings.keep_fp32 = {"*.running_mean"};
  settings.precision = config::Precision::Bf16;
  const auto fault = kept_fp32(settings, kNames, {"blocks.0.norm.running_mean"}).faults.at(0);
  EXPECT_NE(fault.find("matches the buffer blocks.0.norm.running_mean; buffers keep their dtype"), std::string::npos)
      << fault;
}

}  // namespace
}  // namespace zero::sharding::kept_fp32_test
