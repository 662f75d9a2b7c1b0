// activation_checkpointing.partition_activations: which inputs of checkpointed segments are divided over the
// tensor-parallel ranks, what is kept and sent, and that the state does not change.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <string>
#include <vector>

#include "parity/mesh_problems.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::partitioned_activations_test {
namespace {

using namespace zero::test::mesh;

constexpr int kSegments = 4;

// Checkpointed segments with an integer input. The first segment's layers, and what is before it, may be frozen; the
// last segment may have segments inside.
struct SegmentedImpl : torch::nn::Module {
  torch::nn::Linear in{nullptr};
  torch::nn::ModuleList up, down;
  bool nested = false;

  explicit SegmentedImpl(std::int64_t width) {
    in = register_module("in", torch::nn::Linear(6, width));
    register_module("up", up);
    register_module("down", down);
    for (int i = 0; i < kSegments; ++i) {
      up->push_back(torch::nn::Linear(width, 10));
      down->push_back(torch::nn::Linear(10, width));
    }
    fill(*this);
  }
  void freeze_begin() {
    for (auto& p : in->parameters()) p.requires_grad_(false);
    for (auto& p : up[0]->parameters()) p.requires_grad_(false);
    for (auto& p : down[0]->parameters()) p.requires_grad_(false);
  }
  at::Tensor layer(std::size_t i, const at::Tensor& x, const at::Tensor& sign) {
    const auto inside = torch::tanh(up[i]->as<torch::nn::Linear>()->forward(x));
    return x + down[i]->as<torch::nn::Linear>()->forward(inside) * sign.unsqueeze(-1);
  }
  // x: [.., 6]; sign: int64 [..].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& sign) {
    auto y = in(x);
    for (std::size_t i = 0; i < kSegments; ++i)
      y = activation_checkpoint(
          [this, i](const at::Tensor& a, const at::Tensor& s) {
            if (!nested || i + 1 < kSegments) return layer(i, a, s);
            return activation_checkpoint([this, i](const at::Tensor& b, const at::Tensor& r) { return layer(i, b, r); },
                                         a, s);
          },
          y, sign);
    return y;
  }
};

Options options_with(const std::string& activations) {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 2},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": false, "layer_specs": [
      {"patterns": ["up"], "partition_type": "column"}, {"patterns": ["down"], "partition_type": "row"}]}},
    "activation_checkpointing": {)" +
                            activations + "}}");
}

struct Seen {
  std::string hash;
  std::uint64_t kept_device = 0, kept_host = 0, gathered = 0;  // after a forward; in a step
};

// sizes: of the input, without features.
Seen train(const std::shared_ptr<Communicator>& comm, const std::string& activations, std::int64_t width,
           const std::vector<std::int64_t>& sizes, bool frozen, bool nested) {
  const auto module = std::make_shared<SegmentedImpl>(width);
  module->nested = nested;
  if (frozen) module->freeze_begin();
  Engine engine(std::static_pointer_cast<torch::nn::Module>(module), options_with(activations), comm);
  Seen seen;
  for (int step = 0; step < 3; ++step) {
    auto of_input = sizes;
    of_input.push_back(6);
    const auto seed = static_cast<std::uint64_t>(10 * step + engine.mesh().rank("dp"));
    const auto x = draw(of_input, seed), sign = draw(sizes, seed + 5).gt(0).to(at::kLong) * 2 - 1;
    comm->reset_stats();
    const auto loss = module->forward(x, sign).pow(2).mean();
    using Report = MemoryReport;
    seen.kept_device = engine.memory().current(Report::Tier::Device, Report::Purpose::Activations);
    seen.kept_host = engine.memory().current(Report::Tier::Host, Report::Purpose::Activations);
    engine.backward(loss);
    const auto stats = comm->stats();
    const auto row = stats.by_op.find("tp.all_gather");
    seen.gathered = row == stats.by_op.end() ? 0 : row->second.bytes_sent;
    engine.step();
  }
  seen.hash = engine.state_hash();
  return seen;
}

