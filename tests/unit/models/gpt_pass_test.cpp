// The GPT's description of its forward and backward (models/gpt_pass.h): operators in order, and every tensor is
// released. tests/parity/plan_agreement_test.cpp compares it with libtorch.
#include "models/gpt_pass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace models::gpt_pass_test {
namespace {

// "0", "2+3": parameters that operators read. Released tensors must have been allocated before.
class Listener final : public PassListener {
 public:
  void allocated(std::int64_t tensor, std::int64_t bytes) override {
    EXPECT_EQ(tensor, next_++);
    held[tensor] = bytes;
    now_ += bytes;
    peak = std::max(peak, now_);
  }
  void released(std::int64_t tensor) override { let_go(tensor); }
  void used(std::size_t first, std::size_t count) override {
    std::string text;
    for (auto i = first; i < first + count; ++i) text += (text.empty() ? "" : "+") + std::to_string(i);
    (in_backward_ ? backward : forward).push_back(text);
  }
  void segment_begins(std::int64_t input) override {
    EXPECT_EQ(held.count(input), 1u);
    kept_.push_back(held.at(input));
    forward.push_back("[");
  }
  void segment_ends() override { forward.push_back("]"); }
  void segment_runs_again(std::int64_t input) override {
    ASSERT_FALSE(kept_.empty());
    allocated(input, kept_.back());
    kept_.pop_back();
    backward.push_back("again");
  }
  void backward_begins() override { in_backward_ = true; }
  void gradient(std::size_t parameter, std::int64_t tensor) override {
    gradients[parameter] += held[tensor];
    let_go(tensor);
  }
  void backward_ends() override { ended = true; }

  std::vector<std::string> forward, backward;
  std::map<std::size_t, std::int64_t> gradients;  // bytes, by parameter
  std::map<std::int64_t, std::int64_t> held;      // bytes, by tensor
  std::int64_t peak = 0;
  bool ended = false;

 private:
  void let_go(std::int64_t tensor) {
    ASSERT_EQ(held.count(tensor), 1u) << tensor << " is not there";
    now_ -= held[tensor];
    held.erase(tensor);
  }
  std::vector<std::int64_t> kept_;
  std::int64_t next_ = 0, now_ = 0;
  bool in_backward_ = false;
};

using Operators = std::vector<std::string>;

constexpr std::int64_t kHidden = 8, kSequence = 4, kVocabulary = 16;

GptConfig config_of(std::int64_t layers, bool tied = true) {
  return {.layers = layers,
          .hidden = kHidden,
          .heads = 2,
          .sequence = kSequence,
          .vocabulary = kVocabulary,
          .tied_output = tied};
}

Listener pass_of(const GptConfig& config, const GptBatch& batch = {}) {
  Listener listener;
  describe_pass(config, batch, listener);
  EXPECT_TRUE(listener.ended);
  EXPECT_TRUE(listener.held.empty()) << "tensors without an end";
  return listener;
}

TEST(GptPass, OperatorsReadTheirParameters) {
  const auto one = pass_of(config_of(1));
  // Embeddings, norm1, qkv, projection, norm2, up, down, the last norm, the output layer.
  EXPECT_EQ(one.forward, (Operators{"0", "1", "2+3", "4+5", "6+7", "8+9", "10+11", "12+13", "14+15", "0"}));
  // Norms read their bias again, linear layers do not.
  EXPECT_EQ(one.backward, (Operators{"0", "14+15", "12", "10", "8+9", "6", "4", "2+3"}));
  EXPECT_EQ(pass_of(config_of(1, /*tied=*/false)).forward.back(), "16");
}

TEST(GptPass, SegmentsRunAgain) {
  const Operators layer{"2+3", "4+5", "6+7", "8+9", "10+11", "12+13"};
  const auto again = pass_of(config_of(2), {.segments = 1});
  EXPECT_EQ(std::count(again.forward.begin(), again.forward.end(), "["), 1);
  EXPECT_EQ(again.backward[2], "again");
  EXPECT_EQ(Operators(again.backward.begin() + 3, again.backward.begin() + 9), layer);
  const auto two = pass_of(config_of(2), {.segments = 5});
  EXPECT_EQ(std::count(two.backward.begin(), two.backward.end(), "again"), 2) << "at most one a layer";
  EXPECT_LT(pass_of(config_of(8), {.segments = 8}).peak, pass_of(config_of(8)).peak);
}

TEST(GptPass, EveryParameterHasAGradientOfItsSize) {
  for (const bool tied : {true, false})
    for (const std::int64_t segments : {0, 2}) {
      const auto config = config_of(3, tied);
      const auto pass = pass_of(config, {.samples = 2, .segments = segments, .element = 2});
      std::int64_t bytes = 0;
      for (const auto& [parameter, one] : pass.gradients) bytes += one;
      EXPECT_EQ(pass.gradients.size(), 2u + 3 * 12 + 2 + (tied ? 0 : 1));
      const std::int64_t block = 12 * kHidden * kHidden + 13 * kHidden;
      EXPECT_EQ(bytes, 2 * ((tied ? 1 : 2) * kVocabulary * kHidden + kSequence * kHidden + 3 * block + 2 * kHidden));
    }
}

TEST(GptPass, RowsOfTheLossAreFewerOnACpu) {
  auto config = config_of(1);
  config.vocabulary = 1 << 17;
  constexpr std::int64_t kSamples = 16, kRows = 2;
  const auto peak = [&](bool gpu) { return pass_of(config, {.samples = kSamples, .gpu = gpu}).peak; };
  EXPECT_EQ(peak(true) - peak(false), (kSamples * kSequence - kRows) * config.vocabulary * 4);
}

}  // namespace
}  // namespace models::gpt_pass_test
