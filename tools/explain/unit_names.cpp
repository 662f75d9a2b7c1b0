// See unit_names.h.
#include "tools/explain/unit_names.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <utility>

#include "base/check.h"

namespace zero::cli {
namespace {

// " (fp32)" of "blocks.3 (fp32)".
std::string mark_of(const std::string& unit) {
  const auto at = unit.rfind(" (");
  return at == std::string::npos ? "" : unit.substr(at);
}

// Of units with one mark.
std::vector<std::string> runs_of(const std::vector<std::string>& units) {
  // "blocks.12 (fp32)" is stem "blocks." and number 12.
  const auto split = [](const std::string& unit) {
    const auto name = unit.substr(0, unit.size() - mark_of(unit).size());
    auto at = name.size();
    while (at > 0 && std::isdigit(static_cast<unsigned char>(name[at - 1]))) --at;
    long number = -1;
    if (at < name.size() && name.size() - at < 9) std::from_chars(name.data() + at, name.data() + name.size(), number);
    return std::pair{name.substr(0, at), number};
  };
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < units.size();) {
    const auto [stem, first] = split(units[i]);
    std::size_t j = i + 1;
    long step = 0;
    for (; j < units.size() && first >= 0; ++j) {
      const auto [next_stem, next] = split(units[j]);
      const auto before = split(units[j - 1]).second;
      if (next_stem != stem || (step == 0 ? next != before + 1 && next != before - 1 : next != before + step)) break;
      step = next - before;
    }
    std::size_t same = i + 1;
    while (same < units.size() && units[same] == units[i]) ++same;
    if (same - i > 1) {
      runs.push_back(base::join(units[i], " x", same - i));
      i = same;
    } else if (j - i > 2) {
      runs.push_back(units[i] + " to " + units[j - 1]);
      i = j;
    } else {
      runs.push_back(units[i++]);
    }
  }
  return runs;
}

}  // namespace

std::string joined_units(const std::vector<std::string>& units) {
  std::vector<std::pair<std::string, std::vector<std::string>>> by_mark;  // in the order of the first of each
  for (const auto& unit : units) {
    const auto mark = mark_of(unit);
    auto found = std::find_if(by_mark.begin(), by_mark.end(), [&](const auto& one) { return one.first == mark; });
    if (found == by_mark.end()) found = by_mark.insert(by_mark.end(), {mark, {}});
    found->second.push_back(unit);
  }
  std::string text;
  for (const auto& [mark, marked] : by_mark)
    for (const auto& run : runs_of(marked)) text += (text.empty() ? "" : ", ") + run;
  return text;
}

}  // namespace zero::cli
