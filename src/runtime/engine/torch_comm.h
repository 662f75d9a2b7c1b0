// The collectives of the step program over process groups, one per axis. On a GPU they run on their lane's stream.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "engine/torch_ops.h"
#include "observe/trace.h"

namespace zero::engine {

class TorchComm final : public step::CommOps {
 public:
  // The ranks of an axis. node: the ranks that hold secondary shards together, or null.
  struct Ranks {
    std::shared_ptr<comm::Group> all, node;
  };
  // All references must outlive it.
  TorchComm(std::vector<Ranks> axes, const std::vector<step::GroupFacts>& groups, TorchBuffers& buffers,
            TorchTensorOps& tensors, const Lanes& lanes);

  step::WorkPtr all_gather(int group, step::View out, step::View in, step::Lane lane) override;
  step::WorkPtr all_gather_node(int group, step::View out, step::View in, step::Lane lane) override;
  step::WorkPtr reduce_scatter(int group, step::View out, step::View in, int bits) override;
  step::WorkPtr reduce_pieces(const step::PeerReduce& request) override;
  void square_pieces(const step::PeerReduce& reduced) override;
  step::WorkPtr broadcast(int group, step::View inout, int root) override;
  void wait_symmetric(int group, int buffer) override;
  void signal_symmetric(int buffer) override;
  std::vector<double> exchange(double mine) override { return exchange_norms(mine); }
  void barrier() override;

  // Exchanges each rank's part of the norm, together with other values that all ranks must agree on.
  std::function<std::vector<double>(double mine)> exchange_norms;

 private:
  const step::GroupFacts& facts(int group) const { return groups_[static_cast<std::size_t>(group)]; }
  const Ranks& ranks(int group) const { return axes_[static_cast<std::size_t>(facts(group).axis)]; }
  template <class Start>
  step::WorkPtr on(const gpu::SideStream* side, const Start& start);
  const gpu::SideStream* stream_of(step::Lane lane) const;
  void begin_squares(int group);
  void add_squares(const step::PeerReduce& request, std::int64_t begin, std::int64_t end);

  const std::vector<Ranks> axes_;
  const std::vector<step::GroupFacts>& groups_;
  TorchBuffers& buffers_;
  TorchTensorOps& tensors_;
  const Lanes& lanes_;
  std::vector<double> squares_;  // of pending reductions of pieces, by group
};

}  // namespace zero::engine
