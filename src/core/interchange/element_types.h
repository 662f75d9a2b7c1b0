// Conversions between the element types of files: exact to wider types, one rounding to nearest even to narrower ones.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::interchange {

// "F32", "BF16", "F16", "F64": types that are converted into each other.
bool is_floating(const std::string& dtype);
// Bytes of one element; throws ConfigError for types whose elements are not whole bytes.
std::int64_t width_of(const std::string& dtype);
// "fp32" -> "F32", "bf16" -> "BF16", "fp16" -> "F16"; "" for another word.
std::string dtype_of_word(const std::string& word);

struct Conversion {
  std::int64_t overflows = 0;  // finite elements that became infinite
  double largest_change = 0;   // |new - old| / |old| of finite elements, only counted from F64
};
// Converts `numel` elements; the ranges must not overlap. NaN stays NaN. Equal types are copied; other pairs must be
// floating.
Conversion convert_elements(const void* from, const std::string& from_dtype, std::int64_t numel, void* to,
                            const std::string& to_dtype);

// "[2, 3]"
std::string shape_text(const std::vector<std::int64_t>& shape);
// One element as text, for messages: shortest decimal digits that give it back.
std::string element_text(const void* element, const std::string& dtype);

}  // namespace zero::interchange
