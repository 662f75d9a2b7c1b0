// Maps ranges of parameters to ranks. Arithmetic only, no tensors. A group's parameters are placed consecutively in one
// flat vector, each at an aligned offset. The vector is padded to `world` equal, aligned shards. A parameter may extend
// over several shards.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace zero::sharding {

// Alignment of parameters and shards, in elements of `width` bytes: 64 bytes on a CPU, which suits the widest vector
// instructions and libtorch's kernels; 256 on a GPU.
constexpr std::int64_t flat_alignment(std::int64_t width, bool on_cpu) { return (on_cpu ? 64 : 256) / width; }

class ShardLayout {
 public:
  // numels: elements of each parameter, in order; may be 0. alignment: elements, >= 1.
  ShardLayout(std::vector<std::int64_t> numels, int world, std::int64_t alignment);
  // The layout of a group whose compute dtype has `width` bytes. block: elements of its optimizer states that are
  // stored together, a power of two; no block has elements of two parameters or of two ranks.
  static ShardLayout of_group(std::vector<std::int64_t> numels, int world, std::int64_t width, bool on_cpu,
                              std::int64_t block = 1) {
    return {std::move(numels), world, std::max(block, flat_alignment(width, on_cpu))};
  }

  int world() const { return world_; }
  std::int64_t numel() const { return numel_; }          // elements of the parameters, without padding
  std::int64_t padded_numel() const { return padded_; }  // of the flat vector
  std::int64_t shard_numel() const { return padded_ / world_; }
  std::size_t num_parameters() const { return numels_.size(); }
  std::int64_t parameter_numel(std::size_t i) const { return numels_[i]; }
  std::int64_t parameter_offset(std::size_t i) const { return offsets_[i]; }

  // A range of one parameter's elements within a range of the flat vector.
  struct Piece {
    std::size_t parameter;
    std::int64_t parameter_begin;  // first element within the parameter
    std::int64_t range_begin;      // the same element within the range
    std::int64_t numel;
  };
  // The pieces of [begin, begin + numel) in order, without padding.
  std::vector<Piece> pieces(std::int64_t begin, std::int64_t numel) const;
  std::vector<Piece> shard_pieces(int rank) const { return pieces(rank * shard_numel(), shard_numel()); }

  // Ranges of padding in the flat vector.
  struct Gap {
    std::int64_t begin, numel;
  };
  const std::vector<Gap>& gaps() const { return gaps_; }

 private:
  std::vector<std::int64_t> numels_, offsets_;
  int world_;
  std::int64_t numel_ = 0, padded_ = 0;
  std::vector<Gap> gaps_;
};

}  // namespace zero::sharding
