// Exports of random models against the training state: parameters of any shape, scalars, empty ones, ties, frozen ones,
// buffers of several types, at any stage, recipe and number of ranks. Files have the bits of full_state_dict(), and
// another engine that imports them has them too. ZERO_RANDOM_MODELS sets how many models (20).
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <zero/library.h>

#include <cstdlib>
#include <random>

#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "interchange/source.h"
#include "support/folder.h"
#include "support/on_ranks.h"
#include "unit/interchange/source_samples.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::random_models_test {
namespace {

int models_asked() {
  const char* const asked = std::getenv("ZERO_RANDOM_MODELS");
  return asked ? std::max(1, std::atoi(asked)) : 20;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(end));
  }
  bool one_in(std::int64_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

struct ParameterPlan {
  std::string name;
  std::vector<std::int64_t> shape;
  bool frozen = false;
  int tied_to = -1;  // the number of the parameter that it is
};
struct BufferPlan {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::kFloat;
};

struct ModelPlan {
  std::vector<ParameterPlan> parameters;
  std::vector<BufferPlan> buffers;
  std::string recipe;
  int worlds[2] = {1, 1}, stages[2] = {0, 0};
  ExportOptions options;
};

std::vector<std::int64_t> random_shape(Random& random) {
  if (random.one_in(8)) return {};
  std::vector<std::int64_t> shape;
  const auto dims = 1 + random.below(3);
  for (std::int64_t d = 0; d < dims; ++d) shape.push_back(1 + random.below(random.one_in(4) ? 70 : 9));
  if (random.one_in(8)) shape[static_cast<std::size_t>(random.below(dims))] = 0;
  return shape;
}

ModelPlan random_plan(std::uint64_t seed) {
  Random random(seed);
  ModelPlan plan;
  const auto name = [&](const char* what, std::int64_t number) {
    return std::string(random.one_in(2) ? "" : "inner" + std::to_string(random.below(3)) + ".") + what +
           std::to_string(number);
  };
  const auto count = 1 + random.below(9);
  for (std::int64_t i = 0; i < count; ++i) {
    ParameterPlan one{name("p", i), random_shape(random), random.one_in(4), -1};
    if (i > 0 && random.one_in(5)) {
      one.tied_to = static_cast<int>(random.below(i));
      while (plan.parameters[static_cast<std::size_t>(one.tied_to)].tied_to >= 0)
        one.tied_to = plan.parameters[static_cast<std::size_t>(one.tied_to)].tied_to;
    }
    plan.parameters.push_back(one);
  }
  // An engine needs something to train.
  plan.parameters.push_back({name("trained", 0), {3, 1 + random.below(40)}, false, -1});
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                                       at::kInt,   at::kShort,  at::kByte, at::kBool};
  for (std::int64_t i = random.below(4); i-- > 0;)
    plan.buffers.push_back({name("b", i), random_shape(random), kTypes[random.below(std::size(kTypes))]});
  plan.recipe = random.one_in(2) ? "bf16" : "fp32";
  for (const int i : {0, 1}) {
    plan.worlds[i] = 1 + static_cast<int>(random.below(4));
    plan.stages[i] = static_cast<int>(random.below(4));
  }
  constexpr const char* kFormats[] = {"hf", "hf", "pt", "universal"};
  plan.options.format = kFormats[random.below(4)];
  plan.options.shard_bytes = random.one_in(2) ? 5'000'000'000 : 64 + random.below(4000);
  plan.options.duplicate_tied = plan.options.format != "universal" && random.one_in(3);
  return plan;
}

// Any bits of a finite number: signs of zero, subnormal ones, large ones. The same for all ranks.
float value_of(const std::string& text, std::int64_t index, std::uint64_t seed) {
  auto bits = std::hash<std::string>()(text) + 0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(index) + seed + 1);
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  auto word = static_cast<std::uint32_t>(bits >> 32);
  if ((word >> 23 & 255) > 250) word &= ~(std::uint32_t{1} << 30);
  if (word % 16 == 0) word &= std::uint32_t{1} << 31;
  float value = 0;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

struct RandomModel : torch::nn::Module {
  explicit RandomModel(const ModelPlan& plan) {
    std::map<std::string, std::shared_ptr<torch::nn::Module>> inner;
    const auto place = [&](const std::string& name) -> std::pair<torch::nn::Module*, std::string> {
      const auto dot = name.find('.');
      if (dot == std::string::npos) return {this, name};
      auto& module = inner[name.substr(0, dot)];
      if (!module) module = register_module(name.substr(0, dot), std::make_shared<torch::nn::Module>());
      return {module.get(), name.substr(dot + 1)};
    };
    std::vector<at::Tensor> made;
    for (const auto& one : plan.parameters) {
      const auto [module, name] = place(one.name);
      const bool tied = one.tied_to >= 0;
      const auto values = tied ? made[static_cast<std::size_t>(one.tied_to)] : at::zeros(one.shape);
      made.push_back(module->register_parameter(name, values, tied ? values.requires_grad() : !one.frozen));
    }
    for (const auto& one : plan.buffers) {
      const auto [module, name] = place(one.name);
      module->register_buffer(name, at::zeros(one.shape, one.dtype));
    }
  }
};

Options options_of(const ModelPlan& plan, int stage) {
  return Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": )" +
      std::string(plan.recipe == "bf16" ? "true" : "false") + R"(}, "zero_optimization": {"stage": )" +
      std::to_string(stage) + "}}");
}

