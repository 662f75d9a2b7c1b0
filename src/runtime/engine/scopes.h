// Begins and ends a scope of gathered_parameters.
#pragma once
#include <vector>

#include "engine/stepper.h"

namespace zero::engine {

class Scopes {
 public:
  Scopes(Parts& parts, const Checks& checks, Stepper& stepper) : p_(parts), checks_(checks), stepper_(stepper) {}

  // begin() returns the groups of the scope, which are the same on every rank. Collective.
  std::vector<int> begin(const ParameterChoice& choice, bool modify);
  void end(const std::vector<int>& groups, bool modify);

 private:
  std::vector<int> agreed_groups(const ParameterChoice& choice, bool modify);
  void write_back(int group);

  Parts& p_;
  const Checks& checks_;
  Stepper& stepper_;
};

}  // namespace zero::engine
