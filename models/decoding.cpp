// See decoding.h.
#include "models/decoding.h"

namespace models {

DecoderState::DecoderState(const at::Tensor& mask) {
  if (mask.defined()) mask_ = mask.to(torch::kBool);
}

void DecoderState::begin(std::int64_t layers, const at::Tensor& tokens, const char* where, std::int64_t longest) {
  check_tokens(where, tokens, longest - length_);
  if (layers_.empty()) layers_.resize(static_cast<std::size_t>(layers));
  if (!mask_.defined()) return;
  TORCH_CHECK(mask_.dim() == 2 && mask_.size(0) == tokens.size(0), "[", where, "] got a mask ", mask_.sizes(),
              " and tokens ", tokens.sizes(), ", expected one batch");
  if (length_ > 0) mask_ = torch::cat({mask_, torch::ones_like(tokens, mask_.options())}, 1);
  TORCH_CHECK(mask_.size(1) == length_ + tokens.size(1), "[", where, "] got a mask of ", mask_.size(1),
              " tokens, expected the ", length_ + tokens.size(1), " of the prompt");
}

at::Tensor DecoderState::positions(const at::Tensor& tokens) const {
  const std::int64_t count = tokens.size(1);
  if (!mask_.defined()) return torch::arange(length_, length_ + count, tokens.options());
  return (mask_.cumsum(1, torch::kLong) - 1).clamp_min(0).narrow(1, length_, count);
}

}  // namespace models
