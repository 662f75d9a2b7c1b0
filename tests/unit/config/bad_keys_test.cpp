// What no key may be, made from the table of keys; bad_configs.h has what a table cannot say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <string>

#include <zero/config_tools.h>
#include <zero/errors.h>

#include "config/document.h"
#include "config/key_table.h"

namespace zero::test::bad_keys_test {
namespace {

using config::keys;

// Each level on a line of its own: where a key and its value are.
struct Nested {
  std::string text;
  int line, key_column, value_column;
};

// `leaf`: the last name of the path, as the text has it; more: what follows the value.
Nested nested(const std::string& path, const std::string& leaf, const std::string& value,
              const std::string& more = "") {
  Nested result{"{", 1, 0, 0};
  std::string end = "\n}";
  const auto new_line = [&] { result.text += "\n" + std::string(static_cast<std::size_t>(2 * result.line++), ' '); };
  for (std::size_t at = 0, dot; (dot = path.find('.', at)) != std::string::npos; at = dot + 1) {
    new_line();
    result.text += "\"" + path.substr(at, dot - at) + "\": {";
    end += "}";
  }
  new_line();
  result.key_column = 2 * (result.line - 1) + 1;
  result.value_column = result.key_column + static_cast<int>(leaf.size()) + 4;
  result.text += "\"" + leaf + "\": " + value + more + end;
  return result;
}

// A typo, a duplicate, another type, a number that is none and one out of range at every key of every level: each fault
// is at its line and column, with the key's name.
TEST(BadKeys, EveryKeyRefusesWhatItIsNot) {
  int texts = 0;
  const auto expect = [&](const Nested& bad, int column, const std::string& pointer, const char* id) {
    SCOPED_TRACE(bad.text);
    ++texts;
    std::string error;
    try {
      Options::from_json(bad.text, "ds.json");
    } catch (const ConfigError& e) {
      EXPECT_EQ(e.code(), ExitCode::kConfig);
      error = e.what();
    }
    EXPECT_NE(error.find("ds.json:" + std::to_string(bad.line) + ":" + std::to_string(column) + ": error: "),
              std::string::npos)
        << error;
    bool found = false;
    config::Faults faults;
    config::read_document(std::make_shared<config::Source>(config::Source{"ds.json", bad.text}), {}, faults);
    for (const auto& fault : faults.sorted())
      found |= fault.severity == ConfigFault::Severity::Error && fault.line == bad.line && fault.column == column &&
               fault.pointer == pointer && (id == nullptr || fault.id == id);
    EXPECT_TRUE(found) << pointer << " " << (id == nullptr ? "" : id) << ": " << error;
  };
  for (const auto& key : keys()) {
    // Which keys of an optimizer there are depends on its type: bad_configs() has them.
    if (key.type == config::Type::Any || key.type == config::Type::Block || !key.owners.empty() ||
        key.path.starts_with("optimizer.") || key.path.starts_with("scheduler."))
      continue;
    const std::string path = key.path, leaf = path.substr(path.rfind('.') + 1);
    std::string pointer = "/" + path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    const std::string value = key.default_json.empty() ? "1" : key.default_json;
    const auto typo = nested(path, leaf + "zz", value);
    expect(typo, typo.key_column, pointer + "zz", "unknown-key");
    const auto more = nested(path, leaf, value, ", \"" + leaf + "\": " + value);
    expect(more, more.value_column + static_cast<int>(value.size()) + 2, pointer, "duplicate-key");
    const bool number = key.type == config::Type::Int || key.type == config::Type::Num;
    const bool text = key.type == config::Type::Text || key.type == config::Type::TextList;
    for (const char* const other : {R"("no-such-value")", "[[1]]", R"({"a": 1})", "123456789012.5"}) {
      if (text ? other[0] == '"' : other[0] == '1' && key.type == config::Type::Num) continue;
      if ((key.type == config::Type::NumOrList || key.type == config::Type::Bytes) && other[0] == '1') continue;
      // In a list, the item is what is wrong.
      const bool item = other[0] == '[' && (key.type == config::Type::TextList || key.type == config::Type::Groups);
      const auto bad = nested(path, leaf, other);
      expect(bad, bad.value_column + item, pointer + (item && key.type == config::Type::Groups ? "/0" : ""), nullptr);
    }
    if (!number) continue;
    const auto none = nested(path, leaf, "NaN");
    expect(none, none.value_column, pointer, "not-a-number");
    const auto huge = nested(path, leaf, "1e999");
    expect(huge, huge.value_column, pointer, "number-too-large");
    if (!std::isfinite(key.low)) continue;
    const auto low = nested(path, leaf, std::to_string(static_cast<long long>(key.low) - 1));
    expect(low, low.value_column, pointer, nullptr);
  }
  std::cout << texts << " generated texts, all refused at their place\n";
  EXPECT_GE(texts, 500);
}

}  // namespace
}  // namespace zero::test::bad_keys_test
