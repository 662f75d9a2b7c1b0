// See shard_gather.h.
#include "engine/shard_gather.h"

#include <functional>

#include "engine/recipe.h"
#include "kernels/quantize.h"

namespace zero::engine {

// A collective, and what is to be done with its result before anybody uses it.
class ShardGather::Finish final : public Work {
 public:
  Finish(std::shared_ptr<Work> work, std::function<void()> then) : work_(std::move(work)), then_(std::move(then)) {}
  void wait() override {
    work_->wait();
    if (then_) std::exchange(then_, nullptr)();
  }
  bool done() override { return work_->done(); }

 private:
  std::shared_ptr<Work> work_;
  std::function<void()> then_;
};

ShardGather::ShardGather(const Ways& ways, std::int64_t numel, at::ScalarType dtype) : ways_(ways) {
  if (ways_.neighbours != nullptr) second_ = ways_.neighbours->allocate(numel / ways_.neighbours->size(), dtype);
}

std::int64_t ShardGather::second_bytes() const {
  return second_.defined() ? static_cast<std::int64_t>(second_.nbytes()) : 0;
}

at::Tensor ShardGather::second_part(const at::Tensor& whole) const {
  return whole.narrow(0, ways_.neighbours->rank() * second_.numel(), second_.numel());
}

std::shared_ptr<Work> ShardGather::begin(const at::Tensor& whole, const at::Tensor& shard, bool exact) {
  if (exact && lossy()) return ways_.comm->all_gather(whole, shard, ways_.of);
  if (kept_) return ways_.neighbours->all_gather(whole, second_, ways_.of);
  const auto keep = [this, whole] {
    if (!second_.defined()) return;
    second_.copy_(second_part(whole));
    kept_ = true;
  };
  if (ways_.bits == 0) {
    auto work = ways_.comm->all_gather(whole, shard, ways_.of);
    return second_.defined() ? std::make_shared<Finish>(std::move(work), keep) : std::move(work);
  }
  const int bits = ways_.bits;  // when this gather began
  const auto numel = shard.numel(), bytes = kernels::quantized_bytes(numel, bits);
  const auto dtype = dtype_of(shard.scalar_type());
  auto all = ways_.pool->take(bytes * ways_.comm->size(), at::kByte);
  const auto part = [bytes](const at::Tensor& of, std::int64_t rank) { return of.narrow(0, rank * bytes, bytes); };
  const auto mine = part(all, ways_.comm->rank());
  kernels::quantize(mine.mutable_data_ptr(), bits, shard.const_data_ptr(), dtype, numel);
  auto work = ways_.comm->all_gather(all, mine, ways_.of);
  // Its own part, too, is what the others see: every rank computes with the same parameters.
  return std::make_shared<Finish>(std::move(work), [=, this] {
    for (int rank = 0; rank < ways_.comm->size(); ++rank)
      kernels::dequantize(whole.narrow(0, rank * numel, numel).mutable_data_ptr(), dtype,
                          part(all, rank).const_data_ptr(), bits, numel);
    ways_.pool->put(all);
    keep();
  });
}

}  // namespace zero::engine
