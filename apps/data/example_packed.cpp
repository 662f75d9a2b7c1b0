// Samples of packed documents: the next token, and masked tokens.
#include <algorithm>
#include <array>

#include "apps/data/mix.h"
#include "apps/data/sample_maker.h"
#include "apps/data/token_stream.h"

namespace data {
namespace {

// The tokens of one part of the data.
struct Stretch {
  const TokenStream* stream = nullptr;
  std::int64_t begin = 0, end = 0;
};

class PackedMaker : public SampleMaker {
 public:
  PackedMaker(const ExampleOptions& options, const Tokenizer& tokenizer)
      : options_(options), tokenizer_(tokenizer), masked_(options.task == Task::Mlm) {
    const auto& special = tokenizer.special();
    const auto end = masked_ ? required_token(special.separator ? special.separator : special.end,
                                              "a token that separates texts", tokenizer)
                             : end_token(tokenizer);
    if (masked_) {
      mask_ = required_token(special.mask, "a token that masks", tokenizer);
      added_ = static_cast<std::int64_t>(tokenizer.with_special({}).ids.size());
      for (std::int32_t id = 0; id < tokenizer.vocabulary(); ++id)
        if (!tokenizer.is_special(id) && !tokenizer.token_of(id).empty()) ordinary_.push_back(id);
    }
    step_ = options.sequence - added_;
    if (step_ < 1 || (masked_ && ordinary_.empty()))
      throw std::invalid_argument("[Examples] sequence: got " + std::to_string(options.sequence) +
                                  ", expected more than the special tokens");
    const Records records(options.files, {options.format, {"text"}});
    stream_ = std::make_unique<TokenStream>(records, tokenizer, end, options.cache);
    digest_ = records.digest();
    auto held = static_cast<std::int64_t>(static_cast<double>(stream_->size()) * options.holdout);
    if (!options.heldout_files.empty()) {
      const Records other(options.heldout_files, {options.format, {"text"}});
      heldout_stream_ = std::make_unique<TokenStream>(other, tokenizer, end, options.cache);
      digest_ = mix(digest_) ^ other.digest();
      held = 0;
    }
    training_ = {stream_.get(), 0, stream_->size() - held};
    heldout_ = heldout_stream_ ? Stretch{heldout_stream_.get(), 0, heldout_stream_->size()}
                               : Stretch{stream_.get(), stream_->size() - held, stream_->size()};
  }

  std::int64_t samples(Part part) const override {
    const auto& stretch = of(part);
    // The last target of a sample is one token behind its inputs.
    return std::max<std::int64_t>(0, stretch.end - stretch.begin - (masked_ ? 0 : 1)) / step_;
  }
  std::uint64_t digest() const override { return digest_; }

  Sample make(Part part, std::int64_t index, std::uint64_t draw) const override {
    const auto& stretch = of(part);
    auto tokens = stretch.stream->tokens(stretch.begin + index * step_, step_ + (masked_ ? 0 : 1));
    Sample sample;
    if (masked_) {
      auto encoding = tokenizer_.with_special(encoding_of(std::move(tokens)));
      sample.ids = std::move(encoding.ids);
      sample.types.assign(encoding.types.begin(), encoding.types.end());
      mask_tokens(sample, draw);
    } else {
      sample.labels.assign(tokens.begin() + 1, tokens.end());
      tokens.pop_back();
      sample.ids = std::move(tokens);
    }
    sample.mask.assign(sample.ids.size(), 1);
    sample.types.resize(sample.ids.size(), 0);
    return sample;
  }

 private:
  const Stretch& of(Part part) const { return part == Part::Training ? training_ : heldout_; }

  // Of the tokens that are chosen 80 % become the mask, 10 % a random token and 10 % stay (Devlin et al., "BERT", 2019,
  // 3.1).
  void mask_tokens(Sample& sample, std::uint64_t draw) const {
    sample.labels.assign(sample.ids.size(), kIgnored);
    const auto uniform = [&](std::size_t i, std::uint64_t which) {
      return static_cast<double>(mix(draw + (4 * i + which) * kMixStep) >> 11) * 0x1p-53;
    };
    for (std::size_t i = 0; i < sample.ids.size(); ++i) {
      auto& id = sample.ids[i];
      if (tokenizer_.is_special(id) || uniform(i, 0) >= options_.mask_rate) continue;
      sample.labels[i] = id;
      const double kind = uniform(i, 1);
      if (kind < 0.8)
        id = mask_;
      else if (kind < 0.9)
        id = ordinary_[static_cast<std::size_t>(uniform(i, 2) * static_cast<double>(ordinary_.size()))];
    }
  }

  ExampleOptions options_;
  const Tokenizer& tokenizer_;
  bool masked_;
  std::int32_t mask_ = 0;
  std::int64_t added_ = 0, step_ = 0;
  std::vector<std::int32_t> ordinary_;  // tokens that a random one may be
  std::unique_ptr<TokenStream> stream_, heldout_stream_;
  Stretch training_, heldout_;
  std::uint64_t digest_ = 0;
};

}  // namespace

std::unique_ptr<SampleMaker> make_packed(const ExampleOptions& options, const Tokenizer& tokenizer) {
  return std::make_unique<PackedMaker>(options, tokenizer);
}

}  // namespace data
