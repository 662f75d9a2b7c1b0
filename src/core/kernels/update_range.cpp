// Updates of states in any stored form. Masters and states of 16 or 8 bits are opened into fp32 in pieces that stay in
// the first-level cache, updated there and rounded back: memory is read and written once, as with fp32 states.
#include <algorithm>

#include "kernels/blocks8.h"
#include "kernels/rounding_simd.h"
#include "kernels/update_simd.h"

namespace zero::kernels {
namespace {

constexpr std::int64_t kPiece = 1024;  // elements: 20 KiB with three states and the random bits
static_assert(kPiece % kStateBlock == 0);

void* element(void* data, Dtype dtype, std::int64_t i) {
  return static_cast<char*>(data) + i * static_cast<std::int64_t>(size_of(dtype));
}

// One stored vector of the piece that is updated, opened into fp32.
class Opened {
 public:
  // value: its number, for the random bits.
  void open(void* stored, Dtype dtype, int value, std::int64_t numel) {
    stored_ = stored, dtype_ = dtype, value_ = value, numel_ = numel;
    if (dtype_ != Dtype::F32) widen(room_, stored_, dtype_, numel_);
  }
  void open_blocks(void* stored, CodeMap map, std::int64_t numel) {
    stored_ = stored, in_blocks_ = true, map_ = map, numel_ = numel;
    decode_blocks(room_, map_, stored_, numel_);
  }
  void* fp32() { return in_blocks_ || dtype_ != Dtype::F32 ? room_ : stored_; }
  // bits: null: to nearest even.
  void round_back(const std::uint32_t* bits) const {
    if (in_blocks_) return encode_blocks(stored_, map_, room_, numel_);
    if (dtype_ == Dtype::F32) return;
    if (bits == nullptr) return round_to_nearest(stored_, dtype_, room_, numel_);
    round_stochastically(stored_, dtype_, room_, bits, value_, numel_);
  }

 private:
  void* stored_ = nullptr;
  Dtype dtype_ = Dtype::F32;
  int value_ = 0;
  bool in_blocks_ = false;
  CodeMap map_ = CodeMap::Signed;
  std::int64_t numel_ = 0;
  float room_[kPiece];
};

void update_piece(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t numel) {
  void* const stored = element(range.master, range.master_dtype, begin);
  Opened master, slots[kMostSlots];
  master.open(stored, range.master_dtype, 0, numel);
  UpdateRange opened = range;
  opened.master = master.fp32();
  for (int k = 0; k < kMostSlots && range.slots[k] != nullptr; ++k) {
    if (range.slots_in_blocks)
      slots[k].open_blocks(static_cast<char*>(range.slots[k]) + state_block_bytes(begin), state_map(k), numel);
    else
      slots[k].open(element(range.slots[k], range.slot_dtype, begin), range.slot_dtype, 1 + k, numel);
    opened.slots[k] = slots[k].fp32();
  }
  opened.gradient = element(const_cast<void*>(range.gradient), range.gradient_dtype, begin);  // only read
  void* const parameter = range.parameter == nullptr ? nullptr : element(range.parameter, range.parameter_dtype, begin);
  opened.parameter = range.master_dtype == Dtype::F32 ? parameter : nullptr;
  update_fp32_range(constants, opened, factor, 0, numel);
  std::uint32_t drawn[kPiece];
  const bool draws = range.key != 0 && (range.master_dtype != Dtype::F32 || range.slot_dtype != Dtype::F32);
  if (draws) draw_bits(drawn, range.key, range.first_element + begin, numel);
  const auto* const bits = draws ? drawn : nullptr;
  master.round_back(bits);
  for (int k = 0; k < kMostSlots && range.slots[k] != nullptr; ++k) slots[k].round_back(bits);
  // What the next update begins with.
  if (parameter != nullptr && range.master_dtype != Dtype::F32)
    convert(parameter, range.parameter_dtype, stored, range.master_dtype, numel);
}

// The finalizer of MurmurHash3 (A. Appleby, public domain).
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

}  // namespace

void update_range(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t end) {
  if (range.is_fp32()) return update_fp32_range(constants, range, factor, begin, end);
  for (auto at = begin; at < end; at += kPiece) update_piece(constants, range, factor, at, std::min(kPiece, end - at));
}

std::uint64_t rounding_key(std::uint64_t seed, std::int64_t update, std::uint64_t parameter) {
  const auto key = mixed(mixed(mixed(seed) ^ static_cast<std::uint64_t>(update)) ^ parameter);
  return key == 0 ? 1 : key;
}

}  // namespace zero::kernels
