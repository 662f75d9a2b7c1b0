// A sample longer than the model's sequence length: every byte is the model's output for the last `sequence` bytes.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "models/gpt.h"

namespace gpt_sample_test {
namespace {

models::GptConfig small() { return {.layers = 2, .hidden = 32, .heads = 4, .sequence = 16, .vocabulary = 50}; }

// The next token by a plain forward of the whole window, without generate().
std::int64_t most_likely(models::Gpt& model, const at::Tensor& tokens, std::int64_t reach) {
  const torch::NoGradGuard no_grad;
  const std::int64_t seen = std::min(tokens.size(1), reach);
  return model->forward(tokens.narrow(1, tokens.size(1) - seen, seen))
      .select(1, seen - 1)
      .argmax(-1)
      .item<std::int64_t>();
}

TEST(GptSampleTest, EveryTokenFollowsTheLastWindow) {
  torch::manual_seed(11);
  models::Gpt model(small());
  model->eval();
  {
    const torch::NoGradGuard no_grad;  // not uniform: the output depends on the position and on earlier tokens
    for (at::Tensor& p : model->parameters()) p.mul_(8);
  }
  const at::Tensor start = torch::randint(50, {1, 3}, torch::kLong);
  const at::Tensor said = model->generate(start, 100, {.temperature = 0});
  ASSERT_EQ(said.size(1), 103);
  for (std::int64_t end = 3; end < said.size(1); ++end)
    ASSERT_EQ(said[0][end].item<std::int64_t>(), most_likely(model, said.narrow(1, 0, end), 16)) << "token " << end;
  // And one token after the last window alone is the same token: nothing older is seen.
  for (const std::int64_t end : {16, 17, 40, 102}) {
    const at::Tensor window = said.narrow(1, end - 16, 16);
    EXPECT_EQ(model->generate(window, 1, {.temperature = 0})[0][16].item<std::int64_t>(),
              said[0][end].item<std::int64_t>())
        << end;
  }
}

// Counting modulo 10 from any position: a trained model continues far beyond its sequence length.
TEST(GptSampleTest, WhatWasLearnedContinuesBeyondTheReach) {
  torch::manual_seed(12);
  models::Gpt model(small());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  for (int step = 0; step < 200; ++step) {
    const at::Tensor text = (torch::arange(17) + torch::randint(10, {8, 1})).remainder(10).to(torch::kLong);
    optimizer.zero_grad();
    model->forward(text.narrow(1, 0, 16), text.narrow(1, 1, 16)).backward();
    optimizer.step();
  }
  const at::Tensor expected = torch::arange(205).remainder(10).to(torch::kLong).unsqueeze(0);
  EXPECT_TRUE(at::equal(model->generate(expected.narrow(1, 0, 5), 200, {.temperature = 0.8, .top_k = 40, .seed = 1}),
                        expected));
}

}  // namespace
}  // namespace gpt_sample_test
