// The experiments of `zero reproduce`: one function each, which runs programs and returns what it found. Each says
// where in ZeRO's papers or in the documents about them it is from, and puts their figures next to its own.
#pragma once
#include <string>
#include <vector>

#include "lab/reproduce/record.h"
#include "lab/reproduce/trials.h"

namespace zero::cli {

// What an experiment has.
struct Study {
  Trials& trials;
  bool quick = false;  // sizes that take seconds
  std::string folder;  // its own, for configurations and runs
  std::string text;    // to train on; empty: the one that `zero train` takes
};

struct Experiment {
  const char* name;
  const char* title;
  double minutes;  // on two cores
  int trials;      // about as many programs, for the progress shown
  Record (*run)(Study& study);
};

// In the order of `zero reproduce all`.
const std::vector<Experiment>& experiments();

Record reproduce_homework(Study& study);         // memory.cpp
Record reproduce_stages(Study& study);           // memory.cpp
Record reproduce_mixed_precision(Study& study);  // precision.cpp
Record reproduce_ddp_vs_fsdp(Study& study);      // budgets.cpp
Record reproduce_largest_model(Study& study);    // budgets.cpp
Record reproduce_offload(Study& study);          // budgets.cpp
Record reproduce_superlinear(Study& study);      // batches.cpp
Record reproduce_checkpointing(Study& study);    // batches.cpp
Record reproduce_delayed_update(Study& study);   // learning.cpp
Record reproduce_experts(Study& study);          // learning.cpp

}  // namespace zero::cli
