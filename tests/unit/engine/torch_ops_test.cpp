// engine/torch_ops.h with engine/torch_buffers.h: numbered buffers as tensors and regions of files, compared with plain
// tensors.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <memory>

#include "comm/group.h"
#include "engine/torch_ops.h"
#include "support/folder.h"

namespace zero::engine::torch_ops_test {
namespace {

using step::Dtype;
using step::Place;
using step::Purpose;
using step::Role;
using step::Tier;
using step::View;

class TorchOps : public testing::Test {
 protected:
  TorchOps() {
    file_ = std::make_shared<ShardFile>(test::temporary_folder(), storage::IoSettings(), "rank 0/1", /*checked=*/true);
    memory_ = std::make_unique<EngineMemory>(TorchBuffers::Setup{.axes = {comm::group_of(*Communicator::local())},
                                                                 .node = nullptr,
                                                                 .params_file = file_,
                                                                 .states_file = nullptr},
                                             true);
    ops_ = std::make_unique<TorchTensorOps>(memory_->buffers, lanes_, groups_);
  }
  View on(Tier tier, std::int64_t numel, Dtype dtype = Dtype::F32) {
    return memory_->memory.rest({.place = tier == Tier::File ? Place::File : Place::Device,
                                 .tier = tier,
                                 .purpose = Purpose::Parameters,
                                 .role = Role::Params},
                                numel, dtype);
  }
  View holding(const at::Tensor& values, Dtype dtype = Dtype::F32) {
    const auto view = on(Tier::Device, values.numel(), dtype);
    tensor(view).copy_(values);
    return view;
  }
  at::Tensor tensor(const View& view) { return memory_->buffers.tensor(view); }
  void copy(const View& to, const View& from) { ops_->copy(to, from, step::Lane::Compute); }

  const Lanes lanes_{at::kCPU};
  const std::vector<step::GroupFacts> groups_ = std::vector<step::GroupFacts>(2);
  std::shared_ptr<ShardFile> file_;
  std::unique_ptr<EngineMemory> memory_;
  std::unique_ptr<TorchTensorOps> ops_;
};

TEST_F(TorchOps, ViewsAreRangesOfABuffer) {
  const auto whole = holding(at::arange(10, at::kFloat));
  ops_->scale(whole.part(2, 3), 10);
  ops_->fill(whole.part(8, 2), -1);
  ops_->accumulate(whole.part(0, 2), whole.part(5, 2));
  EXPECT_TRUE(at::equal(tensor(whole), at::tensor({5.F, 7.F, 20.F, 30.F, 40.F, 5.F, 6.F, 7.F, -1.F, -1.F})));
}

TEST_F(TorchOps, ACopyConvertsWithOneRounding) {
  const auto values = at::randn({1000});
  const auto from = holding(values), to = on(Tier::Device, 1000, Dtype::BF16);
  copy(to, from);
  EXPECT_TRUE(at::equal(tensor(to), values.to(at::kBFloat16)));
}

TEST_F(TorchOps, FilesReadAsZerosAndKeepWhatIsCopied) {
  const auto file = on(Tier::File, 5000, Dtype::BF16), other = on(Tier::File, 5000);
  memory_->buffers.make_files();
  const auto back = on(Tier::Device, 5000);
  copy(back, file);
  EXPECT_TRUE(at::equal(tensor(back), at::zeros({5000})));
  const auto values = at::randn({5000});
  copy(file, holding(values));
  // A part that begins and ends within blocks leaves its neighbours.
  copy(file.part(2050, 7), holding(at::full({7}, 3.0)));
  copy(back, file);
  auto expected = values.to(at::kBFloat16).to(at::kFloat);
  expected.narrow(0, 2050, 7).fill_(3);
  EXPECT_TRUE(at::equal(tensor(back), expected));
  copy(other, file);  // from file to file
  ops_->fill(other.part(0, 10), 0.5F);
  copy(back, other);
  expected.narrow(0, 0, 10).fill_(0.5);
  EXPECT_TRUE(at::equal(tensor(back), expected));
}

TEST_F(TorchOps, TransfersGoByWayOfIoBuffers) {
  const auto file = on(Tier::File, 3000);
  memory_->buffers.make_files();
  auto io = memory_->memory.take_io(3000, Dtype::F32);
  tensor(io).copy_(at::arange(3000, at::kFloat));
  ops_->write(file, io)->wait();
  ops_->fill(io, 0);
  ops_->read(io, file)->wait();
  EXPECT_TRUE(at::equal(tensor(io), at::arange(3000, at::kFloat)));
  memory_->memory.give(io);
}

TEST_F(TorchOps, QuantizedValuesComeBackWithinAStep) {
  const auto values = at::randn({512});
  const auto integers = on(Tier::Device, 512 + 512 / 256 * 4, Dtype::U8), back = on(Tier::Device, 512);
  ops_->quantize(integers, holding(values), 8);
  ops_->dequantize(back, integers, 8);
  EXPECT_LE((tensor(back) - values).abs().max().item<float>(), values.abs().max().item<float>() / 127);
}

TEST_F(TorchOps, SquaresOfAGroupAreAddedOnce) {
  const auto values = holding(at::tensor({1.F, 2.F, 3.F, 4.F}));
  ops_->begin_squares(0);
  ops_->begin_squares(1);
  ops_->square(0, 0, values.part(0, 2), 0);
  ops_->square(0, 1, values.part(2, 2), 0);
  ops_->square(0, 1, values.part(2, 1), 0);  // again: the later one counts
  ops_->set_square(1, 0, 100);
  EXPECT_EQ(ops_->sum_of_squares(0), 1 + 4 + 9);
  EXPECT_EQ(ops_->sum_of_squares(1), 100);
  ops_->begin_squares(0);
  EXPECT_EQ(ops_->sum_of_squares(0), 0) << "the next step begins without";
}

TEST_F(TorchOps, ABufferThatIsGoneIsAnError) {
  auto view = on(Tier::Device, 10);
  const auto gone = view;
  memory_->memory.give(view);
  EXPECT_THROW(tensor(gone), InternalError);
  memory_->buffers.adopt(1000, at::ones({2, 3}));
  EXPECT_EQ(memory_->buffers.shaped({1000, 0, 6, Dtype::F32}).dim(), 2);
  EXPECT_TRUE(memory_->buffers.drop(1000));
  EXPECT_FALSE(memory_->buffers.drop(1000));
}

}  // namespace
}  // namespace zero::engine::torch_ops_test
