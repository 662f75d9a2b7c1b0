// The main class: one engine for all ZeRO stages. The stage selects which of {optimizer states, gradients, parameters}
// are sharded, and nothing else (ZeRO, Rajbhandari et al., 1910.02054).
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
#include <zero/mesh.h>
#include <zero/options.h>
#include <zero/trace.h>
#include <zero/weights.h>

namespace torch::nn {
class Module;
}

namespace zero {

// [collective]: called by every rank, in the same order as all other collective calls. Blocks until this rank's part is
// complete, which may require every other rank. [local]: involves this rank only and does not wait for others. Any call
// may throw CommError after a peer has failed; rank() names the rank that failed or did not respond, and the
// communicator is then unusable. Calls out of order throw ConfigError. Sizes are in bytes or elements, times in
// seconds.
//
// Threads: on CPUs, forwards and evaluations of the model may run in several threads at once. At stage 3 with several
// ranks, all-gathers are collectives and all ranks must use units in the same order, so use one thread. The calls below
// must not run concurrently. step(), flush(), load_checkpoint() and gathered_parameters() must not run during a
// forward; at stage 3 they throw ConfigError if one is running. An Engine may be constructed, used and destroyed in
// different threads.
class ZERO_API Engine {
 public:
  // [collective] Takes over the parameters of `model` (floating-point, on one device, any shapes): casts them to the
  // recipe's compute dtype, but for those that libzero.keep_fp32 names, shards them if the stage does, and copies rank
  // 0's values to all ranks. The module is used as before. Throws on every rank, and leaves the model unchanged:
  // ConfigError if options, model and ranks do not fit together, IoError if an offload file cannot be created. A model
  // belongs to one Engine at a time. rule: the program's optimizer, equal on all ranks; null: the one of `options`.
  Engine(ModuleHandle model, Options options, std::shared_ptr<Communicator> comm,
         std::shared_ptr<UpdateRule> rule = nullptr);
  // [collective] The same on the ranks of a mesh of the sizes that `options` asks for, which the program also uses.
  Engine(ModuleHandle model, Options options, std::shared_ptr<Mesh> mesh, std::shared_ptr<UpdateRule> rule = nullptr);
  ~Engine();  // [local] waits for this rank's delayed update
  Engine(Engine&&) noexcept;
  Engine(const Engine&) = delete;

