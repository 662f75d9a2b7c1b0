// See examples.h: options, order and positions. How samples are made: example_*.cpp.
#include "apps/data/examples.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "apps/data/corpus.h"
#include "apps/data/mix.h"
#include "apps/data/sample_maker.h"

namespace data {
namespace {

constexpr std::uint64_t kSplitKey = 0x7a65726f;  // which records are held out depends on their number alone
// Larger than before whenever samples of prompts are made in another way: positions of such runs are refused.
constexpr std::uint64_t kPromptRule = 2;
constexpr std::array<const char*, 6> kTaskNames{"lm", "prompt", "mlm", "seq2seq", "classify", "qa"};

std::uint64_t hash_of(const std::vector<std::uint64_t>& values) {
  return XXH3_64bits(values.data(), values.size() * sizeof(std::uint64_t));
}

std::unique_ptr<SampleMaker> maker_of(const ExampleOptions& options, const Tokenizer& tokenizer) {
  switch (options.task) {
    case Task::Lm:
    case Task::Mlm:
      return make_packed(options, tokenizer);
    case Task::Prompt:
      return make_prompts(options, tokenizer);
    case Task::Seq2Seq:
      return make_sequences(options, tokenizer);
    case Task::Classify:
      return make_classified(options, tokenizer);
    case Task::Qa:
      return make_questions(options, tokenizer);
  }
  throw std::logic_error("[Examples] unknown task");
}

void check(const ExampleOptions& o) {
  const auto refuse = [](const char* option, const std::string& got, const std::string& expected) {
    throw std::invalid_argument(std::string("[Examples] ") + option + ": got " + got + ", expected " + expected);
  };
  constexpr std::int64_t kMost = 1 << 24;
  if (o.sequence < 2 || o.sequence > kMost) refuse("sequence", std::to_string(o.sequence), "2 to 2^24 tokens");
  if (o.target_sequence < 0 || o.target_sequence > kMost)
    refuse("target_sequence", std::to_string(o.target_sequence), "0 to 2^24 tokens");
  if (o.answer_tokens < 1 || o.answer_tokens > kMost)
    refuse("answer_tokens", std::to_string(o.answer_tokens), "1 to 2^24 tokens");
  if (!(o.holdout >= 0 && o.holdout < 1)) refuse("holdout", std::to_string(o.holdout), "from 0 up to but without 1");
  if (!(o.mask_rate > 0 && o.mask_rate < 1)) refuse("mask_rate", std::to_string(o.mask_rate), "between 0 and 1");
  if (o.stride < 0) refuse("stride", std::to_string(o.stride), "0 or more tokens");
}

}  // namespace

const std::vector<std::string>& SampleMaker::labels() const {
  static const std::vector<std::string> none;
  return none;
}

RecordSplit::RecordSplit(const ExampleOptions& options, const std::vector<std::string>& required)
    : records_(options.files, {options.format, required}) {
  if (!options.heldout_files.empty()) {
    heldout_ = std::make_unique<Records>(options.heldout_files, RecordOptions{options.format, required});
  } else if (options.holdout > 0) {
    held_ = std::max<std::int64_t>(
        1, static_cast<std::int64_t>(std::floor(static_cast<double>(records_.size()) * options.holdout)));
    if (held_ >= records_.size())
      fail_file("records", options.files[0], std::to_string(records_.size()) + " record, of which one is held out",
                "at least 2. Hint: more records, held-out files or holdout 0");
  }
}

std::int64_t RecordSplit::size(Part part) const {
  if (part == Part::Training) return records_.size() - held_;
  return heldout_ ? heldout_->size() : held_;
}

Record RecordSplit::at(Part part, std::int64_t index) const {
  if (index < 0 || index >= size(part))
    throw std::out_of_range("[Examples] got record " + std::to_string(index) + ", expected less than " +
                            std::to_string(size(part)));
  if (part == Part::Heldout && heldout_) return heldout_->at(index);
  if (held_ == 0) return records_.at(index);
  const Permutation choice(records_.size(), kSplitKey);
  return records_.at(choice(part == Part::Heldout ? index : held_ + index));
}

std::uint64_t RecordSplit::digest() const {
  return hash_of({records_.digest(), heldout_ ? heldout_->digest() : 0, static_cast<std::uint64_t>(held_)});
}

std::int32_t required_token(const std::optional<std::int32_t>& token, const char* role, const Tokenizer& tokenizer) {
  if (!token)
    throw std::runtime_error(std::string("[Examples] got a tokenizer without ") + role + " (" +
                             tokenizer.description() + "), expected one that has it for this task");
  return *token;
}

std::int32_t end_token(const Tokenizer& tokenizer) {
  const auto& special = tokenizer.special();
  return required_token(special.end ? special.end : special.separator, "a token for the end of a text", tokenizer);
}

std::int32_t padding_token(const Tokenizer& tokenizer) {
  return tokenizer.special().padding ? *tokenizer.special().padding : end_token(tokenizer);
}

std::vector<std::int32_t> begin_tokens(const Tokenizer& tokenizer) {
  const auto begin = tokenizer.special().begin;
  const auto empty = tokenizer.encode("", true);
  return begin && !empty.empty() && empty[0] == *begin ? std::vector<std::int32_t>{*begin}
                                                       : std::vector<std::int32_t>{};
}

Encoding encoding_of(std::vector<std::int32_t> ids) {
  Encoding result;
  result.offsets.resize(ids.size());
  result.types.resize(ids.size(), 0);
  result.texts.resize(ids.size(), 0);
  result.ids = std::move(ids);
  return result;
}

void pad(Sample& sample, std::int64_t length, std::int32_t padding) {
  const auto size = static_cast<std::size_t>(length);
  sample.mask.assign(sample.ids.size(), 1);
  sample.mask.resize(size, 0);
  sample.ids.resize(size, padding);
  sample.types.resize(size, 0);
  if (!sample.labels.empty()) sample.labels.resize(size, kIgnored);
}

Examples::Examples(const ExampleOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
    : options_(options), tokenizer_(std::move(tokenizer)) {
  if (options_.target_sequence == 0) options_.target_sequence = options_.sequence;
  if (options_.stride == 0) options_.stride = options_.sequence / 3;
  check(options_);
  maker_ = maker_of(options_, *tokenizer_);
  const auto require_sample = [&](Part part, const char* name, const std::string& file) {
    if (maker_->samples(part) < 1)
      fail_file(
          "data", file,
          std::string("too little for one ") + name + " sample of " + std::to_string(options_.sequence) + " tokens",
          "more. Hint: more data, a shorter sequence or another holdout");
  };
  require_sample(Part::Training, "training", options_.files[0]);
  if (!options_.heldout_files.empty() || options_.holdout > 0)
    require_sample(Part::Heldout, "held-out",
                   options_.heldout_files.empty() ? options_.files[0] : options_.heldout_files[0]);
  std::string names;
  for (const auto& label : maker_->labels()) names += label + '\n';
  std::vector<std::uint64_t> facts{maker_->digest(),
                                   tokenizer_->digest(),
                                   static_cast<std::uint64_t>(options_.task),
                                   static_cast<std::uint64_t>(options_.sequence),
                                   static_cast<std::uint64_t>(options_.target_sequence),
                                   std::bit_cast<std::uint64_t>(options_.holdout),
                                   std::bit_cast<std::uint64_t>(options_.mask_rate),
                                   static_cast<std::uint64_t>(options_.stride),
                                   static_cast<std::uint64_t>(options_.decoder_start.value_or(-1)),
                                   XXH3_64bits(names.data(), names.size())};
  if (options_.task == Task::Prompt) facts.push_back(kPromptRule);
  digest_ = hash_of(facts);
}

Examples::~Examples() = default;

const std::vector<std::string>& Examples::labels() const { return maker_->labels(); }
std::int64_t Examples::training_samples() const { return maker_->samples(Part::Training); }
std::int64_t Examples::heldout_samples() const { return maker_->samples(Part::Heldout); }

Sample Examples::training(std::int64_t number) const {
  if (number < 0)
    throw std::invalid_argument("[Examples::training] got " + std::to_string(number) + ", expected at least 0");
  return maker_->make(Part::Training, shuffled(number, training_samples(), options_.seed),
                      mix(mix(options_.seed) ^ static_cast<std::uint64_t>(number)));
}

Sample Examples::heldout(std::int64_t index) const {
  if (index < 0 || index >= heldout_samples())
    throw std::invalid_argument("[Examples::heldout] got " + std::to_string(index) + ", expected less than " +
                                std::to_string(heldout_samples()));
  return maker_->make(Part::Heldout, index, mix(static_cast<std::uint64_t>(index)));
}

std::int64_t Examples::heldout_records() const { return maker_->heldout_records(); }
Record Examples::heldout_record(std::int64_t index) const { return maker_->heldout_record(index); }
std::vector<std::int32_t> Examples::heldout_prompt(std::int64_t index) const {
  return maker_->prompt(heldout_record(index));
}
std::vector<std::int32_t> Examples::prompt_of(const std::string& text) const {
  if (options_.task == Task::Seq2Seq) return tokenizer_->encode(text, true);
  auto ids = begin_tokens(*tokenizer_);
  const auto own = tokenizer_->encode(text, false);
  ids.insert(ids.end(), own.begin(), own.end());
  return ids;
}
std::vector<std::string> Examples::references(std::int64_t index) const {
  return maker_->references(heldout_record(index));
}

std::vector<Sample> ExampleReader::next(std::int64_t batch) {
  std::vector<Sample> samples;
  samples.reserve(static_cast<std::size_t>(batch));
  for (std::int64_t i = 0; i < batch; ++i) samples.push_back(examples_->training(position_ + rank_ * batch + i));
  position_ += batch * ranks_;
  return samples;
}

std::string ExampleReader::state() const { return position_text(position_, facts()); }

void ExampleReader::restore(const std::string& json) {
  position_ = restored_position(json, facts(), "ExampleReader::restore", "data, tokenizer, task, lengths and seed");
}

ReaderFacts ExampleReader::facts() const {
  return {{"samples", static_cast<std::uint64_t>(examples_->training_samples())},
          {"seed", examples_->options().seed},
          {"sequence", static_cast<std::uint64_t>(examples_->options().sequence)},
          {"digest", examples_->digest()}};
}

Task task_of(const std::string& name) {
  for (std::size_t i = 0; i < kTaskNames.size(); ++i)
    if (name == kTaskNames[i]) return static_cast<Task>(i);
  throw std::invalid_argument("[Examples] got task \"" + name +
                              "\", expected lm, prompt, mlm, seq2seq, classify or qa");
}

const char* name_of(Task task) { return kTaskNames[static_cast<std::size_t>(task)]; }

}  // namespace data
