// The parts of an Engine. State owns one Parts; the classes that implement the Engine hold references to it.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <zero/engine.h>
#include <zero/mesh.h>

#include "activations/activation_store.h"
#include "engine/background_save.h"
#include "engine/error_relay.h"
#include "engine/experts.h"
#include "engine/gathered_scopes.h"
#include "engine/step_trace.h"
#include "engine/tier_plan.h"
#include "engine/torch_backend.h"
#include "optim/loss_scaler.h"
#include "parallel/split_products.h"
#include "step/program.h"

namespace zero::engine {

// Progress of a run, besides the counters of the step program.
struct Progress {
  std::string failed;  // error of a failed backward, until discard_micro_batch()
  std::atomic<bool> in_forward{false}, in_backward{false};
  bool backward_since_step = false;
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

// The order of members is the order of construction.
struct Parts {
  // mesh: null: build() makes one of `comm`.
  Parts(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm,
        std::shared_ptr<Mesh> mesh);
  ~Parts();
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  // "[Engine::step] (rank 0/2, step 5) "
  std::string where(const char* call) const;
  // The ranks over which a group's states are sharded.
  comm::Group& ranks_of(const step::GroupFacts& group) const {
    return *axis_groups[static_cast<std::size_t>(group.axis)];
  }
  step::Prefetcher& prefetcher() const { return program->prefetcher(); }
  ModelBinding& binding() const { return backend->binding; }
  // Between accumulation boundaries this is empty.
  const step::Accumulation& accumulated() const { return program->accumulated(); }

  const std::shared_ptr<torch::nn::Module> model;
  const Options options;
  const config::Settings& settings;
  const std::shared_ptr<Communicator> communicator;
  const std::shared_ptr<comm::Group> comm;  // the group of `communicator`: all ranks of the run
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<comm::Group> shard_group, tensor_group;  // along "dp_sp", over which states are sharded, and "tp"
  std::vector<std::shared_ptr<comm::Group>> axis_groups;   // by axis of `run`: shard_group, and those of equal experts
  ErrorRelay relay;
  std::int64_t accumulation = 1, micro_batch = 1;
  StepTrace trace;
  std::unique_ptr<optim::ShardedOptimizer> optimizer;
  std::unique_ptr<optim::LossScaler> scaler;
  at::Device device = at::kCPU;  // of the parameters and of all states that are not offloaded
  step::RunFacts run;
  std::unique_ptr<TierPlan> tiers;
  std::vector<step::GroupFacts> groups;
  std::shared_ptr<EngineMemory> memory;
  std::unique_ptr<TorchBackend> backend;
  std::unique_ptr<step::StepProgram> program;
  std::shared_ptr<parallel::SplitProducts> products;          // null: no tensor parallelism
  std::unique_ptr<Experts> experts;                           // null: no expert parallelism
  std::vector<ModelParameter> remote;                         // of experts of other ranks, in order of registration
  std::shared_ptr<activations::ActivationStore> activations;  // null: activations are not managed
  Progress progress;
};

}  // namespace zero::engine
