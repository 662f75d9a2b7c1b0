// Locations and numbers of JSON text.
#include "config/json_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "base/json_write.h"
#include "base/printable.h"

namespace zero::config {

Place::Position Place::position() const {
  if (!source) return {0, 0, 1, {}};
  const std::string& text = source->text;
  const std::size_t at = std::min(offset, text.size());
  const std::size_t begin = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;  // npos + 1 is 0
  std::size_t end = text.find('\n', at);
  if (end == std::string::npos) end = text.size();
  const auto points = [&](std::size_t from, std::size_t to) {
    return static_cast<int>(base::width_of(std::string_view(text).substr(from, to - from)));
  };
  std::string line = text.substr(begin, end - begin);
  if (!line.empty() && line.back() == '\r') line.pop_back();
  const int lines = static_cast<int>(std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(begin), '\n'));
  return {lines + 1, points(begin, at) + 1, std::max(1, points(at, std::min(at + length, end))), line};
}

std::string Place::text() const {
  if (!source) return {};
  const Position p = position();
  return source->name + ":" + std::to_string(p.line) + ":" + std::to_string(p.column);
}

const Value* Value::find(std::string_view key) const {
  for (const Member& member : members)
    if (member.key == key) return &member.value;
  return nullptr;
}

std::string Value::kind_name() const {
  switch (kind) {
    case Kind::Null:
      return "null";
    case Kind::Bool:
      return "a boolean";
    case Kind::Number:
      return "a number";
    case Kind::String:
      return "a string";
    case Kind::Array:
      return "a list";
    case Kind::Object:
      return "an object";
  }
  return {};
}

std::string Value::json() const {
  switch (kind) {
    case Kind::Null:
      return "null";
    case Kind::Bool:
      return boolean ? "true" : "false";
    case Kind::Number:
      if (const auto whole = whole_number(text)) return std::to_string(*whole);
      return number_text(finite_number(text).value_or(0));
    case Kind::String:
      return base::json_quote(text);
    case Kind::Array: {
      std::string out = "[";
      for (const Value& item : items) out += (out.size() > 1 ? ", " : "") + item.json();
      return out + "]";
    }
    case Kind::Object: {
      std::string out = "{";
      for (const Member& member : members)
        out += (out.size() > 1 ? ", " : "") + base::json_quote(member.key) + ": " + member.value.json();
      return out + "}";
    }
  }
  return {};
}

std::optional<std::int64_t> whole_number(std::string_view token, bool* too_large) {
  if (too_large) *too_large = false;
  const bool negative = !token.empty() && token[0] == '-';
  std::string digits;
  std::int64_t point = -1, exponent = 0;  // digits after the point change it
  for (std::size_t i = negative ? 1 : 0; i < token.size(); ++i) {
    const char c = token[i];
    if (c == '.') {
      point = static_cast<std::int64_t>(digits.size());
    } else if (c == 'e' || c == 'E') {
      const char* first = token.data() + i + 1;
      if (*first == '+') ++first;
      if (std::from_chars(first, token.data() + token.size(), exponent).ec != std::errc())
        exponent = token[i + 1] == '-' ? -1000000 : 1000000;
      break;
    } else {
      digits += c;
    }
  }
  exponent = std::clamp<std::int64_t>(exponent, -1000000, 1000000);
  if (point >= 0) exponent -= static_cast<std::int64_t>(digits.size()) - point;
  while (!digits.empty() && digits.back() == '0') {
    digits.pop_back();
    ++exponent;
  }
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
  if (digits.empty()) return 0;
  if (exponent < 0) return {};
  if (static_cast<std::int64_t>(digits.size()) + exponent > 19) {
    if (too_large) *too_large = true;
    return {};
  }
  digits = (negative ? "-" : "") + digits + std::string(static_cast<std::size_t>(exponent), '0');
  std::int64_t value = 0;
  if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc()) {
    if (too_large) *too_large = true;
    return {};
  }
  return value;
}

std::optional<double> finite_number(std::string_view token) {
  if (token.empty()) return {};
  double value = 0;
  const auto result = std::from_chars(token.data(), token.data() + token.size(), value);
  const std::string_view mantissa = token.substr(0, token.find_first_of("eE"));
  const bool zero = mantissa.find_first_of("123456789") == std::string_view::npos;
  if (zero) return token[0] == '-' ? -0.0 : 0.0;
  if (result.ec != std::errc() || !std::isfinite(value) || value == 0) return {};
  return value;
}

std::string number_text(double value) {
  if (std::abs(value) < 9007199254740992.0 && value == std::floor(value))
    return std::to_string(static_cast<std::int64_t>(value));
  // The shortest common notation: 0.0001, 1e-08.
  char text[64];
  for (int digits = 1; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (std::strtod(text, nullptr) == value) break;
  }
  return text;
}

}  // namespace zero::config
