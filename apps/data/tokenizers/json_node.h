// A value of a tokenizer's JSON with its file and its place there, for messages. Every getter throws std::runtime_error
// "[tokenizer FILE] PLACE: got X, expected Y".
#pragma once
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/data/json.h"

namespace data {

class JsonNode {
 public:
  // A document of its own. `text` is used while it is read alone.
  static JsonNode read(const std::string& file, std::string_view text);

  const Json& json() const { return *json_; }
  const std::string& place() const { return place_; }
  [[noreturn]] void fail(const std::string& got, const std::string& expected) const;
  // For components that are not built: names them.
  [[noreturn]] void unsupported(const std::string& what, const std::string& known) const;

  bool is(Json::Kind kind) const { return json_->is(kind); }
  bool has(std::string_view key) const;  // and it is not null
  JsonNode at(const std::string& key) const;
  std::optional<JsonNode> find(const std::string& key) const;  // no value for null
  std::vector<JsonNode> items() const;
  // Refuses other keys: what is not known cannot be honoured.
  void only(std::initializer_list<std::string_view> keys) const;

  const std::string& text() const;
  bool boolean() const;
  std::int64_t integer(std::int64_t least, std::int64_t most) const;
  double number() const;
  std::string text_or(const std::string& key, const std::string& otherwise) const;
  bool boolean_or(const std::string& key, bool otherwise) const;
  std::string type() const { return at("type").text(); }

 private:
  JsonNode(std::shared_ptr<const std::string> file, std::shared_ptr<const Json> root, const Json* json,
           std::string place)
      : file_(std::move(file)), root_(std::move(root)), json_(json), place_(std::move(place)) {}
  JsonNode child(const Json& json, const std::string& name) const { return {file_, root_, &json, place_ + "/" + name}; }

  std::shared_ptr<const std::string> file_;
  std::shared_ptr<const Json> root_;
  const Json* json_;
  std::string place_;
};

// The contents of a file of up to `most` bytes. Throws std::runtime_error that names it.
std::string read_tokenizer_file(const std::string& path, std::size_t most = std::size_t{64} << 20);

}  // namespace data
