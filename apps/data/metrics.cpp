// See metrics.h.
#include "apps/data/metrics.h"

#include <utf8proc.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>

#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

bool is_article(const std::string& word) { return word == "a" || word == "an" || word == "the"; }

double f1_of(const std::string& prediction, const std::string& reference) {
  const auto ours = words_of(prediction), theirs = words_of(reference);
  if (ours.empty() || theirs.empty()) return ours.empty() == theirs.empty() ? 1 : 0;
  std::map<std::string, std::int64_t> counts;
  for (const auto& word : theirs) ++counts[word];
  double common = 0;
  for (const auto& word : ours)
    if (counts[word]-- > 0) ++common;
  if (common == 0) return 0;
  const double precision = common / static_cast<double>(ours.size()),
               recall = common / static_cast<double>(theirs.size());
  return 2 * precision * recall / (precision + recall);
}

}  // namespace

std::string normalized_answer(std::string_view text) {
  // As the script: punctuation disappears first, then articles that stand alone become a space, then spaces are joined.
  std::string plain = python_lower(text.substr(0, invalid_utf8(text)));
  std::erase_if(plain, [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x80 && is_punctuation(byte);
  });
  std::string result, word;
  const auto flush = [&] {
    result += is_article(word) ? " " : word;
    word.clear();
  };
  for (std::string_view rest = plain; !rest.empty();) {
    const auto [code, bytes] = first_code_point(rest);
    if (is_python_word(code)) {
      word += rest.substr(0, bytes);
    } else {
      flush();
      if (is_python_space(code))
        result += ' ';
      else
        result += rest.substr(0, bytes);
    }
    rest.remove_prefix(bytes);
  }
  flush();
  std::string joined;
  for (const auto& one : words_of(result)) joined += (joined.empty() ? "" : " ") + one;
  return joined;
}

double exact_match(std::string_view prediction, const std::vector<std::string>& references) {
  const auto ours = normalized_answer(prediction);
  return std::any_of(references.begin(), references.end(), [&](const auto& r) { return normalized_answer(r) == ours; });
}

double answer_f1(std::string_view prediction, const std::vector<std::string>& references) {
  const auto ours = normalized_answer(prediction);
  double best = 0;
  for (const auto& reference : references) best = std::max(best, f1_of(ours, normalized_answer(reference)));
  return best;
}

AnswerScores answer_scores(const std::vector<std::string>& predictions,
                           const std::vector<std::vector<std::string>>& references) {
  if (predictions.size() != references.size())
    throw std::invalid_argument("[answer_scores] got " + std::to_string(predictions.size()) +
                                " predictions, expected " + std::to_string(references.size()) +
                                ", one for each list of references");
  AnswerScores scores;
  scores.count = static_cast<std::int64_t>(predictions.size());
  if (predictions.empty()) return scores;
  for (std::size_t i = 0; i < predictions.size(); ++i) {
    scores.exact += exact_match(predictions[i], references[i]);
    scores.f1 += answer_f1(predictions[i], references[i]);
  }
  scores.exact *= 100 / static_cast<double>(predictions.size());
  scores.f1 *= 100 / static_cast<double>(predictions.size());
  return scores;
}

double accuracy(const std::vector<std::int32_t>& predictions, const std::vector<std::int32_t>& labels) {
  if (predictions.size() != labels.size())
    throw std::invalid_argument("[accuracy] got " + std::to_string(predictions.size()) + " predictions, expected " +
                                std::to_string(labels.size()) + ", one for each label");
  if (labels.empty()) return 0;
  std::int64_t equal = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) equal += predictions[i] == labels[i];
  return static_cast<double>(equal) / static_cast<double>(labels.size());
}

double perplexity(double summed_loss, std::int64_t tokens) {
  return tokens < 1 ? std::numeric_limits<double>::quiet_NaN() : std::exp(summed_loss / static_cast<double>(tokens));
}

}  // namespace data
