// Measures of predictions. The expected values are those of SQuAD's evaluation script (normalize_answer, compute_f1),
// computed by hand; tests/data/tokenizers_test.py compares with the script's rules in Python.
#include <gtest/gtest.h>

#include <cmath>

#include "apps/data/metrics.h"

namespace metrics_test {
namespace {

TEST(MetricsTest, AnswersAreNormalisedAsSquadDoes) {
  EXPECT_EQ(data::normalized_answer("The  Quick, brown fox!"), "quick brown fox");
  EXPECT_EQ(data::normalized_answer("a an the"), "");
  EXPECT_EQ(data::normalized_answer("theatre another a-b"), "theatre another ab");
  EXPECT_EQ(data::normalized_answer("\u00c9COLE d'\u00c9t\u00e9"), "\u00e9cole d\u00e9t\u00e9");
  EXPECT_EQ(data::normalized_answer("x\u00a0y\u3000z"), "x y z");
  EXPECT_EQ(data::normalized_answer("\u201cthe\u201d"), "\u201c \u201d");
  // Python's lower() has a final sigma, and its words have numbers of all kinds, but no connectors and joiners.
  EXPECT_EQ(data::normalized_answer("\u039f\u0394\u039f\u03a3, \u03a3\u0391\u03a3."),
            "\u03bf\u03b4\u03bf\u03c2 \u03c3\u03b1\u03c2");
  EXPECT_EQ(data::normalized_answer("\u03a3"), "\u03c3");
  EXPECT_EQ(data::normalized_answer("\u0391\u03a3'\u0391"), "\u03b1\u03c3\u03b1");
  EXPECT_EQ(data::normalized_answer("the\u00b2 the\u2160 the\u203fx"), "the\u00b2 the\u2170 \u203fx");
}

TEST(MetricsTest, TheBestReferenceCounts) {
  EXPECT_EQ(data::exact_match("the Denver Broncos", {"Panthers", "Denver Broncos."}), 1);
  EXPECT_EQ(data::exact_match("Broncos", {"Denver Broncos"}), 0);
  EXPECT_DOUBLE_EQ(data::answer_f1("Broncos", {"x", "Denver Broncos"}), 2.0 / 3.0);
  EXPECT_DOUBLE_EQ(data::answer_f1("b b c", {"b c c"}), 2.0 / 3.0);
  EXPECT_EQ(data::answer_f1("", {""}), 1);
  EXPECT_EQ(data::answer_f1("x", {""}), 0);
  EXPECT_EQ(data::answer_f1("", {"x"}), 0);
  const auto scores = data::answer_scores({"a b", "c"}, {{"b"}, {"d"}});
  EXPECT_DOUBLE_EQ(scores.exact, 50);
  EXPECT_DOUBLE_EQ(scores.f1, 50);
  EXPECT_EQ(scores.count, 2);
  EXPECT_THROW((void)data::answer_scores({"a"}, {}), std::invalid_argument);
}

TEST(MetricsTest, SharesAndPerplexity) {
  EXPECT_DOUBLE_EQ(data::accuracy({1, 2, 3, 4}, {1, 0, 3, 0}), 0.5);
  EXPECT_EQ(data::accuracy({}, {}), 0);
  EXPECT_THROW((void)data::accuracy({1}, {}), std::invalid_argument);
  EXPECT_DOUBLE_EQ(data::perplexity(10 * std::log(7.0), 10), 7);
  EXPECT_TRUE(std::isinf(data::perplexity(1e9, 1)));
  EXPECT_TRUE(std::isnan(data::perplexity(0, 0)));
}

}  // namespace
}  // namespace metrics_test
