// What an Engine is made of. One Parts belongs to one State; the classes that do its work each have a reference.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <zero/engine.h>

#include "activations/activation_store.h"
#include "engine/error_relay.h"
#include "engine/gathered_scopes.h"
#include "engine/step_trace.h"
#include "engine/tier_plan.h"
#include "engine/torch_backend.h"
#include "optim/loss_scaler.h"
#include "step/program.h"

namespace zero::engine {

// How far a run has come, beside what the step program counts.
struct Progress {
  std::string failed;  // the error of a backward that discard_micro_batch() has not answered yet
  std::atomic<bool> in_forward{false}, in_backward{false};
  bool backward_since_step = false;
  std::int64_t skipped_steps = 0;
  double last_norm = 0;
  OpenScopes scopes;
};

// Members are made in this order, and end in the opposite one.
struct Parts {
  Parts(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm);
  ~Parts();
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  // "[Engine::step] (rank 0/2, step 5) "
  std::string where(const char* call) const;
  step::Prefetcher& prefetcher() const { return program->prefetcher(); }
  ModelBinding& binding() const { return backend->binding; }
  // Between accumulation boundaries nothing has been added up.
  const step::Accumulation& accumulated() const { return program->accumulated(); }

  const std::shared_ptr<torch::nn::Module> model;
  const Options options;
  const config::Settings& settings;
  const std::shared_ptr<Communicator> communicator;
  const std::shared_ptr<comm::Group> comm;  // behind it
  ErrorRelay relay;
  std::int64_t accumulation = 1, micro_batch = 1;
  StepTrace trace;
  std::unique_ptr<optim::ShardedOptimizer> optimizer;
  std::unique_ptr<optim::LossScaler> scaler;
  at::Device device = at::kCPU;  // of the parameters and all that rests
  step::RunFacts run;
  std::unique_ptr<TierPlan> tiers;
  std::vector<step::GroupFacts> groups;
  std::shared_ptr<EngineMemory> memory;
  std::unique_ptr<TorchBackend> backend;
  std::unique_ptr<step::StepProgram> program;
  std::shared_ptr<activations::ActivationStore> activations;  // null: autograd keeps what it keeps
  Progress progress;
};

}  // namespace zero::engine
