#include "engine/model_checks.h"

#include <torch/nn/module.h>

#include "base/check.h"
#include "torch_hooks/gradient_hook.h"
#include "torch_hooks/interception.h"

namespace zero::engine {

void check_hooks(const std::vector<std::unique_ptr<ParamGroup>>& groups, const std::string& where) {
  for (const auto& group : groups) {
    for (const auto& member : group->members())
      if (torch_hooks::gradient_hook_of(member.tensor) != torch_hooks::HookPlace::Ours)
        throw ConfigError(where + "the post-accumulate-grad hook of parameter " + member.name + " (group " +
                          group->name() +
                          ") was replaced after the Engine took it, and its gradient would be lost. Hint: libtorch has "
                          "one place for such a hook; tensor.register_hook() sees gradients too.");
  }
}

void check_no_new_parameters(const torch::nn::Module& model, const std::string& where) {
  std::string names;
  int more = -3;  // beyond as many as are named
  for (const auto& item : model.named_parameters()) {
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
