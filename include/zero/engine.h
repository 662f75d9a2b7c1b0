// The public face: one engine for all ZeRO stages. A stage decides which of {optimizer state,
// gradient, parameter} rests sharded, and nothing else (ZeRO, Rajbhandari et al., 1910.02054).
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/communicator.h>
#include <zero/memory_report.h>
#include <zero/options.h>
#include <zero/trace.h>

namespace torch::nn {
class Module;
}

namespace zero {
namespace engine {
class State;
}

// What one call of Engine::step() did.
struct StepResult {
  bool updated = false;          // false between accumulation boundaries and on overflow
  bool overflow = false;         // a non-finite gradient on some rank: nothing was changed
  double grad_norm = 0;          // global L2 norm before clipping, unscaled; -1 when not finite
  double loss_scale = 1;         // the scale the next backward will use
  double lr = 0;                 // the rate this step used (first parameter group)
  std::int64_t global_step = 0;  // attempted steps, this one included
};

struct BackwardOptions {
  // The graph is kept for another backward(), and the micro-batch stays open: several losses of one forward, one
  // backward() each. The one without retain_graph ends the micro-batch, or step() does.
  bool retain_graph = false;
  // Gradients get a graph of their own, and stay in .grad for a loss that is made of them; retain_graph is implied.
  // They are this rank's, not reduced. One micro-batch a step and a loss scale of 1 only: ConfigError. Where the loss
  // needs gradients of something else than parameters, torch::autograd::grad(..., create_graph) is enough, without
  // limits.
  bool create_graph = false;
  // Within a step of several micro-batches: keeps a copy of what those before have added up, in the same memory, until
  // this micro-batch has ended. Should it fail, they stay; without the copy they are dropped with it.
  bool recoverable = false;
};

// What of a gradient is in this rank's shard.
struct OwnGradient {
  std::int64_t begin = 0;  // of values, in elements of the flattened parameter
  at::Tensor values;       // fp32, flat; may be empty. Undefined: the parameter is frozen
};

// While it lives, all parameters are whole and readable. With modify = true they may be written in place (copy_, mul_;
// not torch::load, which puts other tensors in their place) on rank 0; its values replace those of every rank when it
// ends. Scopes may be nested; a checkpoint is not saved inside one that modifies, nor loaded inside any.
class [[nodiscard]] GatheredParameters {
 public:
  GatheredParameters(std::shared_ptr<engine::State> state, bool modify);
  GatheredParameters(GatheredParameters&&) noexcept;
  GatheredParameters& operator=(GatheredParameters&&) = delete;
  ~GatheredParameters();
  // Ends the scope now, with errors thrown instead of logged.
  void close();

 private:
  std::shared_ptr<engine::State> state_;
  bool modify_;
};

// Threads: forwards and evaluations of the model may run in several threads at once, on CPUs. At stage 3 gathers are
// collectives: with several ranks all must use units in one order, so there one thread computes at a time. No call
// below may run beside another call, nor step(), flush(), load_checkpoint() and gathered_parameters() beside a forward:
// at stage 3 they throw ConfigError when they find one. An Engine may be made, used and destroyed in different threads.
class Engine {
 public:
  // Takes over the parameters of `model`: casts them to the recipe's compute dtype, shards what
  // the stage shards, and gives every rank rank 0's values. The module keeps working as before.
  // Throws ConfigError when options, model and ranks do not fit together, on every rank; the model is then as it was.
  // One Engine holds a model at a time: end the first before making a second.
  Engine(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm);
  // The same for a module holder (TORCH_MODULE).
  template <class Holder>
  requires requires(Holder holder) { std::shared_ptr<torch::nn::Module>(holder.ptr()); }
  Engine(Holder model, Options options, std::shared_ptr<Communicator> comm)
      : Engine(std::shared_ptr<torch::nn::Module>(model.ptr()), std::move(options), std::move(comm)) {}
  ~Engine();
  Engine(Engine&&) noexcept;
  Engine(const Engine&) = delete;

