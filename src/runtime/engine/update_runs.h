// What the optimizer updates of a group, and how: the parameter group of each member, those that are frozen for now,
// and for how many updates they have been.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/member_gradients.h"
#include "sharding/shard_layout.h"

namespace zero::engine {

class UpdateRuns {
 public:
  static constexpr int kFrozen = -1;
  // Elements that one call of the optimizer may update together.
  struct Run {
    std::int64_t begin, numel;  // within the owned range
    int parameter_group;        // or kFrozen
    std::int64_t missed_steps;
  };

  explicit UpdateRuns(std::vector<int> parameter_groups)
      : parameter_groups_(std::move(parameter_groups)), missed_steps_(parameter_groups_.size()) {}

  // Cuts the owned range anew, by what is active.
  void cut(const sharding::ShardLayout& layout, std::int64_t begin, std::int64_t numel,
           const MemberGradients& members) {
    runs_.clear();
    for (const auto& piece : layout.pieces(begin, numel)) {
      const auto i = piece.parameter;
      const int group = group_of(i, members);
      const auto end = piece.range_begin + piece.numel;
      if (!runs_.empty() && runs_.back().parameter_group == group && runs_.back().missed_steps == missed_steps_[i])
        runs_.back().numel = end - runs_.back().begin;  // the padding between is zero and stays zero
      else
        runs_.push_back({piece.range_begin, piece.numel, group, missed_steps_[i]});
    }
  }
  const std::vector<Run>& runs() const { return runs_; }
  int group_of(std::size_t i, const MemberGradients& members) const {
    return members.active(i) ? parameter_groups_[i] : kFrozen;
  }

  // Updates so far that left a member out.
  const std::vector<std::int64_t>& missed_steps() const { return missed_steps_; }
  void set_missed_steps(std::vector<std::int64_t> missed) { missed_steps_ = std::move(missed); }
  // An update was made.
  void count(const MemberGradients& members) {
    for (std::size_t i = 0; i < missed_steps_.size(); ++i) missed_steps_[i] += !members.active(i);
  }

 private:
  std::vector<Run> runs_;
  std::vector<int> parameter_groups_;
  std::vector<std::int64_t> missed_steps_;  // by member
};

}  // namespace zero::engine
