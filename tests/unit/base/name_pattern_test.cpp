// Patterns of parameters' names.
#include "base/name_pattern.h"

#include <gtest/gtest.h>

namespace zero::base::name_pattern_test {
namespace {

TEST(NamePattern, AnExactPatternMatchesItsNameAlone) {
  const std::vector<std::string> names = {"a?.w",   "ab.w", "c*",   "c_long", "c",  "d\\x",
                                          "d\\\\x", "d\\*", "e[f]", "ef",     "g\\"};
  for (const auto& pattern : names)
    for (const auto& name : names)
      EXPECT_EQ(pattern_names(exact_pattern(pattern), name, {}), pattern == name) << pattern << " and " << name;
  EXPECT_TRUE(pattern_names("*\\*", "ab*", {}));
  EXPECT_FALSE(pattern_names("*\\*", "ab", {}));
  EXPECT_TRUE(pattern_names("*\\?x*", "a?b?xc", {}));
  EXPECT_TRUE(pattern_names("a\\", "a\\", {}));  // nothing follows that could be meant
}

TEST(NamePattern, ATiedParameterHasAllItsNames) {
  EXPECT_TRUE(pattern_names("head.*", "embedding.weight", {"head.weight"}));
  EXPECT_FALSE(pattern_names("head.*", "embedding.weight", {"decoder.weight"}));
}

}  // namespace
}  // namespace zero::base::name_pattern_test
