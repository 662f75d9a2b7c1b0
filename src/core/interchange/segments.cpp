// See segments.h.
#include "interchange/segments.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace zero::interchange {
namespace {

// The row of the source that holds the row of the target.
std::int64_t source_row(const Segment& segment, std::int64_t row) {
  const auto width = segment.rows / segment.heads, half = width / 2;
  const auto head = row / width, in_head = row % width;
  return head * width + (segment.order == Order::PairsToHalves ? in_head % half * 2 + in_head / half
                                                               : in_head % 2 * half + in_head / 2);
}

// Runs of elements [begin, end) of the segment; places count from its first element.
void runs_of(const Segment& segment, std::int64_t begin, std::int64_t end, std::int64_t at,
             const std::function<void(const ElementRun&)>& take) {
  const auto cols = segment.cols;
  switch (segment.order) {
    case Order::Same:
      take({segment.source, segment.begin + begin, end - begin, at + begin, 1});
      return;
    case Order::Transposed:
      for (std::int64_t col = 0; col < cols; ++col) {
        // The rows whose element of this column is in the range.
        const auto first = (std::max<std::int64_t>(begin - col, 0) + cols - 1) / cols;
        const auto last = (std::max<std::int64_t>(end - col, 0) + cols - 1) / cols;
        if (first < last)
          take({segment.source, segment.begin + col * segment.rows + first, last - first, at + first * cols + col,
                cols});
      }
      return;
    default:
      for (auto row = begin / cols; row * cols < end; ++row) {
        const auto first = std::max(begin, row * cols), last = std::min(end, (row + 1) * cols);
        take({segment.source, segment.begin + source_row(segment, row) * cols + (first - row * cols), last - first,
              at + first, 1});
      }
  }
}

template <class Element>
void scatter_as(const void* from, std::int64_t numel, void* to, std::int64_t stride) {
  const auto* in = static_cast<const char*>(from);
  auto* out = static_cast<char*>(to);
  constexpr auto kWidth = static_cast<std::int64_t>(sizeof(Element));
  for (std::int64_t i = 0; i < numel; ++i) std::memcpy(out + i * stride * kWidth, in + i * kWidth, sizeof(Element));
}

}  // namespace

Order inverse(Order order) {
  return order == Order::PairsToHalves   ? Order::HalvesToPairs
         : order == Order::HalvesToPairs ? Order::PairsToHalves
                                         : order;
}

bool MappedTensor::moves_elements() const {
  return std::any_of(segments.begin(), segments.end(), [](const Segment& one) { return one.order != Order::Same; });
}

void for_each_run(const MappedTensor& tensor, std::int64_t begin, std::int64_t end,
                  const std::function<void(const ElementRun&)>& take) {
  std::int64_t at = 0;
  for (const auto& segment : tensor.segments) {
    const auto first = std::max(begin - at, std::int64_t{0}), last = std::min(end - at, segment.numel());
    if (first < last) runs_of(segment, first, last, at, take);
    at += segment.numel();
  }
}

void scatter(const void* from, std::int64_t numel, int width, void* to, std::int64_t stride) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(numel * width));
    return;
  }
  switch (width) {
    case 1:
      return scatter_as<std::uint8_t>(from, numel, to, stride);
    case 2:
      return scatter_as<std::uint16_t>(from, numel, to, stride);
    case 4:
      return scatter_as<std::uint32_t>(from, numel, to, stride);
    case 8:
      return scatter_as<std::uint64_t>(from, numel, to, stride);
    default:
      ZERO_CHECK(false, "elements of ", width, " bytes");
  }
}

}  // namespace zero::interchange
