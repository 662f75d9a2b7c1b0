// The storage of activations between forward and backward changes the location of bytes, never a bit of the state:
// kept, recomputed, offloaded to host memory or a file, at every stage and world sizes one to three.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <zero/library.h>

#include <filesystem>
#include <mutex>

#include "parity/problems.h"

namespace activations_test {
namespace {

namespace nn = torch::nn;
using zero::activation_checkpoint;
using Report = zero::MemoryReport;

// Attention over views of one storage, a frozen weight, a mask as a buffer, dropout where asked, tied embeddings, and
// one weight that all layers share.
struct LayerImpl : nn::Module {
  nn::LayerNorm norm{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  at::Tensor mask;
  LayerImpl(std::int64_t width, std::int64_t time, bool frozen) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    out = register_module("out", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
    mask = register_buffer("mask", at::ones({time, time}, at::kBool).triu(1));
    if (frozen) up->weight.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(norm(x)).chunk(3, -1);
    auto scores = parts[0].matmul(parts[1].transpose(1, 2)).masked_fill(mask, -1e4);
    auto y = x + out(at::softmax(scores.to(at::kFloat), -1).to(x.scalar_type()).matmul(parts[2]));
    return y + down(at::gelu(up(norm(y))));
  }
};
TORCH_MODULE(Layer);

constexpr std::int64_t kWidth = 24, kTime = 12, kLayers = 4;

struct Net : nn::Module {
  nn::Embedding tokens{nullptr};
  nn::Linear shared{nullptr};
  nn::ModuleList layers;
  bool segments;
  explicit Net(bool s) : segments(s) {
    tokens = register_module("tokens", nn::Embedding(32, kWidth));
    shared = register_module("shared", nn::Linear(kWidth, kWidth));
    for (std::int64_t i = 0; i < kLayers; ++i) layers->push_back(Layer(kWidth, kTime, i == 1));
    register_module("layers", layers);
  }
  at::Tensor loss(const at::Tensor& ids) {
    auto x = tokens(ids);
    for (std::size_t i = 0; i < layers->size(); ++i) {
      const auto run = [this, i](const at::Tensor& y) { return at::tanh(shared(layers[i]->as<Layer>()->forward(y))); };
      x = segments ? activation_checkpoint(run, x) : run(x);
    }
    return at::cross_entropy_loss(at::linear(x, tokens->weight).reshape({-1, 32}).to(at::kFloat), ids.reshape({-1}));
  }
};

struct Way {
  const char* name;
  bool segments;
  std::string keys;  // top-level, with a leading comma
  Report::Tier tier = Report::Tier::Device;
};

std::vector<Way> ways() {
  const std::string folder = std::filesystem::temp_directory_path().string();
  return {
      {"computed again", true, ""},
      {"computed again, inputs in host memory", true, R"(, "activation_checkpointing": {"cpu_checkpointing": true})",
       Report::Tier::Host},
      {"computed again, inputs in one buffer", true,
       R"(, "activation_checkpointing": {"contiguous_memory_optimization": true, "number_checkpoints": 4})"},
      {"computed again, inputs in one buffer of host memory", true,
       R"(, "activation_checkpointing": {"contiguous_memory_optimization": true, "number_checkpoints": 4,
            "cpu_checkpointing": true, "profile": true, "synchronize_checkpoint_boundary": true})",
       Report::Tier::Host},
      {"computed again, inputs in a file", true, R"(, "libzero": {"activation_file_path": ")" + folder + R"("})",
       Report::Tier::File},
      {"away in host memory", false, R"(, "libzero": {"activation_offload": {"device": "cpu", "min_bytes": 256}})",
       Report::Tier::Host},
      {"away in a file", false,
       R"(, "libzero": {"activation_offload": {"device": "nvme", "min_bytes": 256, "nvme_path": ")" + folder + R"("}})",
       Report::Tier::File},
      {"computed again and away", true, R"(, "libzero": {"activation_offload": {"device": "cpu", "min_bytes": 256}})",
       Report::Tier::Host},
  };
}

struct Trained {
  std::string hash;
  std::vector<double> losses;
  std::uint64_t away = 0, leftover = 0;  // bytes on the tier at most; of the device after the last step
};

std::mutex building;

// `zero`: further keys of zero_optimization, with a leading comma.
Trained train(const Way& way, int stage, int world, const std::string& recipe, int accumulation = 1,
              const std::string& zero = "") {
  Trained first;
  zero::run_ranks(world, [&](std::shared_ptr<zero::Communicator> comm) {
    at::set_num_threads(1);
    std::shared_ptr<Net> net;
    {
      std::lock_guard<std::mutex> lock(building);  // initialisers draw from the shared generator
      net = std::make_shared<Net>(way.segments);
      zero::test::fill_parameters(*net, 5);
    }
    const std::string json =
        R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "gradient_accumulation_steps": )" +
        std::to_string(accumulation) + R"(, "zero_optimization": {"stage": )" + std::to_string(stage) + zero + "}" +
        (recipe == "fp32" ? "" : ", \"" + recipe + "\": {\"enabled\": true}") + way.keys + "}";
    zero::Engine engine(net, zero::Options::from_json(json), comm);
    auto generator = at::detail::createCPUGenerator(100 + static_cast<std::uint64_t>(comm->rank()));
    std::vector<double> losses;
    const auto ids = at::randint(0, 32, {2, kTime}, generator, at::kLong);
    for (int step = 0; step < 3 * accumulation; ++step) {
      auto loss = net->loss(ids);
      engine.backward(loss);
      losses.push_back(loss.item<double>());
      engine.step();
    }
    const auto hash = engine.state_hash();
    const auto memory = engine.memory();
    if (comm->rank() == 0)
      first = {hash, losses, memory.peak(way.tier, Report::Purpose::Activations),
               memory.current(Report::Tier::Device, Report::Purpose::Activations)};
  });
  return first;
}

