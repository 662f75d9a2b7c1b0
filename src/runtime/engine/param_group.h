// The parameters of one unit: what of them rests on this rank, and how it is gathered, reduced,
// updated and published. The stage decides which of the flat vectors are whole and which are a
// shard; nothing else differs between stages.
//
//   state        holds beside what rests
//   Sharded      nothing                          (stage 3 in a world of several ranks, or with offloaded parameters)
//   Fetching     the shard on its way from a file (within Sharded)
//   Gathering    a gather buffer being filled
//   Gathered     a gather buffer that the parameters alias; below stage 3 the resting vector; where the
//                ranks share memory nothing: the parameters alias the shards of all ranks
//   Reducing     a reduce buffer in flight (gradient side, independent of the above)
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/symmetric_buffer.h"
#include "engine/group_context.h"
#include "engine/member_gradients.h"
#include "engine/shard_gather.h"
#include "engine/units.h"
#include "engine/update_runs.h"
#include "sharding/shard_layout.h"
#include "step/prefetcher.h"

namespace zero::engine {

class ParamGroup final : public step::GatherUnit {
 public:
  // Allocates what rests. `members` keep their tensors; adopt() moves their values in.
  ParamGroup(const GroupContext& context, const Unit& unit, std::vector<ModelParameter> members,
             const std::vector<int>& parameter_groups);
  ~ParamGroup() override;
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  // Takes the members' values (rank 0's when `broadcast`), and points their storages here. Returns a hash of the
  // values.
  std::uint64_t adopt(bool broadcast);
  // Leaves the members usable (below stage 3) or guarded with a text after the Engine is gone.
  void abandon();

  const std::string& name() const override { return name_; }
  bool root() const override { return root_; }
  bool trainable() const { return trainable_; }
  // A group that was taken frozen gets masters of the values it computes with, and fresh moments. Without an effect
  // when it, or `then`, throws (ConfigError: a budget, a file without room for them).
  void become_trainable(const std::function<void()>& then);
  const sharding::ShardLayout& layout() const { return layout_; }
  const std::vector<ModelParameter>& members() const { return members_; }
  const c10::Storage& storage(std::size_t i) const { return storages_[i]; }

  // --- parameters ---
  std::int64_t padded_numel() const override { return layout_.padded_numel(); }
  bool rests_sharded() const override { return sharded_; }
  bool rests_in_file() const override { return parameters_.in_file(); }
  bool gathers_in_place() const override { return shared_ != nullptr; }
  Residency residency() const override { return residency_; }
  void begin_fetch() override;
  void cancel_fetch() override;
  std::int64_t gathered_bytes() const;  // of the whole flat vector
  void begin_gather() override { begin_gather(/*exact=*/false); }
  void finish_gather() override;
  void gather_copy() override;
  void release() override;
  at::Tensor whole() const;  // flat; gathered only
  // Rank 0's values of the (gathered, modified) parameters become everybody's.
  void write_back();

  // --- gradients of one pass: a backward ---
  MemberGradients& autograd() { return autograd_; }
  const MemberGradients& autograd() const { return autograd_; }
  void choose_active();  // of autograd(), and what the optimizer updates with it
  // first: of a step. boundary: the step's last. keeps_graph: MemberGradients::begin_pass().
  void begin_pass(bool first, bool boundary, bool keeps_graph);
  // Takes member i's .grad. True when it was the last one awaited.
  bool take_gradient(std::size_t i);
  // Counts members without a gradient as zero; the names of those that were awaited.
  std::vector<std::string> flush_missing();
  void copy_sums(), forget_sums();  // of what passes have added up, for Back::ToCopy
  // Ends a pass in its middle, with what it took, and goes back to before it, or to the copy, or to nothing added up.
  enum class Back { ToBefore, ToCopy, ToNothing };
  void discard(Back back);
  bool all_taken() const { return awaited_ == 0; }
  void begin_reduce();
  void finish_reduce();
  bool reduced() const { return !reduce_work_ || reduce_work_->done(); }  // finish_reduce() would not wait
  void close_accumulation();      // the program ended the step after its last micro-batch: reduces what was accumulated
  double sum_of_squares() const;  // of this rank's part of the reduced gradient, after the boundary's finish_reduce()
  // Name of the first member with a non-finite value in this rank's part, or empty.
  std::string find_non_finite() const;
  // What of member i's reduced gradient is in this rank's shard: from which element of the member on, and flat.
  std::pair<std::int64_t, at::Tensor> own_gradient(std::size_t i) const;

