// First values with tensor parallelism: those of the whole model at every degree, and the memory that it takes to cut
// them.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <zero/library.h>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstring>

#include "examples/megatron_gpt.h"
#include "models/gpt.h"
#include "parity/mesh_problems.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::initial_values_test {
namespace {

using namespace zero::test::mesh;
using Tensors = std::vector<at::Tensor>;

// --- values -------------------------------------------------------------------------------------

// How a parameter is cut, written down here: into pieces along a dimension, each of which is divided among the ranks.
struct Cut {
  const char* suffix;
  int dim, pieces, multiple;
};

std::pair<std::int64_t, std::int64_t> stretch(std::int64_t length, int multiple, int ranks, int rank) {
  const auto count = length / multiple;
  return {rank * count / ranks * multiple, (rank + 1) * count / ranks * multiple};
}

// The ranks' parts, put together.
at::Tensor concatenated(const Tensors& parts, const Cut& cut, std::int64_t length) {
  Tensors pieces;
  for (int piece = 0; piece < cut.pieces; ++piece)
    for (int j = 0; j < static_cast<int>(parts.size()); ++j) {
      const auto [begin, end] = stretch(length / cut.pieces, cut.multiple, static_cast<int>(parts.size()), j);
      pieces.push_back(parts[static_cast<std::size_t>(j)].narrow(cut.dim, piece * (end - begin), end - begin));
    }
  return at::cat(pieces, cut.dim);
}

const std::vector<Cut>& cuts_of_gpt() {
  static const std::vector<Cut> cuts{{"qkv.weight", 0, 3, 4},  {"qkv.bias", 0, 3, 4}, {"projection.weight", 1, 1, 4},
                                     {"up.weight", 0, 1, 1},   {"up.bias", 0, 1, 1},  {"down.weight", 1, 1, 1},
                                     {"token.weight", 0, 1, 1}};
  return cuts;
}

// Of every rank's part of a parameter, in order of the ranks.
Tensors parts_of(Communicator& group, const at::Tensor& part) {
  Tensors parts;
  for (const auto& bytes : group.all_gather_bytes(
           {static_cast<const char*>(part.const_data_ptr()), static_cast<std::size_t>(part.nbytes())})) {
    // Ranks have parts of different sizes: along one dimension, which the number of bytes tells.
    auto flat = at::empty({static_cast<std::int64_t>(bytes.size() / part.element_size())}, part.options());
    std::memcpy(flat.mutable_data_ptr(), bytes.data(), bytes.size());
    parts.push_back(flat);
  }
  return parts;
}

void require_parts(Engine& engine, torch::nn::Module& module, const torch::nn::Module& plain, at::ScalarType dtype,
                   const std::string& what) {
  const auto tp = engine.mesh().group("tp");
  const auto wholes = plain.named_parameters();
  const auto scope = engine.gathered_parameters();
  for (const auto& item : module.named_parameters()) {
    const auto whole = wholes[item.key()].detach().to(dtype);
    const Cut* cut = nullptr;
    for (const auto& each : cuts_of_gpt())
      if (item.key().ends_with(each.suffix)) cut = &each;
    auto parts = parts_of(*tp, item.value().detach().contiguous());
    if (cut == nullptr) {
      for (const auto& part : parts)
        require(part.equal(whole.reshape({-1})), what + ", " + item.key() + " is not whole on every rank");
      continue;
    }
    for (std::size_t j = 0; j < parts.size(); ++j) {
      auto sizes = whole.sizes().vec();
      const auto [begin, end] =
          stretch(whole.size(cut->dim) / cut->pieces, cut->multiple, tp->size(), static_cast<int>(j));
      sizes[static_cast<std::size_t>(cut->dim)] = cut->pieces * (end - begin);
      require(parts[j].numel() == c10::multiply_integers(sizes), what + ", the size of a part of " + item.key());
      parts[j] = parts[j].view(sizes);
    }
    require(concatenated(parts, *cut, whole.size(cut->dim)).equal(whole), what + ", the parts of " + item.key());
  }
}

// Rank 0's values, which a deferred build draws again, for every degree: of tied, fused and unevenly cut weights.
TEST(InitialValues, PartsAreThoseOfTheWholeModel) {
  const TempFolder folder;
  const auto run = [&](const Place& place, int t, const char* recipe = "fp32", const char* zero = "") {
    expect_passed(place, [&](const auto& comm) {
      torch::manual_seed(5);
      const auto plain = std::make_shared<::models::GptImpl>(gpt_config());
      const auto next = at::rand({3});
      for (const bool deferred : {false, true})
        for (const int stage : {0, 3}) {
          if (*zero != 0 && stage != 3) continue;
          torch::manual_seed(static_cast<std::uint64_t>(5 + comm->rank()));
          const auto module = deferred ? zero::build([] { return ::models::Gpt(gpt_config()); }).ptr()
                                       : ::models::Gpt(gpt_config()).ptr();
          Case c{.model = &gpt_model(), .t = t, .stage = stage, .recipe = recipe, .zero = zero};
          Engine engine(module, c.options(), comm);
          const auto what = std::string(deferred ? "deferred" : "eager") + " at stage " + std::to_string(stage) +
                            ", t " + std::to_string(t) + " " + recipe;
          if (comm->rank() == 0 && deferred)
            require(at::rand({3}).equal(next), what + ", the generator is not where an eager build leaves it");
          const auto dtype = std::string(recipe) == "bf16" ? at::kBFloat16 : at::kFloat;
          require_parts(engine, *module, *plain, dtype, what);
          const auto masters = engine.full_state_dict();
          for (const auto& item : plain->named_parameters())
            if (comm->rank() == 0)
              require(masters.at(item.key()).equal(item.value().detach()), what + ", the master of " + item.key());
        }
    });
  };
  run({"local", 1}, 1);
  run({"shm", 2}, 1);
  run({"shm", 2}, 2);
  run({"gloo", 3}, 3);
  run({"shm", 4}, 2, "bf16");
  run({"shm", 4}, 4);
  const auto files = R"(, "offload_param": {"device": "nvme", "nvme_path": ")" + folder.text() +
                     R"("}, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.text() + R"("})";
  run({"shm", 2}, 2, "bf16", files.c_str());
  run({"shm", 2}, 1, "bf16", files.c_str());
  run({"shm", 4}, 2, "fp32", files.c_str());
}

