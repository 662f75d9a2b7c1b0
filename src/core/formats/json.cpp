#include "formats/json.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "formats/files.h"

namespace zero::formats {

namespace {

// An object or array that is being parsed, and the position of its current value.
struct Level {
  bool array = false;
  std::int64_t index = -1;
  std::string key;
  std::set<std::string> keys;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& path, int depth, const ObjectEnd& object_end) {
  // The parser would accept both of these.
  if (text.starts_with("\xEF\xBB\xBF")) fail_damaged(path, "begins with a byte order mark, expected JSON");
  if (const auto at = text.find('\0'); at != std::string_view::npos)
    fail_damaged(path, base::join("has a NUL byte at offset ", at, " of its JSON"));
  std::vector<Level> levels;
  // A JSON pointer (RFC 6901): a key with a slash is no other place.
  const auto place = [&] {
    std::string result;
    for (const auto& level : levels) {
      result += '/';
      if (level.array) result += std::to_string(level.index);
      for (const char c : level.array ? std::string() : level.key)
        result += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    }
    return result;
  };
  const auto look = [&](int, Json::parse_event_t event, Json& value) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        if (!levels.empty()) ++levels.back().index;
        levels.emplace_back().array = event == Json::parse_event_t::array_start;
        if (static_cast<int>(levels.size()) > depth)
          fail_damaged(path, base::join("nests deeper than ", depth, " levels"));
        break;
      case Json::parse_event_t::object_end:
        levels.pop_back();
        return !object_end || object_end(place(), value);
      case Json::parse_event_t::array_end:
        levels.pop_back();
        break;
      case Json::parse_event_t::key:
        levels.back().key = value.get_ref<const std::string&>();
        if (!levels.back().keys.insert(levels.back().key).second)
          fail_damaged(path, "has the key \"" + levels.back().key + "\" twice in one object");
        break;
      case Json::parse_event_t::value:
        if (!levels.empty()) ++levels.back().index;
        break;
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), look);
  } catch (const Json::exception& e) {
    fail_damaged(path, std::string("is not the JSON expected: ") + e.what());
  }
}

void JsonView::fail(const std::string& what) const {
  fail_damaged(path_, (place_.empty() ? "the top level" : place_) + " " + what);
}

const JsonView& JsonView::has_only(const std::vector<const char*>& fields) const {
  if (!value_->is_object()) fail("is not an object");
  for (const auto& item : value_->items())
    if (std::none_of(fields.begin(), fields.end(), [&](const char* name) { return item.key() == name; }))
      fail("has the unknown field \"" + item.key() + "\"");
  for (const char* name : fields)
    if (!value_->contains(name)) fail(std::string("has no field \"") + name + "\"");
  return *this;
}

JsonView JsonView::at(const std::string& field) const {
  if (!value_->is_object()) fail("is not an object");
  const auto found = value_->find(field);
  if (found == value_->end()) fail("has no field \"" + field + "\"");
  return {*found, path_, place_ + "/" + field};
}

std::vector<JsonView> JsonView::items() const {
  if (!value_->is_array()) fail("is not an array");
  std::vector<JsonView> result;
  for (std::size_t i = 0; i < value_->size(); ++i) result.emplace_back((*value_)[i], path_, base::join(place_, "/", i));
  return result;
}

std::vector<std::pair<std::string, JsonView>> JsonView::fields() const {
  if (!value_->is_object()) fail("is not an object");
  std::vector<std::pair<std::string, JsonView>> result;
  for (const auto& item : value_->items())
    result.emplace_back(item.key(), JsonView(item.value(), path_, place_ + "/" + item.key()));
  return result;
}

std::string JsonView::text() const {
  if (!value_->is_string()) fail("is not a string");
  return value_->get<std::string>();
}

bool JsonView::boolean() const {
  if (!value_->is_boolean()) fail("is not true or false");
  return value_->get<bool>();
}

std::int64_t JsonView::count(std::int64_t most) const {
  if (!value_->is_number_unsigned()) fail("is not an integer of 0 or more");
  const auto value = value_->get<std::uint64_t>();
  if (value > static_cast<std::uint64_t>(most)) fail(base::join("is ", value, ", expected at most ", most));
  return static_cast<std::int64_t>(value);
}

}  // namespace zero::formats
