// DeepSpeed's universal checkpoint: plan_universal() of weights_plan.h. What its loader reads is in DeepSpeed's
// checkpoint/universal_checkpoint.py, runtime/base_optimizer.py, runtime/zero/stage3.py and runtime/engine.py.
#include <algorithm>
#include <cstring>

#include <zero/errors.h>

#include "base/check.h"
#include "formats/manifest.h"
#include "interchange/deepspeed_scaler.h"
#include "interchange/pickle_writer.h"
#include "interchange/weights_plan.h"

namespace zero::interchange {
namespace {

// DeepSpeed reads one entry for each of its optimizer's groups, however many it has; empty ones change nothing.
constexpr int kMostGroups = 64;
// The version whose loader this was written for; it compares it with the oldest that it reads.
constexpr const char* kDeepSpeed = "0.19.8";

std::string float_bytes(double value) {
  const auto narrow = static_cast<float>(value);
  std::string bytes(sizeof narrow, '\0');
  std::memcpy(bytes.data(), &narrow, sizeof narrow);
  return bytes;
}

// The number of updates, as torch's optimizers have it: a scalar tensor.
std::string step_file(std::int64_t steps) {
  PickleWriter pickle;
  pickle.tensor("F32", {}, 0);
  return torch_file_text(pickle.finish(), {float_bytes(static_cast<double>(steps))});
}

std::string optimizer_file(const SourceProgress& progress) {
  PickleWriter pickle;
  const auto groups = [&] {
    pickle.text("param_groups");
    pickle.begin_list();
    for (int i = 0; i < kMostGroups; ++i) {
      pickle.begin_dict();
      pickle.end_dict();
    }
    pickle.end_list();
  };
  pickle.begin_dict();
  pickle.text("ds_version");
  pickle.text(kDeepSpeed);
  if (progress.scaler) write_deepspeed_scaler(pickle, *progress.scaler, progress.global_steps);
  groups();
  pickle.text("optimizer_state_dict");  // stage 3
  pickle.begin_dict();
  groups();
  pickle.text("state");
  pickle.begin_dict();
  pickle.integer(0);
  pickle.begin_dict();
  pickle.text("step");
  pickle.tensor("F32", {}, 0);
  pickle.end_dict();
  pickle.end_dict();
  pickle.end_dict();
  pickle.end_dict();
  return torch_file_text(pickle.finish(), {float_bytes(static_cast<double>(progress.applied_steps))});
}

// Frozen parameters and buffers, and where the run stood. buffers: names; ties: the name that is stored, by alias.
std::string model_pickle(const std::vector<OutTensor>& tensors, const std::vector<std::string>& buffers,
                         const std::map<std::string, std::string>& ties, const SourceProgress& progress) {
  PickleWriter pickle;
  const auto number = [&](const char* name, std::int64_t value) {
    pickle.text(name);
    pickle.integer(value);
  };
  pickle.begin_dict();
  pickle.text("module");
  pickle.begin_ordered_dict();
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    pickle.text(tensors[t].name);
    pickle.tensor(tensors[t].dtype, tensors[t].shape, t);
  }
  pickle.end_dict();
  pickle.text("buffer_names");
  pickle.begin_list();
  for (const auto& name : buffers) pickle.text(name);
  pickle.end_list();
  pickle.text("shared_params");
  pickle.begin_dict();
  for (const auto& [alias, stored] : ties) {
    pickle.text(alias);
    pickle.text(stored);
  }
  pickle.end_dict();
  pickle.text("ds_version");
  pickle.text(kDeepSpeed);
  number("global_steps", progress.global_steps);
  number("global_samples", progress.global_samples);
  number("skipped_steps", progress.skipped_steps);
  number("dp_world_size", 1);
  number("mp_world_size", 1);
  pickle.text("lr_scheduler");
  pickle.begin_dict();
  number("last_batch_iteration", progress.applied_steps - 1);
  pickle.end_dict();
  pickle.text("universal_checkpoint_info");
  pickle.begin_dict();
  pickle.text("universal_checkpoint_version");
  pickle.real(0.2);
  pickle.end_dict();
  pickle.end_dict();
  return pickle.finish();
}

std::string state_pickle(const OutTensor& tensor) {
  PickleWriter pickle;
  pickle.begin_dict();
  pickle.text("param");
  pickle.tensor(tensor.dtype, tensor.shape, 0);
  pickle.end_dict();
  return pickle.finish();
}

}  // namespace