  // [collective] Replaces loss.backward(). `loss` has one element of any floating-point dtype. It is multiplied by the
  // loss scale and divided by the number of accumulation steps. Gradients are accumulated, and reduced over ranks as
  // the stage requires.
  //
  // The Engine owns all gradients until step(): reading or writing .grad in between throws ConfigError at every stage.
  // Gradients that the backward() of another Engine sends to this Engine's parameters are dropped (a GAN's generator
  // loss through its discriminator). requires_grad may be changed between passes, identically on all ranks; gradients
  // that arrived count. A frozen parameter is not updated, does not decay and counts no steps. One that was frozen at
  // construction may be unfrozen, which allocates its optimizer states, unless these are offloaded to files.
  //
  // Exceptions of the model or of a hook propagate. With world size 1 the micro-batch is then discarded. Otherwise
  // every rank that continues calls discard_micro_batch().
  void backward(const at::Tensor& loss, const BackwardOptions& options = {});
  // [collective] Discards the current micro-batch, after its forward or backward failed on every rank or while
  // retain_graph keeps it open. Returns how many complete micro-batches of the step remain: all, or 0 if the current
  // one was already added to their sums and no copy exists (BackwardOptions::recoverable).
  std::int64_t discard_micro_batch();
  // [collective] The gradient of one parameter before clipping: reduced over ranks, without the loss scale. fp32, of
  // the parameter's shape, the same on every rank. Undefined if the parameter is frozen; zeros if no loss reached it.
  // Callable between the step's last backward() and step(), else ConfigError. With managed_gradient_accumulation false
  // the first call ends the step's accumulation, and step() must follow. (DeepSpeed: safe_get_full_grad.)
  at::Tensor gradient(const std::string& name);
  // [local] The same, limited to this rank's shard.
  OwnShard own_gradient(const std::string& name);
  // [collective] Replaces it, on all ranks by rank 0's `values`, or on each rank its shard. step() clips and uses the
  // new values; they are rounded to the dtype in which gradients are accumulated. ConfigError for values of another
  // shape and for a frozen parameter. (DeepSpeed: safe_set_full_grad.)
  void set_gradient(const std::string& name, const at::Tensor& values);
  void set_own_gradient(const std::string& name, const at::Tensor& values);
  // [collective] At a gradient accumulation boundary: unscales, clips, updates, and all-gathers updated parameters.
  // Otherwise [local], with updated == false. Throws IoError if an offload file fails, InternalError (kNumerical) after
  // libzero.max_skipped_steps consecutive overflows, or if replicated state differs between ranks
  // (libzero.replica_check_steps).
  StepResult step();
  bool is_gradient_accumulation_boundary() const;  // [local] whether the next step() updates
  // [collective] Call between steps. With zero_optimization.delayed_update, completes the pending update, so that the
  // parameters include all steps so far; otherwise does nothing. Required before an evaluation: without it, an operator
  // that reads parameters without grad mode between steps throws ConfigError. Checkpoints, state_hash() and
  // gathered_parameters() call it.
  void flush();
  MemoryReport memory() const;  // [local] bytes of this rank by purpose and tier, current and peak
  void reset_peak_memory();     // [local] sets the peak to the current bytes and frees idle buffers
  // [collective] Unshards all parameters for the life of the returned scope. modify = true: rank 0 may write them
  // (GatheredParameters); experts that are divided over ranks (zero/moe.h), which each rank sees its own of, the first
  // rank that has them. Throws ConfigError on every rank if ranks pass different arguments.
  GatheredParameters gathered_parameters() { return gather_all(false); }
  template <std::same_as<bool> Modify>  // no implicit conversions: {"root"} is a list of names
  GatheredParameters gathered_parameters(Modify modify) {
    return gather_all(modify);
  }
  // [collective] The same for some units only: those that contain the named parameters. A name is a parameter's, a
  // unit's as in units(), or a pattern (* matches any text, ? one character). Copies, and what modify writes back, are
  // limited to these units. ConfigError with the most similar names if a name matches nothing.
  GatheredParameters gathered_parameters(const std::vector<std::string>& names, bool modify = false);
  // [collective] The same for a module's parameters. ConfigError if the Engine holds none of them.
  template <class M>
  requires std::is_base_of_v<torch::nn::Module, M> GatheredParameters gathered_parameters(const M& module,
                                                                                          bool modify = false) {
    return gather_module(module, modify);
  }

  // [collective] fp32 master parameters by name, unsharded, in host memory of rank 0; empty on other ranks. Every
  // rank gets the buffers of experts that it does not run.
  std::map<std::string, at::Tensor> full_state_dict();
  // [collective] One fp32 state of a parameter, of its shape, on every rank: "master" (of a frozen parameter its
  // value), or one of the optimizer ("exp_avg"; the error for another name lists them). Gathers the states of its unit.
  at::Tensor parameter_state(const std::string& parameter, const std::string& state = "master");
  std::vector<std::string> state_names(const std::string& parameter) const;  // [local] optimizer states; frozen: none
  // [local] This rank's shard of it. ConfigError while a delayed update is pending.
  OwnShard own_parameter_state(const std::string& parameter, const std::string& state = "master");
  // [collective] Replaces it, on all ranks by rank 0's `values`, or on each rank its shard, at once: also between
  // backward() and step(). The parameter follows its master. ConfigError for values of another shape.
  void set_parameter_state(const std::string& parameter, const std::string& state, const at::Tensor& values);
  void set_own_parameter_state(const std::string& parameter, const std::string& state, const at::Tensor& values);
  std::string state_hash();  // [collective] hex digest of all ranks' masters and optimizer states; equal on all ranks
  // [collective] The same of values and names, with frozen parameters and the buffers that all ranks share: independent
  // of ranks, parallel degrees, stage and tier, and equal to checkpoint_digest() of a checkpoint.
  std::string logical_hash();

