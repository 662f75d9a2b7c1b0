// Parts of ranges of an update, for update_simd.cpp.
#pragma once
#include <cstring>

#include "kernels/blocks8.h"
#include "kernels/update_simd.h"

namespace zero::kernels {

inline char* element(void* data, Dtype dtype, std::int64_t i) {
  return static_cast<char*>(data) + i * static_cast<std::int64_t>(size_of(dtype));
}

// The range from element `begin` on.
inline UpdateRange rest_of(const UpdateRange& range, std::int64_t begin) {
  UpdateRange rest = range;
  rest.master = element(range.master, range.master_dtype, begin);
  rest.gradient = element(const_cast<void*>(range.gradient), range.gradient_dtype, begin);  // only read
  if (range.parameter != nullptr) rest.parameter = element(range.parameter, range.parameter_dtype, begin);
  for (int k = 0; k < kMostSlots && range.slots[k] != nullptr; ++k)
    rest.slots[k] = range.slots_in_blocks ? static_cast<char*>(range.slots[k]) + state_block_bytes(begin)
                                          : element(range.slots[k], range.slot_dtype, begin);
  rest.first_element += begin;
  return rest;
}

// Copies a range of `numel` elements into memory for kRoom, calls update(copy), and copies back what it wrote. Blocks
// are not copied: they have that room.
template <std::int64_t kRoom, class Update>
void with_room(const UpdateRange& range, std::int64_t numel, const Update& update) {
  alignas(64) char room[3 + kMostSlots][kRoom * 4] = {};
  UpdateRange copy = range;
  const auto bytes = [&](Dtype dtype) { return static_cast<std::size_t>(numel) * size_of(dtype); };
  const auto has_slot = [&](int k) { return !range.slots_in_blocks && range.slots[k] != nullptr; };
  copy.gradient = std::memcpy(room[0], range.gradient, bytes(range.gradient_dtype));
  copy.master = std::memcpy(room[1], range.master, bytes(range.master_dtype));
  if (range.parameter != nullptr) copy.parameter = room[2];
  for (int k = 0; k < kMostSlots; ++k)
    if (has_slot(k)) copy.slots[k] = std::memcpy(room[3 + k], range.slots[k], bytes(range.slot_dtype));
  update(copy);
  std::memcpy(range.master, copy.master, bytes(range.master_dtype));
  if (range.parameter != nullptr) std::memcpy(range.parameter, copy.parameter, bytes(range.parameter_dtype));
  for (int k = 0; k < kMostSlots; ++k)
    if (has_slot(k)) std::memcpy(range.slots[k], copy.slots[k], bytes(range.slot_dtype));
}

}  // namespace zero::kernels
