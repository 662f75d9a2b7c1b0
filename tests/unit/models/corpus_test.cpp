// The text reader: which bytes each rank reads, in which order, and what it never reads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <stdexcept>

#include "apps/data/corpus.h"
#include "support/file_text.h"
#include "support/folder.h"

namespace corpus_test {
namespace {

using zero::test::file_text;

namespace fs = std::filesystem;

// A file of `size` bytes in which no 8 bytes in a row repeat within a few thousand.
class CorpusTest : public testing::Test {
 protected:
  std::string text(const std::string& name, std::int64_t size) {
    const std::string path = folder_ / name;
    std::ofstream out(path, std::ios::binary);
    for (std::int64_t i = 0; i < size; ++i) out.put(static_cast<char>(i * 31 + i / 256));
    return path;
  }
  std::string error_of(const std::string& path, std::int64_t sequence, double holdout) {
    try {
      data::Corpus corpus(path, sequence, holdout, 1);
    } catch (const std::exception& e) {
      return e.what();
    }
    return "";
  }
  const zero::test::TempFolder temporary_;
  const fs::path& folder_ = temporary_.path();
};

TEST(PermutationTest, IsABijectionOfEverySize) {
  for (const std::int64_t size : {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097, 70000}) {
    const data::Permutation order(size, 42);
    std::vector<bool> hit(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t value = order(i);
      ASSERT_GE(value, 0);
      ASSERT_LT(value, size);
      ASSERT_FALSE(hit[static_cast<std::size_t>(value)]) << size;
      hit[static_cast<std::size_t>(value)] = true;
    }
  }
  EXPECT_THROW(data::Permutation(0, 1), std::invalid_argument);
  EXPECT_THROW(data::Permutation(5, 1)(5), std::invalid_argument);
}

TEST(PermutationTest, LooksLikeARandomOrder) {
  // A random order of n has one fixed point on average, n / 2 rises, and neighbours n / 3 apart.
  const std::int64_t n = 30011;
  for (const std::uint64_t key : {0u, 1u, 2u}) {
    const data::Permutation order(n, key);
    std::int64_t fixed = 0, rises = 0;
    double distance = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      fixed += order(i) == i;
      if (i == 0) continue;
      rises += order(i) > order(i - 1);
      distance += static_cast<double>(std::abs(order(i) - order(i - 1))) / static_cast<double>(n);
    }
    EXPECT_LT(fixed, 10);
    EXPECT_NEAR(static_cast<double>(rises) / n, 0.5, 0.02);
    EXPECT_NEAR(distance / n, 1.0 / 3, 0.02);
  }
}

TEST_F(CorpusTest, SamplesOfAnEpochAreDisjointOverRanksAndComplete) {
  const data::Corpus corpus(text("a", 10007), 16, 0.05, 7);
  const std::int64_t held = 500;  // floor(0.05 * 10007)
  ASSERT_EQ(corpus.training_samples(), (10007 - held - 1) / 16);
  for (const int ranks : {1, 2, 3, 6}) {
    std::vector<data::Reader> readers;
    for (int rank = 0; rank < ranks; ++rank) readers.emplace_back(corpus, rank, ranks);
    const std::int64_t batch = 18 / ranks;
    ASSERT_EQ(corpus.training_samples() % (batch * ranks), 0) << "the test reads whole epochs";
    for (int epoch = 0; epoch < 3; ++epoch) {
      std::multiset<std::int64_t> seen;
      while (readers[0].epoch() == epoch)
        for (data::Reader& reader : readers)
          for (const std::uint8_t* sample : reader.next(batch)) seen.insert(corpus.offset(sample));
      ASSERT_EQ(static_cast<std::int64_t>(seen.size()), corpus.training_samples());
      std::int64_t expected = 0;
      for (const std::int64_t offset : seen) {
        ASSERT_EQ(offset, expected);
        expected += 16;
      }
    }
  }
}

TEST_F(CorpusTest, TheSamplesOfAGlobalBatchDoNotDependOnTheNumberOfRanks) {
  const data::Corpus corpus(text("a", 10007), 16, 0.05, 7);
  const auto global = [&](int ranks, std::int64_t batch) {
    std::vector<std::vector<std::int64_t>> batches;
    std::vector<data::Reader> readers;
    for (int rank = 0; rank < ranks; ++rank) readers.emplace_back(corpus, rank, ranks);
    for (int k = 0; k < 100; ++k) {
      std::vector<std::int64_t> offsets;
      for (data::Reader& reader : readers)
        for (const std::uint8_t* sample : reader.next(batch)) offsets.push_back(corpus.offset(sample));
      batches.push_back(offsets);
    }
    return batches;
  };
  EXPECT_EQ(global(1, 12), global(4, 3));
  EXPECT_EQ(global(1, 12), global(2, 6));
}

TEST_F(CorpusTest, OrderFollowsSeedAndEpoch) {
  const std::string path = text("a", 20000);
  const auto order = [&](std::uint64_t seed, std::int64_t first) {
    const data::Corpus corpus(path, 16, 0.05, seed);
    std::vector<std::int64_t> offsets;
    for (std::int64_t i = 0; i < 200; ++i) offsets.push_back(corpus.offset(corpus.training(first + i)));
    return offsets;
  };
  const std::int64_t epoch = data::Corpus(path, 16, 0.05, 1).training_samples();
  EXPECT_EQ(order(1, 0), order(1, 0));
  EXPECT_NE(order(1, 0), order(2, 0));
  EXPECT_NE(order(1, 0), order(1, epoch));
  // Consecutive seeds do not produce the orders of each other's epochs.
  EXPECT_NE(order(2, 0), order(1, epoch));
}

TEST_F(CorpusTest, HeldOutBytesAreNeverInATrainingSample) {
  for (const double holdout : {0.05, 0.2, 0.5}) {
    for (const std::int64_t sequence : {1, 7, 32}) {
      const std::int64_t size = 5003;
      const data::Corpus corpus(text("a", size), sequence, holdout, 3);
      const std::int64_t begin = size - static_cast<std::int64_t>(static_cast<double>(size) * holdout);
      std::int64_t last = 0;
      for (std::int64_t i = 0; i < corpus.training_samples(); ++i)
        last = std::max(last, corpus.offset(corpus.training(i)) + sequence);
      EXPECT_LT(last, begin);
      EXPECT_GE(last, begin - sequence) << "text left out";
      for (std::int64_t i = 0; i < corpus.heldout_samples(); ++i) {
        EXPECT_EQ(corpus.offset(corpus.heldout(i)), begin + i * sequence);
        EXPECT_LT(corpus.offset(corpus.heldout(i)) + sequence, size);
      }
      EXPECT_GT(corpus.heldout_samples(), 0);
      EXPECT_THROW(corpus.heldout(corpus.heldout_samples()), std::invalid_argument);
    }
  }
  EXPECT_EQ(data::Corpus(text("a", 5003), 7, 0, 3).heldout_samples(), 0);
}

TEST_F(CorpusTest, SamplesHoldTheBytesOfTheFile) {
  const std::string path = text("a", 3000);
  const data::Corpus corpus(path, 64, 0.1, 3);
  const auto whole = file_text(path);
  for (std::int64_t i = 0; i < corpus.training_samples(); ++i) {
    const std::uint8_t* sample = corpus.training(i);
    ASSERT_EQ(std::string(sample, sample + 65), whole.substr(static_cast<std::size_t>(corpus.offset(sample)), 65));
  }
}

TEST_F(CorpusTest, ARestoredReaderContinuesWithAnyNumberOfRanks) {
  const data::Corpus corpus(text("a", 10007), 16, 0.05, 7);
  data::Reader first(corpus, 1, 2);
  for (int i = 0; i < 120; ++i) first.next(6);  // into the third epoch
  const std::string state = first.state();
  data::Reader second(corpus, 1, 2);
  second.restore(state);
  EXPECT_EQ(second.position(), 1440);
  EXPECT_EQ(second.epoch(), 1440 / corpus.training_samples());
  EXPECT_EQ(first.next(6), second.next(6));
  data::Reader alone(corpus, 0, 1);
  alone.restore(state);
  const auto whole = alone.next(12);
  data::Reader again(corpus, 1, 2);
  again.restore(state);
  EXPECT_EQ(again.next(6), std::vector<const std::uint8_t*>(whole.begin() + 6, whole.end()));
}

TEST_F(CorpusTest, RestoreRefusesWhatDoesNotFit) {
  const std::string path = text("a", 10007);
  const data::Corpus corpus(path, 16, 0.05, 7), other_seed(path, 16, 0.05, 8), longer(path, 32, 0.05, 7);
  data::Reader reader(corpus, 0, 1), seeded(other_seed, 0, 1), long_reader(longer, 0, 1);
  reader.next(5);
  for (const char* bad :
       {"", "{", "[]", "{}", R"({"position": 3})", R"({"position": "3", "samples": 1, "seed": 7, "sequence": 16})"})
    EXPECT_THROW(seeded.restore(bad), std::runtime_error) << bad;
  EXPECT_THROW(seeded.restore(reader.state()), std::runtime_error);
  EXPECT_THROW(long_reader.restore(reader.state()), std::runtime_error);
  EXPECT_EQ(seeded.position(), 0);
}

TEST_F(CorpusTest, FaultsNameThePathAndTheReason) {
  EXPECT_NE(error_of(folder_ / "none", 16, 0.05).find("No such file"), std::string::npos);
  EXPECT_NE(error_of(folder_ / "none", 16, 0.05).find("none"), std::string::npos);
  EXPECT_NE(error_of(folder_, 16, 0.05).find("a directory"), std::string::npos);
  EXPECT_NE(error_of(text("empty", 0), 16, 0.05).find("empty"), std::string::npos);
  EXPECT_NE(error_of(text("b", 16), 16, 0).find("16 bytes for training"), std::string::npos);
  EXPECT_EQ(error_of(text("b", 17), 16, 0), "");
  // Enough for training, but the held-out part has no whole sample.
  EXPECT_NE(error_of(text("c", 320), 16, 0.05).find("16 bytes for the held-out part"), std::string::npos);
  EXPECT_EQ(error_of(text("c", 340), 16, 0.05), "");
  EXPECT_THROW(data::Corpus(text("d", 100), 0, 0.05, 1), std::invalid_argument);
  EXPECT_THROW(data::Corpus(text("d", 100), 16, 1, 1), std::invalid_argument);
}

}  // namespace
}  // namespace corpus_test