  // [collective] Writes the checkpoint DIR/TAG, without the gradients of a step that is under way. IoError on every
  // rank if writing fails. With checkpoint.writer.decoupled files are written while training continues:
  // finish_checkpoint(), the next save, or the first step() that finds them written, makes them visible or throws.
  void save_checkpoint(const std::filesystem::path& dir, const std::string& tag, const SaveOptions& options = {});
  bool checkpoint_pending() const;  // [local] whether a save in the background is not complete
  std::string finish_checkpoint();  // [collective] completes it; tag of the last save, "" if none, or failed ("warn")
  // [collective] Call after every step: keeps the states in memory each libzero.keep_snapshot_every steps. After a
  // restart by `zero run --restarts`, load_checkpoint(dir) takes them if they are newer (docs/checkpoints.md).
  void keep_snapshot(const std::filesystem::path& dir);
  // [collective] Loads DIR/TAG, or the newest complete checkpoint if tag is empty; returns the tag. Throws on every
  // rank: IoError (kCheckpoint) if it is missing or damaged, ConfigError with all that does not fit the model.
  std::string load_checkpoint(const std::filesystem::path& dir, const std::string& tag = "",
                              const LoadOptions& options = {});
  // [collective] Masters and buffers in other libraries' files and back, between steps, each rank its own elements.
  // ConfigError with all that does not fit, IoError if files fail, after which an import may want load_checkpoint().
  ExportReport export_weights(const std::filesystem::path& path, const ExportOptions& options = {});
  ImportReport import_weights(const std::filesystem::path& path, const ImportOptions& options = {});
  ImportReport load_weights(const std::filesystem::path& path, const ImportOptions& options = {});  // the same
  // [collective] DIR/FILENAME for torch.load: the same in the dtype that the recipe computes in, at every stage.
  ExportReport save_16bit_model(const std::filesystem::path& dir, const std::string& filename = "pytorch_model.bin",
                                bool exclude_frozen_parameters = false);
  // [local] Text that checkpoints store with the engine's state, for example the data position. Rank 0's is saved.
  void set_user_state(std::string json);
  std::string user_state() const;  // [local]
  // [collective] Starts a trace for ui.perfetto.dev (docs/trace.md): FILE.rank-N.json of every rank. Between steps; one
  // at a time. IoError if a file cannot be created; a later write error ends it with a warning. ZERO_TRACE=FILE, with
  // ZERO_TRACE_STEPS=A:B (default 3:22), traces a whole run without a call.
  void start_trace(const std::filesystem::path& file, TraceSteps steps = {});
  // [collective] Ends the trace, if any. Merges the parts into FILE if all ranks see the same folder.
  TraceSummary stop_trace();
  // [local] Seconds spent in the parts of all steps; zeros unless wall_clock_breakdown is true. Call between steps.
  StepTimes times() const;
  // [local]
  std::int64_t global_step() const;     // attempted steps
  std::int64_t skipped_steps() const;   // skipped because of overflow
  std::int64_t global_samples() const;  // of all ranks in all attempted steps, also those before a resume
  std::int64_t accumulation_steps() const;
  std::int64_t micro_batch_size() const;  // samples per rank and forward
  std::int64_t micro_batches() const;     // complete micro-batches since the last update
  double loss_scale() const;              // used by the next backward()
  // [local] Rate of the next step. Group i + 1: parameters of pattern i of libzero.parameter_groups, 0: all others.
  double lr(int group = 0) const;
  // [local] The group of a parameter, as lr() numbers them. ConfigError if there is no such parameter.
  int parameter_group(const std::string& name) const;
  // [local] The learning rate from the next step on, the same on all ranks, which step() checks; checkpoints store it.
  // Waits for this rank's delayed update. ConfigError if the configuration has a scheduler.
  void set_lr(int group, double lr);

  // [local] Units of communication: name and number of elements.
  std::vector<std::pair<std::string, std::int64_t>> units() const;
  // [local] Paths of the modules whose parameters form units, before small units are merged and large ones split.
  std::vector<std::string> unit_modules() const;
  const Options& options() const;             // [local]
  Communicator& communicator() const;         // [local] all ranks of the run
  const Mesh& mesh() const;                   // [local] the same ranks by dimension
  std::shared_ptr<Mesh> shared_mesh() const;  // [local] mesh(), which may outlive the Engine

 private:
  friend class ProgramSteps;
  GatheredParameters gather_all(bool modify);
  GatheredParameters gather_module(const torch::nn::Module& module, bool modify);
  std::shared_ptr<engine::State> state_;
};

}  // namespace zero