// Layers that ask for their own cut, with groups of partial, replicated and cut members.
TEST(InitialValues, OfLayersWithSequenceRegions) {
  for (const Place& place : {Place{"shm", 2}, Place{"shm", 4}})
    expect_passed(place, [](const auto& comm) {
      const MegatronGptConfig config{.layers = 2, .hidden = 24, .heads = 6, .sequence = 9, .vocabulary = 22};
      torch::manual_seed(6);
      const auto plain = std::make_shared<MegatronGptImpl>(config);
      for (const bool deferred : {false, true})
        for (int stage = 0; stage <= 3; ++stage) {
          // Deferred, the positions are drawn at once, by an operator that is no initializer: with one seed for all.
          torch::manual_seed(static_cast<std::uint64_t>(6 + (deferred ? 0 : comm->rank())));
          const auto make = [&] { return std::make_shared<MegatronGptImpl>(config); };
          const auto module = deferred ? zero::build(make) : make();
          const auto options =
              Options::build().stage(stage).adamw({.lr = 0.01}).train_micro_batch_size(3).tensor_parallel(2, {});
          Engine engine(std::static_pointer_cast<torch::nn::Module>(module), options, comm);
          const auto masters = engine.full_state_dict();
          if (comm->rank() != 0) continue;
          for (const auto& item : plain->named_parameters())
            require(masters.at(item.key()).equal(item.value().detach()),
                    (deferred ? "deferred " : "eager ") + item.key() + " at stage " + std::to_string(stage));
        }
    });
}

