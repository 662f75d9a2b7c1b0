// See t5.h.
#include "models/t5.h"

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "models/cross_entropy.h"

namespace models {
namespace {

constexpr std::int64_t kAnyLength = std::numeric_limits<std::int64_t>::max();

double power(std::int64_t of) { return 1 / std::sqrt(static_cast<double>(of)); }

// The buckets of distances from a query's place to a key's: half of them for single distances, the others for ranges
// that grow up to max_distance. Where keys may come later, half of all is for them. Rounded as transformers rounds.
at::Tensor buckets_of(at::Tensor distance, bool both_ways, std::int64_t buckets, std::int64_t max_distance) {
  at::Tensor result = torch::zeros_like(distance);
  if (both_ways) {
    buckets /= 2;
    result = distance.gt(0).to(torch::kLong) * buckets;
    distance = distance.abs();
  } else {
    distance = -distance.clamp_max(0);
  }
  const std::int64_t single = buckets / 2;
  const double range = std::log(static_cast<double>(max_distance) / static_cast<double>(single));
  const at::Tensor share = torch::log(distance.to(torch::kFloat32) / single) / range * (buckets - single);
  const at::Tensor large = (single + share.to(torch::kLong)).clamp_max(buckets - 1);
  return result + torch::where(distance.lt(single), distance, large);
}

// fp16 cannot hold the sums of some trained models; transformers cuts them as here.
at::Tensor finite(const at::Tensor& x) { return x.scalar_type() == torch::kHalf ? x.clamp(-64504, 64504) : x; }

}  // namespace

T5BlockImpl::T5BlockImpl(const T5Config& config, bool decoder, bool first) : config_(config), decoder_(decoder) {
  const auto layers = make_path(*this, "layer");
  const auto self = make_path(*layers, "0");
  own_ = attention(*self, "SelfAttention");
  if (first)
    positions_ = self->named_children()["SelfAttention"]->register_module(
        "relative_attention_bias", make_embedding(config.buckets, config.heads, config.factor * power(config.hidden)));
  if (decoder) cross_ = attention(*make_path(*layers, "1"), "EncDecAttention");
  const auto last = make_path(*layers, decoder ? "2" : "1");
  const auto mlp = make_path(*last, "DenseReluDense");
  const auto inward = [&] { return Linear(config.hidden, config.inner, false, config.factor * power(config.hidden)); };
  if (config.gated) gate_ = mlp->register_module("wi_0", inward());
  up_ = mlp->register_module(config.gated ? "wi_1" : "wi", inward());
  down_ = mlp->register_module("wo", Linear(config.inner, config.hidden, false, config.factor * power(config.inner)));
  norm_ = last->register_module("layer_norm", RmsNorm(config.hidden, config.norm_epsilon, config.factor));
}

T5BlockImpl::Attention T5BlockImpl::attention(torch::nn::Module& layer, const char* name) {
  const auto& c = config_;
  const std::int64_t width = c.heads * c.head_width;
  const auto path = make_path(layer, name);
  const auto linear = [&](const char* key, std::int64_t in, std::int64_t out, std::int64_t of) {
    return path->register_module(key, Linear(in, out, false, c.factor * power(of)));
  };
  Attention all;
  all.q = linear("q", c.hidden, width, c.hidden * c.head_width);
  all.k = linear("k", c.hidden, width, c.hidden);
  all.v = linear("v", c.hidden, width, c.hidden);
  all.o = linear("o", width, c.hidden, width);
  all.norm = layer.register_module("layer_norm", RmsNorm(c.hidden, c.norm_epsilon, c.factor));
  return all;
}

at::Tensor T5BlockImpl::positions(std::int64_t queries, std::int64_t keys) {
  const auto places = torch::arange(keys, torch::dtype(torch::kLong).device(positions_->weight.device()));
  const at::Tensor distance = places.unsqueeze(0) - places.narrow(0, keys - queries, queries).unsqueeze(1);
  const at::Tensor buckets = buckets_of(distance, !decoder_, config_.buckets, config_.max_distance);
  return positions_(buckets).permute({2, 0, 1}).unsqueeze(0);
}

T5Memory T5BlockImpl::remember(const at::Tensor& encoded) {
  return {split_heads(cross_.k(encoded), config_.heads), split_heads(cross_.v(encoded), config_.heads)};
}

at::Tensor T5BlockImpl::forward(const at::Tensor& x, const Visible& own, const T5Memory& memory, const Visible& seen,
                                KeyValues* kept) {
  const double dropout = is_training() ? config_.dropout : 0;
  const at::Tensor norm = own_.norm(x);
  at::Tensor k = split_heads(own_.k(norm), config_.heads), v = split_heads(own_.v(norm), config_.heads);
  if (kept != nullptr) std::tie(k, v) = kept->append(k, v);
  const at::Tensor mixed = attend(split_heads(own_.q(norm), config_.heads), k, v, own, dropout, 1.0);
  at::Tensor y = finite(x + dropped(own_.o(merge_heads(mixed))));
  if (decoder_) {
    const at::Tensor q = split_heads(cross_.q(cross_.norm(y)), config_.heads);
    const at::Tensor read = attend(q, memory.k, memory.v, seen, dropout, 1.0);
    y = finite(y + dropped(cross_.o(merge_heads(read))));
  }
  const at::Tensor inner = norm_(y);
  at::Tensor wide = activate(config_.activation, config_.gated ? gate_(inner) : up_(inner));
  if (config_.gated) wide = wide * up_(inner);
  return finite(y + dropped(down_(dropped(wide))));
}

T5StackImpl::T5StackImpl(const T5Config& config, bool decoder, const at::Tensor& shared)
    : config_(config), decoder_(decoder) {
  token_ = register_module("embed_tokens", share_embedding(shared));
  blocks_ = register_module("block", torch::nn::ModuleList());
  const std::int64_t layers = decoder ? config.decoder_layers : config.encoder_layers;
  for (std::int64_t i = 0; i < layers; ++i) blocks_->push_back(T5Block(config, decoder, /*first=*/i == 0));
  norm_ = register_module("final_layer_norm", RmsNorm(config.hidden, config.norm_epsilon, config.factor));
}

Visible T5StackImpl::visible_of(const at::Tensor& mask, std::int64_t queries, std::int64_t keys,
                                const at::Tensor& like) {
  const Visible seen = visible(mask, queries, keys, decoder_, like);
  at::Tensor scores = block(0)->positions(queries, keys);
  if (seen.added.defined()) return {scores + seen.added, false};
  if (!seen.causal) return {scores, false};
  const auto low = -std::numeric_limits<double>::infinity();
  return {scores + torch::full({queries, keys}, low, like.options()).triu(1), false};
}

at::Tensor T5StackImpl::embed(const at::Tensor& tokens) {
  return torch::dropout(token_(tokens), config_.dropout, is_training());
}

at::Tensor T5StackImpl::finish(const at::Tensor& x) { return torch::dropout(norm_(x), config_.dropout, is_training()); }

at::Tensor T5StackImpl::forward(const at::Tensor& tokens, const at::Tensor& mask, const at::Tensor& encoded,
                                const Visible& seen) {
  check_tokens("T5::forward", tokens, kAnyLength);
  const std::int64_t time = tokens.size(1), layers = static_cast<std::int64_t>(blocks_->size());
  const at::Tensor x = embed(tokens);
  const Visible own = visible_of(mask, time, time, x);
  return finish(segments.run(layers, x, [this, own, encoded, seen](std::int64_t i, const at::Tensor& y) {
    T5Block layer = block(i);
    return layer->forward(y, own, decoder_ ? layer->remember(encoded) : T5Memory{}, seen);
  }));
}

T5ForConditionalGenerationImpl::T5ForConditionalGenerationImpl(T5Config config) : config_(std::move(config)) {
  config_.validate();
  shared_ = register_module("shared", make_embedding(config_.vocabulary, config_.hidden, config_.factor));
  encoder_ = register_module("encoder", T5Stack(config_, /*decoder=*/false, shared_->weight));
  decoder_ = register_module("decoder", T5Stack(config_, /*decoder=*/true, shared_->weight));
  output_ = register_module("lm_head", config_.tied_output
                                           ? Linear(shared_->weight, at::Tensor())
                                           : Linear(config_.hidden, config_.vocabulary, false, config_.factor));
}

at::Tensor T5ForConditionalGenerationImpl::head(const at::Tensor& features) {
  return output_(config_.scaled_output ? features * power(config_.hidden) : features);
}

namespace {

// Of the tokens that the encoder reads: the decoder's queries are others, so that a mask of pairs fits only one of
// them.
void require_flat(const at::Tensor& mask, const char* where) {
  TORCH_CHECK(!mask.defined() || mask.dim() == 2, "[", where, "] got a mask of the encoder's tokens ", mask.sizes(),
              ", expected [batch, time]. Hint: packed samples are not supported here");
}

}  // namespace

at::Tensor T5ForConditionalGenerationImpl::forward(const at::Tensor& tokens, const at::Tensor& decoder_tokens,
                                                   const at::Tensor& mask, const at::Tensor& decoder_mask) {
  TORCH_CHECK(tokens.dim() == 2 && decoder_tokens.dim() == 2 && tokens.size(0) == decoder_tokens.size(0),
              "[T5::forward] got tokens ", tokens.sizes(), " and decoder tokens ", decoder_tokens.sizes(),
              ", expected [batch, time] of one batch");
  require_flat(mask, "T5::forward");
  const at::Tensor encoded = encoder_(tokens, mask);
  const Visible seen = visible(mask, decoder_tokens.size(1), tokens.size(1), /*causal=*/false, encoded);
  return head(decoder_(decoder_tokens, decoder_mask, encoded, seen));
}

at::Tensor T5ForConditionalGenerationImpl::shift_right(const at::Tensor& targets) const {
  TORCH_CHECK(targets.dim() == 2 && targets.size(1) >= 1, "[T5::shift_right] got targets ", targets.sizes(),
              ", expected [batch, time]");
  const at::Tensor start = torch::full({targets.size(0), 1}, config_.start_token, targets.options());
  const at::Tensor shifted = torch::cat({start, targets.narrow(1, 0, targets.size(1) - 1)}, 1);
  return shifted.masked_fill(shifted.eq(kIgnored), config_.pad_token);
}

at::Tensor T5ForConditionalGenerationImpl::loss(const at::Tensor& tokens, const at::Tensor& targets,
                                                const at::Tensor& mask) {
  return cross_entropy(forward(tokens, shift_right(targets), mask).flatten(0, 1), targets.flatten());
}

T5State T5ForConditionalGenerationImpl::encode(const at::Tensor& tokens, const at::Tensor& mask) {
  require_flat(mask, "T5::encode");
  const at::Tensor encoded = encoder_(tokens, mask);
  T5State state;
  for (std::int64_t i = 0; i < config_.decoder_layers; ++i)
    state.memory.push_back(decoder_->block(i)->remember(encoded));
  state.seen = visible(mask, 1, tokens.size(1), /*causal=*/false, encoded);
  return state;
}

at::Tensor T5ForConditionalGenerationImpl::next(const at::Tensor& decoder_tokens, T5State& state) {
  const std::int64_t queries = decoder_tokens.size(1);
  state.decoder.begin(config_.decoder_layers, decoder_tokens, "T5::next", kAnyLength);
  at::Tensor x = decoder_->embed(decoder_tokens);
  const Visible own = decoder_->visible_of(state.decoder.mask(), queries, state.decoder.length() + queries, x);
  for (std::int64_t i = 0; i < config_.decoder_layers; ++i)
    x = decoder_->block(i)->forward(x, own, state.memory[static_cast<std::size_t>(i)], state.seen,
                                    &state.decoder.layer(i));
  state.decoder.end(queries);
  return head(decoder_->finish(x.narrow(1, queries - 1, 1))).select(1, 0);
}

at::Tensor T5ForConditionalGenerationImpl::generate(const at::Tensor& tokens, std::int64_t count,
                                                    const Sampling& sampling, const at::Tensor& mask) {
  std::optional<T5State> state;
  const auto next = [&](const at::Tensor& newest) {
    if (!state) state = encode(tokens, mask);
    return this->next(newest, *state);
  };
  check_tokens("T5::generate", tokens, kAnyLength);
  const at::Tensor start = torch::full({tokens.size(0), 1}, config_.start_token, tokens.options());
  return generate_by(*this, next, start, count, sampling);
}

void T5ForConditionalGenerationImpl::run_layers_by(std::int64_t count, const Runner& runner) {
  encoder_->segments.run_by(count, runner);
  decoder_->segments.run_by(count, runner);
}

}  // namespace models
