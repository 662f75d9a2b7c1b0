// Reads the keys of one JSON object and collects what is wrong with them. Only for models/hf_config.cpp.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace models {

class HfFields {
 public:
  HfFields(const nlohmann::json& object, std::string prefix, std::string& faults)
      : object_(object), prefix_(std::move(prefix)), faults_(faults) {}

  // Absent or null: `missing`.
  std::int64_t integer(const char* key, std::int64_t missing) {
    const auto* value = get(key);
    if (value == nullptr) return missing;
    if (value->is_number_unsigned() && value->get<std::uint64_t>() > kLargest)
      return fault(key, "a smaller integer"), missing;
    if (!value->is_number_integer()) return fault(key, "an integer"), missing;
    const auto got = value->get<std::int64_t>();
    if (got < -1 || got > static_cast<std::int64_t>(kLargest)) return fault(key, "an integer from -1 to 2^40"), missing;
    return got;
  }
  double number(const char* key, double missing) {
    const auto* value = get(key);
    if (value == nullptr) return missing;
    if (!value->is_number()) return fault(key, "a number"), missing;
    return value->get<double>();
  }
  bool flag(const char* key, bool missing) {
    const auto* value = get(key);
    if (value == nullptr) return missing;
    if (!value->is_boolean()) return fault(key, "true or false"), missing;
    return value->get<bool>();
  }
  std::string text(const char* key, const std::string& missing) {
    const auto* value = get(key);
    if (value == nullptr) return missing;
    if (!value->is_string()) return fault(key, "a text"), missing;
    return value->get<std::string>();
  }
  // An integer, or a list of some; absent or null: none.
  std::vector<std::int64_t> integers(const char* key) {
    const auto* value = get(key);
    if (value == nullptr) return {};
    std::vector<std::int64_t> all;
    for (const auto& one : value->is_array() ? *value : nlohmann::json::array({*value})) {
      if (!one.is_number_integer() || one < 0 || one > kLargest) return fault(key, "token numbers"), all;
      all.push_back(one.get<std::int64_t>());
    }
    return all;
  }
  // null if absent or null. Counts as known.
  const nlohmann::json* get(const char* key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool has(const char* key) const { return object_.contains(key); }
  void fault(const char* key, const std::string& expected) {
    const auto found = object_.find(key);
    std::string got =
        found == object_.end() ? "nothing" : found->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (got.size() > 80) got = got.substr(0, 77) + "...";
    faults_ += "\n  " + prefix_ + key + ": got " + got + ", expected " + expected;
  }
  // The value must be absent, null or this one.
  void only(const char* key, const nlohmann::json& value) {
    const auto* got = get(key);
    if (got != nullptr && *got != value) fault(key, value.dump() + ", as the model has no other");
  }
  void known(std::initializer_list<const char*> keys) { known_.insert(keys.begin(), keys.end()); }
  std::vector<std::string> unknown() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object_.items())
      if (!known_.contains(key)) keys.push_back(prefix_ + key);
    return keys;
  }

 private:
  static constexpr std::uint64_t kLargest = std::uint64_t{1} << 40;
  const nlohmann::json& object_;
  const std::string prefix_;
  std::string& faults_;
  std::set<std::string> known_;
};

}  // namespace models
