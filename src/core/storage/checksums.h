// One XXH3-64 checksum per block of a file region, kept in memory. Set when a block is written and compared when it is
// read, which detects misplaced, stale and corrupted data. Threads may work on different blocks concurrently. No torch.
#pragma once
#include <cstdint>
#include <vector>

namespace zero::storage {

class Checksums {
 public:
  static constexpr std::int64_t kBlock = 4096;

  // For a region of zeros. bytes: a multiple of kBlock.
  explicit Checksums(std::int64_t bytes);

  // Records the contents of whole blocks of the region, starting at `offset`.
  void set(std::int64_t offset, const void* data, std::int64_t bytes);
  // The offset in the region of the first block that differs from its recorded contents; -1: none.
  std::int64_t first_difference(std::int64_t offset, const void* data, std::int64_t bytes) const;

 private:
  std::vector<std::uint64_t> of_block_;
};

}  // namespace zero::storage
