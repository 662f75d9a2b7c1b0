// One XXH3-64 for each block of a region of a file, kept in memory: set when the block is written, compared when it is
// read, so that what comes back from a wrong place, too old or rotten is noticed. Blocks are independent: threads may
// work on different ones at the same time. No torch here.
#pragma once
#include <cstdint>
#include <vector>

namespace zero::storage {

class Checksums {
 public:
  static constexpr std::int64_t kBlock = 4096;

  // Of a region of zeros; bytes: a multiple of kBlock.
  explicit Checksums(std::int64_t bytes);

  // Whole blocks of the region, from `offset` on, have these bytes.
  void set(std::int64_t offset, const void* data, std::int64_t bytes);
  // Where the first block begins, in the region, that has other bytes than were set; -1: none.
  std::int64_t first_difference(std::int64_t offset, const void* data, std::int64_t bytes) const;

 private:
  std::vector<std::uint64_t> of_block_;
};

}  // namespace zero::storage
