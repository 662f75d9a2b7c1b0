// What a checkpoint of DeepSpeed's stage 0 holds: one file with the whole model, and the optimizer's states by number.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "interchange/torch_archive.h"

namespace zero::interchange {

struct Stage0Plan {
  struct Entry {
    std::string kind, name;
    StoredTensor stored;
  };
  std::vector<Entry> tensors;               // without buffers
  std::map<std::string, std::string> ties;  // views of one storage
  std::vector<StoredTensor> steps;          // counts of steps
  std::vector<std::string> remarks;
};

// States are numbered in the order of the optimizer's groups, without names. They are given names only where shapes
// leave no choice: all parameters of a shape are in one group, in the order of the model. Otherwise, and without fp32
// masters, the plan has "weight" alone, with a remark that says why.
Stage0Plan plan_stage0(const TorchArchive& archive, const std::set<std::string>& buffers);

}  // namespace zero::interchange
