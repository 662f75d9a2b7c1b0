// The ranges of a group that the optimizer updates: by parameter group, without frozen members, and by the number of
// updates that a member has missed; on request by member.
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
  // Consecutive elements that one optimizer call can update.
  struct Run {
    std::int64_t begin, numel;  // within the owned range
    int parameter_group;        // or kFrozen
    std::int64_t missed_steps;
    std::size_t member;  // the first element's, and its position in it
    std::int64_t member_begin;
  };

  // by_member: a run has elements of one member only.
  explicit UpdateRuns(std::vector<int> parameter_groups, bool by_member)
      : parameter_groups_(std::move(parameter_groups)),
        missed_steps_(parameter_groups_.size()),
        by_member_(by_member) {}

  // Recomputes the ranges from the members that are active.
  void cut(const sharding::ShardLayout& layout, std::int64_t begin, std::int64_t numel,
           const MemberGradients& members) {
    runs_.clear();
    for (const auto& piece : layout.pieces(begin, numel)) {
      const auto i = piece.parameter;
      const int group = group_of(i, members);
      const auto end = piece.range_begin + piece.numel;
      if (!by_member_ && !runs_.empty() && runs_.back().parameter_group == group &&
          runs_.back().missed_steps == missed_steps_[i])
        runs_.back().numel = end - runs_.back().begin;  // includes the padding in between, which stays zero
      else
        runs_.push_back({piece.range_begin, piece.numel, group, missed_steps_[i], i, piece.parameter_begin});
    }
  }
  const std::vector<Run>& runs() const { return runs_; }
  int group_of(std::size_t i, const MemberGradients& members) const {
    return members.active(i) ? parameter_groups_[i] : kFrozen;
  }

  // Updates so far without this member.
  const std::vector<std::int64_t>& missed_steps() const { return missed_steps_; }
  void set_missed_steps(std::vector<std::int64_t> missed) { missed_steps_ = std::move(missed); }
  // Call after an update.
  void count(const MemberGradients& members) {
    for (std::size_t i = 0; i < missed_steps_.size(); ++i) missed_steps_[i] += !members.active(i);
  }

 private:
  std::vector<Run> runs_;
  std::vector<int> parameter_groups_;
  std::vector<std::int64_t> missed_steps_;  // by member
  bool by_member_;
};

}  // namespace zero::engine
