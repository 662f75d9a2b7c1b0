// Samples that are one record each: prompts with completions, sources with targets, texts with labels.
#include <algorithm>
#include <map>
#include <set>

#include "apps/data/faults.h"
#include "apps/data/sample_maker.h"

namespace data {
namespace {

class RecordMaker : public SampleMaker {
 public:
  RecordMaker(const ExampleOptions& options, const Tokenizer& tokenizer, const std::vector<std::string>& required)
      : options_(options), tokenizer_(tokenizer), split_(options, required) {}

  std::int64_t samples(Part part) const override { return split_.size(part); }
  std::uint64_t digest() const override { return split_.digest(); }
  Sample make(Part part, std::int64_t index, std::uint64_t) const override {
    auto sample = make_of(split_.at(part, index));
    sample.record = index;
    return sample;
  }
  Record heldout_record(std::int64_t index) const override { return split_.at(Part::Heldout, index); }

 protected:
  // Calls check(record, faults) for every record of both parts and throws all faults.
  template <class Check>
  void check_records(const Check& check) const {
    Faults faults;
    for (const auto part : {Part::Training, Part::Heldout})
      for (std::int64_t i = 0; i < samples(part); ++i) check(split_.at(part, i), faults);
    faults.raise_any();
  }
  virtual Sample make_of(const Record& record) const = 0;
  // Tokens of a text that leave room for `added` more in `length`.
  std::vector<std::int32_t> encode_at_most(const std::string& text, std::int64_t length) const {
    auto ids = tokenizer_.encode(text, false);
    ids.resize(std::min(ids.size(), static_cast<std::size_t>(std::max<std::int64_t>(0, length))));
    return ids;
  }

  ExampleOptions options_;
  const Tokenizer& tokenizer_;
  RecordSplit split_;
};

// Every record must have one of two pairs of fields, or be a question.
void require_pair(const Record& record, const char* first, const char* second, Faults& faults) {
  if (record.find(first) != nullptr && record.find(second) != nullptr) return;
  if (record.find("question") != nullptr && (record.impossible || !record.answers.empty())) return;
  faults.add(
      record.where, "a record without them",
      std::string("\"") + first + "\" and \"" + second + "\", or \"question\", \"answers\" and perhaps \"context\"");
}

// The accepted texts; a question without an answer has the empty one.
std::vector<std::string> texts_of(const Record& record, const char* field) {
  if (const auto* text = record.find(field)) return {*text};
  std::vector<std::string> texts;
  for (const auto& answer : record.answers) texts.push_back(answer.text);
  if (texts.empty()) texts.emplace_back();
  return texts;
}

class PromptMaker : public RecordMaker {
 public:
  PromptMaker(const ExampleOptions& options, const Tokenizer& tokenizer)
      : RecordMaker(options, tokenizer, {}), end_(end_token(tokenizer)), begin_(begin_tokens(tokenizer)) {
    const auto shortest = options.answer_tokens + static_cast<std::int64_t>(begin_.size()) + 1;
    if (samples(Part::Heldout) > 0 && options.sequence < shortest)
      throw std::invalid_argument("[Examples] sequence: got " + std::to_string(options.sequence) +
                                  ", expected at least " + std::to_string(shortest) + ": a prompt and answer_tokens (" +
                                  std::to_string(options.answer_tokens) +
                                  "). Hint: a longer sequence, or fewer answer_tokens");
    check_records([this](const Record& record, Faults& faults) {
      require_pair(record, "prompt", "completion", faults);
      const auto *before = record.find("prompt"), *after = record.find("completion");
      const auto blank = [](const std::string* text) {
        return text != nullptr && text->find_first_not_of(" \t\r\n") == std::string::npos;
      };
      if (blank(before) && blank(after) && completion(record).size() == 1 && prompt_of(record, 1).empty())
        faults.add(record.where, "a prompt and a completion without a token", "one of them with text");
    });
  }

  std::int64_t heldout_records() const override { return samples(Part::Heldout); }

  std::vector<std::int32_t> prompt(const Record& record) const override {
    // The reference must not decide how much may be generated: its length would be told.
    return prompt_of(record, options_.sequence - options_.answer_tokens);
  }
  std::vector<std::string> references(const Record& record) const override { return texts_of(record, "completion"); }

