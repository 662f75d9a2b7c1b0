// Weights of other libraries at tensor- and expert-parallel layouts: files have whole tensors, whatever ranks cut or
// divide, and every layout takes them.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "parity/mesh_problems.h"
#include "parity/moe_problems.h"
#include "support/folder.h"
#include "support/require.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::weights_layouts_test {
namespace {

using namespace zero::test::mesh;
using Comm = std::shared_ptr<Communicator>;

at::Tensor values_of(const PlainTensor& plain) {
  auto values = at::empty(plain.shape, at::kFloat);
  std::memcpy(values.mutable_data_ptr(), plain.bytes.data(), plain.bytes.size());
  return values;
}

// Whether the files have the parameters of a module that nobody cut.
void require_values(const PlainTensors& files, torch::nn::Module& whole) {
  const auto parameters = whole.named_parameters();
  require(files.size() == parameters.size(), "the number of tensors");
  for (const auto& item : parameters)
    require(files.contains(item.key()) && values_of(files.at(item.key())).equal(item.value()), item.key());
}

void set_to_zero(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.zero_();
}

TEST(WeightsLayouts, TensorParallelRanksWriteAndReadWholeTensors) {
  struct Layout {
    int world, t, stage;
  };
  for (const auto& model : models())
    for (const auto& layout : {Layout{2, 2, 0}, {4, 2, 3}}) {
      TempFolder folder;
      expect_passed({"shm", layout.world}, [&](const Comm& comm) {
        const Case c{.model = &model, .t = layout.t, .stage = layout.stage};
        engine::State state(make_model(model), c.options(), comm);
        (void)checkpoint::export_weights(state, formats::system_files(), folder.file("out"), {});
        if (comm->rank() == 0) require_values(plain_folder(folder.path() / "out"), *make_model(model));
        // Into another cut, of ranks whose values differ.
        const Case other{.model = &model, .t = layout.t == layout.world ? 1 : layout.t, .stage = 2};
        const auto module = make_model(model);
        set_to_zero(*module);
        engine::State next(module, other.options(), comm);
        (void)checkpoint::import_weights(next, formats::system_files(), folder.file("out"), {});
        (void)checkpoint::export_weights(next, formats::system_files(), folder.file("again"), {});
        if (comm->rank() == 0) require_values(plain_folder(folder.path() / "again"), *make_model(model));
      });
    }
}

// What ranks have cut is whole in the file for other libraries of each checkpoint, and it is verified.
TEST(WeightsLayouts, EachSaveHasWholeTensors) {
  for (const auto& model : models()) {
    TempFolder folder;
    expect_passed({"shm", 4}, [&](const Comm& comm) {
      const Case c{.model = &model, .t = 2, .stage = 3};
      engine::State state(
          make_model(model),
          c.options().with({{"zero_optimization.stage3_gather_16bit_weights_on_model_save", "true", "test"}}), comm);
      checkpoint::save(state, formats::system_files(), folder.file("saved"), "t");
      if (comm->rank() > 0) return;
      require_values(plain_tensors(folder.path() / "saved" / "t" / "model.safetensors"), *make_model(model));
      (void)inspect_checkpoint(folder.path() / "saved", "t", /*verify=*/true);
    });
  }
}

TEST(WeightsLayouts, ExpertsOfAllRanks) {
  TempFolder folder;
  expect_passed({"shm", 2}, [&](const Comm& comm) {
    engine::State state(moe::make_net(moe::options_of(2, 1)), moe::engine_options(1), comm);
    (void)checkpoint::export_weights(state, formats::system_files(), folder.file("out"), {});
    if (comm->rank() == 0) require_values(plain_folder(folder.path() / "out"), *moe::make_net(moe::options_of(1, 1)));
    const auto module = moe::make_net(moe::options_of(1, 1));
    set_to_zero(*module);
    engine::State next(module, moe::engine_options(2), comm);
    (void)checkpoint::import_weights(next, formats::system_files(), folder.file("out"), {});
    (void)checkpoint::export_weights(next, formats::system_files(), folder.file("again"), {});
    if (comm->rank() == 0) require_values(plain_folder(folder.path() / "again"), *moe::make_net(moe::options_of(1, 1)));
  });
}

}  // namespace
}  // namespace zero::test::weights_layouts_test
