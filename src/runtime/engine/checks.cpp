// See checks.h.
#include "engine/checks.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "base/check.h"
#include "base/printable.h"
#include "torch_hooks/gradient_hook.h"
#include "torch_hooks/interception.h"

namespace zero::engine {

void Checks::require_usable(const char* call, bool loading) const {
  if (!p_.relay.ended().empty())
    throw CommError(p_.where(call) + "called after an error that ended the run: " + p_.relay.ended());
  if (const auto& half = p_.progress.half_loaded; !half.empty() && !loading)
    throw ConfigError(p_.where(call) + "called after a load or an import that failed halfway (" + half +
                      "): the state is neither the one before nor the checkpoint's. Hint: load_checkpoint() of a "
                      "whole checkpoint on all ranks.");
  const auto& failed = p_.progress.failed;
  if (failed.empty()) return;
  p_.relay.report(failed);
  throw ConfigError(p_.where(call) + "called after a backward that failed (" + failed +
                    "). Hint: where every rank catches the same error, call engine.discard_micro_batch() on all of "
                    "them; else let the error end the program.");
}

void Checks::require_between_passes(const char* call) const {
  require_usable(call);
  require_closed(call);
}

void Checks::require_closed(const char* call) const {
  if (p_.accumulated().open)
    throw ConfigError(p_.where(call) +
                      "called within a micro-batch: the last backward() kept its graph. Hint: call it "
                      "after step() has acted.");
}

void Checks::require_boundary(const char* call, bool loading) const {
  require_usable(call, loading);
  require_closed(call);
  const auto& accumulated = p_.accumulated();
  if (accumulated.micro_batches != 0)
    throw ConfigError(p_.where(call) + base::join("called after ", accumulated.micro_batches, " of ",
                                                  p_.plan.batch.accumulation,
                                                  " micro-batches. Hint: call it after step() has acted."));
}

void Checks::require_no_scope(const char* call, bool reading_too) const {
  const auto& scopes = p_.progress.scopes;
  if (!scopes.any_modifying() && (!scopes.any() || !reading_too)) return;
  throw ConfigError(p_.where(call) + "called inside a scope of gathered_parameters" +
                    (reading_too ? "" : "(true), whose writes count from its end on") +
                    ". Hint: close() the scope first.");
}

// Between steps, an operator without grad mode reads parameters that lack the pending update: most likely an evaluation
// of a model one step behind. The update cannot be completed here, because that is collective and ranks may evaluate
// alone.
void Checks::require_current(const char* op) const {
  const auto& progress = p_.progress;
  if (!p_.program->update_pending() || at::GradMode::is_enabled() || progress.in_forward || progress.in_backward ||
      p_.accumulated().passes > 0)
    return;
  p_.relay.keeping([&] {
    throw ConfigError(
        p_.where("forward") + op +
        " reads parameters without grad mode between steps while a delayed update is on its way: they are "
        "one step behind. Hint: call engine.flush() on every rank before an evaluation.");
  });
}

void Checks::before_backward(const at::Tensor& loss, const BackwardOptions& options) const {
  require_usable("backward");
  const auto where = p_.where("backward");
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad())
    throw ConfigError(where +
                      (!loss.defined() ? "got no tensor"
                                       : base::join("got a loss with ", loss.numel(), " elements, requires_grad ",
                                                    loss.requires_grad())) +
                      ", expected a scalar that requires grad");
  before_pass(options);
}

void Checks::before_pass(const BackwardOptions& options) const {
  constexpr const char* kCall = "backward";
  require_usable(kCall);
  parameters(kCall);
  const auto where = p_.where(kCall);
  if (p_.progress.scopes.any()) throw ConfigError(where + "called inside a scope of gathered_parameters");
  if (options.create_graph && p_.products)
    throw ConfigError(where +
                      "got create_graph with tensor parallelism, whose sums over ranks cannot be differentiated twice. "
                      "Hint: tensor_parallel.autotp_size 1.");
  if (options.tokens && *options.tokens < 0)
    throw ConfigError(where + base::join("got ", *options.tokens, " tokens, expected 0 or more"));
  const auto micro_batches = p_.accumulated().micro_batches;
  if (p_.program->counts_micro_batches() && micro_batches == p_.plan.batch.accumulation)
    throw ConfigError(where + "called " + std::to_string(p_.plan.batch.accumulation + 1) +
                      " times without step(). Hint: call step() after every backward(); it acts at the boundary.");
  if (p_.accumulated().closed)
    throw ConfigError(where +
                      "called after gradient() or set_gradient(), which have reduced the gradients for step(). Hint: "
                      "call step() before the next micro-batch.");
  if (options.create_graph && (p_.plan.batch.accumulation != 1 || micro_batches != 0 || p_.scaler->scale() != 1))
    throw ConfigError(where +
                      base::join("got create_graph with ", p_.plan.batch.accumulation,
                                 " micro-batches a step and a loss scale of ", p_.scaler->scale(),
                                 ", expected 1 and 1: .grad would hold something else than gradients. "
                                 "Hint: torch::autograd::grad(..., create_graph) and one backward of the whole loss."));
}

