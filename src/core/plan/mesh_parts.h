// What tensor, sequence and expert parallelism change in a plan: the part of the model that one rank holds and
// computes, and the bytes of activations that it sends. Of uneven parts, the largest is planned: that of the last rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <zero/plan.h>

#include "config/settings.h"
#include "plan/units.h"

namespace zero::planning {

// The model's parameters that one rank has, cut as an Engine would: by the configuration's partition_config if it has
// one, else between attention heads, inner columns and rows of the vocabulary. Throws ConfigError for weights that
// cannot be cut. tensor_rank: whose parts; negative: the last one's.
std::vector<Parameter> parts_of(const PlanModel& model, const config::Settings& settings, int tensor_rank = -1);

// The degree by which the cut divides each dimension of the computation.
struct Share {
  double heads = 1, inner = 1, vocabulary = 1;  // fractions of the model's
  std::int64_t tokens = 0;                      // of each sample
  int tensor = 1, sequence = 1;
  bool gathered_logits = true;     // every rank has whole logits
  std::vector<Parameter> split{};  // weights of layers that are cut, in order
  bool ends_with_sum = false;      // the last product of a layer is one of rows
};
Share share_of(const PlanModel& model, const config::Settings& settings, const std::vector<Parameter>& parts);

// A matrix product of a layer whose weight is cut, as the engine splits it (runtime/parallel/split_products.h): f
// before a product of columns, g after one of rows.
struct SplitProduct {
  struct Exchange {
    std::string name;       // "f", "g"; empty: an all-gather
    std::string operation;  // "all-reduce"; empty: nothing is sent
    std::string of;         // "output", "gradient of the input"
    std::int64_t bytes = 0;
  };
  std::string weight;              // "blocks.0.qkv.weight"
  std::string unit;                // "blocks.0"
  std::vector<std::int64_t> part;  // the weight's sizes on one rank
  bool row = false;                // else columns: rows of the weight
  Exchange forward{}, backward{};  // bytes that a rank sends in one micro-batch
};
// In order. Consecutive column products of a layer take the same input and have one f.
std::vector<SplitProduct> split_products(const Share& share, std::int64_t samples, std::int64_t element);

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
// Of experts, the bytes if all are chosen equally often. Without dropout, a segment's second run ends when the last
// saved tensor is there, which spares its last sum.
std::vector<Exchange> exchanges_of(const ActivationExchange& input);

}  // namespace zero::planning
