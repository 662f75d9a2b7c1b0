// See kept_fp32.h.
#include "sharding/kept_fp32.h"

#include <zero/config_tools.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/check.h"
#include "base/name_pattern.h"

namespace zero::sharding {
namespace {

constexpr std::size_t kMostSimilar = 3;

// The end of a name that has as many dots.
std::string with_dots(const std::string& name, std::ptrdiff_t dots) {
  auto at = name.size();
  for (auto passed = -1; passed < dots && at != std::string::npos; ++passed)
    at = at == 0 ? std::string::npos : name.rfind('.', at - 1);
  return at == std::string::npos ? name : name.substr(at + 1);
}

}  // namespace

KeptFp32 kept_fp32(const config::Settings& settings, const std::vector<ParameterNames>& parameters,
                   const std::vector<std::string>& buffers) {
  KeptFp32 result{std::vector<bool>(parameters.size()), {}};
  for (const auto& pattern : settings.keep_fp32) {
    bool matched = false;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!base::pattern_names(pattern, parameters[i].name, parameters[i].aliases)) continue;
      matched = true;
      result.kept[i] = settings.precision != config::Precision::Fp32;
    }
    if (matched) continue;
    auto fault = pattern_fault("libzero.keep_fp32", pattern, parameters);
    const auto buffer = std::find_if(buffers.begin(), buffers.end(),
                                     [&](const auto& name) { return base::pattern_names(pattern, name, {}); });
    if (buffer != buffers.end()) fault += ". Hint: it matches the buffer " + *buffer + "; buffers keep their dtype";
    result.faults.push_back(std::move(fault));
  }
  return result;
}

std::string pattern_fault(const std::string& key, const std::string& pattern,
                          const std::vector<ParameterNames>& parameters) {
  // What follows the last wildcard, compared with as much of each name.
  auto word = pattern.substr(pattern.find_last_of("*?") + 1);
  if (word.starts_with('.')) word.erase(0, 1);
  const auto dots = std::count(word.begin(), word.end(), '.');
  std::vector<std::string> names, ends;
  for (const auto& parameter : parameters) {
    names.push_back(parameter.name);
    names.insert(names.end(), parameter.aliases.begin(), parameter.aliases.end());
  }
  for (const auto& name : names) ends.push_back(with_dots(name, dots));
  const auto nearest = nearest_name(word, ends);
  auto text = base::join(key, ": the pattern \"", pattern, "\" matches no parameter");
  std::size_t shown = 0, more = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!nearest.empty() && ends[i] != nearest) continue;
    if (shown == kMostSimilar)
      ++more;
    else
      text += base::join(shown++ > 0       ? ", "
                         : nearest.empty() ? "; names are such as "
                                           : "; similar names are ",
                         names[i]);
  }
  return more == 0 ? text : base::join(text, " and ", more, " more");
}

}  // namespace zero::sharding
