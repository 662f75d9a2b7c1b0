// What an Engine is made of: the model's parameters in groups, the collectives between ranks, the optimizer. Engine
// (include/zero/engine.h) is the public face of exactly one State; checkpoints read and fill it through StatePiece.
// Files on disk are not known here.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <zero/engine.h>

#include "activations/activation_store.h"
#include "engine/background.h"
#include "engine/error_relay.h"
#include "engine/state_piece.h"
#include "engine/step_trace.h"
#include "engine/tier_plan.h"
#include "observe/status_page.h"
#include "optim/loss_scaler.h"
#include "step/prefetcher.h"
#include "torch_hooks/allocation_observer.h"
#include "torch_hooks/interception.h"
#include "torch_hooks/normal_mode.h"

namespace zero::engine {

class State final : public torch_hooks::UseListener {
 public:
  State(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm);
  ~State() override;

  void backward(const at::Tensor& loss, const BackwardOptions& options);
  StepResult step();
  std::int64_t discard_micro_batch();
  // An update that is still on its way is finished. Collective, between steps.
  void flush();
  bool at_boundary() const;
  MemoryReport memory() const;
  void reset_peak_memory();

  void begin_gathered(bool modify);
  void end_gathered(bool modify);
  std::map<std::string, at::Tensor> full_state_dict();
  std::string state_hash();
  at::Tensor gradient(const std::string& name);
  OwnGradient own_gradient(const std::string& name);

  // Collective, between steps (state_trace.cpp).
  void start_trace(const std::string& file, TraceSteps steps);
  TraceSummary stop_trace();
  StepTimes step_times() const { return trace_.times(); }
  observe::Trace& trace() { return trace_.trace(); }
  // --- for checkpoints ---
  // What this rank writes: over all ranks every element of every state once; buffers whole by every rank.
  std::vector<StatePiece> pieces_to_save();
  // What this rank must fill to go on: its shards, or everything at stage 0. All ranks must have met between their last
  // forward and the first write, since a shard may be read in place.
  std::vector<StatePiece> pieces_to_load();
  // Before the pieces are filled: an update on its way is dropped, nothing is read ahead.
  void begin_replacing();
  // Groups taken frozen of which a parameter requires grad by now can be trained from now on, once the ranks have
  // compared which (collective; ConfigError on all when they differ).
  void compare_unfrozen(const char* where);
  void admit_unfrozen();
  // After the pieces were filled: compute copies from masters, published over ranks.
  void adopt_loaded();
  // Names tied to another: alias -> owner.
  std::map<std::string, std::string> aliases() const;
  using Counters = StateCounters;
  Counters counters() const;
  void set_counters(const Counters& counters);
  // Throw ConfigError: between accumulation boundaries; inside a scope that modifies, or inside any (reading_too).
  void require_boundary(const char* where);
  void require_no_scope(const char* where, bool reading_too) const;
  const Options& options() const { return options_; }
  const config::Settings& settings() const { return settings_; }
  Communicator& communicator() const { return *communicator_; }
  comm::Group& comm() const { return *comm_; }
  const std::shared_ptr<torch::nn::Module>& model() const { return model_; }
  const Recipe& recipe() const { return recipe_; }
  optim::ShardedOptimizer& optimizer() { return *optimizer_; }
  const std::vector<std::unique_ptr<ParamGroup>>& groups() const { return groups_; }
  std::int64_t accumulation_steps() const { return accumulation_; }
  std::int64_t micro_batch_size() const { return micro_batch_; }
  std::int64_t global_steps() const { return global_steps_; }
  std::int64_t skipped_steps() const { return skipped_steps_; }
  double loss_scale() const { return scaler_->scale(); }
  std::int64_t micro_batches() const { return micro_step_; }
  double lr(int group) const;
  void set_lr(int group, double lr);
  std::string user_state;
  ErrorRelay& relay() { return relay_; }

