// Measures of predictions. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace data {

// SQuAD's normalisation of an answer: lower case, without ASCII punctuation, without the words a, an and the, with one
// space between words.
std::string normalized_answer(std::string_view text);
// 1 or 0; the share of common words (F1). As SQuAD's evaluation script (Rajpurkar et al., 2016; 2018): the best of all
// references; a question without an answer has the reference "".
double exact_match(std::string_view prediction, const std::vector<std::string>& references);
double answer_f1(std::string_view prediction, const std::vector<std::string>& references);

struct AnswerScores {
  double exact = 0, f1 = 0;  // in percent
  std::int64_t count = 0;
};
// Throws std::invalid_argument if the lists differ in length.
AnswerScores answer_scores(const std::vector<std::string>& predictions,
                           const std::vector<std::vector<std::string>>& references);

// The share of equal elements, in [0, 1]; 0 of none.
double accuracy(const std::vector<std::int32_t>& predictions, const std::vector<std::int32_t>& labels);
// exp of the mean loss in nats; infinity beyond what a double holds, NaN of no tokens.
double perplexity(double summed_loss, std::int64_t tokens);

}  // namespace data
