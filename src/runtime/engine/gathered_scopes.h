// Scopes of gathered_parameters: which groups a program asks for, and what open scopes allow. The groups' copies are
// the Prefetcher's, what a scope does at its ends is in scopes.h.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/model_binding.h"

namespace zero::engine {

// What a scope was asked for: everything, or a module's parameters, or what names and patterns (* and ?) match:
// parameters, their aliases, and groups.
struct ParameterChoice {
  bool all = false;
  const torch::nn::Module* module = nullptr;
  std::vector<std::string> names{};
};

// The groups with a chosen parameter, in order. Throws ConfigError, beginning with `where`, that lists all names
// without a match and the nearest ones.
std::vector<int> chosen_groups(const ModelBinding& binding, const ParameterChoice& choice, const std::string& where);

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
  std::vector<int> writers_;  // by group: open scopes that may write it
};

}  // namespace zero::engine
