// Which weights tensor parallelism cuts, by patterns of parameter names: DeepSpeed's tensor_parallel.partition_config
// and preset_model.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zero::config {

class Faults;
struct Value;

enum class PartitionType : std::uint8_t { Column, Row, Skip };

// One entry of partition_config.layer_specs. The first entry with a matching pattern decides about a parameter.
struct LayerSpec {
  std::string place;  // for messages: "config.json:12:7", a JSON pointer if there is no file, or "preset gpt"
  std::vector<std::string> patterns;  // ECMAScript, anchored at the start of the parameter's full name
  PartitionType type = PartitionType::Skip;
  // Of a fused weight, cut by columns: lengths along dim 0, each cut separately; {}: not fused. equal_pieces: the one
  // number in `pieces` is how many equal pieces there are.
  std::vector<std::int64_t> pieces;
  bool equal_pieces = false;
  std::optional<bool> gather_output;  // column: the output is all-gathered; unset: by lm_head_patterns
  bool grad_allreduce = false;        // skip: gradients are summed over the tensor-parallel ranks
  bool scatter_input = false;         // row: the input is whole, each rank takes its columns
  std::int64_t multiple = 1;          // of elements, at which the weight is divided (the head width)
  bool preset = false;                // need not match anything
  bool head = false;                  // computes logits, as names that match lm_head_patterns
};

struct TpPlan {
  std::vector<LayerSpec> specs;
  std::vector<std::string> lm_head_patterns{"lm_head", "embed_out"};
  bool vocab_parallel_lm_head = false;  // logits stay divided over the vocabulary
  bool strict = false;                  // a two-dimensional weight that no entry matches is an error
  bool empty() const { return specs.empty(); }
};

// The plan of tensor_parallel.partition_config (null or an object) and preset_model (empty: none) for `degree` ranks.
// Adds errors to `faults`.
TpPlan read_tp_plan(const Value& partition_config, const std::string& preset, int degree, Faults& faults);

}  // namespace zero::config
