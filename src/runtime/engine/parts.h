// What an Engine consists of. State owns one Parts, which build() makes; the classes that implement the Engine hold
// references to it.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "activations/activation_store.h"
#include "engine/background_save.h"
#include "engine/error_relay.h"
#include "engine/experts.h"
#include "engine/gathered_scopes.h"
#include "engine/job.h"
#include "engine/step_trace.h"
#include "engine/tier_plan.h"
#include "engine/torch_backend.h"
#include "optim/loss_scaler.h"
#include "parallel/split_products.h"
#include "step/program.h"

namespace zero::engine {

// The groups of ranks over which a run is divided.
struct RankGroups {
  // Those over which a group's states are sharded.
  comm::Group& of(const step::GroupFacts& group) const { return *axes[static_cast<std::size_t>(group.axis)]; }

  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<comm::Group> shard, tensor;      // along "dp_sp", over which states are sharded, and "tp"
  std::vector<std::shared_ptr<comm::Group>> axes;  // by axis of RunPlan::run: `shard`, and those of equal experts
};

// What else build() decides about a Job.
struct RunPlan {
  config::BatchSizes batch;
  at::Device device;  // of the parameters and of all states that are not offloaded
  step::RunFacts run;
  std::unique_ptr<const TierPlan> tiers;
  std::vector<ModelParameter> remote;  // of experts of other ranks, in order of registration
};

// Progress of a run, besides the counters of the step program.
struct Progress {
  std::string failed;  // error of a failed backward, until discard_micro_batch()
  std::atomic<bool> in_forward{false}, in_backward{false};
  bool backward_since_step = false;
  bool adds_up = false;  // see ProgramSteps::add_up()
  // By which gradients of a micro-batch are divided, see ProgramSteps::set_accumulation_steps(); none: the plan's.
  std::optional<std::int64_t> accumulation;
  std::int64_t skipped_steps = 0;
  std::int64_t global_samples = 0;  // of all ranks in all attempted steps
  bool worth_keeping = false;       // a load, an import or the program has set states
  std::string saved_tag;            // of the last save; empty: there was none, it is under way, or it has failed
  int failed_saves = 0;             // in the background, in a row
  std::string half_loaded;          // error of a load or import that has filled a part, until a load is complete
  double last_norm = 0;
  OpenScopes scopes;
  std::unique_ptr<BackgroundSave> background;  // null: none
  std::unique_ptr<KeptSave> kept;              // null: none yet
  int kept_slot = -1;                          // that holds the newest kept snapshot of all ranks; -1: none

  // [collective] Call before states change other than by an update. `call` is named in errors.
  void release_saves(const char* call) {
    if (background) background->release(call);
    if (kept) kept->release();
  }
  // [local] The same, for a change of what all ranks change, or of what this one alone has.
  void release_saves_here() const {
    if (background) background->release_here();
    if (kept) kept->release();
  }
};

struct Found;  // build.h

// The order of members is the order of construction. `const` ones stay as they are made.
struct Parts {
  // Takes memory and makes files, without changing the model. May throw on some ranks only. by_axis: RankGroups::axes,
  // with the ranks that hold secondary shards together.
  Parts(const Job& job, ErrorRelay& relay, RunPlan plan, RankGroups ranks, std::vector<TorchComm::Ranks> by_axis,
        Found found);
  ~Parts();
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  std::string where(const char* call) const { return job.where(call, program->steps()); }
  step::Prefetcher& prefetcher() const { return program->prefetcher(); }
  ModelBinding& binding() const { return backend->binding; }
  // Between accumulation boundaries this is empty.
  const step::Accumulation& accumulated() const { return program->accumulated(); }
  std::int64_t accumulation() const { return progress.accumulation.value_or(plan.batch.accumulation); }

  const Job& job;
  ErrorRelay& relay;
  const RunPlan plan;
  const RankGroups ranks;
  // What works in each step.
  StepTrace trace;
  const std::unique_ptr<optim::ShardedOptimizer> optimizer;
  const std::unique_ptr<optim::LossScaler> scaler;
  const std::shared_ptr<parallel::SplitProducts> products;  // null: no tensor parallelism
  const std::unique_ptr<Experts> experts;                   // null: no expert parallelism
  std::vector<step::GroupFacts> groups;  // those of a frozen unit are replaced when it is trained: admit_unfrozen()
  const std::shared_ptr<EngineMemory> memory;
  std::unique_ptr<TorchBackend> backend;  // this and the program stay until ~Parts, which ends them in turn
  std::unique_ptr<step::StepProgram> program;
  std::shared_ptr<activations::ActivationStore> activations;  // null: activations are not managed
  Progress progress;
};

}  // namespace zero::engine
