// The walk of a forecast through the steps of a run: for every unit what ParamGroup would do with it, in the order in
// which State, Prefetcher and StagedUpdate ask for it. Facts go in, events come out; what they add up to, and what is
// printed, is schedule.h's and its callers'.
#pragma once
#include <memory>
#include <vector>

#include "memory/prefetcher.h"
#include "plan/schedule.h"

namespace zero::planning {

struct Facts {
  const config::Settings& settings;
  Surroundings around;
  std::int64_t accumulation = 1;
  int parameter_width = 4, gradient_width = 4, wire_width = 4, num_slots = 2;  // bytes an element; moments
  bool in_place = false;          // ranks read each other's memory
  bool reads_gradients = false;   // and each other's gradients, where backward left them
  bool direct_gradients = false;  // autograd's own are the kept ones
  bool overlap = false;           // a reduction goes on while backward does
  int trainable_bits = 0, frozen_bits = 0, gradient_bits = 0;  // of integers on their way; 0: as they are
  int neighbours = 0;             // ranks that keep second shards together; 0: none
  memory::Movable movable = {};
};

class Run {
 public:
  Run(const Facts& facts, const std::vector<Unit>& units, const Pass& pass);
  ~Run();

  void build();
  void step(std::int64_t number, bool overflow);
  std::vector<Event> take_events() { return std::move(events_); }
  std::vector<Holding> holdings() const;

 private:
  struct Group;
  struct Segment {
    Tier tier;
    std::int64_t numel;
    bool aliases_master;
  };
  void place();
  void keep_budgets();
  std::int64_t slots_of_update() const;
  std::vector<Segment> segments(const Group& group) const;
  bool delays(std::int64_t step) const;
  void micro_step(bool boundary, bool reads_ahead);
  void use(const std::vector<std::size_t>& parameters);
  void begin_reduce(Group& group, bool boundary);
  void finish_reduce(Group& group, bool boundary);
  void update(bool late);
  bool travels(const Group& group, const Segment& segment) const;
  void list_tiles();
  void fetch_tiles(std::size_t end);
  void update_tiles(Group& group, const Segment& segment, bool late);
  void adopt_late();
  void publish(Group& group);
  Event& emit(const Group& group, What what, How how, const char* purpose, Tier from, Tier to, std::int64_t bytes);
  std::int64_t share(std::int64_t bytes) const;  // that one rank sends of a vector of all

  const Facts facts_;
  const config::ZeroSettings& zero_;
  const std::vector<Unit>& units_;
  const Pass& pass_;
  bool delayed_ = false;
  std::int64_t tile_numel_ = 1;
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
