// See expert_load.h.
#include "tools/report/page/expert_load.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>

#include "tools/report/page/json_lines.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {

using Json = nlohmann::ordered_json;

ExpertLoad load_of(const Json& json) {
  ExpertLoad load{json.at("first").get<std::int64_t>(), json.at("last").get<std::int64_t>(), {}};
  for (const Json& row : json.at("layers")) {
    load.layers.push_back({row.at("block").get<std::int64_t>(), row.at("counts").get<std::vector<std::int64_t>>(),
                           row.at("kept").get<std::int64_t>()});
    const auto& layer = load.layers.back();
    if (layer.counts.empty() || layer.kept < 0 || layer.kept > layer.sum() ||
        std::any_of(layer.counts.begin(), layer.counts.end(), [](std::int64_t count) { return count < 0; }))
      throw std::runtime_error("counts of block " + std::to_string(layer.block) + " that cannot be");
  }
  if (load.first > load.last || load.layers.empty()) throw std::runtime_error("no steps or no layers");
  return load;
}

}  // namespace

std::int64_t LayerLoad::sum() const { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

double LayerLoad::over_mean(std::int64_t count) const {
  const auto all = sum();
  return all == 0 ? 1 : static_cast<double>(count) * static_cast<double>(counts.size()) / static_cast<double>(all);
}

double LayerLoad::max_over_mean() const { return over_mean(*std::max_element(counts.begin(), counts.end())); }

double LayerLoad::min_over_mean() const { return over_mean(*std::min_element(counts.begin(), counts.end())); }

double LayerLoad::dropped() const {
  const auto all = sum();
  return all == 0 ? 0 : 1 - static_cast<double>(kept) / static_cast<double>(all);
}

void ExpertLoad::add(const ExpertLoad& later) {
  last = later.last;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    for (std::size_t e = 0; e < layers[i].counts.size(); ++e) layers[i].counts[e] += later.layers[i].counts[e];
    layers[i].kept += later.layers[i].kept;
  }
}

double ExpertLoad::max_over_mean() const {
  double most = 0;
  for (const auto& layer : layers) most = std::max(most, layer.max_over_mean());
  return most;
}

double ExpertLoad::dropped() const {
  LayerLoad all;
  for (const auto& layer : layers) all.counts.push_back(layer.sum()), all.kept += layer.kept;
  return all.dropped();
}

std::int64_t steps_of_load_line(std::int64_t steps) {
  return std::max<std::int64_t>(1, (steps + kMostLoadLines - 1) / kMostLoadLines);
}

std::string load_json(const ExpertLoad& load) {
  Json layers = Json::array();
  for (const auto& layer : load.layers)
    layers.push_back({{"block", layer.block}, {"counts", layer.counts}, {"kept", layer.kept}});
  return Json{{"first", load.first}, {"last", load.last}, {"layers", layers}}.dump();
}

std::string load_text(const ExpertLoad& load) {
  auto text = "experts, steps " + std::to_string(load.first) + " to " + std::to_string(load.last) + ":\n";
  for (const auto& layer : load.layers)
    text += "  block " + std::to_string(layer.block) + ": the busiest has " + printed("%.2f", layer.max_over_mean()) +
            " x the mean, " + printed("%.1f", 100 * layer.dropped()) + " % dropped\n";
  return text;
}

std::vector<ExpertLoad> read_loads(const std::filesystem::path& path) {
  std::vector<ExpertLoad> loads;
  std::ifstream in(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(in), {});
  for_each_line(path, text, "the load of some steps", [&](const std::string& line) {
    auto load = load_of(Json::parse(line));
    // A resumed run repeats steps. Those of a line before the first repeated one are known in its sum only.
    while (!loads.empty() && loads.back().first >= load.first) loads.pop_back();
    if (!loads.empty()) loads.back().last = std::min(loads.back().last, load.first - 1);
    if (!loads.empty() && !std::equal(load.layers.begin(), load.layers.end(), loads.back().layers.begin(),
                                      loads.back().layers.end(), [](const LayerLoad& a, const LayerLoad& b) {
                                        return a.block == b.block && a.counts.size() == b.counts.size();
                                      }))
      throw std::runtime_error("other layers than in the line before");
    loads.push_back(std::move(load));
  });
  return loads;
}

std::vector<ExpertLoad> joined(const std::vector<ExpertLoad>& loads, std::size_t most) {
  const auto group = std::max<std::size_t>(1, (loads.size() + most - 1) / most);
  std::vector<ExpertLoad> sums;
  for (std::size_t i = 0; i < loads.size(); ++i)
    if (i % group == 0)
      sums.push_back(loads[i]);
    else
      sums.back().add(loads[i]);
  return sums;
}

}  // namespace zero::report
