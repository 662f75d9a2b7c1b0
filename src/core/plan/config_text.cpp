// Writes the configuration file of a plan: the keys of the given configuration, overridden by the plan's choices.
#include <zero/errors.h>
#include <zero/plan.h>

#include <map>

#include "base/check.h"
#include "base/json_write.h"
#include "config/document.h"
#include "plan/model.h"

namespace zero {
namespace {

// JSON objects by dotted key; a leaf has text and no children.
struct Node {
  std::map<std::string, Node> children;
  std::string text;

  Node& at(const std::string& path) {
    const auto dot = path.find('.');
    auto& child = children[path.substr(0, dot)];
    return dot == std::string::npos ? child : child.at(path.substr(dot + 1));
  }
  void set(const std::string& path, std::string value) { at(path) = {{}, std::move(value)}; }
  void erase(const std::string& path) {
    const auto dot = path.find('.');
    if (dot == std::string::npos) {
      children.erase(path);
    } else if (const auto it = children.find(path.substr(0, dot)); it != children.end()) {
      it->second.erase(path.substr(dot + 1));
      if (it->second.children.empty()) children.erase(it);
    }
  }
  std::string json(std::size_t indent = 0) const {
    if (children.empty()) return text.empty() ? "{}" : text;
    std::string out = "{";
    for (const auto& [name, child] : children)
      out += (out.size() > 1 ? "," : "") + ("\n" + std::string(indent + 2, ' ')) + "\"" + name +
             "\": " + child.json(indent + 2);
    return out + "\n" + std::string(indent, ' ') + "}";
  }
};

}  // namespace

std::string plan_config(const PlanModel& model, const Options& options, const Plan& plan,
                        const std::string& offload_folder) {
  if (plan.offload == "nvme" && offload_folder.empty())
    throw ConfigError("[plan_config] got no folder, expected one for the files of offload nvme");
  Node root;
  for (const auto& [path, entry] : options.document().entries)
    root.set(path, entry.automatic ? "\"auto\"" : entry.value.json());
  root.erase("train_batch_size");
  root.set("train_micro_batch_size_per_gpu", std::to_string(plan.micro_batch));
  root.set("gradient_accumulation_steps", std::to_string(plan.accumulation));
  root.set("zero_optimization.stage", std::to_string(plan.stage));
  for (const char* which : {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"}) {
    const bool applies =
        plan.offload != "none" && (which[std::string_view(which).size() - 1] == 'r' || plan.stage == 3);
    if (!applies) {
      root.erase(which);
      continue;
    }
    root.set(base::join(which, ".device"), base::json_quote(plan.offload));
    root.erase(base::join(which, ".nvme_path"));
    if (plan.offload == "nvme")
      root.set(base::join(which, ".nvme_path"), base::json_quote(offload_folder, base::NotUtf8::Keep));
  }
  if (!plan.checkpointing) {
    root.erase("activation_checkpointing");
    root.erase("libzero.activation_file_path");
  } else {
    const auto given = options.settings().activations.num_checkpoints;
    root.set("activation_checkpointing.number_checkpoints", std::to_string(given > 0 ? given : model.layers));
  }
  root.erase("libzero.model");
  for (const auto& [path, entry] : options.document().entries)
    if (model.experts.count > 0 && path.starts_with("libzero.model.experts.")) root.set(path, entry.value.json());
  if (model.kind == PlanModel::Kind::Gpt || model.kind == PlanModel::Kind::Count) {
    root.set("libzero.model.layers", std::to_string(model.layers));
    root.set("libzero.model.hidden", std::to_string(model.hidden));
    root.set("libzero.model.heads", std::to_string(model.heads));
    root.set("libzero.model.seq_length", std::to_string(model.sequence));
    root.set("libzero.model.vocabulary", std::to_string(model.vocabulary));
    if (!model.tied) root.set("libzero.model.tied", "false");
  }
  return root.json() + "\n";
}

}  // namespace zero
