#include "models/gpt_activations.h"

namespace models {
namespace {

// In multiples of tokens x hidden elements, from GptBlockImpl::forward. A layer saves its input, the result of norm1,
// q, k and v, the result of attention, the residual sum, the result of norm2, and two tensors of the MLP, each four
// times as wide.
constexpr std::int64_t kInput = 1, kInside = 1 + 3 + 1 + 1 + 1 + 4 + 4;
// During backward of the MLP's last product: the gradients of the layer's result and of the product's input.
constexpr std::int64_t kGradients = 1 + 4;

}  // namespace

GptActivations activations_of(const GptConfig& config, std::int64_t batch, std::int64_t element,
                              std::int64_t segments) {
  const std::int64_t tokens = batch * config.sequence, wide = tokens * config.hidden * element;
  const std::int64_t runs = segments == 0 ? 1 : std::min(segments, config.layers);
  const std::int64_t longest = (config.layers + runs - 1) / runs;
  // Mean and standard deviation of two norms, and attention's log-sum-exp in fp32.
  const std::int64_t small = tokens * (4 * element + 4 * config.heads);
  const std::int64_t of_layers = longest * ((kInput + kInside) * wide + small);
  // With segments, the input of the segment that is recomputed is counted among the kept inputs.
  const std::int64_t kept = segments == 0 ? 0 : runs * wide, again = segments == 0 ? 0 : kInput * wide;
  const std::int64_t weight = 4 * config.hidden * config.hidden * element;
  const std::int64_t embedding = config.vocabulary * config.hidden * element;
  const std::int64_t logits = tokens * config.vocabulary * element;
  // The first gradient of a tied embedding is kept until the second arrives.
  const std::int64_t waiting = config.tied_output ? embedding : 0;
  // 16-bit logits need an fp32 copy of the rows in addition to their softmax.
  const std::int64_t rows =
      std::min(tokens * config.vocabulary, loss_row_elements(/*gpu=*/false)) * 4 * (element < 4 ? 2 : 1);
  const std::int64_t forward = segments == 0 ? of_layers : kept;

  GptActivations peaks;
  peaks.layers = kept + of_layers - again + kGradients * wide + weight + waiting;
  // The results of the last layer and of the last norm, which the output layer saves, plus the larger of: the logits
  // during the cross entropy; later the gradients of the logits, of the output layer and of its input.
  peaks.head = forward + 2 * wide + std::max(2 * logits + rows, logits + wide + embedding);
  // The gradients of the embeddings' sum, of the token embedding (two if it is tied) and of the position embedding.
  peaks.tokens = wide + waiting + embedding + config.sequence * config.hidden * element;
  return peaks;
}

}  // namespace models
