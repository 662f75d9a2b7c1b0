// The public face: one engine for all ZeRO stages. A stage decides which of {optimizer state,
// gradient, parameter} rests sharded, and nothing else (ZeRO, Rajbhandari et al., 1910.02054).
#pragma once
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/communicator.h>
#include <zero/engine_types.h>
#include <zero/export.h>
#include <zero/memory_report.h>
#include <zero/options.h>
#include <zero/trace.h>

namespace torch::nn {
class Module;
}

namespace zero {

// [collective]: every rank calls it, in the same order beside other collective calls; it blocks until this rank's part
// is done, which may wait for every other rank. [local]: this rank alone; it waits for no other rank. A CommError of a
// collective call names the rank that failed or did not come, and is the end of the communicator. Every call may throw
// CommError after that end, and ConfigError when it is out of order. Sizes are in bytes or elements as said; times in
// seconds.
//
// Threads: forwards and evaluations of the model may run in several threads at once, on CPUs. At stage 3 gathers are
// collectives: with several ranks all must use units in one order, so there one thread computes at a time. No call
// below may run beside another call, nor step(), flush(), load_checkpoint() and gathered_parameters() beside a forward:
// at stage 3 they throw ConfigError when they find one. An Engine may be made, used and destroyed in different threads.
class ZERO_API Engine {
 public:
  // [collective] Takes over the parameters of `model` (floating-point, one device, any shapes): casts them to the
  // recipe's compute dtype, shards what the stage shards, and gives every rank rank 0's values. The module keeps
  // working as before. Throws ConfigError when options, model and ranks do not fit together, IoError when files of
  // offload cannot be made, on every rank; the model is then as it was. One Engine holds a model at a time: end the
  // first before making a second.
  Engine(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm);
  // The same for a module holder (TORCH_MODULE).
  template <class Holder>
  requires requires(Holder holder) { std::shared_ptr<torch::nn::Module>(holder.ptr()); }
  Engine(Holder model, Options options, std::shared_ptr<Communicator> comm)
      : Engine(std::shared_ptr<torch::nn::Module>(model.ptr()), std::move(options), std::move(comm)) {}
  ~Engine();  // [local]; waits for this rank's delayed update
  Engine(Engine&&) noexcept;
  Engine(const Engine&) = delete;

  // [collective] Backpropagates `loss` (one element, any floating-point dtype): scales it by the loss scale, divides by
  // the accumulation steps, accumulates, and reduces over ranks as the stage asks. Replaces loss.backward().
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
  // [collective] Drops the micro-batch under way: one whose forward or backward failed on every rank, or one that
  // retain_graph left open. Returns how many whole micro-batches of the step stay: all, or none where the one under way
  // has already been added to them and there is no copy (BackwardOptions::recoverable).
  std::int64_t discard_micro_batch();
  // [collective] A parameter's gradient as step() will use it, before clipping: reduced over ranks, without the loss
  // scale. fp32, of the parameter's shape, the same on every rank; undefined where the parameter is frozen, zeros where
  // no loss reached it. From the step's last backward() to step(), else ConfigError. (DeepSpeed: safe_get_full_grad.)
  at::Tensor gradient(const std::string& name);
  // [local] The same, only what this rank's shard has of it.
  OwnGradient own_gradient(const std::string& name);
  // [collective] Acts at an accumulation boundary: unscales, clips, updates, publishes; otherwise updated == false, and
  // it is local. IoError when a file of offloaded states fails, InternalError (kNumerical) after
  // libzero.max_skipped_steps overflows in a row.
  StepResult step();
  bool is_gradient_accumulation_boundary() const;  // [local] the next step() acts
  // [collective] With zero_optimization.delayed_update, between steps: finishes the update that is on its way, so that
  // the parameters are those of all steps so far; else nothing. Needed before an evaluation: without it an operator
  // that reads parameters without grad mode between steps throws ConfigError. Checkpoints, digests and gathered scopes
  // do it themselves.
  void flush();

  MemoryReport memory() const;  // [local] bytes of this rank by purpose and tier, now and at the peak
  void reset_peak_memory();     // [local] the peak is what is held now; idle buffers are freed