  // --- optimizer ---
  const std::vector<std::int64_t>& missed_steps() const { return runs_.missed_steps(); }
  void set_missed_steps(std::vector<std::int64_t> missed);
  // Where a range of the states lies while it is updated. parameter: of the compute copy; null: the master is it.
  struct UpdatePlace {
    float* master;
    float* slots[2];
    void* parameter;
    bool travels;  // parameter is not where the compute copy rests: all of it has to be written
  };
  // Updates elements [begin, begin + numel) of the owned range.
  void update(optim::ShardedOptimizer& optimizer, float factor, std::int64_t begin, std::int64_t numel,
              const UpdatePlace& place);
  // The same for a segment whose states, and the compute copy, are in the memory that the update runs on.
  void update(optim::ShardedOptimizer& optimizer, float factor, const GroupStates::Segment& segment, bool to_next);
  // What was reduced is what the next update, which counts, reads while the next gradients are made.
  void hand_over_gradients();
  // For updates beside training: the compute copy of the owned range, from an element on, that is not in use yet.
  void* next_parameters(std::int64_t begin) const;
  void adopt_next();  // it comes into use
  // All of the owned range was updated, and written where it rests.
  void tell_changed();
  void begin_publish(), finish_publish();
  void refresh_parameters();  // compute copy = round(master) over the owned range; told to the ranks

  // This rank's shard of a state (GroupStates), fp32, shard_numel elements.
  at::Tensor state_shard(int state) const;
  // What rests here: the shard, or everything at stage 0. begin is its place in the flat vector.
  struct Owned {
    std::int64_t begin, numel;
  };
  Owned owned() const { return owned_; }
  GroupStates& states() { return states_; }
  const GroupStates& states() const { return states_; }
  // The resting compute-dtype vector: whole below stage 3, the shard at stage 3.
  engine::ShardStore& parameters() { return parameters_; }
  const engine::ShardStore& parameters() const { return parameters_; }
  // First element of the owned range in that vector.
  std::int64_t parameters_begin() const { return sharded_ ? 0 : owned_.begin; }

 private:
  at::Tensor allocate(std::int64_t numel, at::ScalarType dtype) const;
  at::Tensor book(at::Tensor tensor, step::Tier tier, step::Purpose purpose);
  void book_bytes(std::int64_t bytes, step::Tier tier, step::Purpose purpose);
  using Bytes = std::array<std::array<std::int64_t, MemoryReport::kPurposes>, MemoryReport::kTiers>;
  void cancel_bookings(const Bytes& left);
  void make_parameters(), make_states(), make_next();
  int gather_bits() const { return (trainable_ ? context_.quantize_trainable : context_.quantize_frozen) ? 8 : 0; }
  at::Tensor own_part(const at::Tensor&whole) const, own_shard(const at::Tensor&kept) const;
  void begin_gather(bool exact);
  at::Tensor shard_to_gather();
  void drop_fetched(), point_members_into(const at::Tensor&flat);
  void begin_reduce_scattered(), wait_for_gather(), wait_for_reduction();
  void read_in_place(), become_whole();
  std::int64_t reduced_bytes() const;
  void take_squares(), offload_gradients();
  void add_squares(std::int64_t begin, std::int64_t end), take_zeros(std::size_t i);
  at::Tensor& reduce_input();
  void cut_runs() { runs_.cut(layout_, owned_.begin, owned_.numel, autograd_); }
  kernels::Dtype compute_dtype() const { return dtype_of(context_.recipe.parameter); }

  GroupContext context_;
  std::string name_;
  bool root_, trainable_, sharded_;
  std::vector<ModelParameter> members_;
  std::vector<c10::Storage> storages_;  // the members', for life: one that a program puts in its place is not touched
  sharding::ShardLayout layout_;
  Owned owned_{};
  std::int64_t shard_begin_;  // of this rank's shard in the flat vector

  engine::ShardStore parameters_;
  GroupStates states_;
  at::Tensor gradients_, copied_gradients_;
  step::Tier gradients_tier_ = step::Tier::Device;
  at::Tensor offloaded_gradients_;  // the reduced shard in host memory, where gradients are kept elsewhere before
  at::Tensor pending_gradients_, next_parameters_;  // of delayed updates, in host memory
  Bytes booked_{};

  Residency residency_ = Residency::Gathered;
  std::shared_ptr<comm::SharedVector> shared_;  // of which parameters_ is the shard
  std::optional<ShardGather> from_shards_;      // where they are not read in place
  at::Tensor gathered_;
  storage::IoBuffer fetched_;  // the shard, from its file
  std::shared_ptr<Work> fetch_work_, gather_work_, publish_work_;
  gpu::Mark gathered_mark_, reduced_mark_;  // of the side streams
  observe::TraceOperation fetch_trace_, gather_trace_, whole_trace_, publish_trace_, reduce_trace_;

  MemberGradients autograd_;
  bool first_ = true, boundary_ = true;
  std::vector<char> taken_;
  std::size_t awaited_ = 0;
  at::Tensor reduce_input_, reduce_output_;
  std::vector<at::Tensor> scattered_;  // stages 2 and 3 with `blocks`: the members' gradients on their way
  std::shared_ptr<Work> reduce_work_;
  double sum_of_squares_ = 0;
  int first_sum_ = 0, num_sums_ = 0;  // in context_.sums: of the members' or of the flat gradient
  bool squared_ = false;              // while the reduction went on
  UpdateRuns runs_;
};

}  // namespace zero::engine
