// A JSON value that remembers where it was written. Numbers keep their text: whether one is whole,
// and fits, is decided on its digits and not through a double. No keys' meaning here.
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

struct Place {  // a range of a source's bytes
  std::shared_ptr<const Source> source;
  std::size_t offset = 0, length = 1;
  struct Position {
    int line, column, width;  // 1-based; in code points
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

// The exact value of a JSON number token as a 64-bit integer; empty when it is not whole or does
// not fit (`too_large` tells which).
std::optional<std::int64_t> whole_number(std::string_view token, bool* too_large = nullptr);
// As a double; empty beyond its range, tiny values that would become 0 included.
std::optional<double> finite_number(std::string_view token);
// Shortest text that reads back as the same double.
std::string number_text(double value);

}  // namespace zero::config
