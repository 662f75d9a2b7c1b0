#include "gpu/happens_before.h"

#include <algorithm>

namespace zero::test {

void HappensBefore::join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (std::size_t s = 0; s < from.size(); ++s) to[s] = std::max(to[s], from[s]);
}

bool HappensBefore::includes(const Clock& clock, const Use& use) {
  return static_cast<std::size_t>(use.stream) < clock.size() &&
         clock[static_cast<std::size_t>(use.stream)] >= use.count;
}

HappensBefore::Clock& HappensBefore::clock_of(int stream) {
  const auto index = static_cast<std::size_t>(stream);
  if (clocks_.size() <= index) clocks_.resize(index + 1);
  if (clocks_[index].size() <= index) clocks_[index].resize(index + 1);
  return clocks_[index];
}

int HappensBefore::number_of(const std::string& name) {
  const auto [it, inserted] = numbers_.try_emplace(name, static_cast<int>(names_.size()));
  if (inserted) names_.push_back(name);
  return it->second;
}

void HappensBefore::host_waits_for_all() {
  for (const auto& clock : clocks_) join(host_, clock);
}

bool HappensBefore::host_knows(const Clock& clock) const {
  for (std::size_t s = 0; s < clock.size(); ++s)
    if (clock[s] > (s < host_.size() ? host_[s] : 0)) return false;
  return true;
}

void HappensBefore::split(std::uintptr_t at) {
  auto it = intervals_.upper_bound(at);
  if (it == intervals_.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  auto rest = it->second;
  it->second.end = at;
  intervals_.emplace(at, std::move(rest));
}

template <class Body>
void HappensBefore::over(const Access& access, const Body& body) {
  if (access.bytes == 0) return;
  const auto end = access.begin + access.bytes;
  split(access.begin);
  split(end);
  for (auto at = access.begin; at < end;) {
    auto it = intervals_.lower_bound(at);
    if (it == intervals_.end() || it->first != at) {
      const auto gap = it == intervals_.end() ? end : std::min(end, it->first);
      it = intervals_.emplace_hint(it, at, Interval{gap, {}, {}});
    }
    body(it->second);
    at = it->second.end;
  }
}

void HappensBefore::report(const std::string& later, const Access& access, const Use& earlier, const char* what) {
  auto text = later + (access.write ? " writes " : " reads ") + "what stream " + std::to_string(earlier.stream) +
              "'s " + names_[static_cast<std::size_t>(earlier.name)] + " " + what + ", and is not ordered after it";
  if (std::find(faults_.begin(), faults_.end(), text) == faults_.end()) faults_.push_back(std::move(text));
}

void HappensBefore::operation(int stream, const std::string& name, const std::vector<Access>& accesses) {
  auto& clock = clock_of(stream);
  join(clock, host_);
  const Use use{stream, ++clock[static_cast<std::size_t>(stream)], number_of(name)};
  const auto later = "stream " + std::to_string(stream) + ": " + name;
  for (const auto& access : accesses)
    over(access, [&](Interval& interval) {
      for (const auto& write : interval.write)
        if (!includes(clock, write)) report(later, access, write, "writes");
      if (!access.write) {
        std::erase_if(interval.reads, [&](const Use& read) { return read.stream == stream; });
        interval.reads.push_back(use);
        return;
      }
      for (const auto& read : interval.reads)
        if (!includes(clock, read)) report(later, access, read, "reads");
      interval.reads.clear();
      interval.write = {use};
    });
}

void HappensBefore::host_access(const std::string& name, const Access& access) {
  over(access, [&](Interval& interval) {
    for (const auto& write : interval.write)
      if (!includes(host_, write)) report("the host: " + name, access, write, "writes");
    if (!access.write) return;
    for (const auto& read : interval.reads)
      if (!includes(host_, read)) report("the host: " + name, access, read, "reads");
    interval.reads.clear();
    interval.write.clear();
  });
}

void HappensBefore::forget(std::uintptr_t begin, std::size_t bytes, const Clock& clock) {
  const auto known = [&](const Use& use) { return includes(clock, use); };
  over({begin, bytes, true}, [&](Interval& interval) {
    std::erase_if(interval.write, known);
    std::erase_if(interval.reads, known);
  });
}

bool HappensBefore::in_use(std::uintptr_t byte, bool read) const {
  auto it = intervals_.upper_bound(byte);
  if (it == intervals_.begin()) return false;
  --it;
  if (it->second.end <= byte) return false;
  const auto unknown = [&](const Use& use) { return !includes(host_, use); };
  return std::any_of(it->second.write.begin(), it->second.write.end(), unknown) ||
         (read && std::any_of(it->second.reads.begin(), it->second.reads.end(), unknown));
}

bool HappensBefore::in_use(std::uintptr_t begin, std::size_t bytes) const {
  if (bytes == 0) return false;
  if (in_use(begin, true)) return true;
  for (auto it = intervals_.upper_bound(begin); it != intervals_.end() && it->first < begin + bytes; ++it)
    if (in_use(it->first, true)) return true;
  return false;
}

}  // namespace zero::test