class Worlds : public ::testing::TestWithParam<std::tuple<int, std::string>> {};
INSTANTIATE_TEST_SUITE_P(All, Worlds, ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values("fp32", "bf16")),
                         [](const auto& info) {
                           return std::get<1>(info.param) + "_on_" + std::to_string(std::get<0>(info.param));
                         });

TEST_P(Worlds, TheStateIsTheSameHoweverActivationsAreKept) {
  const auto& [world, recipe] = GetParam();
  const Way kept{"kept", false, ""};
  for (int stage = 0; stage <= 3; ++stage) {
    const auto plain = train(kept, stage, world, recipe);
    ASSERT_LT(plain.losses.back(), plain.losses.front());
    for (const auto& way : ways()) {
      SCOPED_TRACE(std::string(way.name) + ", stage " + std::to_string(stage));
      const auto run = train(way, stage, world, recipe);
      EXPECT_EQ(run.hash, plain.hash);
      EXPECT_EQ(run.losses, plain.losses);
      EXPECT_GT(run.away, 0u);
    }
  }
}

TEST_P(Worlds, TheStateIsTheSameWhereverEverythingRests) {
  const auto& [world, recipe] = GetParam();
  const std::string folder = std::filesystem::temp_directory_path().string();
  const auto rests = [&](const char* block, const char* device, const char* more) {
    return std::string(", \"") + block + R"(": {"device": ")" + device + R"(", "nvme_path": ")" + folder + "\"" + more +
           "}";
  };
  const auto all = ways();
  const Way kept{"kept", false, ""};
  for (int stage = 1; stage <= 3; ++stage) {
    const auto plain = train(kept, stage, world, recipe);
    for (const char* optimizer : {"none", "cpu", "nvme"}) {
      for (const char* parameters : {"none", "cpu", "nvme"}) {
        if (stage < 3 && std::string(parameters) != "none") continue;  // whole on every rank
        const auto zero =
            rests("offload_optimizer", optimizer, "") + rests("offload_param", parameters, ", \"max_in_cpu\": 0");
        for (const auto* way : {&kept, &all[0], &all[5], &all[6]}) {
          SCOPED_TRACE(std::string(way->name) + ", optimizer " + optimizer + ", parameters " + parameters + ", stage " +
                       std::to_string(stage));
          const auto run = train(*way, stage, world, recipe, 1, zero);
          EXPECT_EQ(run.hash, plain.hash);
          EXPECT_EQ(run.losses, plain.losses);
        }
      }
    }
  }
}

TEST(Activations, AccumulationOverMicroBatches) {
  for (const int stage : {1, 3}) {
    const auto plain = train({"kept", false, ""}, stage, 2, "fp32", 3);
    for (const auto& way : ways()) {
      SCOPED_TRACE(std::string(way.name) + ", stage " + std::to_string(stage));
      EXPECT_EQ(train(way, stage, 2, "fp32", 3).hash, plain.hash);
    }
  }
}

// --- which engine's policy applies --------------------------------------------------------------

std::unique_ptr<zero::Engine> engine_of(const std::shared_ptr<Net>& net, const std::string& keys) {
  return std::make_unique<zero::Engine>(
      net,
      zero::Options::from_json(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"},
                                    "zero_optimization": {"stage": 1})" +
                               keys + "}"),
      zero::Communicator::local());
}