 private:
  struct Member {  // of the flat list of all parameters, whose index is the interception's tag
    int group;
    std::size_t index;
  };
  // construction (state_build.cpp)
  void check_second_shards() const;
  void use_slow_links(GroupContext& context);
  void arrange_tiers(const std::vector<ModelParameter>& parameters, const std::vector<Unit>& units);
  void take_device(const std::vector<ModelParameter>& parameters);
  void check_agreement(const std::vector<ModelParameter>& parameters, const std::vector<Unit>& units);
  void adopt_values(), adopt_buffers();
  void attach(), order_reductions(), make_update();
  void detach() noexcept;
  void keep_activations();
  // interception
  void begin_forward(), end_activations() const;
  void before_use(const int* tags, int count, const char* op) override;
  void after_use(const int* tags, int count) noexcept override;
  bool before_write(int tag, const char* op) override;
  void check_parameters(const char* where) const;
  void require_usable(const char* where);
  // backward (state_backward.cpp)
  void check_backward(const at::Tensor& loss, const BackwardOptions& options);
  void run_pass(const at::Tensor& loss, const BackwardOptions& options);
  void run_autograd(const at::Tensor& loss, const BackwardOptions& options);
  std::vector<std::string> reduced_names() const;
  std::string unfrozen_units() const;
  void note_unused(bool check), choose_active();
  void close_micro_batch(), begin_accumulation(), copy_sums(), forget_sums();
  void on_gradient(int group, std::size_t member);
  void reduce_ready_groups(), finish_reductions(std::size_t most_in_flight);
  void give_pass_up(const std::string& error) noexcept;
  void drop_micro_batch();
  std::pair<const ParamGroup*, std::size_t> reduced_member(const char* what, const std::string& name);
  // update
  std::uint64_t hash_of_choices() const;
  double norm_and_overflow(bool* overflow);
  void fail_numerically(std::int64_t in_a_row);
  // state_delayed.cpp
  bool delays() const;
  void apply(float factor, bool late);
  bool finish_update();
  void publish(ParamGroup& group);
  void publish_within(std::int64_t numel);
  std::string where(const char* what) const;
  void begin_trace(const std::string& file, TraceSteps steps);
  void start_trace_of_environment(), end_trace() noexcept;
  void count_bytes() {
    if (trace_.recording()) count_bytes_on();
  }
  void count_bytes_on();
  std::vector<StatePiece> pieces(bool to_save);

  std::shared_ptr<torch::nn::Module> model_;
  Options options_;
  const config::Settings& settings_;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<comm::Group> comm_, neighbours_;  // neighbours_: who keep second shards (hpZ), or null
  ErrorRelay relay_;
  int stage_;
  std::int64_t accumulation_ = 1, micro_batch_ = 1;
  Recipe recipe_;
  at::Device device_ = at::kCPU;  // of the parameters and all that rests
  // Shared with blocks of memory that outlive this State.
  std::shared_ptr<step::MemoryLedger> ledger_ = std::make_shared<step::MemoryLedger>();
  std::unique_ptr<engine::TensorPool> gather_pool_, reduce_pool_;
  std::shared_ptr<engine::BlockPool> blocks_;  // of gradients that ranks read in place; shared with late blocks
  std::unique_ptr<DeviceSums> sums_;           // null where square sums are taken at once
  std::unique_ptr<gpu::SideStream> gather_stream_, reduce_stream_;
  std::unique_ptr<optim::ShardedOptimizer> optimizer_;
  std::unique_ptr<optim::LossScaler> scaler_;
  StepTrace trace_;  // before the groups, whose reads ahead may end with them
  std::unique_ptr<TierPlan> tiers_;
  std::vector<std::unique_ptr<ParamGroup>> groups_;
  std::unique_ptr<StagedUpdate> update_;
  bool pending_ = false;   // an update is running in the background, or waits to be seen
  Background background_;  // after what its job uses
  std::vector<Member> members_;
  std::unique_ptr<step::Prefetcher> prefetcher_;
  std::unique_ptr<torch_hooks::AllocationObserver> observer_;
  std::shared_ptr<activations::ActivationStore> activations_;  // null: autograd keeps what it keeps
  observe::Heartbeat heartbeat_;
  observe::Trace::Setup trace_setup_;

  std::vector<ParamGroup*> reduce_order_;
  std::size_t reduce_next_ = 0;         // in reduce_order_: the next group to begin
  std::vector<ParamGroup*> in_flight_;  // reductions begun and not finished, oldest first
  std::deque<ParamGroup*> publishing_;  // likewise
  // Since the last update: whole micro-batches, passes, passes whose gradients were taken.
  std::int64_t micro_step_ = 0, passes_ = 0, taken_passes_ = 0;
  bool open_ = false, touched_ = false;  // the micro-batch goes on; some gradient of it has been taken
  std::int64_t copied_passes_[2] = {};   // passes_ and taken_passes_ at the copy of the sums; 0: there is none
  std::vector<std::string> unused_;      // parameters that the micro-batch had no gradient for
  std::string failed_;                   // the error of a backward that discard_micro_batch() has not answered yet
  bool backward_since_step_ = false, reads_ahead_ = false;
  std::atomic<bool> in_forward_{false}, in_backward_{false};
  int gathered_scopes_ = 0, modifying_scopes_ = 0;
  std::atomic<int> shown_unit_{-1};  // group named on the status page
  std::int64_t global_steps_ = 0, skipped_steps_ = 0;
  double last_norm_ = 0;
  float predivide_ = 1, postmultiply_ = 1;  // around the reduction: mean, prescale, predivide_factor
};

}  // namespace zero::engine