// Fills everything that the ranks store.
void fill(engine::State& state, std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  state.stepper.begin_replacing("fill");
  for (const auto& piece : state.exports.pieces_to_load()) {
    auto values = at::empty({piece.numel});
    auto* const out = values.mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < piece.numel; ++i) out[i] = value_of(piece.kind + piece.name, piece.begin + i, seed);
    if (piece.dtype == at::kBool) values = values > 0;
    if (at::isIntegralType(piece.dtype, false)) values = values.view(at::kInt).bitwise_and(127);
    if (piece.dtype == at::kHalf) values = values.clamp(-60000, 60000);
    piece.write(0, values.to(piece.dtype));
  }
  state.exports.adopt_loaded();
}

// Bits by name: parameters in fp32, buffers in their type.
using Bits = std::map<std::string, std::pair<std::string, std::string>>;

std::pair<std::string, std::string> bits_of(const at::Tensor& values) {
  const auto dense = values.contiguous();
  const auto numel = static_cast<std::size_t>(dense.numel());
  return {checkpoint::file_dtype(dense.scalar_type(), "it") + " " + std::to_string(dense.dim()),
          numel == 0 ? "" : std::string(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes())};
}

Bits bits_in(engine::State& state) {
  Bits bits;
  for (const auto& [name, values] : state.exports.full_state_dict()) bits[name] = bits_of(values.to(at::kFloat));
  for (const auto& item : state.job.model->named_buffers()) bits[item.key()] = bits_of(item.value());
  for (const auto& [alias, owner] : state.exports.aliases())
    if (bits.contains(owner)) bits[alias] = bits[owner];  // rank 0 has everything
  return bits;
}

// What the files say, without the optimizer's states; ties under all their names.
Bits bits_in(const std::string& path) {
  const auto source = interchange::open_source(formats::system_files(), path);
  Bits bits;
  for (const auto& tensor : source->tensors())
    if (!tensor.kind.starts_with("opt.")) {
      auto data = bytes_of(*source, tensor);
      // A universal checkpoint has frozen parameters in their own type.
      if (tensor.kind == "param" && tensor.dtype == "BF16") {
        std::string wide(data.size() * 2, '\0');
        for (std::size_t i = 0; i < data.size(); i += 2) wide.replace(2 * i + 2, 2, data, i, 2);
        bits[tensor.name] = {"F32 " + std::to_string(tensor.shape.size()), wide};
      } else {
        bits[tensor.name] = {tensor.dtype + " " + std::to_string(tensor.shape.size()), data};
      }
    }
  for (const auto& [name, stored] : source->aliases()) bits[name] = bits.at(stored);
  return bits;
}

TEST(RandomModels, ExportsAreTheTrainingState) {
  const int count = models_asked();
  int empty = 0, scalars = 0, ties = 0, frozen = 0, buffers = 0;
  for (int seed = 1; seed <= count && !HasFailure(); ++seed) {
    const auto plan = random_plan(static_cast<std::uint64_t>(seed));
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + plan.options.format + ", " + plan.recipe);
    for (const auto& one : plan.parameters) {
      empty += formats::numel_of(one.shape) == 0;
      scalars += one.shape.empty();
      ties += one.tied_to >= 0;
      frozen += one.frozen;
    }
    buffers += static_cast<int>(plan.buffers.size());
    const TempFolder folder(TempFolder::On::Memory);
    const auto out = folder.file("out");
    Bits expected;
    std::string hash;
    on_ranks(plan.worlds[0], [&](const auto& comm) {
      engine::State state(std::make_shared<RandomModel>(plan), options_of(plan, plan.stages[0]), comm);
      fill(state, static_cast<std::uint64_t>(seed));
      (void)checkpoint::export_weights(state, formats::system_files(), out, plan.options);
      const auto bits = bits_in(state);
      const auto digest = checkpoint::logical_hash(state);
      if (comm->rank() != 0) return;
      expected = bits;
      hash = digest;
    });
    auto files = bits_in(out);
    for (const auto& [name, bits] : files)
      EXPECT_TRUE(expected.contains(name)) << name << " is too many: " << bits.first;
    for (const auto& [name, bits] : expected)
      if (files.contains(name)) {
        EXPECT_EQ(files[name].first, bits.first) << name;
        EXPECT_TRUE(files[name].second == bits.second) << name;
      } else {
        ADD_FAILURE() << name << " is missing";
      }
    // Into other values, ranks and stage.
    on_ranks(plan.worlds[1], [&](const auto& comm) {
      engine::State state(std::make_shared<RandomModel>(plan), options_of(plan, plan.stages[1]), comm);
      fill(state, static_cast<std::uint64_t>(seed) + 1'000'000);
      ImportOptions options;
      options.optimizer = plan.options.format == "universal";
      (void)checkpoint::import_weights(state, formats::system_files(), out, options);
      const auto bits = bits_in(state);
      const auto digest = checkpoint::logical_hash(state);
      if (comm->rank() != 0) return;
      EXPECT_TRUE(bits == expected);
      EXPECT_TRUE(digest == hash || !options.optimizer) << "states of the optimizer";
    });
  }
  EXPECT_TRUE(count < 20 || (empty > 0 && scalars > 0 && ties > 0 && frozen > 0 && buffers > 0));
  std::cout << count << " random models: " << scalars << " scalars, " << empty << " empty parameters, " << ties
            << " ties, " << frozen << " frozen, " << buffers << " buffers\n";
}

}  // namespace
}  // namespace zero::test::random_models_test
