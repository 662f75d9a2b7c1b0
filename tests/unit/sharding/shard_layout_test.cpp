// The arithmetic of shards against its definition, element by element.
#include <gtest/gtest.h>

#include "sharding/shard_layout.h"

namespace zero::sharding::shard_layout_test {
namespace {

TEST(ShardLayout, EveryElementLiesInOnePlaceOfOneShard) {
  for (const int world : {1, 2, 3, 5}) {
    for (const std::int64_t alignment : {1, 4, 16}) {
      const std::vector<std::int64_t> numels{7, 0, 1, 33, 16, 5};
      const ShardLayout layout(numels, world, alignment);
      EXPECT_EQ(layout.padded_numel() % (alignment * world), 0);
      EXPECT_EQ(layout.shard_numel() * world, layout.padded_numel());
      // What each element of the flat vector is: of a parameter, or padding.
      std::vector<int> seen(static_cast<std::size_t>(layout.padded_numel()));
      std::int64_t end = 0;
      for (std::size_t i = 0; i < numels.size(); ++i) {
        EXPECT_EQ(layout.parameter_offset(i) % alignment, 0) << "parameter " << i << " world " << world;
        EXPECT_GE(layout.parameter_offset(i), end);
        EXPECT_LT(layout.parameter_offset(i), end + alignment) << "no more padding than the alignment asks for";
        end = layout.parameter_offset(i) + numels[i];
      }
      for (int rank = 0; rank < world; ++rank) {
        std::int64_t last = 0;
        for (const auto& piece : layout.shard_pieces(rank)) {
          EXPECT_GE(piece.range_begin, last);
          EXPECT_GT(piece.numel, 0);
          last = piece.range_begin + piece.numel;
          EXPECT_LE(last, layout.shard_numel());
          for (std::int64_t k = 0; k < piece.numel; ++k) {
            const auto flat = rank * layout.shard_numel() + piece.range_begin + k;
            EXPECT_EQ(flat, layout.parameter_offset(piece.parameter) + piece.parameter_begin + k);
            ++seen[static_cast<std::size_t>(flat)];
          }
        }
      }
      std::int64_t of_parameters = 0;
      for (const int count : seen) of_parameters += count;
      EXPECT_EQ(of_parameters, layout.numel());
      for (const auto& gap : layout.gaps())
        for (auto k = gap.begin; k < gap.begin + gap.numel; ++k) ++seen[static_cast<std::size_t>(k)];
      for (std::size_t k = 0; k < seen.size(); ++k)
        EXPECT_EQ(seen[k], 1) << "element " << k << " world " << world << " alignment " << alignment;
    }
  }
}

TEST(ShardLayout, PiecesOfAnyRange) {
  const ShardLayout layout({10, 20}, 2, 8);  // 10, six of padding, 20, twelve of padding
  EXPECT_EQ(layout.padded_numel(), 48);
  const auto pieces = layout.pieces(9, 9);  // the last of the first, the first two of the second
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].parameter_begin, 9);
  EXPECT_EQ(pieces[0].range_begin, 0);
  EXPECT_EQ(pieces[0].numel, 1);
  EXPECT_EQ(pieces[1].parameter_begin, 0);
  EXPECT_EQ(pieces[1].range_begin, 7);
  EXPECT_EQ(pieces[1].numel, 2);
  EXPECT_TRUE(layout.pieces(10, 6).empty());
}

}  // namespace
}  // namespace zero::sharding::shard_layout_test
