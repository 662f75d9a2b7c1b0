// Samples of questions whose answer is a part of their context: windows over the context, and from scores back to text.
#include <algorithm>
#include <mutex>

#include "apps/data/faults.h"
#include "apps/data/sample_maker.h"

namespace data {
namespace {

class QuestionMaker : public SampleMaker {
 public:
  QuestionMaker(const ExampleOptions& options, const Tokenizer& tokenizer)
      : options_(options),
        tokenizer_(tokenizer),
        split_(options, {"context", "question", "answers"}),
        padding_(padding_token(tokenizer)) {
    required_token(tokenizer.special().classifier, "a token at the beginning of a sequence ([CLS])", tokenizer);
    const Encoding none;
    added_ = tokenizer.with_special(none, &none).ids.size();
    // At least half of the sequence is for the context.
    longest_question_ = static_cast<std::size_t>(options.sequence) / 2;
    longest_question_ -= std::min(longest_question_, added_);
    const auto context = static_cast<std::size_t>(options.sequence) - added_ - longest_question_;
    if (longest_question_ < 1 || static_cast<std::size_t>(options.stride) >= context)
      throw std::invalid_argument("[Examples] stride: got " + std::to_string(options.stride) + " with sequence " +
                                  std::to_string(options.sequence) + ", expected less than " + std::to_string(context));
    Faults faults;
    for (const auto part : {Part::Training, Part::Heldout}) {
      auto& windows = windows_of(part);
      for (std::int64_t i = 0; i < split_.size(part); ++i) {
        const auto record = split_.at(part, i);
        for (const auto& answer : record.answers)
          if (answer.begin < 0)
            faults.add(record.where, "the answer \"" + answer.text.substr(0, 80) + "\", which is not in the context",
                       "a part of it");
        const auto count = windows_in(context_of(record).ids.size(), question_of(record).ids.size());
        for (std::uint32_t w = 0; w < count; ++w) windows.push_back({static_cast<std::uint32_t>(i), w});
      }
    }
    faults.raise_any();
  }

  std::int64_t samples(Part part) const override {
    return static_cast<std::int64_t>(part == Part::Training ? training_.size() : heldout_.size());
  }
  std::uint64_t digest() const override { return split_.digest(); }
  std::int64_t heldout_records() const override { return split_.size(Part::Heldout); }
  Record heldout_record(std::int64_t index) const override { return split_.at(Part::Heldout, index); }
  std::vector<std::string> references(const Record& record) const override {
    std::vector<std::string> texts;
    for (const auto& answer : record.answers) texts.push_back(answer.text);
    if (texts.empty()) texts.emplace_back();
    return texts;
  }

  Sample make(Part part, std::int64_t index, std::uint64_t) const override {
    const auto& window = (part == Part::Training ? training_ : heldout_)[static_cast<std::size_t>(index)];
    const auto record = split_.at(part, window.record);
    const auto context = context_of(record);
    const auto question = question_of(record);
    const auto length = context_room(question.ids.size());
    const auto begin = window.number * (length - static_cast<std::size_t>(options_.stride));
    const auto end = std::min(begin + length, context.ids.size());
    Encoding shown;
    const auto cut = [&](const auto& from, auto& to) {
      to.assign(from.begin() + static_cast<std::ptrdiff_t>(begin), from.begin() + static_cast<std::ptrdiff_t>(end));
    };
    cut(context.ids, shown.ids);
    cut(context.offsets, shown.offsets);
    cut(context.types, shown.types);
    cut(context.texts, shown.texts);
    auto whole = tokenizer_.with_special(question, &shown);
    Sample sample;
    sample.record = window.record;
    sample.offsets.resize(static_cast<std::size_t>(options_.sequence));
    for (std::size_t i = 0; i < whole.ids.size(); ++i)
      if (whole.texts[i] == 1) sample.offsets[i] = whole.offsets[i];
    if (!record.answers.empty()) place(sample, record.answers[0]);
    sample.ids = std::move(whole.ids);
    sample.types.assign(whole.types.begin(), whole.types.end());
    pad(sample, options_.sequence, padding_);
    return sample;
  }

