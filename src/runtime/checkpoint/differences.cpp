// See differences.h.
#include "checkpoint/differences.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>

#include "base/log.h"
#include "engine/model_buffers.h"
#include "interchange/names.h"

namespace zero::checkpoint {
namespace {

using config::PrivateBuffers;

constexpr std::size_t kMostShown = 20;

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += base::join(i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

// Whether the wanted dtype holds all values of the stored one.
bool fits(const std::string& stored, const std::string& wanted) {
  return stored == wanted || (wanted == "F32" && (stored == "BF16" || stored == "F16")) ||
         (wanted == "F64" && stored == "F32");
}

// A master or a state of the optimizer that this run stores in 16 bits.
bool is_narrowed(const formats::Tensor& stored, const formats::Tensor& wanted) {
  return (wanted.kind == "master" || is_slot(wanted.kind)) && stored.dtype != wanted.dtype &&
         (wanted.dtype == "BF16" || wanted.dtype == "F16");
}

// The rank that saved the private state that this rank takes.
std::size_t source_rank(const engine::Job& job, const formats::Manifest& manifest) {
  const auto saved = manifest.ranks.size();
  const auto& comm = *job.comm;
  const auto rule = job.settings.checkpoint.private_buffers;
  if (static_cast<std::size_t>(comm.size()) == saved || rule == PrivateBuffers::Modulo)
    return static_cast<std::size_t>(comm.rank()) % saved;
  return 0;
}

std::string private_buffers(const formats::Manifest& manifest) {
  std::string names;
  for (const auto& tensor : manifest.ranks[0])
    if (tensor.kind == kBuffer) names += (names.empty() ? "" : ", ") + tensor.name;
  return names;
}

std::string layout_text(std::int64_t world, std::int64_t sequence, std::int64_t tensor) {
  return base::join(world, world == 1 ? " rank" : " ranks", sequence > 1 ? base::join(" (sp ", sequence, ")") : "",
                    tensor > 1 ? base::join(" (tp ", tensor, ")") : "");
}

std::string slots_text(const std::vector<std::string>& slots) {
  std::string text;
  for (const auto& slot : slots) text += (text.empty() ? "" : ", ") + slot;
  return text.empty() ? "none" : text;
}

std::string names_text(const std::set<std::string>& names) {
  std::string text;
  std::size_t shown = 0;
  for (const auto& name : names)
    if (shown++ < kMostShown) text += (text.empty() ? "" : ", ") + name;
  return names.size() <= kMostShown ? text : base::join(text, " and ", names.size() - kMostShown, " more");
}

// By name of a parameter or buffer.
class Partial {
 public:
  explicit Partial(const std::vector<std::string>& patterns) : patterns_(patterns) {}
  bool matches(const std::string& name) const {
    return std::any_of(patterns_.begin(), patterns_.end(),
                       [&](const std::string& pattern) { return interchange::name_matches(pattern, name); });
  }

 private:
  const std::vector<std::string>& patterns_;
};

void tell_left_out(const std::string& tag, const LeftOut& left_out) {
  if (!left_out.kept.empty())
    base::log(LogLevel::Warning, "checkpoint " + tag + ": left as they were (partial): " + names_text(left_out.kept));
  if (!left_out.lost.empty())
    base::log(LogLevel::Warning,
              "checkpoint " + tag + ": not in the model, left out (partial): " + names_text(left_out.lost));
}

}  // namespace

Names by_name(const std::vector<formats::Tensor>& tensors) {
  Names result;
  for (const auto& tensor : tensors) result[{tensor.kind, tensor.name}] = &tensor;
  return result;
}

Names stored_for(engine::State& state, const formats::Manifest& manifest) {
  auto stored = by_name(manifest.tensors);
  stored.merge(by_name(manifest.ranks[source_rank(state.job, manifest)]));
  return stored;
}

const formats::Tensor* source_of(const Names& stored, const std::string& kind, const std::string& name,
                                 bool weights_only) {
  if (const auto found = stored.find({kind, name}); found != stored.end()) return found->second;
  const auto other = kind == "master"                  ? stored.find({"param", name})
                     : weights_only && kind == kFrozen ? stored.find({"master", name})
                                                       : stored.end();
  return other == stored.end() ? nullptr : other->second;
}

bool was_frozen(const Names& stored, const std::string& name) { return stored.contains({"param", name}); }

bool same_layout(const Mesh& mesh, const formats::Manifest& manifest) {
  return manifest.world == mesh.world()->size() && manifest.sequence == mesh.size("sp") &&
         manifest.tensor == mesh.size("tp");
}

void require_resumable(const formats::Manifest& manifest, const std::string& label) {
  if (manifest.weights_only)
    throw ConfigError("[load_checkpoint] " + label +
                      " holds weights only: no run can be resumed from it. Hint: weights_only (zero train "
                      "--weights-only) takes them, and begins at step 0.");
}

void require_same_slots(engine::State& state, const formats::Manifest& manifest, const std::string& label) {
  const auto optimizer = state.parts.optimizer->name();
  const auto& slots = state.parts.optimizer->states();
  if (manifest.optimizer != optimizer && manifest.slots != slots)
    throw ConfigError("[load_checkpoint] " + label + " has the states of the optimizer " + manifest.optimizer + " (" +
                      slots_text(manifest.slots) + "), this run has " + optimizer + " (" + slots_text(slots) +
                      "). Hint: optimizer.type must be the one of the run that saved it; weights_only (zero train "
                      "--weights-only) takes the weights alone, and begins at step 0.");
}

void require_private_buffers(const engine::Job& job, const formats::Manifest& manifest, const std::string& label) {
  if (job.settings.checkpoint.private_buffers != PrivateBuffers::Error || manifest.world == job.comm->size()) return;
  if (const auto names = private_buffers(manifest); !names.empty())
    throw ConfigError(
        base::join("[load_checkpoint] ", label, " has buffers that differed between its ", manifest.world,
                   " ranks, this run has ", job.comm->size(), ": ", names,
                   ". Hint: libzero.private_buffers \"modulo\", \"rank0\" or \"mean\" says which to take."));
}

LeftOut compare_models(engine::State& state, const formats::Manifest& manifest, const std::string& label,
                       const LoadOptions& options) {
  const Partial partial(options.partial);
  const auto wanted = tensors_of(state);
  const auto stored = stored_for(state, manifest);
  const auto unsaved = engine::unsaved_buffers(*state.job.model);
  std::vector<std::string> differences;
  LeftOut left_out;
  std::set<std::string> frozen_here;  // but trained in the checkpoint: one line each
  std::set<std::pair<std::string, std::string>> taken;
  const auto differs = [&](const std::string& name, const std::string& text) {
    if (partial.matches(name))
      left_out.kept.insert(name);
    else
      differences.push_back(text);
  };
  for (const auto& tensor : wanted) {
    if (options.weights_only && is_slot(tensor.kind)) continue;
    const auto name = tensor.kind + " of " + tensor.name;
    const auto* const found = source_of(stored, tensor.kind, tensor.name, options.weights_only);
    if (found == nullptr) {
      if (tensor.kind == kFrozen && stored.contains({"master", tensor.name})) {
        frozen_here.insert(tensor.name);
        differs(tensor.name, tensor.name +
                                 ": frozen in the model, trained in the checkpoint. Hint: requires_grad_(true) before "
                                 "load_checkpoint");
      } else if (tensor.kind == kBuffer || !was_frozen(stored, tensor.name)) {
        differs(tensor.name, name + ": not in the checkpoint");
      }
      continue;
    }
    if (found->shape != tensor.shape)
      differs(tensor.name, name + ": has the shape " + text_of(found->shape) + " in the checkpoint, " +
                               text_of(tensor.shape) + " in the model");
    // Of a parameter that is frozen now, the master is rounded as that of a trained one is.
    const bool rounded = (tensor.kind == kFrozen && found->kind == "master") || is_narrowed(*found, tensor);
    if (!rounded && !fits(found->dtype, tensor.dtype))
      differs(tensor.name, name + ": is " + found->dtype + " in the checkpoint, " + tensor.dtype + " in the model" +
                               (tensor.kind == kFrozen ? ". Hint: libzero.keep_fp32 keeps it in fp32" : ""));
    taken.insert({found->kind, found->name});
  }
  for (const auto& [key, tensor] : stored) {
    const auto& [kind, name] = key;
    if (kind == kBuffer && unsaved.contains(name)) continue;  // the loader takes what it can
    if (kind == kPrivate || taken.contains(key) || (kind != kBuffer && frozen_here.contains(name))) continue;
    if (left_out.kept.contains(name) || (options.weights_only && is_slot(kind))) continue;
    if (partial.matches(name))
      left_out.lost.insert(name);
    else
      differences.push_back(kind + " of " + name + ": in the checkpoint, not in the model");
  }
  const auto aliases = state.exports.aliases();
  for (const auto& [alias, owner] : aliases)
    if (const auto found = manifest.aliases.find(alias);
        (found == manifest.aliases.end() || found->second != owner) && !partial.matches(alias))
      differences.push_back(alias + ": tied to " + owner + " in the model, not in the checkpoint");
  for (const auto& [alias, owner] : manifest.aliases)
    if (!aliases.contains(alias) && !partial.matches(alias))
      differences.push_back(alias + ": tied to " + owner + " in the checkpoint, not in the model");
  if (differences.empty() && !taken.empty()) return left_out;
  if (differences.empty())
    throw ConfigError("[load_checkpoint] " + label +
                      " has nothing that the model has. Hint: partial names what may be missing, not everything.");
  std::string text =
      base::join("[load_checkpoint] ", label, " does not fit the model; ", differences.size(), " differences:");
  for (std::size_t i = 0; i < std::min(differences.size(), kMostShown); ++i) text += "\n  " + differences[i];
  if (differences.size() > kMostShown) text += base::join("\n  and ", differences.size() - kMostShown, " more");
  throw ConfigError(text);
}

void tell_differences(engine::State& state, const formats::Manifest& manifest, const formats::Choice& choice,
                      const LoadOptions& options, const LeftOut& left_out) {
  const auto notice = [&](const std::string& text) {
    base::log(LogLevel::Warning, "checkpoint " + choice.tag + ": " + text);
  };
  for (const auto& text : choice.notices) notice(text);
  if (options.weights_only)
    base::log(LogLevel::Info, base::join("checkpoint ", choice.tag, ": taking the weights of step ",
                                         manifest.global_steps, " alone; optimizer states and counters are reset"));
  if (const auto& mesh = *state.parts.ranks.mesh; !same_layout(mesh, manifest)) {
    base::log(
        LogLevel::Info,
        base::join(
            "checkpoint ", choice.tag, ": loading the checkpoint of ",
            layout_text(manifest.world, manifest.sequence, manifest.tensor), " on ",
            layout_text(state.job.comm->size(), mesh.size("sp"), mesh.size("tp")),
            options.weights_only ? "" : "; every rank's random numbers start again, from a seed of the checkpoint's"));
    const auto names = private_buffers(manifest);
    const auto rule = state.job.settings.checkpoint.private_buffers;
    if (!names.empty() && manifest.world != state.job.comm->size())
      notice(base::join("buffers that differed between ranks: ",
                        rule == PrivateBuffers::Mean ? "every rank takes their mean"
                        : rule == PrivateBuffers::Rank0
                            ? "every rank takes those of rank 0"
                            : base::join("rank r takes those of rank r mod ", manifest.world),
                        " (libzero.private_buffers): ", names));
  }
  tell_left_out(choice.tag, left_out);
  if (options.weights_only) return;
  const auto batch = state.parts.plan.batch.train;
  if (manifest.global_batch > 0 && manifest.global_batch != batch)
    notice(base::join("was trained with ", manifest.global_batch, " samples a step, this run has ", batch,
                      "; schedules continue by steps"));
  if (const auto optimizer = state.parts.optimizer->name(); manifest.optimizer != optimizer)
    notice("was trained with " + manifest.optimizer + ", this run has " + optimizer + ", which has the same states");
  const auto parameter = file_dtype(engine::scalar_type(state.parts.plan.run.precision.param), "parameters");
  if (manifest.parameter_dtype != parameter)
    notice("was trained in " + manifest.parameter_dtype + ", this run computes in " + parameter +
           "; masters are taken and cast again");
  const auto stored = by_name(manifest.tensors);
  for (const auto& tensor : tensors_of(state)) {
    const auto* const found = source_of(stored, tensor.kind, tensor.name, false);
    if (found == nullptr || !is_narrowed(*found, tensor)) continue;
    notice(base::join("has ", tensor.kind, " of ", tensor.name, " in ", found->dtype, ", this run stores it in ",
                      tensor.dtype, "; it and others like it are rounded to the nearest"));
    break;
  }
  constexpr const char* kKeepFp32 = "libzero.keep_fp32";
  if (const auto found = manifest.config.find(kKeepFp32);
      found != manifest.config.end() && state.job.settings.precision != config::Precision::Fp32)
    if (const auto kept = state.job.options.effective().at(kKeepFp32); found->second != kept)
      notice(base::join("was trained with ", kKeepFp32, " ", found->second, ", this run has ", kept,
                        "; masters are taken and cast again"));
  const bool imported = manifest.cpu_capability.empty();  // was not written by a run
  if (!imported &&
      (manifest.torch_threads != at::get_num_threads() || manifest.cpu_capability != at::get_cpu_capability()))
    notice(base::join("was written with ", manifest.torch_threads, " torch threads on ", manifest.cpu_capability,
                      ", this run has ", at::get_num_threads(), " on ", at::get_cpu_capability(),
                      "; results may differ in the last bits"));
}

}  // namespace zero::checkpoint
