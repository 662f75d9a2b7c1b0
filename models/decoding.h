// What a decoder keeps between the steps of a generation (models/generation.h): the keys and values of its layers, and
// where tokens are. Without gradients.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "models/layers.h"

namespace models {

class DecoderState {
 public:
  DecoderState() = default;
  // mask: [batch, prompt], 0 where a prompt that is shorter than others is padded on its left; undefined: nowhere.
  explicit DecoderState(const at::Tensor& mask);

  // For models, around the layers of a step with the newest tokens, int64 [batch, new]. The first step has the whole
  // prompt. Throws c10::Error for tokens beyond `longest`, or of another batch.
  void begin(std::int64_t layers, const at::Tensor& tokens, const char* where, std::int64_t longest);
  void end(std::int64_t more) { length_ += more; }
  KeyValues& layer(std::int64_t i) { return layers_[static_cast<std::size_t>(i)]; }
  // Tokens of earlier steps, with padding.
  std::int64_t length() const { return length_; }
  // Of the newest tokens: [new], or with padding [batch, new], counted from the first token that is none.
  at::Tensor positions(const at::Tensor& tokens) const;
  // [batch, all tokens with the newest]; undefined without padding.
  const at::Tensor& mask() const { return mask_; }

 private:
  std::vector<KeyValues> layers_;
  std::int64_t length_ = 0;
  at::Tensor mask_;
};

}  // namespace models
