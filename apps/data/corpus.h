// Text as training samples: a memory-mapped file whose bytes are the tokens. Which sample a rank
// reads is a pure function of (seed, position, rank, ranks); the position is all that a resumed run
// needs. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/data/mapped_file.h"

namespace data {

// A bijection of [0, size) chosen by a key, computed and not stored: a Feistel network over the
// next even number of bits, walked along its cycle until the value is inside (Black and Rogaway,
// "Ciphers with Arbitrary Finite Domains", 2002). At most four passes a call on average.
class Permutation {
 public:
  Permutation(std::int64_t size, std::uint64_t key);
  // index in [0, size).
  std::int64_t operator()(std::int64_t index) const;

 private:
  std::uint64_t size_, key_, mask_;
  int half_bits_;
};

// Which of `samples` samples a run reads as its `number`th, from 0 on: number / samples is the epoch. Each epoch has a
// different order, which depends on the seed.
std::int64_t shuffled(std::int64_t number, std::int64_t samples, std::uint64_t seed);

// The saved position of a reader: {"position": 640, ...} with whole numbers that say what is read. restored_position
// throws std::runtime_error that begins with "[`where`]" for another text, and if a fact differs; `same` says what has
// to be the same ("text, sequence length").
using ReaderFacts = std::vector<std::pair<const char*, std::uint64_t>>;
std::string position_text(std::int64_t position, const ReaderFacts& facts);
std::int64_t restored_position(const std::string& json, const ReaderFacts& facts, const std::string& where,
                               const std::string& same);

class Corpus {
 public:
  // `sequence`: tokens of one sample, without the additional one for the last target. `holdout`: the
  // fraction at the end of the file that training never reads; in [0, 1). Throws std::runtime_error
  // if the file cannot be read or one part has no sample.
  Corpus(const std::string& path, std::int64_t sequence, double holdout, std::uint64_t seed);

  std::int64_t sequence() const { return sequence_; }
  std::int64_t bytes() const { return file_.size(); }
  // Complete samples of the training part: one epoch. Samples begin `sequence` bytes apart; the last
  // target of a sample is the first input of the next.
  std::int64_t training_samples() const { return training_samples_; }
  std::int64_t heldout_samples() const { return heldout_samples_; }

  // sequence + 1 bytes, in the order of shuffled().
  const std::uint8_t* training(std::int64_t number) const;
  const std::uint8_t* heldout(std::int64_t index) const;  // in file order
  // The offset in the file, for tests and messages.
  std::int64_t offset(const std::uint8_t* sample) const { return sample - file_.data(); }

 private:
  MappedFile file_;
  std::int64_t sequence_, training_samples_ = 0, heldout_samples_ = 0, heldout_begin_ = 0;
  std::uint64_t seed_;
  friend class Reader;
};

// The samples of one rank. Global batch k has the samples [k, k + 1) * ranks * batch; each rank takes
// `batch` of them.
class Reader {
 public:
  Reader(const Corpus& corpus, int rank, int ranks) : corpus_(&corpus), rank_(rank), ranks_(ranks) {}

  // The rank's next `batch` samples. All ranks must pass the same number.
  std::vector<const std::uint8_t*> next(std::int64_t batch);

  // Samples that all ranks together have read; the same on every rank.
  std::int64_t position() const { return position_; }
  std::int64_t epoch() const { return position_ / corpus_->training_samples(); }

  // {"position": 640, "samples": 30000, "seed": 1, "sequence": 128}: sufficient to resume with any number
  // of ranks. restore() throws std::runtime_error for another text or the state of another corpus.
  std::string state() const;
  void restore(const std::string& json);

 private:
  ReaderFacts facts() const;

  const Corpus* corpus_;
  int rank_, ranks_;
  std::int64_t position_ = 0;
};

}  // namespace data
