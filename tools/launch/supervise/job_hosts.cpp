// A slot is left out only when it fails twice in a row, because a single death may have any reason.
#include "tools/launch/supervise/job_hosts.h"

#include <algorithm>

#include "base/check.h"

namespace zero::launch {

JobHosts::JobHosts(std::vector<LaunchHost> hosts, int min_ranks, int min_hosts)
    : all_(std::move(hosts)), left_(all_), now_(all_), min_ranks_(min_ranks), min_hosts_(min_hosts) {}

int JobHosts::count(const std::vector<LaunchHost>& hosts) {
  std::size_t ranks = 0;
  for (const LaunchHost& host : hosts) ranks += host.slots.size();
  return static_cast<int>(ranks);
}

std::string JobHosts::name_of(const std::string& host, int slot) const {
  return base::join("slot ", slot, all_.size() > 1 ? " of " + host : "");
}

std::string JobHosts::leave_out(const HostFault& fault) {
  if (!elastic()) return "";
  std::string text;
  const auto drop = [&](const std::string& host, auto unwanted) {
    for (LaunchHost& candidate : left_)
      if (candidate.name == host) std::erase_if(candidate.slots, unwanted);
    std::erase_if(left_, [](const LaunchHost& candidate) { return candidate.slots.empty(); });
  };
  for (const int index : fault.lost_hosts) {
    const std::string& host = now_.at(static_cast<std::size_t>(index)).name;
    drop(host, [](int) { return true; });
    text += base::join(text.empty() ? "" : ", ", "host ", host, " lost");
  }
  if (!text.empty() || fault.host < 0) {
    failed_.reset();
    return text;
  }
  const LaunchHost& host = now_.at(static_cast<std::size_t>(fault.host));
  const std::pair failed(host.name, host.slots.at(static_cast<std::size_t>(fault.slot)));
  if (failed_ != failed) {
    failed_ = failed;
    return "";
  }
  failed_.reset();
  drop(failed.first, [&](int slot) { return slot == failed.second; });
  return name_of(failed.first, failed.second) + " died twice";
}

std::string JobHosts::choose(const std::optional<base::WorldRule>& rule) {
  if (!elastic()) return "";
  const int most = left();
  int ranks = most;
  while (ranks >= min_ranks_ && rule && !rule->allows(ranks)) --ranks;
  if (ranks < min_ranks_ || ranks < 1) {
    std::string text = base::join(most, " of ", count(all_), " ranks are left, expected ");
    text += min_ranks_ >= most ? base::join("at least ", min_ranks_) : base::join("from ", min_ranks_, " to ", most);
    if (rule) {
      const auto fitting = rule->allowed(count(all_));
      text += base::join(" that the configuration allows: ", base::one_of(fitting), " would do");
      if (!fitting.empty() && fitting.front() <= most)
        text += base::join(". Hint: --min-ranks ", *std::prev(std::upper_bound(fitting.begin(), fitting.end(), most)));
    }
    return text;
  }
  if (static_cast<int>(left_.size()) < min_hosts_)
    return base::join(left_.size(), " of ", all_.size(), " hosts are left, expected at least ", min_hosts_);
  now_ = left_;
  for (int surplus = most - ranks; surplus > 0; --surplus) {
    now_.back().slots.pop_back();
    if (now_.back().slots.empty()) now_.pop_back();
  }
  return "";
}

}  // namespace zero::launch
