// See json.h. nlohmann's SAX parser neither recurses nor keeps anything; the tree is built from its events.
#include "apps/data/json.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

// Tells how far the parser has read: after a key or a text, exactly behind its closing quote.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** reached) : at_(at), reached_(reached) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *reached_ = ++at_;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** reached_;
};

class TreeBuilder {
 public:
  TreeBuilder(std::string_view text, const JsonLimits& limits, const JsonObjectEnd& object_end)
      : text_(text), reached_(text.data()), limits_(limits), object_end_(object_end) {}

  const char** reached() { return &reached_; }
  Json take() { return std::move(root_); }

  bool null() { return add({}); }
  bool boolean(bool value) {
    Json json;
    json.kind = Json::Kind::Bool;
    json.boolean = value;
    return add(std::move(json));
  }
  bool number_integer(std::int64_t value) { return integer(value); }
  bool number_unsigned(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(INT64_MAX)) return number(static_cast<double>(value));
    return integer(static_cast<std::int64_t>(value));
  }
  bool number_float(double value, const std::string&) { return number(value); }
  bool string(std::string& value) {
    check_text(value);
    Json json;
    json.kind = Json::Kind::Text;
    json.text = std::move(value);
    return add(std::move(json));
  }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool start_object(std::size_t) { return open(Json::Kind::Object); }
  bool start_array(std::size_t) { return open(Json::Kind::List); }
  bool key(std::string& name) {
    check_text(name);
    auto& level = levels_.back();
    if (!level.keys.insert(name).second)
      throw JsonFault(position(), "the key \"" + name.substr(0, 80) + "\" twice in one object");
    level.key = std::move(name);
    before_ = position();
    return true;
  }
  bool end_object() {
    auto level = std::move(levels_.back());
    levels_.pop_back();
    level.value.end = position();
    const std::size_t before = level.values;
    const bool keep = !object_end_ || object_end_(static_cast<int>(levels_.size()) + 1, level.value);
    if (keep) return place(std::move(level.value), std::move(level.place));
    values_ = before;
    return after();
  }
  bool end_array() {
    auto level = std::move(levels_.back());
    levels_.pop_back();
    level.value.end = position();
    return place(std::move(level.value), std::move(level.place));
  }
  bool parse_error(std::size_t at, const std::string& token, const nlohmann::json::exception&) {
    const bool ended = at > text_.size();
    throw JsonFault(at == 0 ? 0 : std::min(at - 1, text_.size()),
                    ended ? "the end of the text inside a value" : "\"" + token.substr(0, 40) + "\"");
  }

 private:
  struct Level {
    Json value;
    std::string place;       // the key of `value` in the object that has it
    std::string key;         // of the value that comes next
    std::size_t values = 0;  // of the tree before this one
    std::unordered_set<std::string> keys;
  };

  std::size_t position() const { return static_cast<std::size_t>(reached_ - text_.data()); }
  void check_text(const std::string& value) const {
    if (value.size() > limits_.text_bytes)
      throw JsonFault(position(), "a text of " + std::to_string(value.size()) + " bytes, more than " +
                                      std::to_string(limits_.text_bytes));
  }
  bool integer(std::int64_t value) {
    Json json;
    json.kind = Json::Kind::Integer;
    json.integer = value;
    json.number = static_cast<double>(value);
    return add(std::move(json));
  }
  bool number(double value) {
    if (!std::isfinite(value)) throw JsonFault(position(), "a number that no double holds");
    Json json;
    json.kind = Json::Kind::Number;
    json.number = value;
    return add(std::move(json));
  }
  bool open(Json::Kind kind) {
    if (static_cast<int>(levels_.size()) >= limits_.depth)
      throw JsonFault(position(), "more than " + std::to_string(limits_.depth) + " levels of objects and lists");
    std::string place = levels_.empty() ? "" : std::move(levels_.back().key);
    auto& level = levels_.emplace_back();
    level.values = values_;
    count();
    level.place = std::move(place);
    level.value.kind = kind;
    level.value.begin = before_;
    before_ = position();
    return true;
  }
  void count() {
    if (++values_ > limits_.values)
      throw JsonFault(position(), "more than " + std::to_string(limits_.values) + " values");
  }
  bool add(Json json) {
    count();
    json.begin = before_;
    json.end = position();
    return place(std::move(json), levels_.empty() ? "" : std::move(levels_.back().key));
  }
  bool place(Json json, std::string name) {
    if (levels_.empty()) {
      root_ = std::move(json);
    } else if (auto& outer = levels_.back().value; outer.kind == Json::Kind::List) {
      outer.items.push_back(std::move(json));
    } else {
      outer.fields.push_back({std::move(name), std::move(json)});
    }
    return after();
  }
  bool after() {
    before_ = position();
    return true;
  }

  std::string_view text_;
  const char* reached_;
  JsonLimits limits_;
  const JsonObjectEnd& object_end_;
  std::vector<Level> levels_;
  std::size_t before_ = 0, values_ = 0;
  Json root_;
};

}  // namespace

const Json* Json::find(std::string_view key) const {
  for (const auto& [name, value] : fields)
    if (name == key) return &value;
  return nullptr;
}

const char* Json::kind_name() const {
  switch (kind) {
    case Kind::Null:
      return "null";
    case Kind::Bool:
      return boolean ? "true" : "false";
    case Kind::Integer:
      return "an integer";
    case Kind::Number:
      return "a number";
    case Kind::Text:
      return "a text";
    case Kind::List:
      return "a list";
    case Kind::Object:
      return "an object";
  }
  return "a value";
}

Json read_json(std::string_view text, const JsonLimits& limits, const JsonObjectEnd& object_end) {
  if (text.size() > limits.bytes)
    throw JsonFault(0, std::to_string(text.size()) + " bytes, more than " + std::to_string(limits.bytes));
  // The parser would accept the first two of these.
  if (text.starts_with("\xEF\xBB\xBF")) throw JsonFault(0, "a byte order mark");
  if (const auto at = text.find('\0'); at != std::string_view::npos) throw JsonFault(at, "a byte of 0");
  if (const auto at = invalid_utf8(text); at < text.size()) throw JsonFault(at, "bytes that are not UTF-8");
  TreeBuilder builder(text, limits, object_end);
  nlohmann::json::sax_parse(CountingIterator(text.data(), builder.reached()),
                            CountingIterator(text.data() + text.size(), builder.reached()), &builder);
  return builder.take();
}

std::int64_t line_of(std::string_view text, std::size_t offset) {
  return 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(std::min(offset, text.size())), '\n');
}

}  // namespace data
