// Strict JSON for checkpoints: valid UTF-8, no duplicate keys, bounded depth, nothing after the value, integers written
// as integers. Every violation is reported as damage of the named file. The format files in this folder interpret the
// values.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace zero::formats {

using Json = nlohmann::json;

// Called with every object that has ended and its position, such as "/tensors/3". false: the value is not kept, so that
// a long list takes the memory of one of its items.
using ObjectEnd = std::function<bool(const std::string& place, const Json& value)>;
// Throws IoError (kCheckpoint) with `path` and the byte offset. depth: of nested objects and arrays.
Json parse_json(std::string_view text, const std::string& path, int depth, const ObjectEnd& object_end = nullptr);

// A JSON value with its file and its position in it, such as "/tensors/3/shape". Every getter throws IoError
// (kCheckpoint) if the value is missing, has another type or is out of range.
class JsonView {
 public:
  JsonView(const Json& value, std::string path, std::string place = "")
      : value_(&value), path_(std::move(path)), place_(std::move(place)) {}

  const Json& raw() const { return *value_; }
  const std::string& path() const { return path_; }
  const std::string& place() const { return place_; }
  [[noreturn]] void fail(const std::string& what) const;

  // An object with exactly these fields.
  const JsonView& has_only(const std::vector<const char*>& fields) const;
  JsonView at(const std::string& field) const;
  std::vector<JsonView> items() const;                           // of an array
  std::vector<std::pair<std::string, JsonView>> fields() const;  // of an object
  std::string text() const;
  bool boolean() const;
  // A non-negative integer of at most `most`.
  std::int64_t count(std::int64_t most = INT64_MAX) const;

 private:
  const Json* value_;
  std::string path_, place_;
};

}  // namespace zero::formats