 private:
  // The text right before the answer that is tokenised as one.
  static std::string before_answer(const Record& record) {
    if (const auto* text = record.find("prompt")) return *text;
    return (record.find("context") != nullptr ? "\n\nQuestion: " : "Question: ") + *record.find("question") +
           "\n\nAnswer:";
  }
  // With the end of the text. The answer to a question follows "Answer:" and a space. Its tokens are those of both
  // texts as one, after the prompt's (as TRL does): by itself, a tokenizer of words would begin it with a space. Where
  // the two texts join in one token, so that the prompt's tokens are others, the answer is tokenised by itself: a model
  // continues the prompt's own tokens.
  std::vector<std::int32_t> completion(const Record& record) const {
    const auto* text = record.find("completion");
    const std::string answer = text != nullptr ? *text : record.answers.empty() ? "" : " " + record.answers[0].text;
    const auto before = before_answer(record);
    const auto prompt = tokenizer_.encode(before, false);
    auto ids = tokenizer_.encode(before + answer, false);
    if (prompt.size() <= ids.size() && std::equal(prompt.begin(), prompt.end(), ids.begin()))
      ids.erase(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(prompt.size()));
    else
      ids = tokenizer_.encode(answer, false);
    ids.resize(std::min(ids.size(), static_cast<std::size_t>(options_.sequence - 1)));
    ids.push_back(end_);
    return ids;
  }
  // Of a prompt that is too long the beginning is cut; of a question's, the end of its context.
  std::vector<std::int32_t> prompt_of(const Record& record, std::int64_t length) const {
    const auto room = static_cast<std::size_t>(std::max<std::int64_t>(0, length));
    std::vector<std::int32_t> ids = begin_;
    const auto last = tokenizer_.encode(before_answer(record), false);
    if (record.find("prompt") != nullptr) {
      const auto keep = std::min(last.size(), room - std::min(room, ids.size()));
      ids.insert(ids.end(), last.end() - static_cast<std::ptrdiff_t>(keep), last.end());
    } else {
      const auto* context = record.find("context");
      const auto used = ids.size() + last.size();
      if (context != nullptr) {
        const auto own = encode_at_most(*context, static_cast<std::int64_t>(room - std::min(room, used)));
        ids.insert(ids.end(), own.begin(), own.end());
      }
      ids.insert(ids.end(), last.begin(), last.end());
      if (ids.size() > room) ids.erase(ids.begin(), ids.end() - static_cast<std::ptrdiff_t>(room));
    }
    return ids;
  }
  Sample make_of(const Record& record) const override {
    const auto answer = completion(record);
    Sample sample;
    // One more than the sequence: the last token is a target only.
    sample.ids = prompt_of(record, options_.sequence + 1 - static_cast<std::int64_t>(answer.size()));
    const auto prompt_size = sample.ids.size();
    sample.ids.insert(sample.ids.end(), answer.begin(), answer.end());
    sample.labels.assign(sample.ids.begin() + 1, sample.ids.end());
    if (prompt_size > 1) std::fill_n(sample.labels.begin(), prompt_size - 1, kIgnored);
    sample.labels.resize(static_cast<std::size_t>(options_.sequence), kIgnored);
    sample.ids.pop_back();
    pad(sample, options_.sequence, padding_token(tokenizer_));
    return sample;
  }

  std::int32_t end_;
  std::vector<std::int32_t> begin_;
};

class SequenceMaker : public RecordMaker {
 public:
  SequenceMaker(const ExampleOptions& options, const Tokenizer& tokenizer)
      : RecordMaker(options, tokenizer, {}),
        padding_(padding_token(tokenizer)),
        start_(options.decoder_start.value_or(padding_)),
        end_(end_token(tokenizer)),
        added_(static_cast<std::int64_t>(tokenizer.with_special({}).ids.size())) {
    const auto empty = tokenizer.with_special({}).ids;
    target_added_ = added_ + (empty.empty() || empty.back() != end_ ? 1 : 0);
    if (added_ >= options.sequence || target_added_ >= options.target_sequence)
      throw std::invalid_argument(
          "[Examples] sequence: got one shorter than the special tokens, expected a longer one");
    check_records([](const Record& record, Faults& faults) { require_pair(record, "source", "target", faults); });
  }

  std::int64_t heldout_records() const override { return samples(Part::Heldout); }
  std::vector<std::int32_t> prompt(const Record& record) const override {
    return ids_of(source_of(record), options_.sequence - added_);
  }
  std::vector<std::string> references(const Record& record) const override { return texts_of(record, "target"); }

