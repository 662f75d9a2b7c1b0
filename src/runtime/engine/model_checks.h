// What a program may have done to the model since the Engine took it, that would train wrongly in silence. Each check
// names what it found; what a call does about it is the State's.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/param_group.h"

namespace torch::nn {
class Module;
}

namespace zero::engine {

// Throws ConfigError, beginning with `where`, when a parameter's gradient hook is no longer the Engine's.
void check_hooks(const std::vector<std::unique_ptr<ParamGroup>>& groups, const std::string& where);
// Throws ConfigError, beginning with `where`, naming parameters of the model that no Engine holds.
void check_no_new_parameters(const torch::nn::Module& model, const std::string& where);

// Whether a checkpoint has a name for the type: buffers of others can be trained with, not saved.
bool can_be_saved(at::ScalarType type);

}  // namespace zero::engine
