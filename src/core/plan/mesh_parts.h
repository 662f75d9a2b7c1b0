// What tensor and sequence parallelism change in a plan: the part of the model that one rank holds and computes, and
// the bytes of activations that it sends. Of uneven parts, the largest is planned: that of the last rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <zero/plan.h>

#include "config/settings.h"
#include "plan/units.h"

namespace zero::planning {

// The model's parameters, cut as an Engine would: by the configuration's partition_config if it has one, else between
// attention heads, inner columns and rows of the vocabulary. Throws ConfigError for weights that cannot be cut.
std::vector<Parameter> parts_of(const PlanModel& model, const config::Settings& settings);

// The degree by which the cut divides each dimension of the computation.
struct Share {
  double heads = 1, inner = 1, vocabulary = 1;  // fractions of the model's
  std::int64_t tokens = 0;                      // of each sample
  int tensor = 1, sequence = 1;
  bool gathered_logits = true;  // every rank has whole logits
};
Share share_of(const PlanModel& model, const config::Settings& settings, const std::vector<Parameter>& parts);

// Collectives of activations in one forward and backward, of one rank.
struct Exchange {
  std::string operation;              // as in CommStats::by_op of the world: "tp.all_reduce", "sp.all_to_all", ...
  std::string phase;                  // "forward", "backward", "recomputation"
  std::string purpose;                // "sums of row layers", "gradients of inputs of column layers", ...
  std::int64_t calls = 0, bytes = 0;  // bytes: sent, of all calls
};
struct ActivationExchange {
  const PlanModel& model;
  const config::Settings& settings;
  const Share& share;
  std::int64_t samples = 1, segments = 0, element = 4;
};
// Without dropout, a segment's second run ends when the last saved tensor is there, which spares its last sum.
std::vector<Exchange> exchanges_of(const ActivationExchange& input);

}  // namespace zero::planning
