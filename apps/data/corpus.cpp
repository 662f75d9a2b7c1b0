// See corpus.h. Errors have the path, the value and the requirement, so that commands can print them unchanged.
#include "apps/data/corpus.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "apps/data/mix.h"

namespace data {
namespace {

constexpr int kRounds = 4;

}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t key)
    : size_(static_cast<std::uint64_t>(size)), key_(mix(key)) {
  if (size < 1) throw std::invalid_argument("[Permutation] got size " + std::to_string(size) + ", expected at least 1");
  half_bits_ = 1;
  while (half_bits_ < 31 && (std::uint64_t{1} << (2 * half_bits_)) < size_) ++half_bits_;
  mask_ = (std::uint64_t{1} << half_bits_) - 1;
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  std::uint64_t value = static_cast<std::uint64_t>(index);
  if (value >= size_)
    throw std::invalid_argument("[Permutation] got index " + std::to_string(index) + ", expected less than " +
                                std::to_string(size_));
  do {
    std::uint64_t left = value >> half_bits_, right = value & mask_;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ (mix(right ^ mix(key_ + round)) & mask_);
      left = right;
      right = next;
    }
    value = left << half_bits_ | right;
  } while (value >= size_);
  return static_cast<std::int64_t>(value);
}

std::int64_t shuffled(std::int64_t number, std::int64_t samples, std::uint64_t seed) {
  const Permutation order(samples, mix(seed) + static_cast<std::uint64_t>(number / samples));
  return order(number % samples);
}

std::string position_text(std::int64_t position, const ReaderFacts& facts) {
  nlohmann::json json{{"position", position}};
  for (const auto& [key, value] : facts) json[key] = value;
  return json.dump();
}

std::int64_t restored_position(const std::string& json, const ReaderFacts& facts, const std::string& where,
                               const std::string& same) {
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    throw std::runtime_error("[" + where + "] got " + got + ", expected " + expected);
  };
  const auto saved = nlohmann::json::parse(json, nullptr, false);
  const auto check = [&](const char* key) {
    if (!saved.is_object() || !saved.contains(key) || !saved[key].is_number_unsigned())
      refuse("\"" + json.substr(0, 200) + "\"", "the saved position of a corpus");
  };
  check("position");
  for (const auto& [key, value] : facts) check(key);
  for (const auto& [key, value] : facts)
    if (saved[key].get<std::uint64_t>() != value)
      refuse(std::string(key) + " " + std::to_string(value),
             saved[key].dump() + " as when the position was saved. Hint: continue with the same " + same);
  if (saved["position"].get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))
    refuse("position " + saved["position"].dump(), "less than 2^63");
  return saved["position"].get<std::int64_t>();
}

Corpus::Corpus(const std::string& path, std::int64_t sequence, double holdout, std::uint64_t seed)
    : file_(path), sequence_(sequence), seed_(seed) {
  if (sequence < 1)
    throw std::invalid_argument("[Corpus] got sequence " + std::to_string(sequence) + ", expected at least 1");
  if (!(holdout >= 0 && holdout < 1))
    throw std::invalid_argument("[Corpus] got holdout " + std::to_string(holdout) +
                                ", expected from 0 up to but without 1");
  heldout_begin_ = file_.size() - static_cast<std::int64_t>(std::floor(static_cast<double>(file_.size()) * holdout));
  // The last target is one byte after a sample's inputs and must be in the same part.
  training_samples_ = (heldout_begin_ - 1) / sequence;
  heldout_samples_ = std::max<std::int64_t>(0, file_.size() - heldout_begin_ - 1) / sequence;
  const auto check = [&](const char* part, std::int64_t size, std::int64_t samples) {
    if (samples < 1)
      fail_file("text", path, std::to_string(size) + " bytes for " + part,
                "at least the " + std::to_string(sequence + 1) +
                    " of one sample. Hint: use more text, a shorter sequence or another holdout");
  };
  check("training", heldout_begin_, training_samples_);
  if (holdout > 0) check("the held-out part", file_.size() - heldout_begin_, heldout_samples_);
}

const std::uint8_t* Corpus::training(std::int64_t number) const {
  if (number < 0)
    throw std::invalid_argument("[Corpus::training] got " + std::to_string(number) + ", expected at least 0");
  return file_.data() + shuffled(number, training_samples_, seed_) * sequence_;
}

const std::uint8_t* Corpus::heldout(std::int64_t index) const {
  if (index < 0 || index >= heldout_samples_)
    throw std::invalid_argument("[Corpus::heldout] got " + std::to_string(index) + ", expected less than " +
                                std::to_string(heldout_samples_));
  return file_.data() + heldout_begin_ + index * sequence_;
}

std::vector<const std::uint8_t*> Reader::next(std::int64_t batch) {
  std::vector<const std::uint8_t*> samples;
  samples.reserve(static_cast<std::size_t>(batch));
  for (std::int64_t i = 0; i < batch; ++i) samples.push_back(corpus_->training(position_ + rank_ * batch + i));
  position_ += batch * ranks_;
  return samples;
}

std::string Reader::state() const { return position_text(position_, facts()); }

void Reader::restore(const std::string& json) {
  position_ = restored_position(json, facts(), "Reader::restore", "text, sequence length, holdout and seed");
}

ReaderFacts Reader::facts() const {
  return {{"samples", static_cast<std::uint64_t>(corpus_->training_samples_)},
          {"seed", corpus_->seed_},
          {"sequence", static_cast<std::uint64_t>(corpus_->sequence_)}};
}

}  // namespace data
