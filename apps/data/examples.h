// Tokenised training samples of a task, as plain vectors. Which sample a rank reads is a pure function of (seed,
// position, rank, ranks), and what is random in a sample of (seed, position), so the position is all that a resumed run
// needs. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/data/corpus.h"
#include "apps/data/records.h"
#include "apps/data/tokenizers/tokenizer.h"

namespace data {

enum class Task {
  Lm,        // next token, on packed documents: field "text"
  Prompt,    // next token of the completion alone: "prompt" and "completion"; or "context", "question" and "answers"
  Mlm,       // masked tokens (BERT), on packed documents: "text"
  Seq2Seq,   // encoder and decoder: "source" and "target"; or "context", "question" and "answers"
  Classify,  // one label a text, or a pair of texts: "text", optionally "text_pair", and "label"
  Qa,        // the answer's first and last token in the context (BERT): "context", "question" and "answers"
};

inline constexpr std::int32_t kIgnored = -100;  // a label without a loss, torch's ignore_index

struct ExampleOptions {
  Task task = Task::Lm;
  std::vector<std::string> files = {}, heldout_files = {};  // without heldout_files, `holdout` of `files`
  RecordFormat format = RecordFormat::ByEnding;
  std::int64_t sequence = 128;       // tokens of a sample, with special tokens
  std::int64_t target_sequence = 0;  // Seq2Seq: of the target; 0: as `sequence`
  std::int64_t answer_tokens = 32;   // Prompt: of `sequence`, what a held-out prompt leaves to the generated answer
  double holdout = 0.1;              // in [0, 1): of packed text the end, of records a choice that no seed changes
  std::uint64_t seed = 1;
  double mask_rate = 0.15;               // Mlm
  std::int64_t stride = 0;               // Qa: context tokens that two windows share; 0: a third of `sequence`
  std::vector<std::string> labels = {};  // Classify: names in the order of their numbers; empty: those found, sorted
  std::optional<std::int32_t> decoder_start = {};  // Seq2Seq: first input of the decoder; default: the padding, as T5
  std::string cache = {};  // Lm, Mlm: folder for files of tokens; empty: a temporary file of this process
};

// Vectors of `sequence` elements; decoder_ids and labels of Seq2Seq have target_sequence. logits[i] of the model are to
// predict labels[i]: those of next-token tasks are shifted already.
struct Sample {
  std::vector<std::int32_t> ids, labels;
  std::vector<std::uint8_t> mask;         // 1: a token, 0: padding, which follows all tokens
  std::vector<std::int32_t> types;        // token types of a pair; 0 elsewhere
  std::vector<std::int32_t> decoder_ids;  // Seq2Seq
  std::int32_t label = -1;                // Classify
  std::int32_t start = 0, end = 0;        // Qa: the answer's first and last token; 0 and 0 ([CLS]): not in this window
  std::vector<ByteRange> offsets;         // Qa: of each context token in the context; empty ranges elsewhere
  std::int64_t record = -1;               // of the held-out or training records; -1: packed text
};

// The token that training puts at the end of a text, at which generation is to stop; BERT's: the separator. Throws
// std::runtime_error if there is none.
std::int32_t end_token(const Tokenizer& tokenizer);

class SampleMaker;

class Examples {
 public:
  // Reads all records once: labels, windows and lengths. Throws std::runtime_error for files and records that do not
  // serve the task, and for a tokenizer without a token that it needs; std::invalid_argument for options out of range.
  Examples(const ExampleOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
  ~Examples();

  const ExampleOptions& options() const { return options_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const std::vector<std::string>& labels() const;  // Classify
  std::int64_t training_samples() const;           // of one epoch; at least 1
  std::int64_t heldout_samples() const;
  // `number` counts the samples of the whole run from 0 on, as data::Corpus::training.
  Sample training(std::int64_t number) const;
  Sample heldout(std::int64_t index) const;

  // Held-out records, for evaluation by generated text: Prompt, Seq2Seq, Qa. 0 for the other tasks.
  std::int64_t heldout_records() const;
  Record heldout_record(std::int64_t index) const;
  // Prompt: what the model continues, at most sequence - answer_tokens tokens, whatever the reference is. Seq2Seq:
  // the source, without padding.
  std::vector<std::int32_t> heldout_prompt(std::int64_t index) const;
  // Of any text: what the model continues, of any length. Seq2Seq: as a source.
  std::vector<std::int32_t> prompt_of(const std::string& text) const;
  // The accepted texts: answers (a question without one: an empty text), the completion or the target.
  std::vector<std::string> references(std::int64_t index) const;

  // Of the data, the tokenizer and every option that changes a sample.
  std::uint64_t digest() const { return digest_; }

 private:
  ExampleOptions options_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<SampleMaker> maker_;
  std::uint64_t digest_ = 0;
};

// The samples of one rank, as data::Reader.
class ExampleReader {
 public:
  ExampleReader(const Examples& examples, int rank, int ranks) : examples_(&examples), rank_(rank), ranks_(ranks) {}

  // The rank's next `batch` samples. All ranks must pass the same number.
  std::vector<Sample> next(std::int64_t batch);
  std::int64_t position() const { return position_; }
  std::int64_t epoch() const { return position_ / examples_->training_samples(); }

  // {"position": 640, "samples": 30000, "seed": 1, "sequence": 128, "digest": 1234}: sufficient to resume with any
  // number of ranks. restore() throws std::runtime_error for other data, another tokenizer or other options.
  std::string state() const;
  void restore(const std::string& json);

 private:
  ReaderFacts facts() const;

  const Examples* examples_;
  int rank_, ranks_;
  std::int64_t position_ = 0;
};

// Task::Qa: the texts that a model's scores choose, one for each held-out record. The best pair of a first and a last
// token of the context, over all windows; with `may_abstain`, an empty text where [CLS] scores higher in every window
// (Devlin et al., "BERT", 2019, 4.2 and 4.3).
class QaAnswers {
 public:
  QaAnswers(const Examples& examples, bool may_abstain, std::int64_t longest_answer = 30);
  // The scores of sample `heldout(index)`: one for each token.
  void add(const Sample& sample, std::span<const float> start, std::span<const float> end);
  std::vector<std::string> texts() const;

 private:
  struct Best {
    float score, empty_score;
    ByteRange range;
  };
  const Examples* examples_;
  bool may_abstain_;
  std::int64_t longest_;
  std::vector<std::optional<Best>> best_;
};

// Throws std::invalid_argument for another name: lm, prompt, mlm, seq2seq, classify, qa.
Task task_of(const std::string& name);
const char* name_of(Task task);

}  // namespace data
