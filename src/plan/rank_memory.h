// The memory of one rank through steps of training, without tensors: what an Engine would hold, book and give back, in
// the order in which it would, so that peaks come out and not only sums. The decisions about gathering are the engine's
// own code (memory/prefetcher.h); the pools and the bookings follow BufferPool, BlockPool, ParamGroup and StagedUpdate,
// and tests/parity/plan_agreement_test.cpp compares every byte with Engine::memory(). What a model allocates and which
// parameters it reads is told by a pass over it (model_pass.h). What moves meanwhile is counted; times are not known
// here.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <zero/memory_report.h>

#include "plan/pass_sink.h"
#include "plan/rank_rules.h"
#include "plan/units.h"

namespace zero::planning {

class RankMemory;

// Bytes that are booked from its making to its end.
class Block final : public PassTensor {
 public:
  Block(RankMemory& memory, std::int64_t bytes, bool pooled) : memory_(memory), bytes_(bytes), pooled_(pooled) {}
  ~Block() override;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::int64_t bytes() const { return bytes_; }
  bool pooled() const { return pooled_; }  // in memory that other ranks read

 private:
  friend class RankMemory;
  RankMemory& memory_;
  std::int64_t bytes_;
  bool pooled_;
};

// Bytes that moved: sent to other ranks; over a GPU's host link; of files. And elements that were updated, all of them
// and those whose states rest elsewhere than on the device.
struct Moved {
  std::int64_t gathered = 0, reduced = 0, collectives = 0, to_host = 0, from_host = 0, read = 0, written = 0;
  std::int64_t updated = 0, updated_on_host = 0;
  void add(const Moved& other, std::int64_t times = 1) {
    for (const auto field : {&Moved::gathered, &Moved::reduced, &Moved::collectives, &Moved::to_host, &Moved::from_host,
                             &Moved::read, &Moved::written, &Moved::updated, &Moved::updated_on_host})
      this->*field += times * other.*field;
  }
};

class RankMemory final : public PassSink {
 public:
  // `units` and the settings of `rules` outlive this. buffer_bytes: of the model's buffers. Everything that rests is
  // booked, where the budgets `memory` put it even if it does not fit there.
  RankMemory(const RankRules& rules, const std::vector<Unit>& units, std::int64_t buffer_bytes = 0);
  ~RankMemory() override;

  // --- what a pass over the model does ---
  Tensor make(std::int64_t bytes) override;
  // What waits for backward leaves the device, for host memory or a file, and comes back.
  void put_away(Tier tier, std::int64_t bytes) override;
  void bring_back(Tier tier, std::int64_t bytes) override;
  // An operator reads these parameters (indices into what the units were cut from).
  using PassSink::use;
  void use(std::span<const std::size_t> parameters) override;
  void begin_backward() override;
  // Autograd hands over a gradient, which is in no other hands.
  void gradient(std::size_t parameter, Tensor gradient) override;
  void end_backward() override;
  // After accumulation micro-batches.
  void step();
  // Idle buffers are freed and peaks begin anew, as Engine::reset_peak_memory().
  void reset_peak();

  MemoryReport report() const;
  // Since the last call.
  Moved take_moved() { return std::exchange(moved_, {}); }
  // The highest need of a tier beside the budget of the configuration; at most 1 where the engine would start and go
  // on.
  double most_of_budgets() const;
  // What it would say where it does not; empty: it goes on.
  std::string refusal() const;
  bool on_gpu() const override { return rules_.around.gpu; }

 private:
  friend class Block;
  struct Group;
  struct Pool;    // BufferPool
  struct Blocks;  // BlockPool
  using Purpose = MemoryReport::Purpose;

  void book(Tier tier, Purpose purpose, std::int64_t bytes);
  void rebook(Purpose from, Purpose to, std::int64_t bytes);  // on the device
  void free(Block& block);
  void book_resting(Group& group);
  void book_update_tiles();
  void reduce_ready_groups();
  void finish_reductions(std::size_t most_in_flight);
  using Booked = std::shared_ptr<Block>;
  Booked readable(const Booked& gradient, std::int64_t numel);
  void begin_reduce(Group& group);
  void finish_reduce(Group& group);
  void count_update(const Group& group);
  void drop_gradients(Group& group);
  void drop_gradients();

  const RankRules rules_;
  const Arrangement arrangement_;
  Moved moved_;
  std::int64_t now_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_total_[MemoryReport::kTiers] = {};
  std::unique_ptr<Pool> gathers_, reductions_;
  std::unique_ptr<Blocks> blocks_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::pair<std::size_t, std::size_t>> member_of_;  // of a parameter: group, index in it
  std::unique_ptr<memory::Prefetcher> gathering_;
  std::vector<Group*> reduce_order_, in_flight_;
  std::size_t reduce_next_ = 0;
  std::int64_t micro_step_ = 0;
  int away_ = 0;                                  // checkpoints in a file
  std::int64_t away_bytes_ = 0, file_bytes_ = 0;  // of them; of the file
  bool first_ = true, boundary_ = true, in_backward_ = false;
};

}  // namespace zero::planning