// The row of padding_idx is zeroed after all rows were drawn.
TEST(InitialValues, OfOneRowAlone) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto make = [] {
      torch::nn::Sequential module(torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 6).padding_idx(2)),
                                   torch::nn::Linear(6, 4));
      const torch::NoGradGuard no_grad;
      module->parameters().back().uniform_(0.25, 0.5);  // the bias, a second time
      module->parameters()[1].mul_(3);
      return module;
    };
    torch::manual_seed(8);
    const auto plain = make();
    torch::manual_seed(8);
    const auto module = zero::build(make);
    const auto options = Options::build()
                             .stage(3)
                             .adamw({.lr = 0.01})
                             .train_micro_batch_size(3)
                             .tensor_parallel(2, {.layer_specs = {{.patterns = {"[01]\\.weight"}}}});
    Engine engine(module.ptr(), options, comm);
    const auto masters = engine.full_state_dict();
    if (comm->rank() != 0) return;
    for (const auto& item : plain->named_parameters())
      require(masters.at(item.key()).equal(item.value().detach()), item.key());
  });
}

// --- memory -------------------------------------------------------------------------------------

// libtorch's allocator for the CPU, which counts the bytes of this process and their peak, and gives memory full of
// NaN. Memory that ranks share is not libtorch's, and is not counted.
class Counter final : public c10::Allocator {
 public:
  static Counter& instance() {
    static auto* counter = [] {
      auto* made = new Counter;
      c10::SetCPUAllocator(made, /*priority=*/100);
      return made;
    }();
    return *counter;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &give, c10::Device(c10::kCPU)};
    auto* block = static_cast<char*>(c10::alloc_cpu(bytes + kHeader));
    std::memset(block, 0x7f, bytes + kHeader);
    std::memcpy(block, &bytes, sizeof bytes);
    instance().add(static_cast<std::int64_t>(bytes));
    return {block + kHeader, block + kHeader, &give, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  std::int64_t live() const { return live_; }
  std::int64_t peak() const { return peak_; }
  void restart() { peak_ = live_.load(); }

 private:
  static constexpr std::size_t kHeader = 64;
  static void give(void* data) {
    if (data == nullptr) return;
    auto* block = static_cast<char*>(data) - kHeader;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof bytes);
    instance().add(-static_cast<std::int64_t>(bytes));
    c10::free_cpu(block);
  }
  void add(std::int64_t bytes) {
    const auto now = live_ += bytes;
    for (auto before = peak_.load(); before < now && !peak_.compare_exchange_weak(before, now);) {
    }
  }
  std::atomic<std::int64_t> live_ = 0, peak_ = 0;
};

constexpr std::int64_t kWidth = 256, kInner = 1024, kPairs = 6;
constexpr std::int64_t kParameter = kWidth * kInner * 4;  // bytes of a whole parameter in fp32

// One unit of many equal parameters, which are initialised a second time once all of them are there.
struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    const auto layer = register_module("layer", torch::nn::ModuleList());
    struct Unit : torch::nn::Module {};
    const auto unit = std::make_shared<Unit>();
    std::vector<torch::nn::Linear> linears;
    for (std::int64_t i = 0; i < kPairs; ++i)
      for (const bool up : {true, false})
        linears.push_back(unit->register_module((up ? "up" : "down") + std::to_string(i),
                                                torch::nn::Linear(up ? kWidth : kInner, up ? kInner : kWidth)));
    const torch::NoGradGuard no_grad;
    for (auto& linear : linears) linear->weight.normal_(0, 0.02);
    for (auto& linear : linears) linear->bias.zero_();
    layer->push_back(unit);
  }
};
TORCH_MODULE(Many);

const Model& many() {
  static const Model model{.name = "many",
                           .plan = R"([{"patterns": [".*up[0-4]\\.weight"], "partition_type": "column"},
                                       {"patterns": [".*down[0-4]\\.weight"], "partition_type": "row"},
                                       {"patterns": [".*5\\.weight"], "partition_type": "skip"}])",
                           .make = {},
                           .loss = {}};
  return model;
}