// The values of ZeRO's formula: 4 segments with inputs of 2 x 8 x 16 fp32, of which each of 2 ranks keeps a half.
TEST(PartitionedActivations, KeepsAndSendsAPart) {
  expect_passed({"shm", 4}, [](const auto& comm) {
    const auto whole = train(comm, "", 16, {2, 8}, false, false);
    const auto part = train(comm, R"("partition_activations": true)", 16, {2, 8}, false, false);
    const auto host =
        train(comm, R"("partition_activations": true, "cpu_checkpointing": true)", 16, {2, 8}, false, false);
    require(whole.gathered == 0, "all-gathers without partition_activations");
    for (const auto* seen : {&part, &host}) {
      require(seen->gathered == 2048, "sent " + std::to_string(seen->gathered));
      require(seen->hash == whole.hash, "another state");
    }
    require(whole.kept_device - part.kept_device == 4096 - 2048,
            "kept " + std::to_string(whole.kept_device) + " and " + std::to_string(part.kept_device));
    require(whole.kept_device - host.kept_device == 4096,
            "kept " + std::to_string(host.kept_device) + " in addition to the host's");
    // And the 16 integers, whole and once.
    require(host.kept_host == 2048 + 16 * 8, "on the host " + std::to_string(host.kept_host));
  });
}

// 35 elements do not divide by 2; integers, frozen beginnings and segments inside of segments.
TEST(PartitionedActivations, TheStateIsTheSame) {
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const auto& comm) {
    const std::string file =
        R"("partition_activations": true}, "libzero": {"activation_file_path": ")" + folder.path().string() + "\"";
    for (const bool frozen : {false, true})
      for (const bool nested : {false, true}) {
        const auto wanted = train(comm, "", 7, {5}, frozen, nested);
        for (const std::string& way : std::vector<std::string>{
                 R"("partition_activations": true)", R"("partition_activations": true, "cpu_checkpointing": true)",
                 R"("partition_activations": true, "contiguous_memory_optimization": true, "number_checkpoints": 4)",
                 R"("partition_activations": true, "cpu_checkpointing": true, "contiguous_memory_optimization": true,
                    "number_checkpoints": 4)",
                 file}) {
          const auto got = train(comm, way, 7, {5}, frozen, nested);
          require(got.hash == wanted.hash, "another state with " + way);
          // A part of 18 elements of each segment that backward runs again: not of one without gradients.
          const std::uint64_t segments = frozen ? kSegments - 1 : kSegments;
          require(got.gathered == segments * 18 * 4, "sent " + std::to_string(got.gathered) + " with " + way);
        }
      }
  });
}

// Whether a rank still has an input when backward needs it must not decide about a collective.
TEST(PartitionedActivations, ARankMayKeepAnInput) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    std::string known;
    for (const bool keeps : {false, true}) {
      const auto module = std::make_shared<SegmentedImpl>(8);
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module),
                    options_with(R"("partition_activations": true)"), comm);
      const auto sign = at::ones({4}, at::kLong);
      for (int step = 0; step < 2; ++step) {
        std::vector<at::Tensor> kept;
        auto y = module->in(draw({4, 6}, static_cast<std::uint64_t>(step)));
        for (std::size_t i = 0; i < kSegments; ++i) {
          if (keeps && comm->rank() == static_cast<int>(i % 2)) kept.push_back(y.detach());
          y = activation_checkpoint(
              [&module, i](const at::Tensor& a, const at::Tensor& s) { return module->layer(i, a, s); }, y, sign);
        }
        const auto loss = y.pow(2).mean();
        engine.backward(loss, {.retain_graph = true});
        engine.backward(loss);
        engine.step();
      }
      const auto hash = engine.state_hash();
      if (known.empty()) known = hash;
      require(hash == known, "another state");
    }
  });
}

TEST(PartitionedActivations, RefusesInputsThatDiffer) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<SegmentedImpl>(8);
    Engine engine(std::static_pointer_cast<torch::nn::Module>(module), options_with(R"("partition_activations": true)"),
                  comm);
    const auto same = draw({4, 8}, 3), sign = at::ones({4}, at::kLong);
    try {  // only the segment's input differs, not what the column layers get
      activation_checkpoint([&](const at::Tensor& x) { return x * module->layer(1, same, sign); },
                            draw({4, 8}, static_cast<std::uint64_t>(comm->rank())).requires_grad_() * 2);
    } catch (const ConfigError& e) {
      return require(contains(e.what(), "differs between tp 0 and tp 1"), e.what());
    }
    require(false, "expected a ConfigError");
  });
}

}  // namespace
}  // namespace zero::test::partitioned_activations_test
