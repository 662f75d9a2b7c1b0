// See element_types.h.
#include "interchange/element_types.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <vector>

#include <zero/errors.h>

#include "base/check.h"
#include "base/hex.h"
#include "formats/safetensors.h"
#include "kernels/elementwise.h"

namespace zero::interchange {
namespace {

constexpr std::int64_t kConversionBlock = 4096;  // elements on the stack's side of a conversion

std::optional<kernels::Dtype> kernel_dtype(const std::string& dtype) {
  if (dtype == "F32") return kernels::Dtype::F32;
  if (dtype == "BF16") return kernels::Dtype::BF16;
  if (dtype == "F16") return kernels::Dtype::F16;
  return std::nullopt;
}

// From F64 or to it; via fp32 from and to 16 bits, except that a double is rounded to 16 bits from fp32 rounded to odd,
// so that there is one rounding in effect.
float to_odd(double value) {
  auto nearest = static_cast<float>(value);
  if (std::isnan(nearest) || static_cast<double>(nearest) == value) return nearest;
  std::uint32_t bits;
  // Rounds toward zero with a sticky last bit (round to odd).
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) nearest = std::nextafter(nearest, 0.0f);
  std::memcpy(&bits, &nearest, sizeof bits);
  bits |= 1;
  std::memcpy(&nearest, &bits, sizeof bits);
  return nearest;
}

std::int64_t overflows_in(const float* from, std::int64_t numel, const std::uint16_t* to) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < numel; ++i) count += (to[i] & 0x7fff) == 0x7c00 && std::isfinite(from[i]);
  return count;
}

template <class Integer>
std::string integer_text(const void* element) {
  Integer value;
  std::memcpy(&value, element, sizeof value);
  return std::to_string(value);
}

template <class Float>
std::string float_text(Float value) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return {text, end};
}

}  // namespace

bool is_floating(const std::string& dtype) { return dtype == "F64" || kernel_dtype(dtype).has_value(); }

std::int64_t width_of(const std::string& dtype) {
  const auto bits = formats::bits_of(dtype);
  if (bits == 0 || bits % 8 != 0)
    throw ConfigError("[checkpoint] got elements of the type " + dtype +
                      ", expected a type of whole bytes. Hint: dequantise the file first.");
  return bits / 8;
}

std::string dtype_of_word(const std::string& word) {
  return word == "fp32" ? "F32" : word == "bf16" ? "BF16" : word == "fp16" ? "F16" : "";
}

Conversion convert_elements(const void* from, const std::string& from_dtype, std::int64_t numel, void* to,
                            const std::string& to_dtype) {
  Conversion result;
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<std::size_t>(numel * width_of(from_dtype)));
    return result;
  }
  ZERO_CHECK(is_floating(from_dtype) && is_floating(to_dtype), "elements of ", from_dtype, " to ", to_dtype);
  const auto source = kernel_dtype(from_dtype), target = kernel_dtype(to_dtype);
  std::vector<float> block(static_cast<std::size_t>(std::min(numel, kConversionBlock)));
  for (std::int64_t done = 0; done < numel; done += kConversionBlock) {
    const auto count = std::min(kConversionBlock, numel - done);
    const auto* const in = static_cast<const char*>(from) + done * width_of(from_dtype);
    auto* const out = static_cast<char*>(to) + done * width_of(to_dtype);
    if (source) {
      kernels::convert(block.data(), kernels::Dtype::F32, in, *source, count);
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        double value;
        std::memcpy(&value, in + i * 8, sizeof value);
        const float narrow = to_dtype == "F32" ? static_cast<float>(value) : to_odd(value);
        block[static_cast<std::size_t>(i)] = narrow;
        if (std::isfinite(value) && std::isinf(narrow)) ++result.overflows;
        if (to_dtype == "F32" && std::isfinite(value) && value != 0)
          result.largest_change = std::max(result.largest_change, std::fabs((narrow - value) / value));
      }
    }
    if (target) {
      kernels::convert(out, *target, block.data(), kernels::Dtype::F32, count);
      if (to_dtype == "F16")
        result.overflows += overflows_in(block.data(), count, reinterpret_cast<const std::uint16_t*>(out));
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        const double value = block[static_cast<std::size_t>(i)];
        std::memcpy(out + i * 8, &value, sizeof value);
      }
    }
  }
  return result;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

std::string element_text(const void* element, const std::string& dtype) {
  if (is_floating(dtype)) {
    double value = 0;
    convert_elements(element, dtype, 1, &value, "F64");
    return dtype == "F64" ? float_text(value) : float_text(static_cast<float>(value));
  }
  if (dtype == "I64") return integer_text<std::int64_t>(element);
  if (dtype == "I32") return integer_text<std::int32_t>(element);
  if (dtype == "I16") return integer_text<std::int16_t>(element);
  if (dtype == "I8") return integer_text<std::int8_t>(element);
  if (dtype == "U64") return integer_text<std::uint64_t>(element);
  if (dtype == "U32") return integer_text<std::uint32_t>(element);
  if (dtype == "U16") return integer_text<std::uint16_t>(element);
  if (dtype == "U8" || dtype == "BOOL") return integer_text<std::uint8_t>(element);
  const auto* const bytes = static_cast<const unsigned char*>(element);
  return "0x" + base::hex(std::vector<unsigned char>(std::make_reverse_iterator(bytes + width_of(dtype)),
                                                     std::make_reverse_iterator(bytes))
                              .data(),
                          static_cast<std::size_t>(width_of(dtype)));
}

}  // namespace zero::interchange
