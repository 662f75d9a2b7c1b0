// Orders and formats findings.
#include "config/fault.h"

#include <algorithm>
#include <tuple>

#include "base/json_write.h"
#include "base/printable.h"

namespace zero::config {

void Faults::add(ConfigFault::Severity severity, std::string id, const Place& place, std::string pointer,
                 std::string message, std::string hint, const std::vector<Place>& related) {
  ConfigFault fault;
  fault.id = std::move(id);
  fault.severity = severity;
  fault.pointer = std::move(pointer);
  fault.message = std::move(message);
  fault.hint = std::move(hint);
  if (place.source) {
    const auto position = place.position();
    fault.file = place.source->name;
    fault.line = position.line;
    fault.column = position.column;
    fault.source_line = position.text;
    fault.mark_width = position.width;
  }
  for (const Place& other : related)
    if (other.source) fault.related.push_back(other.text());
  if (std::find(faults_.begin(), faults_.end(), fault) == faults_.end()) faults_.push_back(std::move(fault));
}

bool Faults::has_errors() const {
  return std::any_of(faults_.begin(), faults_.end(),
                     [](const auto& f) { return f.severity == ConfigFault::Severity::Error; });
}

std::vector<ConfigFault> Faults::sorted() const {
  auto result = faults_;
  std::stable_sort(result.begin(), result.end(), [](const ConfigFault& a, const ConfigFault& b) {
    // The file first, then keys given outside it, then findings without a location.
    const auto rank = [](const ConfigFault& f) {
      const bool outside = f.file.starts_with("--") || f.file.starts_with("Options::");
      return std::tuple(f.line == 0 ? 2 : outside ? 1 : 0, f.line, f.column);
    };
    return rank(a) < rank(b);
  });
  return result;
}

std::string pointer_of(std::string_view path) {
  std::string out = "/";
  for (const char c : path) out += c == '.' ? '/' : c;
  return path.empty() ? "" : out;
}

}  // namespace zero::config

namespace zero {
namespace {

constexpr std::size_t kMostShown = 100;
constexpr std::size_t kWidestLine = 160;

std::string counted(std::size_t number, const char* word) {
  return std::to_string(number) + " " + word + (number == 1 ? "" : "s");
}

std::string inline_text(std::string_view text) { return base::printable(text, base::Lines::Escape); }

// The first `count` code points of `text`.
std::string_view first_points(std::string_view text, int count) {
  std::size_t end = 0;
  for (int points = 0; end < text.size(); ++end) {
    if ((static_cast<unsigned char>(text[end]) & 0xC0u) != 0x80u && ++points > count) break;
  }
  return text.substr(0, end);
}

// The source line with marks below it. Escaped characters are longer than in the file.
std::string marked_line(const ConfigFault& fault) {
  const std::string_view line = fault.source_line;
  const auto before = first_points(line, fault.column - 1);
  const auto word = first_points(line.substr(before.size()), fault.mark_width);
  std::string number = std::to_string(fault.line);
  number.insert(0, number.size() < 6 ? 6 - number.size() : 0, ' ');
  // Tabs are preserved, so that the caret is below its word.
  std::string marks;
  const std::string shown = base::printable(before);
  for (const char c : shown)
    if ((static_cast<unsigned char>(c) & 0xC0u) != 0x80u) marks += c == '\t' ? '\t' : ' ';
  const auto width = std::max<std::size_t>(1, base::width_of(base::printable(word)));
  return number + " | " + base::printable(line) + "\n       | " + marks + "^" + std::string(width - 1, '~') + "\n";
}

std::string block(const ConfigFault& fault) {
  std::string out;
  if (fault.line > 0)
    out += inline_text(fault.file) + ":" + std::to_string(fault.line) + ":" + std::to_string(fault.column) + ": ";
  out += fault.severity == ConfigFault::Severity::Error ? "error: " : "notice: ";
  if (!fault.pointer.empty()) out += inline_text(fault.pointer) + ": ";
  out += inline_text(fault.message) + " [" + fault.id + "]\n";
  if (fault.line > 0 && fault.source_line.size() <= kWidestLine) out += marked_line(fault);
  for (const auto& place : fault.related) out += "  see: " + inline_text(place) + "\n";
  if (!fault.hint.empty()) out += "  hint: " + inline_text(fault.hint) + "\n";
  return out;
}

}  // namespace

std::string faults_text(const std::vector<ConfigFault>& faults, std::string_view name) {
  std::string out;
  std::size_t errors = 0, notices = 0;
  for (const auto& fault : faults) {
    const bool error = fault.severity == ConfigFault::Severity::Error;
    if (error ? errors < kMostShown : notices < kMostShown) out += block(fault);
    ++(error ? errors : notices);
  }
  if (errors > kMostShown) out += counted(errors - kMostShown, "more error") + " not shown\n";
  out += counted(errors, "error") + ", " + counted(notices, "notice") + " in " + inline_text(name) + "\n";
  return out;
}

std::string faults_json(const std::vector<ConfigFault>& faults, std::string_view name) {
  using base::json_quote;
  std::string rows;
  std::size_t errors = 0;
  for (const auto& f : faults) {
    const bool error = f.severity == ConfigFault::Severity::Error;
    errors += error;
    std::string related;
    for (const auto& place : f.related) related += (related.empty() ? "" : ", ") + json_quote(place);
    rows += (rows.empty() ? "\n  " : ",\n  ") + ("{\"file\": " + json_quote(f.file)) +
            ", \"line\": " + std::to_string(f.line) + ", \"col\": " + std::to_string(f.column) +
            ", \"pointer\": " + json_quote(f.pointer) + ", \"id\": " + json_quote(f.id) +
            ", \"severity\": " + json_quote(error ? "error" : "notice") + ", \"message\": " + json_quote(f.message) +
            ", \"hint\": " + json_quote(f.hint) + ", \"related\": [" + related + "]}";
  }
  return "{\"schema\": \"zero.config.check/1\", \"file\": " + json_quote(name) +
         ", \"errors\": " + std::to_string(errors) + ", \"notices\": " + std::to_string(faults.size() - errors) +
         ", \"faults\": [" + rows + "]}\n";
}

}  // namespace zero
