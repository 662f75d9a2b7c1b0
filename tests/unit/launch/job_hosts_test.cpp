// What a job leaves out after failures, and the number of ranks that it continues with.
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tools/launch/supervise/job_hosts.h"

namespace zero::launch::job_hosts_test {
namespace {

using base::WorldRule;

std::vector<LaunchHost> one_host(int slots) {
  LaunchHost host{"localhost", std::vector<int>(static_cast<std::size_t>(slots)), true};
  std::iota(host.slots.begin(), host.slots.end(), 0);
  return {host};
}

std::string shown(const std::vector<LaunchHost>& hosts) {
  std::string text;
  for (const LaunchHost& host : hosts) {
    text += (text.empty() ? "" : " ") + host.name + ":";
    for (const int slot : host.slots) text += std::to_string(slot);
  }
  return text;
}

HostFault died(int host, int slot) { return {{}, host, slot}; }
HostFault lost(int host) { return {{host}, host, 0}; }

TEST(JobHosts, ASlotThatDiesTwiceInARowIsLeftOut) {
  JobHosts hosts(one_host(4), 2, 1);
  EXPECT_EQ(hosts.leave_out(died(0, 2)), "");
  EXPECT_EQ(hosts.choose(std::nullopt), "");
  EXPECT_EQ(hosts.ranks(), 4);
  EXPECT_EQ(hosts.leave_out(died(0, 2)), "slot 2 died twice");
  EXPECT_EQ(hosts.choose(std::nullopt), "");
  EXPECT_EQ(shown(hosts.now()), "localhost:013");
  // The rank after it has its number now, and is another slot.
  EXPECT_EQ(hosts.leave_out(died(0, 2)), "");
  EXPECT_EQ(hosts.leave_out(died(0, 2)), "slot 3 died twice");
  EXPECT_EQ(hosts.choose(std::nullopt), "");
  EXPECT_EQ(shown(hosts.now()), "localhost:01");
}

TEST(JobHosts, DeathsOfOthersBetweenRestartTheCount) {
  JobHosts hosts(one_host(4), 1, 1);
  for (const int slot : {2, 1, 2, 1}) EXPECT_EQ(hosts.leave_out(died(0, slot)), "") << slot;
  EXPECT_EQ(hosts.leave_out(HostFault()), "") << "the network";
  EXPECT_EQ(hosts.leave_out(died(0, 1)), "");
  EXPECT_EQ(hosts.leave_out(died(0, 1)), "slot 1 died twice");
}

TEST(JobHosts, ALostHostIsLeftOutAtOnce) {
  JobHosts hosts({{"w0", {0, 1}, true}, {"w1", {0, 1}, false}, {"w2", {4, 6}, false}}, 1, 2);
  EXPECT_EQ(hosts.leave_out(lost(1)), "host w1 lost");
  EXPECT_EQ(hosts.choose(std::nullopt), "");
  EXPECT_EQ(shown(hosts.now()), "w0:01 w2:46");
  EXPECT_EQ(hosts.leave_out(died(1, 1)), "");
  EXPECT_EQ(hosts.leave_out(died(1, 1)), "slot 6 of w2 died twice");
  EXPECT_EQ(hosts.choose(std::nullopt), "");
  EXPECT_EQ(shown(hosts.now()), "w0:01 w2:4");
  EXPECT_EQ(hosts.leave_out(lost(1)), "host w2 lost");
  EXPECT_EQ(hosts.choose(std::nullopt), "1 of 3 hosts are left, expected at least 2");
}

TEST(JobHosts, ASpareSlotTakesTheNextPlace) {
  WorldRule rule;
  rule.batch_parts = 8;
  JobHosts hosts(one_host(4), 2, 1);
  (void)hosts.leave_out(died(0, 0));
  EXPECT_EQ(hosts.leave_out(died(0, 0)), "slot 0 died twice");
  EXPECT_EQ(hosts.choose(rule), "");
  EXPECT_EQ(shown(hosts.now()), "localhost:12") << "3 do not divide 8";
  EXPECT_EQ(hosts.left(), 3);
  (void)hosts.leave_out(died(0, 1));
  EXPECT_EQ(hosts.leave_out(died(0, 1)), "slot 2 died twice");
  EXPECT_EQ(hosts.choose(rule), "");
  EXPECT_EQ(shown(hosts.now()), "localhost:13");
}

TEST(JobHosts, SaysWhichNumbersWouldDo) {
  WorldRule rule;
  rule.batch_parts = 8;
  JobHosts hosts(one_host(4), 3, 1);
  (void)hosts.leave_out(died(0, 3));
  (void)hosts.leave_out(died(0, 3));
  EXPECT_EQ(hosts.choose(rule),
            "3 of 4 ranks are left, expected at least 3 that the configuration allows: 1, 2 or 4 would do. "
            "Hint: --min-ranks 2");
  EXPECT_EQ(hosts.ranks(), 4) << "now() stays";
  JobHosts few(one_host(2), 2, 1);
  (void)few.leave_out(died(0, 1));
  (void)few.leave_out(died(0, 1));
  EXPECT_EQ(few.choose(std::nullopt), "1 of 2 ranks are left, expected at least 2");
  rule.data_parallel = 4;
  EXPECT_EQ(hosts.choose(rule), "3 of 4 ranks are left, expected at least 3 that the configuration allows: 4 would do");
}

TEST(JobHosts, WithoutALeastNumberNothingIsLeftOut) {
  JobHosts hosts(one_host(3), 0, 1);
  EXPECT_FALSE(hosts.elastic());
  WorldRule rule;
  rule.batch_parts = 2;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(hosts.leave_out(died(0, 1)), "");
    EXPECT_EQ(hosts.choose(rule), "");
  }
  EXPECT_EQ(hosts.ranks(), 3);
}

// Any sequence of failures: what is chosen is what is left, in order and without repeats, and its number is the largest
// that is allowed.
TEST(JobHosts, RandomFailuresKeepTheRules) {
  std::mt19937 random(20261);
  for (int round = 0; round < 2000; ++round) {
    const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
    std::vector<LaunchHost> start;
    std::set<std::pair<std::string, int>> left;
    for (int h = 0, count = draw(1, 4); h < count; ++h) {
      start.push_back({"w" + std::to_string(h), {}, h == 0});
      for (int slot = 0, slots = draw(1, 4); slot < slots; ++slot) {
        start.back().slots.push_back(slot);
        left.emplace(start.back().name, slot);
      }
    }
    WorldRule rule;
    rule.batch_parts = draw(0, 12);
    rule.copy = rule.tensor = draw(1, 2);
    const int least = draw(1, 3);
    JobHosts hosts(start, least, 1);
    std::optional<std::pair<std::string, int>> previous;
    for (int failure = 0; failure < 12; ++failure) {
      const auto now = hosts.now();
      const int h = draw(0, static_cast<int>(now.size()) - 1);
      const LaunchHost& host = now[static_cast<std::size_t>(h)];
      const int s = draw(0, static_cast<int>(host.slots.size()) - 1);
      const std::pair which(host.name, host.slots[static_cast<std::size_t>(s)]);
      if (draw(0, 5) == 0) {
        (void)hosts.leave_out(lost(h));
        std::erase_if(left, [&](const auto& slot) { return slot.first == host.name; });
        previous.reset();
      } else {
        const bool again = previous == which;
        EXPECT_EQ(hosts.leave_out(died(h, s)).empty(), !again);
        if (again) left.erase(which);
        previous = again ? std::nullopt : std::optional(which);
      }
      int expected = static_cast<int>(left.size());
      while (expected > 0 && !rule.allows(expected)) --expected;
      const std::string problem = hosts.choose(rule);
      EXPECT_EQ(problem.empty(), expected >= least) << problem;
      if (!problem.empty()) break;
      EXPECT_EQ(hosts.ranks(), expected);
      std::vector<std::pair<std::string, int>> chosen;
      for (const LaunchHost& one : hosts.now())
        for (const int slot : one.slots) chosen.emplace_back(one.name, slot);
      const std::vector<std::pair<std::string, int>> first(left.begin(), std::next(left.begin(), expected));
      EXPECT_EQ(chosen, first);
    }
  }
}

TEST(WorldRule, CountsCopiesAndExperts) {
  EXPECT_EQ(WorldRule().allowed(4), (std::vector<std::int64_t>{1, 2, 3, 4}));
  WorldRule rule;
  rule.batch_parts = 6;
  rule.copy = 4;
  rule.tensor = 2;
  EXPECT_EQ(rule.allowed(24), (std::vector<std::int64_t>{4, 8, 12, 24}));
  rule.experts = 4;
  EXPECT_EQ(rule.allowed(24), (std::vector<std::int64_t>{8, 24}));
  EXPECT_EQ(base::one_of(rule.allowed(24)), "8 or 24");
  EXPECT_EQ(base::one_of({}), "none");
  EXPECT_EQ(base::one_of({1, 2, 4}), "1, 2 or 4");
}

}  // namespace
}  // namespace zero::launch::job_hosts_test
