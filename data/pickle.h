// Reads pickles as far as numbers, texts, lists, dictionaries and numpy arrays of bytes need it: protocol 2, as Python
// 2 and Python 3 write it. A pickle is a program that may call any function. Here nothing is called: the four functions
// that arrays are written with are recognised, and everything else is an error. Independent of libzero, torch and
// models.
#pragma once
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace data {

struct PickleValue {
  enum class Kind { None, Integer, Text, Tuple, List, Dict, Function, ByteType, Array };
  Kind kind = Kind::None;
  std::int64_t integer = 0;  // Integer, also of True and False
  // Text: Python 2's str and Python 3's bytes as they are, unicode in UTF-8. Function: "numpy.dtype". Array: its
  // elements, row by row.
  std::string_view text;
  std::vector<const PickleValue*> items;  // Tuple, List; Dict: key, value, key, value, ...
  std::vector<std::int64_t> shape;        // Array, of uint8

  // The value of a key in a Dict; the last one, as in Python. Null if there is none.
  const PickleValue* find(std::string_view key) const;
};

// What was found at which byte, and what can be read.
struct PickleFault : std::runtime_error {
  PickleFault(const std::string& found, const std::string& readable)
      : std::runtime_error("[pickle] got " + found + ", expected " + readable), got(found), expected(readable) {}
  std::string got, expected;
};

class Pickle {
 public:
  // `bytes` must outlive it: texts and arrays are not copied. Throws PickleFault.
  explicit Pickle(std::string_view bytes);
  const PickleValue& value() const { return *value_; }

 private:
  class Machine;
  std::deque<PickleValue> values_;
  std::deque<std::string> decoded_;  // what Python 3 wrote as text for Python 2's str
  const PickleValue* value_ = nullptr;
};

}  // namespace data
