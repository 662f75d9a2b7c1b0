// Strict reader of traces, and the viewers' rule that slices of one track must nest.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace zero::test {

struct TraceSlice {
  std::string name, category;
  std::int64_t begin, end;  // ns
  std::int64_t value;       // bytes, of a step its number; -1: none
};

// Throws for anything but strict JSON.
inline nlohmann::json read_trace(const std::string& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in);
}

inline std::int64_t ns_of(const nlohmann::json& us) { return std::llround(us.get<double>() * 1e3); }

// "compute" -> its slices, by rank and name of the track.
inline std::map<std::pair<int, std::string>, std::vector<TraceSlice>> tracks(const nlohmann::json& events) {
  std::map<std::pair<int, int>, std::string> names;
  for (const auto& event : events)
    if (event.at("ph") == "M" && event.at("name") == "thread_name")
      names[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
  std::map<std::pair<int, std::string>, std::vector<TraceSlice>> all;
  for (const auto& event : events) {
    if (event.at("ph") != "X") continue;
    const auto begin = ns_of(event.at("ts"));
    std::int64_t value = -1;
    if (event.contains("args")) value = event["args"].begin().value();
    all[{event.at("pid"), names.at({event.at("pid"), event.at("tid")})}].push_back(
        {event.at("name"), event.at("cat"), begin, begin + ns_of(event.at("dur")), value});
  }
  for (auto& [track, list] : all)
    std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
  return all;
}

// The slices of one track in order of time; optionally of one category.
inline std::vector<TraceSlice> slices(const nlohmann::json& events, const std::string& track,
                                      const std::string& category = "", int rank = 0) {
  std::vector<TraceSlice> found;
  auto all = tracks(events);
  for (const auto& slice : all[{rank, track}])
    if (category.empty() || slice.category == category) found.push_back(slice);
  return found;
}

// The first two slices of a track that overlap without being nested; empty: there are none.
inline std::string nesting_fault(const nlohmann::json& events) {
  const auto all = tracks(events);
  for (const auto& [track, list] : all) {
    std::vector<const TraceSlice*> open;
    for (const auto& slice : list) {
      while (!open.empty() && open.back()->end <= slice.begin) open.pop_back();
      if (slice.end < slice.begin) return track.second + ": " + slice.name + " ends before it begins";
      if (!open.empty() && slice.end > open.back()->end)
        return track.second + " of rank " + std::to_string(track.first) + ": " + slice.name + " at " +
               std::to_string(slice.begin) + " outlives " + open.back()->name;
      open.push_back(&slice);
    }
  }
  return "";
}

}  // namespace zero::test