void Checks::before_step() const {
  constexpr const char* kCall = "step";
  require_usable(kCall);
  parameters(kCall);
  no_new_parameters(p_.where(kCall));
  if (p_.progress.scopes.any()) throw ConfigError(p_.where(kCall) + "called inside a scope of gathered_parameters");
}

// --- the model --------------------------------------------------------------------------------

void Checks::parameters(const char* call) const {
  const auto& groups = p_.binding().groups();
  for (const auto& group : groups)
    for (const auto& parameter : group->members)
      if (!torch_hooks::is_intercepted(parameter.tensor)) fail_replaced(call, parameter);
  for (const auto& group : groups)
    if (const auto text = group->gradients.find_meddling(/*first=*/p_.accumulated().passes == 0); !text.empty())
      throw ConfigError(p_.where(call) + text);
  hooks(p_.where(call));
}

void Checks::cut_parameters(int group) const {
  for (const auto& parameter : p_.binding().group(group).members)
    if (parameter.is_cut() && !torch_hooks::is_intercepted(parameter.tensor)) fail_replaced("forward", parameter);
}

void Checks::fail_replaced(const char* call, const ModelParameter& parameter) const {
  const auto text = p_.where(call) + "parameter " + parameter.name + " was replaced behind the Engine";
  const char* const hint =
      " (module.to(...), set_data, torch::load). Hint: move, cast and load the module before the Engine takes it, and "
      "let the recipe and libzero.keep_fp32 choose the dtype; ";
  const char* const write = "in a scope of gathered_parameters(true) write with copy_";
  if (!parameter.is_cut()) throw ConfigError(text + hint + write + ".");
  throw ConfigError(text + base::join(" by a tensor of shape ", parameter.tensor.sizes(), "; this rank, tp ",
                                      p_.ranks.mesh->rank("tp"), ", has a part of shape ",
                                      at::IntArrayRef(parameter.part_sizes), " of ", at::IntArrayRef(parameter.sizes),
                                      hint, write,
                                      " to this rank's part, or give set_parameter_state() the whole values."));
}

void Checks::hooks(const std::string& where) const {
  for (const auto& group : p_.binding().groups())
    for (const auto& member : group->members)
      if (torch_hooks::gradient_hook_of(member.tensor) != torch_hooks::HookPlace::Ours)
        throw ConfigError(where + "the post-accumulate-grad hook of parameter " + member.name + " (group " +
                          group->facts.name +
                          ") was replaced after the Engine took it, and its gradient would be lost. Hint: libtorch has "
                          "one place for such a hook; tensor.register_hook() sees gradients too.");
}

void Checks::no_new_parameters(const std::string& where) const {
  std::string names;
  int more = -3;  // parameters beyond those named
  for (const auto& item : p_.job.model->named_parameters()) {
    if (!item.value().defined() || torch_hooks::is_intercepted(item.value())) continue;
    if (more < 0) names += (names.empty() ? "" : ", ") + item.key();
    ++more;
  }
  if (names.empty()) return;
  throw ConfigError(where + "the model has parameters that the Engine does not hold: " + names +
                    (more > 0 ? base::join(" and ", more, " more") : "") +
                    ", registered after it was made. They would never be trained. Hint: register all modules before "
                    "making the Engine.");
}

std::string name_fault(const std::string& name) {
  constexpr std::size_t kMostShown = 60;
  if (name.size() > kMostModelNameBytes)
    return base::join(base::printable(name.substr(0, kMostShown), base::Lines::Escape), "..: has a name of ",
                      name.size(), " bytes, expected at most ", kMostModelNameBytes,
                      ", which checkpoints can hold. Hint: rename a module");
  return base::printable(name, base::Lines::Escape) +
         ": has a control character in its name, which checkpoints cannot hold. Hint: rename the module";
}

bool can_be_saved(at::ScalarType type) {
  switch (type) {
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
      return true;
    default:
      return false;
  }
}

}  // namespace zero::engine
