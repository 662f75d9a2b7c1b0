// JSON as checkpoints read it: valid UTF-8, no duplicate key at any level, bounded depth, nothing
// after the value, integers that were written as integers. Every failure is damage and names the
// file. What the values mean is decided by the format files beside this one.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace zero::formats {

using Json = nlohmann::json;

// Throws IoError (kCheckpoint) with `path` and the byte offset. depth: of nested objects and arrays.
Json parse_json(std::string_view text, const std::string& path, int depth);

// A JSON value, the file it is from and the place in it, "/tensors/3/shape" say. Every getter
// throws the same damage error when the value is missing, of another type or out of range.
class JsonView {
 public:
  JsonView(const Json& value, std::string path, std::string place = "")
      : value_(&value), path_(std::move(path)), place_(std::move(place)) {}

  const Json& raw() const { return *value_; }
  const std::string& path() const { return path_; }
  [[noreturn]] void fail(const std::string& what) const;

  // An object with exactly these fields.
  const JsonView& has_only(std::initializer_list<const char*> fields) const;
  JsonView at(const std::string& field) const;
  std::vector<JsonView> items() const;                           // of an array
  std::vector<std::pair<std::string, JsonView>> fields() const;  // of an object
  std::string text() const;
  bool boolean() const;
  // Written as an integer, not negative, at most `most`.
  std::int64_t count(std::int64_t most = INT64_MAX) const;

 private:
  const Json* value_;
  std::string path_, place_;
};

}  // namespace zero::formats
