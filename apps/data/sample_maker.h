// How the samples of a task are made: one maker each, behind Examples.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "apps/data/examples.h"

namespace data {

enum class Part { Training, Heldout };

class SampleMaker {
 public:
  virtual ~SampleMaker() = default;
  virtual std::int64_t samples(Part part) const = 0;
  // `draw`: the seed of what is random in the sample.
  virtual Sample make(Part part, std::int64_t index, std::uint64_t draw) const = 0;
  virtual std::uint64_t digest() const = 0;  // of the data

  virtual const std::vector<std::string>& labels() const;
  virtual std::int64_t heldout_records() const { return 0; }
  virtual Record heldout_record(std::int64_t) const { throw std::logic_error("[Examples] packed text has no records"); }
  virtual std::vector<std::int32_t> prompt(const Record&) const { throw std::logic_error("[Examples] no prompts"); }
  virtual std::vector<std::string> references(const Record&) const { return {}; }
};

// The records of a task in two parts.
class RecordSplit {
 public:
  RecordSplit(const ExampleOptions& options, const std::vector<std::string>& required);
  std::int64_t size(Part part) const;
  Record at(Part part, std::int64_t index) const;
  std::uint64_t digest() const;

 private:
  Records records_;
  std::unique_ptr<Records> heldout_;
  std::int64_t held_ = 0;  // of records_, without heldout_
};

// Throws std::runtime_error that names the role if the tokenizer has no such token.
std::int32_t required_token(const std::optional<std::int32_t>& token, const char* role, const Tokenizer& tokenizer);
std::int32_t padding_token(const Tokenizer& tokenizer);  // without one, the end of a text
// What the tokenizer puts before a text: its token for the beginning, or nothing.
std::vector<std::int32_t> begin_tokens(const Tokenizer& tokenizer);
// Ids without special tokens as an encoding, for Tokenizer::with_special.
Encoding encoding_of(std::vector<std::int32_t> ids);
// Fills `ids`, and the mask, types and labels that go with it, up to `length`.
void pad(Sample& sample, std::int64_t length, std::int32_t padding);

std::unique_ptr<SampleMaker> make_packed(const ExampleOptions& options, const Tokenizer& tokenizer);      // Lm, Mlm
std::unique_ptr<SampleMaker> make_prompts(const ExampleOptions& options, const Tokenizer& tokenizer);     // Prompt
std::unique_ptr<SampleMaker> make_sequences(const ExampleOptions& options, const Tokenizer& tokenizer);   // Seq2Seq
std::unique_ptr<SampleMaker> make_classified(const ExampleOptions& options, const Tokenizer& tokenizer);  // Classify
std::unique_ptr<SampleMaker> make_questions(const ExampleOptions& options, const Tokenizer& tokenizer);   // Qa

}  // namespace data
