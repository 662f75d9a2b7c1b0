// Scopes of gathered_parameters: the groups that a program selects, and what open scopes permit. The Prefetcher owns
// the unsharded copies; scopes.h begins and ends scopes.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/model_binding.h"

namespace zero::engine {

// The selection of a scope: all parameters, a module's parameters, or names and patterns (* and ?) of parameters,
// aliases and groups.
struct ParameterChoice {
  bool all = false;
  const torch::nn::Module* module = nullptr;
  std::vector<std::string> names{};
};

// The groups with a selected parameter, in order. Throws ConfigError, prefixed with `where`, that lists all names
// without a match and the most similar names.
std::vector<int> chosen_groups(const ModelBinding& binding, const std::vector<ModelParameter>& remote,
                               const ParameterChoice& choice, const std::string& where);

class OpenScopes {
 public:
  void open(const std::vector<int>& groups, bool modify) { change(groups, modify, 1); }
  void close(const std::vector<int>& groups, bool modify) { change(groups, modify, -1); }
  bool any() const { return open_ > 0; }
  bool any_modifying() const { return modifying_ > 0; }
  bool may_write(int group) const {
    const auto g = static_cast<std::size_t>(group);
    return g < writers_.size() && writers_[g] > 0;
  }

 private:
  void change(const std::vector<int>& groups, bool modify, int by) {
    open_ += by;
    if (!modify) return;
    modifying_ += by;
    for (const int group : groups) {
      const auto g = static_cast<std::size_t>(group);
      if (g >= writers_.size()) writers_.resize(g + 1);
      writers_[g] += by;
    }
  }

  int open_ = 0, modifying_ = 0;
  std::vector<int> writers_;  // by group: number of open scopes that may write it
};

}  // namespace zero::engine