  // Backpropagates `loss` (a scalar): scales it by the loss scale, divides by the accumulation
  // steps, accumulates, and reduces over ranks as the stage asks. Replaces loss.backward().
  //
  // Gradients belong to the Engine from here to step(): reading or writing a .grad meanwhile is a ConfigError at every
  // stage. What reaches this Engine's parameters from the backward() of another one (a generator's loss through its
  // discriminator) is dropped. requires_grad may be changed between steps, alike on all ranks: a frozen parameter is
  // not updated, does not decay and counts no step; one that was frozen when the Engine was made may be unfrozen unless
  // optimizer states rest in files, and takes memory for its states then.
  //
  // An exception of the model or of a hook goes through. In a world of one the Engine then discards the micro-batch,
  // which leaves it as before; else every rank that goes on calls discard_micro_batch().
  void backward(const at::Tensor& loss, const BackwardOptions& options = {});
  // Drops the micro-batch under way: one whose forward or backward failed on every rank, or one that retain_graph left
  // open. Returns how many whole micro-batches of the step stay: all, or none where the one under way has already been
  // added to them and there is no copy (BackwardOptions::recoverable). Collective.
  std::int64_t discard_micro_batch();
  // A parameter's gradient as step() will use it, before clipping: reduced over ranks, without the loss scale. fp32, of
  // the parameter's shape, the same on every rank; undefined where the parameter is frozen, zeros where no loss reached
  // it. From the step's last backward() to step(), else ConfigError. Collective. (DeepSpeed: safe_get_full_grad.)
  at::Tensor gradient(const std::string& name);
  // The same, only what this rank's shard has of it. Not collective.
  OwnGradient own_gradient(const std::string& name);
  // Acts at an accumulation boundary: unscales, clips, updates, publishes; otherwise updated == false.
  StepResult step();
  bool is_gradient_accumulation_boundary() const;
  // With zero_optimization.delayed_update: finishes the update that is on its way, so that the parameters are those of
  // all steps so far. Before an evaluation; checkpoints, digests and gathered scopes do it themselves. Collective,
  // between steps; else nothing.
  void flush();

  // Bytes of this rank by purpose and tier.
  MemoryReport memory() const;
  void reset_peak_memory();

  GatheredParameters gathered_parameters(bool modify = false);
  // fp32 masters by parameter name, whole, on rank 0 (empty elsewhere). Collective.
  std::map<std::string, at::Tensor> full_state_dict();
  // Hex digest over all ranks' masters and moments; the same on every rank. Collective.
  std::string state_hash();

  // Writes a checkpoint DIR/TAG: one file per rank and a manifest with hashes, published by one
  // rename. Only at an accumulation boundary. Collective; throws IoError on every rank alike.
  void save_checkpoint(const std::filesystem::path& dir, const std::string& tag);
  // Loads DIR/TAG, or the newest whole checkpoint when tag is empty; returns the tag it took.
  std::string load_checkpoint(const std::filesystem::path& dir, const std::string& tag = "");
  // Text kept in the checkpoint beside the engine's own state (data position and the like).
  void set_user_state(std::string json);
  std::string user_state() const;

  // From now on shows what happens when, in a file that ui.perfetto.dev and chrome://tracing open (docs/trace.md).
  // Every rank writes FILE.rank-N.json. Between steps only, one trace at a time. Collective; throws IoError when a
  // part cannot be made. A write that fails later ends the trace with a warning, not the run. ZERO_TRACE=FILE in the
  // environment, with ZERO_TRACE_STEPS=A:B (3:22), does the same from construction to destruction without a call.
  void start_trace(const std::filesystem::path& file, TraceSteps steps = {});
  // Ends it; the parts become one FILE where all ranks see one folder. Collective. Nothing without a trace.
  TraceSummary stop_trace();

  // What this rank's steps were made of so far; zeros unless wall_clock_breakdown is true. Not while one runs.
  StepTimes times() const;

  std::int64_t global_step() const;    // attempted steps
  std::int64_t skipped_steps() const;  // steps skipped for overflow
  std::int64_t accumulation_steps() const;
  std::int64_t micro_batch_size() const;  // samples per rank and forward
  std::int64_t micro_batches() const;     // whole ones since the last update
  double loss_scale() const;
  // The rate the next step will use. Group 0 holds what no pattern of libzero.parameter_groups matches, i + 1 what the
  // i-th does.
  double lr(int group = 0) const;
  // Sets it, from the next step on, alike on all ranks (checked by that step); checkpoints keep it. ConfigError where
  // the configuration has a scheduler.
  void set_lr(int group, double lr);

  // Names of the groups (units) that parameters are communicated in, with their elements.
  std::vector<std::pair<std::string, std::int64_t>> groups() const;

  const Options& options() const;
  Communicator& communicator() const;

 private:
  std::shared_ptr<engine::State> state_;
};

}  // namespace zero