 private:
  // A question as T5 was trained on SQuAD (Raffel et al., 1910.10683, appendix D).
  static std::string source_of(const Record& record) {
    if (const auto* text = record.find("source")) return *text;
    const auto* context = record.find("context");
    return "question: " + *record.find("question") + (context != nullptr ? " context: " + *context : "");
  }
  std::vector<std::int32_t> ids_of(const std::string& text, std::int64_t length) const {
    return tokenizer_.with_special(encoding_of(encode_at_most(text, length))).ids;
  }
  // With the end that generation stops at, also where the tokenizer adds none (GPT-2's, bytes).
  std::vector<std::int32_t> target_of(const Record& record) const {
    auto ids = ids_of(texts_of(record, "target").front(), options_.target_sequence - target_added_);
    if (ids.empty() || ids.back() != end_) ids.push_back(end_);
    return ids;
  }
  Sample make_of(const Record& record) const override {
    Sample sample;
    sample.ids = prompt(record);
    pad(sample, options_.sequence, padding_);
    sample.labels = target_of(record);
    sample.decoder_ids = {start_};
    sample.decoder_ids.insert(sample.decoder_ids.end(), sample.labels.begin(), sample.labels.end());
    const auto length = static_cast<std::size_t>(options_.target_sequence);
    sample.decoder_ids.resize(length, padding_);
    sample.labels.resize(length, kIgnored);
    return sample;
  }

  std::int32_t padding_, start_, end_;
  std::int64_t added_, target_added_ = 0;  // special tokens of a source; of a target, with its end
};

class ClassifiedMaker : public RecordMaker {
 public:
  ClassifiedMaker(const ExampleOptions& options, const Tokenizer& tokenizer)
      : RecordMaker(options, tokenizer, {"text", "label"}),
        padding_(padding_token(tokenizer)),
        labels_(options.labels) {
    std::set<std::string> found;
    if (labels_.empty()) {
      for (std::int64_t i = 0; i < samples(Part::Training); ++i) found.insert(label_of(split_.at(Part::Training, i)));
      labels_.assign(found.begin(), found.end());
      // "10" comes after "9".
      const auto digits = [](const std::string& s) { return s.find_first_not_of("0123456789") == std::string::npos; };
      if (std::all_of(labels_.begin(), labels_.end(), digits))
        std::sort(labels_.begin(), labels_.end(),
                  [](const auto& a, const auto& b) { return a.size() != b.size() ? a.size() < b.size() : a < b; });
    }
    for (std::size_t i = 0; i < labels_.size(); ++i) numbers_[labels_[i]] = static_cast<std::int32_t>(i);
    if (numbers_.size() != labels_.size())
      throw std::invalid_argument("[Examples] labels: got a name twice, expected each once");
    check_records([this](const Record& record, Faults& faults) {
      if (!numbers_.contains(label_of(record)))
        faults.add(record.where, "the label \"" + label_of(record).substr(0, 80) + "\"",
                   "one of the " + std::to_string(labels_.size()) + " of the training records");
    });
  }

  const std::vector<std::string>& labels() const override { return labels_; }

 private:
  static const std::string& label_of(const Record& record) { return *record.find("label"); }
  Sample make_of(const Record& record) const override {
    auto first = encoding_of(tokenizer_.encode(*record.find("text"), false)), second = Encoding{};
    const auto* pair = record.find("text_pair");
    if (pair != nullptr) second = encoding_of(tokenizer_.encode(*pair, false));
    const auto* other = pair != nullptr ? &second : nullptr;
    const Encoding none;
    const auto added = tokenizer_.with_special(none, pair != nullptr ? &none : nullptr).ids.size();
    auto room = static_cast<std::size_t>(options_.sequence);
    room -= std::min(room, added);
    // The longer text is cut first.
    auto a = first.ids.size(), b = second.ids.size();
    while (a + b > room) --(a > b ? a : b);
    first = encoding_of({first.ids.begin(), first.ids.begin() + static_cast<std::ptrdiff_t>(a)});
    second = encoding_of({second.ids.begin(), second.ids.begin() + static_cast<std::ptrdiff_t>(b)});
    auto whole = tokenizer_.with_special(first, other);
    Sample sample;
    sample.ids = std::move(whole.ids);
    sample.ids.resize(std::min(sample.ids.size(), static_cast<std::size_t>(options_.sequence)));
    sample.types.assign(whole.types.begin(), whole.types.end());
    pad(sample, options_.sequence, padding_);
    sample.label = numbers_.at(label_of(record));
    return sample;
  }

  std::int32_t padding_;
  std::vector<std::string> labels_;
  std::map<std::string, std::int32_t> numbers_;
};

}  // namespace

std::unique_ptr<SampleMaker> make_prompts(const ExampleOptions& options, const Tokenizer& tokenizer) {
  return std::make_unique<PromptMaker>(options, tokenizer);
}
std::unique_ptr<SampleMaker> make_sequences(const ExampleOptions& options, const Tokenizer& tokenizer) {
  return std::make_unique<SequenceMaker>(options, tokenizer);
}
std::unique_ptr<SampleMaker> make_classified(const ExampleOptions& options, const Tokenizer& tokenizer) {
  return std::make_unique<ClassifiedMaker>(options, tokenizer);
}

}  // namespace data
