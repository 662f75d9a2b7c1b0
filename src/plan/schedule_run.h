// The walk of a forecast through the steps of a run: for every unit what ParamGroup would do with it, in the order in
// which State, Prefetcher and StagedUpdate ask for it. Rules go in, events come out; what they add up to, and what is
// printed, is schedule.h's and its callers'.
#pragma once
#include <memory>
#include <vector>

#include "plan/schedule.h"

namespace zero::planning {

class Run {
 public:
  // Throws ConfigError (kOutOfMemory) for budgets that cannot be kept.
  Run(const RankRules& rules, const std::vector<Unit>& units, const Pass& pass);
  ~Run();

  void build();
  void step(std::int64_t number, bool overflow);
  std::vector<Event> take_events() { return std::move(events_); }
  std::vector<Holding> holdings() const;

 private:
  struct Group;
  using Segment = PlacedUnit::Segment;
  bool delays(std::int64_t step) const;
  void micro_step(bool boundary, bool reads_ahead);
  void use(const std::vector<std::size_t>& parameters);
  void begin_reduce(Group& group, bool boundary);
  void finish_reduce(Group& group, bool boundary);
  void update(bool late);
  void list_tiles();
  void fetch_tiles(std::size_t end);
  void update_tiles(Group& group, const Segment& segment, bool late);
  void adopt_late();
  void publish(Group& group);
  Event& emit(const Group& group, What what, How how, const char* purpose, Tier from, Tier to, std::int64_t bytes);

  const RankRules rules_;
  const Arrangement arrangement_;
  const config::ZeroSettings& zero_;
  const std::vector<Unit>& units_;
  const Pass& pass_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::size_t> group_of_;      // of a parameter
  std::vector<std::size_t> ready_after_;   // operator of backward, by group
  std::vector<std::size_t> reduce_order_;
  std::unique_ptr<memory::Prefetcher> prefetcher_;
  std::vector<Event> events_;
  int step_ = 0, micro_ = 0;
  Phase phase_ = Phase::Build;
  bool pending_ = false;
  struct Tile {  // of an update through host memory
    Group* group;
    std::int64_t numel;
    bool in_file;
  };
  std::vector<Tile> tiles_;       // in the order of groups
  std::size_t slots_ = 0;         // of them at once
  std::size_t fetched_ = 0, next_tile_ = 0;  // whose read has begun; that is updated next
};

}  // namespace zero::planning
