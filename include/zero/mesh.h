// The ranks of a run as a grid of data, sequence and tensor parallelism, as torch's DeviceMesh.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <zero/communicator.h>
#include <zero/export.h>
#include <zero/options.h>

namespace zero {
namespace parallel {
struct MeshMaker;
}

// Rank (d * u + i) * t + j has the coordinates d < D of "dp", i < u of "sp" and j < t of "tp". u is
// sequence_parallel_size, t is tensor_parallel.autotp_size, and D the number of ranks / (u * t). This is DeepSpeed's
// and Megatron's order: tensor ranks are neighbours.
//
// Training data are divided by (rank("dp"), size("dp")): all "tp" ranks of a group read the same samples; all "sp"
// ranks the same samples, each its own stretch of their tokens. ZeRO shards over "dp_sp", the ranks with equal j in
// order of d * u + i (torch: a flattened dimension).
class ZERO_API Mesh {
 public:
  // [collective] Sizes are taken from the configuration. ConfigError on all ranks if theirs differ, if u * t does not
  // divide the number of ranks, or if the transport cannot be split (a process group that is not gloo's) and u * t > 1.
  static std::shared_ptr<Mesh> of(const Options& options, std::shared_ptr<Communicator> world);

  // [local] Number of ranks along a dimension, "dp", "sp", "tp" or "dp_sp", and this rank's coordinate. ConfigError for
  // another name.
  int size(std::string_view dim) const { return at(dim).size; }
  int rank(std::string_view dim) const { return at(dim).rank; }
  // [local] This rank's group along a dimension. It is the world's Communicator if the dimension has all ranks, and a
  // Communicator of one rank if its size is 1. Others count as "tp.all_reduce" and so on in the world's statistics.
  const std::shared_ptr<Communicator>& group(std::string_view dim) const { return at(dim).group; }
  const std::shared_ptr<Communicator>& world() const { return world_; }

  // The ranks along "dp_sp" that share the experts of a layer, by place, and those that have the same experts. Rank n
  // of N has place n % ep_size, and ep_size consecutive ranks share the experts of a layer (DeepSpeed: E+D). With
  // use_data_before_expert_parallelism its place is n / (N / ep_size), and N / ep_size consecutive ranks have the same
  // experts (D+E).
  struct Experts {
    std::shared_ptr<Communicator> expert, data;  // count as "ep" and "edp", as above
  };
  // [collective] at the first call for a size, else [local]. ConfigError if ep_size does not divide size("dp_sp").
  const Experts& experts(int ep_size) const;

  // [local] Begin and end of this sequence rank's stretch of `tokens` tokens: floor(i * tokens / u) and
  // floor((i + 1) * tokens / u).
  std::pair<std::int64_t, std::int64_t> tokens(std::int64_t tokens) const;
  // [local] Whether the functions of zero/sp.h have exchanged anything over this mesh.
  bool exchanged_sequence() const { return exchanged_sequence_; }
  void note_sequence_exchange() const { exchanged_sequence_ = true; }
  // [local] "8 ranks = 2 dp x 2 sp x 2 tp; rank 5 is dp 1, sp 0, tp 1".
  std::string text() const;

 private:
  friend struct parallel::MeshMaker;
  struct Dim {
    int size = 1, rank = 0;
    std::shared_ptr<Communicator> group;
  };
  explicit Mesh(std::shared_ptr<Communicator> world) : world_(std::move(world)) {}
  const Dim& at(std::string_view dim) const;

  const std::shared_ptr<Communicator> world_;
  std::map<std::string, Dim, std::less<>> dims_;
  bool data_before_experts_ = false;
  mutable std::map<int, Experts> experts_;
  mutable std::atomic<bool> exchanged_sequence_ = false;
};

}  // namespace zero