WeightsPlan plan_universal(const std::vector<SourceTensor>& tensors, const std::map<std::string, std::string>& aliases,
                           const SourceProgress& progress, const NameMap* map, const ExportOptions& options,
                           const std::string& label) {
  if (!options.dtype.empty() && options.dtype != "fp32")
    throw ConfigError("[export] dtype: got \"" + options.dtype +
                      "\", expected fp32: a universal checkpoint has the optimizer's states");
  WeightsPlan plan;
  plan.mapping =
      map != nullptr ? map_names(*map, Direction::ToTheirs, tensors, aliases, label) : same_names(tensors, aliases);
  const auto tag = "global_step" + std::to_string(progress.global_steps);
  std::vector<std::size_t> trained, others;
  for (std::size_t i = 0; i < plan.mapping.tensors.size(); ++i) {
    const auto& kind = plan.mapping.tensors[i].kind;
    (kind == "master" || kind.starts_with("opt.") ? trained : others).push_back(i);
  }
  const auto add = [&](std::size_t i) {
    const auto& tensor = plan.mapping.tensors[i];
    plan.tensors.push_back({options.prefix + tensor.name, tensor.dtype, tensor.shape});
    plan.from.push_back(i);
  };
  std::vector<OutFile> steps;
  for (const auto i : trained) {
    const auto& tensor = plan.mapping.tensors[i];
    const auto name = options.prefix + tensor.name;
    if (!formats::valid_file_name(name))
      throw ConfigError("[export] the name \"" + name + "\" cannot be that of a directory");
    const auto folder = tag + "/zero/" + name + "/";
    const auto state = tensor.kind == "master" ? "fp32" : tensor.kind.substr(std::strlen("opt."));
    add(i);
    plan.torch.push_back(torch_layout(state_pickle(plan.tensors.back()), {plan.tensors.back().bytes()}));
    plan.layout.places.push_back({plan.layout.files.size(), plan.torch.back().offset(0)});
    plan.layout.files.push_back(plan.torch.back().file(folder + state + ".pt"));
    if (tensor.kind == "master") steps.push_back(text_file(folder + "step.pt", step_file(progress.applied_steps)));
  }
  std::map<std::string, std::string> ties;
  for (const auto& [alias, stored] : plan.mapping.aliases) ties[options.prefix + alias] = options.prefix + stored;
  // The same file under both names: which one is read depends on the stage there.
  for (const char* name : {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"}) {
    const auto first = plan.tensors.size();
    std::vector<std::uint64_t> bytes;
    std::vector<std::string> buffers;
    for (const auto i : others) {
      add(i);
      if (plan.mapping.tensors[i].kind == "buffer") buffers.push_back(plan.tensors.back().name);
      bytes.push_back(plan.tensors.back().bytes());
    }
    const std::vector<OutTensor> module(plan.tensors.begin() + static_cast<std::ptrdiff_t>(first), plan.tensors.end());
    plan.torch.push_back(torch_layout(model_pickle(module, buffers, ties, progress), bytes));
    for (std::size_t t = 0; t < module.size(); ++t)
      plan.layout.places.push_back({plan.layout.files.size(), plan.torch.back().offset(t)});
    plan.layout.files.push_back(plan.torch.back().file(tag + "/" + name));
  }
  for (auto& file : steps) plan.layout.files.push_back(std::move(file));
  plan.layout.files.push_back(text_file(tag + "/zero/optimizer_state.pt", optimizer_file(progress)));
  plan.layout.files.push_back(text_file("latest_universal", tag));
  return plan;
}

}  // namespace zero::interchange
