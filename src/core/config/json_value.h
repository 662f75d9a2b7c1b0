// A JSON value with its location. Numbers keep their text: whether a number is whole and in range is decided from its
// digits, not from a double. Independent of the key table.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zero::config {

struct Source {  // one text that was read
  std::string name, text;
};

struct Place {  // a range of bytes of a source
  std::shared_ptr<const Source> source;
  std::size_t offset = 0, length = 1;
  struct Position {
    int line, column, width;  // 1-based, in code points
    std::string text;         // the line
  };
  Position position() const;
  std::string text() const;  // "file:line:col", or "" without a source
};

struct Member;

struct Value {
  enum class Kind { Null, Bool, Number, String, Array, Object };
  Kind kind = Kind::Null;
  bool boolean = false;
  std::string text;  // Number: its token; String: decoded
  std::vector<Value> items;
  std::vector<Member> members;
  Place place;

  bool is(Kind k) const { return kind == k; }
  const Value* find(std::string_view key) const;
  std::string json() const;       // compact, canonical numbers
  std::string kind_name() const;  // "a number", "an object", ...
};

struct Member {
  std::string key;
  Place key_place;
  Value value;
};

// The exact value of a JSON number as a 64-bit integer; nullopt if it is not whole or out of range (too_large
// distinguishes these).
std::optional<std::int64_t> whole_number(std::string_view token, bool* too_large = nullptr);
// The value as a double; nullopt if out of range, including tiny values that would become 0.
std::optional<double> finite_number(std::string_view token);
// Shortest text that reads back as the same double.
std::string number_text(double value);

}  // namespace zero::config
