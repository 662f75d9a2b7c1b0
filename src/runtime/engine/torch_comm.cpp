// See torch_comm.h.
#include "engine/torch_comm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/tensor_segments.h"
#include "engine/dtypes.h"

namespace zero::engine {
namespace {

// wait() orders the current stream after the work on the side stream.
class OnStream final : public Work {
 public:
  OnStream(std::shared_ptr<Work> work, at::Device device) : work_(std::move(work)) { mark_.set(device); }
  void wait() override {
    work_->wait();
    mark_.hold();
  }
  bool done() override { return work_->done(); }

 private:
  const std::shared_ptr<Work> work_;
  gpu::Mark mark_;
};

}  // namespace

TorchComm::TorchComm(std::vector<Ranks> axes, const std::vector<step::GroupFacts>& groups, TorchBuffers& buffers,
                     TorchTensorOps& tensors, const Lanes& lanes)
    : axes_(std::move(axes)),
      groups_(groups),
      buffers_(buffers),
      tensors_(tensors),
      lanes_(lanes),
      squares_(groups.size()) {}

const gpu::SideStream* TorchComm::stream_of(step::Lane lane) const {
  return lane == step::Lane::Unshard ? &lanes_.unshard : lane == step::Lane::Reduce ? &lanes_.reduce : nullptr;
}

template <class Start>
step::WorkPtr TorchComm::on(const gpu::SideStream* side, const Start& start) {
  if (side == nullptr || side->device().is_cpu()) return start();
  // After the work on the current stream, which includes the last use of the buffers.
  const gpu::SideStream::Scope scope(*side);
  return std::make_shared<OnStream>(start(), side->device());
}

step::WorkPtr TorchComm::all_gather(int group, step::View out, step::View in, step::Lane lane) {
  return on(stream_of(lane),
            [&] { return ranks(group).all->all_gather(buffers_.tensor(out), buffers_.tensor(in), facts(group).name); });
}

step::WorkPtr TorchComm::all_gather_node(int group, step::View out, step::View in, step::Lane lane) {
  return on(stream_of(lane), [&] {
    return ranks(group).node->all_gather(buffers_.tensor(out), buffers_.tensor(in), facts(group).name);
  });
}

step::WorkPtr TorchComm::reduce_scatter(int group, step::View out, step::View in, int bits) {
  return on(&lanes_.reduce, [&] {
    const auto to = buffers_.tensor(out), from = buffers_.tensor(in);
    auto& comm = *ranks(group).all;
    return bits > 0 ? comm.reduce_scatter_quantized(to, from, bits) : comm.reduce_scatter(to, from);
  });
}

step::WorkPtr TorchComm::broadcast(int group, step::View inout, int root) {
  return ranks(group).all->broadcast(buffers_.tensor(inout), root);
}

step::WorkPtr TorchComm::reduce_pieces(const step::PeerReduce& request) {
  comm::PeerReduce sum;
  sum.shard_numel = facts(request.group).shard();
  sum.to_all = request.to_all;
  for (const auto& [begin, view] : request.pieces) sum.vector.push_back({begin, buffers_.tensor(view)});
  if (request.out) sum.out = buffers_.tensor(request.out);
  if (request.square) {
    begin_squares(request.group);
    sum.summed = [this, request](std::int64_t begin, std::int64_t end) { add_squares(request, begin, end); };
  }
  return ranks(request.group).all->peer_reduce_scatter(std::move(sum));
}

void TorchComm::square_pieces(const step::PeerReduce& reduced) {
  begin_squares(reduced.group);
  add_squares(reduced, 0, facts(reduced.group).shard());
}

void TorchComm::begin_squares(int group) {
  squares_[static_cast<std::size_t>(group)] = 0;
  tensors_.set_square(group, 0, 0);
}

// The sum of squares of the shard adds its pieces in the same order for every sharding policy and transport
// (kernels/elementwise.h). Here they are computed while they are in the cache.
void TorchComm::add_squares(const step::PeerReduce& request, std::int64_t begin, std::int64_t end) {
  auto& sum = squares_[static_cast<std::size_t>(request.group)];
  const auto uncounted =
      facts(request.group).counted_begin - ranks(request.group).all->rank() * facts(request.group).shard();
  if (end <= uncounted) return;
  begin = std::max(begin, uncounted);
  const auto set = [&] { tensors_.set_square(request.group, 0, sum); };
  if (request.out) {
    const auto done = buffers_.stretch(request.out.part(begin, end - begin));
    sum += kernels::sum_of_squares(done.data, done.dtype, done.numel, begin);
    return set();
  }
  const auto& layout = facts(request.group).layout;
  const auto shard_begin = ranks(request.group).all->rank() * facts(request.group).shard();
  const auto piece_at = [&](std::int64_t offset) {
    return std::lower_bound(request.pieces.begin(), request.pieces.end(), offset,
                            [](const auto& piece, std::int64_t at) { return piece.first < at; })
        ->second;
  };
  for (auto at = begin, next = at; at < end; at = next) {
    next = std::min((at / comm::kSummedNumel + 1) * comm::kSummedNumel, end);
    const auto numel = next - at;
    const auto pieces = layout.pieces(shard_begin + at, numel);
    const auto stretch_of = [&](const sharding::ShardLayout::Piece& piece) {
      return buffers_.stretch(
          piece_at(layout.parameter_offset(piece.parameter)).part(piece.parameter_begin, piece.numel));
    };
    if (pieces.size() == 1 && pieces[0].numel == numel) {
      const auto values = stretch_of(pieces[0]);
      sum += kernels::sum_of_squares(values.data, values.dtype, numel);
      continue;
    }
    if (pieces.empty()) continue;
    const auto dtype = stretch_of(pieces[0]).dtype;
    std::vector<char> flat(static_cast<std::size_t>(numel) * kernels::size_of(dtype));  // padding is zero
    for (const auto& piece : pieces)
      std::memcpy(flat.data() + static_cast<std::size_t>(piece.range_begin) * kernels::size_of(dtype),
                  stretch_of(piece).data, static_cast<std::size_t>(piece.numel) * kernels::size_of(dtype));
    sum += kernels::sum_of_squares(flat.data(), dtype, numel);
  }
  set();
}

void TorchComm::wait_symmetric(int group, int buffer) { ranks(group).all->gather(buffers_.symmetric(buffer)); }

void TorchComm::signal_symmetric(int buffer) { buffers_.symmetric(buffer).publish(); }

void TorchComm::barrier() { axes_[0].all->barrier(); }

}  // namespace zero::engine
