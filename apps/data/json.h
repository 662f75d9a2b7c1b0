// JSON that others have written, as a tree of limited depth: strict (UTF-8, no key twice in an object, nothing after
// the value) and with the position of every value. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace data {

struct JsonField;

struct Json {
  enum class Kind : std::uint8_t { Null, Bool, Integer, Number, Text, List, Object };
  Kind kind = Kind::Null;
  bool boolean = false;
  std::int64_t integer = 0;  // Integer: of 64 bits; a larger one is a Number
  double number = 0;         // Integer, Number
  std::string text;
  std::vector<Json> items;        // List
  std::vector<JsonField> fields;  // Object, in the order of the file
  // Bytes of the file. From `begin` on there may be white space, a colon or a comma before the value.
  std::size_t begin = 0, end = 0;

  bool is(Kind wanted) const { return kind == wanted; }
  // The value of a key; null if there is none or this is no object.
  const Json* find(std::string_view key) const;
  // "a text", "a list": for messages.
  const char* kind_name() const;
};

struct JsonField {
  std::string name;
  Json value;
};

// What is wrong at which byte.
struct JsonFault : std::runtime_error {
  JsonFault(std::size_t at, const std::string& what) : std::runtime_error(what), offset(at) {}
  std::size_t offset;
};

struct JsonLimits {
  int depth = 16;                                  // of nested objects and lists
  std::size_t bytes = std::size_t{64} << 20;       // of the text
  std::size_t text_bytes = std::size_t{64} << 20;  // of one key or text
  std::size_t values = std::size_t{1} << 22;       // kept in the tree at once; one takes about 150 bytes
};

// Called at the end of every object that is `depth` levels deep (the outermost: 1). false: the tree does not keep it,
// so that a long list takes the memory of one of its items.
using JsonObjectEnd = std::function<bool(int depth, const Json& object)>;

// Throws JsonFault.
Json read_json(std::string_view text, const JsonLimits& limits = {}, const JsonObjectEnd& object_end = nullptr);

// The number of the line that holds the byte, from 1 on.
std::int64_t line_of(std::string_view text, std::size_t offset);

}  // namespace data
