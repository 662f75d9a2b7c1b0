// Updates of states in any stored dtype. 16-bit masters and states are opened into fp32 in pieces that stay in the
// first-level cache, updated there and rounded back: memory is read and written once, as with fp32 states.
#include <algorithm>

#include "kernels/rounding_simd.h"
#include "kernels/update_simd.h"

namespace zero::kernels {
namespace {

constexpr std::int64_t kPiece = 1024;  // elements: 20 KiB with three states and the random bits

void* element(void* data, Dtype dtype, std::int64_t i) {
  return static_cast<char*>(data) + i * static_cast<std::int64_t>(size_of(dtype));
}

// One stored vector of the piece that is updated.
class Opened {
 public:
  // value: its number, for the random bits.
  Opened(void* stored, Dtype dtype, int value, std::int64_t numel)
      : stored_(stored), dtype_(dtype), value_(value), numel_(numel) {
    if (stored_ != nullptr && dtype_ != Dtype::F32) convert(room_, Dtype::F32, stored_, dtype_, numel_);
  }
  void* fp32() { return stored_ == nullptr || dtype_ == Dtype::F32 ? stored_ : room_; }
  // bits: null: to nearest even.
  void round_back(const std::uint32_t* bits) const {
    if (stored_ == nullptr || dtype_ == Dtype::F32) return;
    if (bits == nullptr) return convert(stored_, dtype_, room_, Dtype::F32, numel_);
    round_stochastically(stored_, dtype_, room_, bits, value_, numel_);
  }

 private:
  void* stored_;
  Dtype dtype_;
  int value_;
  std::int64_t numel_;
  float room_[kPiece];
};

void update_piece(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t numel) {
  const auto slot = [&](int k) {
    return range.slots[k] == nullptr ? nullptr : element(range.slots[k], range.slot_dtype, begin);
  };
  void* const stored = element(range.master, range.master_dtype, begin);
  Opened master(stored, range.master_dtype, 0, numel);
  Opened slots[kMostSlots] = {{slot(0), range.slot_dtype, 1, numel},
                              {slot(1), range.slot_dtype, 2, numel},
                              {slot(2), range.slot_dtype, 3, numel}};
  static_assert(kMostSlots == 3);
  UpdateRange opened = range;
  opened.master = master.fp32();
  for (int k = 0; k < kMostSlots; ++k) opened.slots[k] = slots[k].fp32();
  opened.gradient = element(const_cast<void*>(range.gradient), range.gradient_dtype, begin);  // only read
  void* const parameter = range.parameter == nullptr ? nullptr : element(range.parameter, range.parameter_dtype, begin);
  opened.parameter = range.master_dtype == Dtype::F32 ? parameter : nullptr;
  update_fp32_range(constants, opened, factor, 0, numel);
  std::uint32_t drawn[kPiece];
  if (range.key != 0) draw_bits(drawn, range.key, range.first_element + begin, numel);
  const auto* const bits = range.key != 0 ? drawn : nullptr;
  master.round_back(bits);
  for (const auto& state : slots) state.round_back(bits);
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
