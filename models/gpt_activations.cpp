#include "models/gpt_activations.h"

namespace models {
namespace {

// In units of tokens x hidden elements, from GptBlockImpl::forward. A layer saves its input, norm1's result, q, k and
// v, attention's result, the sum in the middle, norm2's result, and the two of the MLP, four times as wide.
constexpr std::int64_t kInput = 1, kInside = 1 + 3 + 1 + 1 + 1 + 4 + 4;
// While the MLP's last product is differentiated: the gradient of the layer's result, that of the MLP's inside.
constexpr std::int64_t kGradients = 1 + 4;

}  // namespace

GptActivations activations_of(const GptConfig& config, std::int64_t batch, std::int64_t element,
                              std::int64_t segments) {
  const std::int64_t tokens = batch * config.sequence, wide = tokens * config.hidden * element;
  const std::int64_t runs = segments == 0 ? 1 : std::min(segments, config.layers);
  const std::int64_t longest = (config.layers + runs - 1) / runs;
  // Mean and deviation of two norms, and attention's logarithm of sums in fp32.
  const std::int64_t small = tokens * (4 * element + 4 * config.heads);
  const std::int64_t of_layers = longest * ((kInput + kInside) * wide + small);
  // With segments the first input of the one that runs again is among those that are kept.
  const std::int64_t kept = segments == 0 ? 0 : runs * wide, again = segments == 0 ? 0 : kInput * wide;
  const std::int64_t weight = 4 * config.hidden * config.hidden * element;
  const std::int64_t embedding = config.vocabulary * config.hidden * element;
  const std::int64_t logits = tokens * config.vocabulary * element;
  // A tied embedding's first gradient waits for its second.
  const std::int64_t waiting = config.tied_output ? embedding : 0;
  // Of 16-bit logits there is an fp32 copy of the rows beside their softmax.
  const std::int64_t rows =
      std::min(tokens * config.vocabulary, loss_row_elements(/*gpu=*/false)) * 4 * (element < 4 ? 2 : 1);
  const std::int64_t forward = segments == 0 ? of_layers : kept;

  GptActivations peaks;
  peaks.layers = kept + of_layers - again + kGradients * wide + weight + waiting;
  // The last layer's result and the last norm's, which the output layer saves; or behind the cross entropy the
  // gradient of the logits, of the output layer and of its input.
  peaks.head = forward + 2 * wide + std::max(2 * logits + rows, logits + wide + embedding);
  // The gradients of the result of both embeddings, of the token embedding twice where it is tied, and of positions.
  peaks.tokens = wide + waiting + embedding + config.sequence * config.hidden * element;
  return peaks;
}

}  // namespace models
