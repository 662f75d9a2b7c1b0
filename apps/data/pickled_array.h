// Arrays of bytes in a pickle, as numpy writes them. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pickle/pickle.h"

namespace data {

// An array of uint8, row by row.
struct PickledArray {
  std::vector<std::int64_t> shape;
  std::string_view bytes;  // in the pickle, or in `decoded`
  std::string decoded;     // what Python 3 wrote as text for Python 2
};

// A text of Python 3, or what Python 2 wrote as a text.
inline bool is_text(const pickle::Node& node) { return node.is(pickle::Kind::Text) || node.is(pickle::Kind::Bytes); }
// The characters of a text; also of bytes that Python 3 wrote for Python 2, of which it encodes a text. Null for
// another value, and right for ASCII.
const pickle::Node* text_in(const pickle::Node& node);
// The value of a key in a dictionary, the last one; null if there is none.
const pickle::Node* find_by_text(const pickle::Node& dict, std::string_view key);

// Protocol 2, as Python 2 and Python 3 write it; as many values as a large file of pictures has.
pickle::Limits limits_of_pictures();

// Throws pickle::Fault for every other value.
void read_array(const pickle::Node& node, PickledArray& array);

}  // namespace data
