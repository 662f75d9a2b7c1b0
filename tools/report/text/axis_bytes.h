// Bytes that a rank sent, apart for each kind of parallelism (docs/parallelism.md).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace zero::report {

// Degrees of parallelism: data * sequence * tensor ranks, of which `expert` data- and sequence-parallel ones share the
// experts of a layer.
struct Degrees {
  int data = 1, sequence = 1, tensor = 1, expert = 1;
  bool share_samples() const { return sequence * tensor > 1; }
  // Ranks send each other activations, not only states.
  bool exchange_activations() const { return share_samples() || expert > 1; }
  bool operator==(const Degrees&) const = default;
};

// "2 dp x 1 sp x 2 tp", "4 dp x 1 sp x 1 tp, experts over 2".
std::string degrees_text(const Degrees& degrees);

// The name of an operation with the dimension of the ranks that took part: "tp.all_reduce", "sp.all_to_all", and plain
// names for ZeRO's. A Communicator counts an operation of all ranks of the run under its plain name, whichever
// dimension that is. ZeRO shards over data- and sequence-parallel ranks, and states of experts over "edp", and uses no
// all-to-all; sequence and expert parallelism use nothing else. If both are over all ranks, all is named sequence
// parallelism's.
std::string operation_on_mesh(std::string_view counted, const Degrees& degrees);

struct AxisBytes {
  std::uint64_t zero = 0;      // all-gathers of parameters and reductions of gradients
  std::uint64_t tensor = 0;    // activations and their gradients, between ranks that share cut weights
  std::uint64_t sequence = 0;  // the same between ranks that share the tokens of a sample
  std::uint64_t expert = 0;    // rows of tokens to experts of other ranks and back, and their gradients

  std::uint64_t sum() const { return zero + tensor + sequence + expert; }
  // By a name of operation_on_mesh(). Operations of other groups, and "control", are not counted.
  void add(std::string_view operation, std::uint64_t bytes);
  bool operator==(const AxisBytes&) const = default;
};

// "ZeRO 1.03MiB, tensor parallelism 2.53MiB": of the dimensions that have several ranks.
std::string axes_text(const AxisBytes& bytes, const Degrees& degrees);

}  // namespace zero::report
