// The loss of the models: cross entropy for large vocabularies, in fp32.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace models {

// A target that does not count, as in transformers.
constexpr std::int64_t kIgnored = -100;

// Mean cross entropy in nats of logits [n, classes] (any floating dtype) against int64 targets [n],
// computed in fp32 a few rows at a time; rows with a target of kIgnored do not count, and without others the loss and
// its gradient are zero. Saves only the logits; log_softmax of fp32 logits would save four
// more bytes per element and make two more copies in backward. Not twice differentiable.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

// Throws c10::Error unless targets are int64 of the shape of tokens.
void check_targets(const char* where, const at::Tensor& tokens, const at::Tensor& targets);

}  // namespace models