  // [collective] A scope in which parameters are whole, all of them, or with modify = true may be written
  // (GatheredParameters). Throws ConfigError, on every rank, when ranks ask for different things.
  GatheredParameters gathered_parameters() { return gather_all(false); }
  template <std::same_as<bool> Modify>  // nothing converts to it: {"root"} is a list of names
  GatheredParameters gathered_parameters(Modify modify) {
    return gather_all(modify);
  }
  // [collective] The same for the units that hold these parameters only: names of parameters, or of units as units()
  // lists them, or patterns (* any run, ? one character). The copies take these units' bytes, and what modify writes
  // back is these units. ConfigError with the nearest names when one matches nothing.
  GatheredParameters gathered_parameters(const std::vector<std::string>& names, bool modify = false);
  // [collective] The same for the parameters of a module that this Engine holds. ConfigError when it holds none.
  template <class M>
  requires std::is_base_of_v<torch::nn::Module, M> GatheredParameters gathered_parameters(const M& module,
                                                                                          bool modify = false) {
    return gather_module(module, modify);
  }

  // [collective] fp32 masters by parameter name, whole, of the parameter's shape, in host memory of rank 0; empty on
  // other ranks.
  std::map<std::string, at::Tensor> full_state_dict();
  // [collective] Hex digest over all ranks' masters and moments; the same on every rank.
  std::string state_hash();

  // [collective] Writes a checkpoint DIR/TAG: one file per rank and a manifest with hashes, published by one rename. At
  // an accumulation boundary, else ConfigError. Throws IoError on every rank alike; nothing is published then.
  void save_checkpoint(const std::filesystem::path& dir, const std::string& tag);
  // [collective] Loads DIR/TAG, or the newest whole checkpoint when tag is empty; returns the tag it took. Throws
  // IoError (kCheckpoint) when it is missing or damaged, ConfigError when it is of another model, on every rank.
  std::string load_checkpoint(const std::filesystem::path& dir, const std::string& tag = "");
  // [local] Text kept in the checkpoint beside the engine's own state (data position and the like); rank 0's is saved.
  void set_user_state(std::string json);
  std::string user_state() const;  // [local]

  // [collective] From now on shows what happens when, in a file that ui.perfetto.dev and chrome://tracing open
  // (docs/trace.md). Every rank writes FILE.rank-N.json. Between steps only, one trace at a time. Throws IoError when a
  // part cannot be made. A write that fails later ends the trace with a warning, not the run. ZERO_TRACE=FILE in the
  // environment, with ZERO_TRACE_STEPS=A:B (3:22), does the same from construction to destruction without a call.
  void start_trace(const std::filesystem::path& file, TraceSteps steps = {});
  // [collective] Ends it; the parts become one FILE where all ranks see one folder. Nothing without a trace.
  TraceSummary stop_trace();

  // [local] What this rank's steps were made of so far, in seconds; zeros unless wall_clock_breakdown is true. Not
  // while one runs.
  StepTimes times() const;

  // [local]
  std::int64_t global_step() const;    // attempted steps
  std::int64_t skipped_steps() const;  // steps skipped for overflow
  std::int64_t accumulation_steps() const;
  std::int64_t micro_batch_size() const;  // samples per rank and forward
  std::int64_t micro_batches() const;     // whole ones since the last update
  double loss_scale() const;              // that the next backward() will use
  // [local] The rate the next step will use. Group 0 holds what no pattern of libzero.parameter_groups matches, i + 1
  // what the i-th does. ConfigError for another group.
  double lr(int group = 0) const;
  // [local] Sets it, from the next step on, alike on all ranks (checked by that step); checkpoints keep it. ConfigError
  // where the configuration has a scheduler; waits for this rank's delayed update.
  void set_lr(int group, double lr);

  // [local] Names of the units that parameters are communicated in, with their elements.
  std::vector<std::pair<std::string, std::int64_t>> units() const;
  [[deprecated("call units()")]] std::vector<std::pair<std::string, std::int64_t>> groups() const { return units(); }

  const Options& options() const;      // [local]
  Communicator& communicator() const;  // [local]

 private:
  GatheredParameters gather_all(bool modify);
  GatheredParameters gather_module(const torch::nn::Module& module, bool modify);
  std::shared_ptr<engine::State> state_;
};

}  // namespace zero
