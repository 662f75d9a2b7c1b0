// Which parameters stay fp32 in a run in 16 bits (libzero.keep_fp32). Names only, no tensors. Gives the engine and the
// planner the same ones.
#pragma once
#include <string>
#include <vector>

#include "config/settings.h"

namespace zero::sharding {

struct ParameterNames {
  std::string name;
  std::vector<std::string> aliases = {};  // further names of a tied parameter
};

struct KeptFp32 {
  std::vector<bool> kept;           // by parameter; in fp32 none, as all of them are fp32
  std::vector<std::string> faults;  // one for each pattern that matches no parameter
};
// buffers: names of the model's buffers, which a pattern may have been meant for.
KeptFp32 kept_fp32(const config::Settings& settings, const std::vector<ParameterNames>& parameters,
                   const std::vector<std::string>& buffers = {});

// What is wrong with a pattern of the key that matches no parameter, with names that may have been meant.
std::string pattern_fault(const std::string& key, const std::string& pattern,
                          const std::vector<ParameterNames>& parameters);

}  // namespace zero::sharding