std::uint64_t host(const zero::Engine& engine) {
  return engine.memory().current(Report::Tier::Host, Report::Purpose::Activations);
}

TEST(Activations, OfTwoEnginesInAThreadEachKeepsItsOwn) {
  const auto away = R"(, "libzero": {"activation_offload": {"device": "cpu", "min_bytes": 256}})";
  auto a = std::make_shared<Net>(false), b = std::make_shared<Net>(false), c = std::make_shared<Net>(false);
  auto first = engine_of(a, away), plain = engine_of(b, ""), third = engine_of(c, away);
  const auto ids = at::arange(2 * kTime).remainder(32).view({2, kTime});
  auto loss_b = b->loss(ids);
  EXPECT_EQ(host(*first) + host(*plain) + host(*third), 0u);
  auto loss_a = a->loss(ids);
  const auto of_a = host(*first);
  EXPECT_GT(of_a, 0u);
  EXPECT_EQ(host(*third), 0u);
  auto loss_c = c->loss(ids);
  EXPECT_EQ(host(*first), of_a);
  EXPECT_EQ(host(*third), of_a);
  // Switch between engines again, while forwards are in progress.
  auto loss_b2 = b->loss(ids);
  EXPECT_EQ(host(*first) + host(*plain) + host(*third), 2 * of_a);
  plain->backward(loss_b + loss_b2);
  first->backward(loss_a);
  third->backward(loss_c);
  // After backward no tensors are offloaded.
  auto leaf = at::randn({4096}).requires_grad_();
  auto kept = (leaf * 2).tanh();
  EXPECT_EQ(host(*first) + host(*third), 2 * of_a);
}

TEST(Activations, AnEngineMayGoBeforeItsGraph) {
  auto net = std::make_shared<Net>(false);
  auto engine = engine_of(net, R"(, "libzero": {"activation_offload": {"device": "cpu", "min_bytes": 256}})");
  auto loss = net->loss(at::arange(2 * kTime).remainder(32).view({2, kTime}));
  engine.reset();
  EXPECT_NO_THROW(loss.backward());
}

// Recomputed dropout uses the same random numbers. One rank, because threads share libtorch's generator.
TEST(Activations, DropoutIsRepeated) {
  std::vector<std::string> hashes;
  for (const auto& keys :
       {std::string(), std::string(R"(, "activation_checkpointing": {"cpu_checkpointing": true})")}) {
    torch::manual_seed(3);
    auto net = std::make_shared<Net>(false);
    zero::test::fill_parameters(*net, 5);
    auto engine = engine_of(net, keys);
    torch::manual_seed(4);
    for (int step = 0; step < 3; ++step) {
      auto x = net->tokens(at::arange(2 * kTime).remainder(32).view({2, kTime}));
      for (std::size_t i = 0; i < net->layers->size(); ++i) {
        const auto run = [&, i](const at::Tensor& y) {
          return at::dropout(net->layers[i]->as<Layer>()->forward(y), 0.2, true);
        };
        x = keys.empty() ? run(x) : activation_checkpoint(run, x);
      }
      engine->backward(x.pow(2).sum());
      engine->step();
    }
    hashes.push_back(engine->state_hash());
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

}  // namespace
}  // namespace activations_test