 private:
  struct Window {
    std::uint32_t record, number;
  };
  std::vector<Window>& windows_of(Part part) { return part == Part::Training ? training_ : heldout_; }
  std::size_t context_room(std::size_t question) const {
    return static_cast<std::size_t>(options_.sequence) - added_ - question;
  }
  std::uint32_t windows_in(std::size_t context, std::size_t question) const {
    const auto room = context_room(question), step = room - static_cast<std::size_t>(options_.stride);
    return static_cast<std::uint32_t>(context <= room ? 1 : 1 + (context - room + step - 1) / step);
  }
  // The questions of a paragraph follow each other in a file: its tokens are kept from one to the next.
  Encoding context_of(const Record& record) const {
    const auto& text = *record.find("context");
    const std::lock_guard lock(mutex_);
    if (kept_text_ != text || kept_.ids.empty()) {
      kept_ = tokenizer_.encode_with_offsets(text, false);
      kept_text_ = text;
    }
    return kept_;
  }
  Encoding question_of(const Record& record) const {
    auto encoding = tokenizer_.encode_with_offsets(*record.find("question"), false);
    const auto size = std::min(encoding.ids.size(), longest_question_);
    encoding.ids.resize(size);
    encoding.offsets.resize(size);
    encoding.types.resize(size);
    encoding.texts.resize(size);
    return encoding;
  }
  // The tokens that hold the answer's first and last byte; none if one of them is in another window.
  static void place(Sample& sample, const Answer& answer) {
    const auto first = static_cast<std::uint32_t>(answer.begin);
    const auto last = first + static_cast<std::uint32_t>(answer.text.size()) - 1;
    std::int32_t start = 0, end = 0;
    bool before = false;
    for (std::size_t i = 0; i < sample.offsets.size(); ++i) {
      const auto& range = sample.offsets[i];
      if (range.begin == range.end) continue;
      before |= range.begin <= first;
      if (start == 0 && range.end > first) start = static_cast<std::int32_t>(i);
      if (range.begin <= last) end = static_cast<std::int32_t>(i);
    }
    const bool whole = before && start > 0 && sample.offsets[static_cast<std::size_t>(end)].end > last && end >= start;
    if (!whole) return;
    sample.start = start;
    sample.end = end;
  }

  ExampleOptions options_;
  const Tokenizer& tokenizer_;
  RecordSplit split_;
  std::int32_t padding_;
  std::size_t added_ = 0, longest_question_ = 0;
  std::vector<Window> training_, heldout_;
  mutable std::mutex mutex_;
  mutable std::string kept_text_;
  mutable Encoding kept_;
};

constexpr std::size_t kCandidates = 20;

// The tokens with the highest scores, at most kCandidates.
std::vector<std::size_t> highest(std::span<const float> scores, const Sample& sample) {
  std::vector<std::size_t> tokens;
  for (std::size_t i = 0; i < scores.size(); ++i)
    if (sample.offsets[i].begin != sample.offsets[i].end) tokens.push_back(i);
  const auto keep = std::min(kCandidates, tokens.size());
  std::partial_sort(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(keep), tokens.end(),
                    [&](auto a, auto b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
  tokens.resize(keep);
  return tokens;
}

}  // namespace

std::unique_ptr<SampleMaker> make_questions(const ExampleOptions& options, const Tokenizer& tokenizer) {
  return std::make_unique<QuestionMaker>(options, tokenizer);
}

QaAnswers::QaAnswers(const Examples& examples, bool may_abstain, std::int64_t longest_answer)
    : examples_(&examples),
      may_abstain_(may_abstain),
      longest_(longest_answer),
      best_(static_cast<std::size_t>(examples.heldout_records())) {}

void QaAnswers::add(const Sample& sample, std::span<const float> start, std::span<const float> end) {
  const auto size = sample.offsets.size();
  if (size == 0 || start.size() != size || end.size() != size || sample.record < 0 ||
      sample.record >= static_cast<std::int64_t>(best_.size()))
    throw std::invalid_argument("[QaAnswers::add] got " + std::to_string(start.size()) + " and " +
                                std::to_string(end.size()) + " scores, expected one for each of the " +
                                std::to_string(size) + " tokens of a held-out sample of questions");
  auto& best = best_[static_cast<std::size_t>(sample.record)];
  const float empty = start[0] + end[0];
  if (!best)
    best = Best{-std::numeric_limits<float>::infinity(), empty, {}};
  else
    best->empty_score = std::min(best->empty_score, empty);
  const auto ends = highest(end, sample);
  for (const auto first : highest(start, sample))
    for (const auto last : ends) {
      if (last < first || static_cast<std::int64_t>(last - first) >= longest_) continue;
      if (const float score = start[first] + end[last]; score > best->score) {
        best->score = score;
        best->range = {sample.offsets[first].begin, sample.offsets[last].end};
      }
    }
}

std::vector<std::string> QaAnswers::texts() const {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < best_.size(); ++i) {
    const auto& best = best_[i];
    const bool none =
        !best || best->range.begin == best->range.end || (may_abstain_ && best->empty_score > best->score);
    if (none) {
      texts.emplace_back();
    } else {
      const auto record = examples_->heldout_record(static_cast<std::int64_t>(i));
      texts.push_back(record.find("context")->substr(best->range.begin, best->range.end - best->range.begin));
    }
  }
  return texts;
}

}  // namespace data
