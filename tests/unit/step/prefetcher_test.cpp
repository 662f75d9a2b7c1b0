// The prefetcher's calls to its units, use by use, compared with an order written by hand.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "step/prefetcher.h"

namespace zero::step::prefetcher_test {
namespace {

struct Noted final : Unshardable {
  Noted(std::string its_name, std::int64_t its_numel, bool is_root, std::string& its_log)
      : label(std::move(its_name)), numel(its_numel), at_root(is_root), log(its_log) {}
  const std::string& name() const override { return label; }
  int module() const override { return of_module; }
  bool root() const override { return at_root; }
  std::int64_t padded_numel() const override { return numel; }
  std::int64_t whole_bytes() const override { return 4 * numel; }
  bool rests_sharded() const override { return true; }
  bool rests_in_file() const override { return false; }
  bool symmetric() const override { return false; }
  Residency residency() const override { return now; }
  void begin_fetch() override {}
  void cancel_fetch() override {}
  void begin_unshard() override {
    now = Residency::Unsharding;
    log += " +" + label;
  }
  void finish_unshard() override {
    if (now == Residency::Unsharded) return;
    log += (now == Residency::Sharded ? " !" : " =") + label;  // waited for: from the start, or its rest
    now = Residency::Unsharded;
  }
  void unshard_copy() override { finish_unshard(); }
  void reshard() override {
    if (now == Residency::Sharded) return;
    now = Residency::Sharded;
    log += " -" + label;
  }

  const std::string label;
  const std::int64_t numel;
  const bool at_root;
  std::string& log;
  Residency now = Residency::Sharded;
  int of_module = -1;
};

class Prefetching : public ::testing::Test {
 protected:
  // a, b and c in a row, and the root r around them.
  // modules: of a, b and c.
  void make(const Prefetcher::Policy& policy, const std::vector<int>& modules = {-1, -1, -1}) {
    units_.clear();
    std::vector<Unshardable*> all;
    for (const char* name : {"r", "a", "b", "c"}) {
      units_.push_back(std::make_unique<Noted>(name, 100, *name == 'r', log_));
      if (*name != 'r') units_.back()->of_module = modules[static_cast<std::size_t>(*name - 'a')];
      all.push_back(units_.back().get());
    }
    prefetcher_ = std::make_unique<Prefetcher>(all, policy, [](const std::string&) {});
  }
  // The events since the last call.
  std::string use(int unit) {
    log_.clear();
    prefetcher_->use(&unit, 1, /*training=*/true);
    return log_;
  }
  void pass() {
    for (const int unit : {0, 1, 2, 3}) use(unit);
    prefetcher_->begin_backward();
    for (const int unit : {3, 2, 1}) use(unit);
    prefetcher_->end_pass();
  }

  std::string log_;
  std::vector<std::unique_ptr<Noted>> units_;
  std::unique_ptr<Prefetcher> prefetcher_;
};

// Operators read a and b in turn, then c and back.
TEST_F(Prefetching, GroupsOfOneModuleAreGatheredAndReleasedTogether) {
  make({.ahead = 1000, .max_live = 1000, .max_reuse = 0}, {7, 7, -1});
  const auto forward = [&] {
    std::string all;
    for (const int unit : {1, 2, 1, 2, 3}) all += "|" + use(unit);
    return all;
  };
  EXPECT_EQ(forward(), "| !a +b| =b||| -a -b !c");
  prefetcher_->begin_backward();
  log_.clear();
  std::string back;
  for (const int unit : {3, 2, 1, 2}) back += "|" + use(unit);
  EXPECT_EQ(back, "| !c| -c !b +a| =a|");
  prefetcher_->end_pass();
  EXPECT_EQ(forward(), "| !a +b +c| =b||| -a -b =c");
}

TEST_F(Prefetching, TheFirstPassGathersOnUseAndReleasesBehind) {
  make({.ahead = 1000, .max_live = 1000, .max_reuse = 0});
  EXPECT_EQ(use(0), " !r");
  EXPECT_EQ(use(1), " !a");
  EXPECT_EQ(use(2), " -a !b");
  EXPECT_EQ(use(2), "");
  EXPECT_EQ(use(3), " -b !c");
  log_.clear();
  prefetcher_->begin_backward();
  EXPECT_EQ(log_, " -r -c");
}

TEST_F(Prefetching, ALearnedPassHasTheNextOneUnderWay) {
  make({.ahead = 1000, .max_live = 1000, .max_reuse = 0});
  pass();
  EXPECT_EQ(use(0), " !r +a");
  EXPECT_EQ(use(1), " =a +b");
  EXPECT_EQ(use(2), " -a =b +c");
  EXPECT_EQ(use(3), " -b =c");
  prefetcher_->begin_backward();
  EXPECT_EQ(use(3), " !c +b");
  EXPECT_EQ(use(2), " -c =b +a");
  EXPECT_EQ(use(1), " -b =a");
  EXPECT_EQ(prefetcher_->divergences(), 0);
}

TEST_F(Prefetching, AheadAndLiveAreLimits) {
  make({.ahead = 99, .max_live = 1000, .max_reuse = 0});
  pass();
  EXPECT_EQ(use(0), " !r") << "larger than what may be unsharded ahead";
  make({.ahead = 1000, .max_live = 299, .max_reuse = 0});
  pass();
  EXPECT_EQ(use(0), " !r +a");
  EXPECT_EQ(use(1), " =a") << "the third at once would be above the limit";
}

TEST_F(Prefetching, WhatIsUsedAgainSoonStays) {
  make({.ahead = 0, .max_live = 1000, .max_reuse = 100});
  pass();
  use(0);
  use(1);
  EXPECT_EQ(use(2), " -a !b");
  EXPECT_EQ(use(3), " !c") << "b comes again after c alone";
}

TEST_F(Prefetching, AnotherOrderIsLearned) {
  make({.ahead = 1000, .max_live = 1000, .max_reuse = 0});
  pass();
  use(0);
  EXPECT_EQ(use(2), " -a !b +c") << "a was under way for nothing";
  EXPECT_EQ(prefetcher_->divergences(), 1);
}

}  // namespace
}  // namespace zero::step::prefetcher_test