// In addition to shards, and to what is left of a model that the program has built eagerly, a rank has one whole
// parameter and its part, in the model's type and in fp32.
TEST(InitialValues, NeedTheMemoryOfOneParameter) {
  const TempFolder folder;
  const auto files = R"(, "offload_param": {"device": "nvme", "nvme_path": ")" + folder.text() +
                     R"("}, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.text() + R"("})";
  const auto run = [&](const Place& place, int t, const std::string& recipe, at::ScalarType built_in,
                       std::initializer_list<int> stages, const std::string& zero = "") {
    expect_passed(place, [&](const auto& comm) {
      auto& counter = Counter::instance();
      for (const bool deferred : {true, false})
        for (const int stage : stages) {
          const auto before = counter.live();
          const auto make = [&] {
            torch::set_default_dtype(c10::scalarTypeToTypeMeta(built_in));
            Many module;
            torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
            return module;
          };
          const auto module = deferred ? zero::build(make) : make();
          const auto whole_model = counter.live() - before;
          Case c{.model = &many(), .t = t, .stage = stage, .recipe = recipe, .zero = zero};
          counter.restart();
          Engine engine(std::static_pointer_cast<torch::nn::Module>(module.ptr()), c.options(), comm);
          // The buffers of the Engine are there before values are; the model's own memory is gone afterwards.
          const auto shards = counter.live() - before;
          const auto extra = counter.peak() - before - shards - whole_model;
          const auto one = kParameter * static_cast<std::int64_t>(c10::elementSize(built_in)) / 4;
          const auto part = built_in == at::kFloat ? one / (t > 1 ? 2 : 1) : kParameter;
          const auto what = std::string(deferred ? "deferred" : "eager") + " " + recipe + " at stage " +
                            std::to_string(stage) + " " + name_of(place) + ": ";
          require(extra <= one + part + (kParameter / 8),
                  what + std::to_string(extra) + " bytes in addition to shards of " + std::to_string(shards) +
                      " and a model of " + std::to_string(whole_model));
          const auto memory = engine.memory();
          const auto booked = memory.current(MemoryReport::Tier::Device) + memory.current(MemoryReport::Tier::Host);
          require(shards <= static_cast<std::int64_t>(booked) + kParameter / 8,
                  what + std::to_string(shards) + " bytes are left of " + std::to_string(booked));
          require(!deferred || extra >= one / 2, what + "a parameter was never there as a whole");
        }
    });
  };
  run({"shm", 2}, 2, "fp32", at::kFloat, {0, 1, 2, 3});
  run({"gloo", 3}, 3, "bf16", at::kFloat, {0, 3});
  run({"shm", 4}, 2, "bf16", at::kBFloat16, {2, 3});
  run({"shm", 2}, 2, "fp32", at::kFloat, {3}, files);
}

// Padding that is no zero would be in the scale of a block of quantized parameters.
TEST(InitialValues, HaveZerosAsPadding) {
  expect_passed({"gloo", 2}, [](const auto& comm) {
    Counter::instance();
    std::vector<double> losses;
    for (const bool deferred : {false, true}) {
      torch::manual_seed(5);
      const auto make = [] { return ::models::Gpt(gpt_config()); };
      const auto module = (deferred ? zero::build(make) : make()).ptr();
      Case c{.model = &gpt_model(), .t = 1, .stage = 3, .recipe = "bf16"};
      c.zero = R"(, "zero_quantized_weights": true, "stage3_param_persistence_threshold": 0)";
      Engine engine(module, c.options(), comm);
      const auto loss = c.model->loss(*module, seed_of(0, 0, 0));
      losses.push_back(loss.template item<double>());
      engine.backward(loss);
    }
    require(losses[0] == losses[1],
            "loss " + std::to_string(losses[1]) + " of a deferred build, " + std::to_string(losses[0]) + " of another");
  });
}

}  // namespace
}  // namespace zero::test::initial_values_test
