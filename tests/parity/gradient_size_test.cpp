// The size of gradients: means over ranks and micro-batches, the global norm, clipping and the update. The reference is
// a loop written from the definitions, in fp64, with one plain module, independent of the engine and of the other
// parity tests. Only this test detects errors that all stages and transports have in common.
//
// As processes, this program is started again for every rank: it trains all cases of its world, and rank 0 writes norms
// and masters to a file.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "support/folder.h"
#include "support/spawn.h"

namespace zero::test::gradient_size_test {
namespace {

constexpr int kSteps = 4;

struct Rule {
  const char* name;
  const char* json;
  double lr, momentum, weight_decay;
  bool adam;
};

// A large eps, so that AdamW's update shows how large a gradient is.
constexpr Rule kRules[] = {
    {"sgd", R"({"type": "SGD", "params": {"lr": 0.1}})", 0.1, 0, 0, false},
    {"momentum", R"({"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}})", 0.05, 0.9, 0.01,
     false},
    {"adamw", R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 0.001}})", 0.01, 0, 0.1, true}};

struct Variant {
  const char* name;
  const char* json;
  bool sum;
};

constexpr Variant kVariants[] = {{"mean", "", false},
                                 {"prescale", R"(, "prescale_gradients": true)", false},
                                 {"predivide", R"(, "gradient_predivide_factor": 4.0)", false},
                                 {"sum", R"(, "gradient_allreduce_op": "sum")", true}};

struct Case {
  int stage = 0, accumulation = 1;
  double clip = 0;
  const Rule* rule = &kRules[0];
  const Variant* variant = &kVariants[0];
  const char* recipe = "fp32";

  std::string name() const {
    std::ostringstream out;
    out << "stage" << stage << "_k" << accumulation << "_clip" << clip << "_" << rule->name << "_" << variant->name
        << "_" << recipe;
    return out.str();
  }
  std::string json() const {
    std::ostringstream out;
    out << R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": )" << accumulation
        << R"(, "gradient_clipping": )" << clip << R"(, "optimizer": )" << rule->json
        << R"(, "zero_optimization": {"stage": )" << stage << "}" << variant->json;
    if (std::string(recipe) == "bf16") out << R"(, "bf16": {"enabled": true})";
    if (std::string(recipe) == "fp16") out << R"(, "fp16": {"enabled": true, "initial_scale_power": 7})";
    out << "}";
    return out.str();
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int stage = 0; stage <= 3; ++stage)
    for (const int accumulation : {1, 3})
      for (const double clip : {0.0, 0.05}) {
        for (const auto& rule : kRules)
          for (const auto& variant : kVariants) all.push_back({stage, accumulation, clip, &rule, &variant, "fp32"});
        for (const char* recipe : {"bf16", "fp16"})
          all.push_back({stage, accumulation, clip, &kRules[0], &kVariants[0], recipe});
      }
  return all;
}

// Units of odd sizes, so that shards have padding and cut through parameters; one large enough to be read in place.
torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(7, 67), torch::nn::Tanh(), torch::nn::Linear(67, 71), torch::nn::Tanh(),
                            torch::nn::Linear(71, 5));
  at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(3);
  for (auto& p : net->parameters()) p.copy_(at::randn(p.sizes(), generator, at::TensorOptions()) * 0.15);
  return net;
}

// Every micro-batch of every rank has other data and another size of gradient.
at::Tensor loss_of(torch::nn::Sequential& net, int rank, int micro) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * micro + rank + 1));
  const auto dtype = net->parameters().front().scalar_type();
  const auto x = at::randn({4, 7}, generator, at::TensorOptions()),
             y = at::randn({4, 5}, generator, at::TensorOptions());
  return (net->forward(x.to(dtype)).to(at::kFloat) - y * (1.0 + rank + 0.5 * (micro % 3))).pow(2).mean();
}

struct Result {
  std::vector<double> norms;
  std::map<std::string, std::vector<double>> masters;
};

std::vector<double> numbers(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(at::kDouble).contiguous().view({-1});
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

Result train_engine(const Case& c, const std::shared_ptr<Communicator>& comm) {
  auto net = make_net();
  Engine engine(net, Options::from_json(c.json()), comm);
  Result result;
  for (int micro = 0; micro < kSteps * c.accumulation; ++micro) {
    engine.backward(loss_of(net, comm->rank(), micro));
    const auto step = engine.step();
    if (step.updated) result.norms.push_back(step.grad_norm);
  }
  for (const auto& [name, master] : engine.full_state_dict()) result.masters[name] = numbers(master);
  return result;
}

// The reference, written directly from the definitions.
Result train_by_hand(const Case& c, int world) {
  auto net = make_net();
  const auto named = net->named_parameters();
  std::vector<at::Tensor> masters, first, second;
  for (const auto& item : named) {
    masters.push_back(item.value().detach().to(at::kDouble));
    first.push_back(at::zeros_like(masters.back()));
    second.push_back(at::zeros_like(masters.back()));
  }
  Result result;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> gradients;
    for (const auto& master : masters) gradients.push_back(at::zeros_like(master));
    for (int rank = 0; rank < world; ++rank) {
      for (int micro = 0; micro < c.accumulation; ++micro) {
        net->zero_grad();
        loss_of(net, rank, step * c.accumulation + micro).backward();
        for (std::size_t i = 0; i < masters.size(); ++i) gradients[i] += named[i].value().grad().to(at::kDouble);
      }
    }
    double squares = 0;
    for (auto& gradient : gradients) {
      gradient /= c.accumulation;
      if (!c.variant->sum) gradient /= world;
      squares += gradient.pow(2).sum().item<double>();
    }
    const double norm = std::sqrt(squares);
    result.norms.push_back(norm);
    for (std::size_t i = 0; i < masters.size(); ++i) {
      auto gradient = c.clip > 0 && norm > c.clip ? gradients[i] * (c.clip / (norm + 1e-6)) : gradients[i];
      auto& p = masters[i];
      const auto& rule = *c.rule;
      if (rule.adam) {
        p *= 1 - rule.lr * rule.weight_decay;
        first[i] = 0.9 * first[i] + 0.1 * gradient;
        second[i] = 0.999 * second[i] + 0.001 * gradient * gradient;
        const auto mean = first[i] / (1 - std::pow(0.9, step + 1)),
                   square = second[i] / (1 - std::pow(0.999, step + 1));
        p -= rule.lr * mean / (square.sqrt() + 0.001);
      } else {
        gradient = gradient + rule.weight_decay * p;
        first[i] = step == 0 ? gradient : rule.momentum * first[i] + gradient;
        p -= rule.lr * first[i];
      }
      at::NoGradGuard no_grad;
      named[i].value().copy_(p);
    }
  }
  for (std::size_t i = 0; i < masters.size(); ++i) result.masters[named[i].key()] = numbers(masters[i]);
  return result;
}

double length(const std::vector<double>& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

// Masters agree within fp32 rounding, and so do their changes by training.
void expect_equal(const Result& got, const Result& expected, const Case& c, const std::string& where) {
  const bool exact = std::string(c.recipe) == "fp32";
  const auto text = where + " " + c.name();
  ASSERT_EQ(got.norms.size(), expected.norms.size()) << text;
  for (std::size_t i = 0; i < expected.norms.size(); ++i)
    EXPECT_NEAR(got.norms[i], expected.norms[i], (exact ? 1e-6 : 2e-2) * expected.norms[i]) << text << " step " << i;
  if (c.clip > 0) {
    EXPECT_GT(expected.norms[0], 10 * c.clip) << text << ": clipping has nothing to do";
  }
  auto start = make_net();
  ASSERT_EQ(got.masters.size(), expected.masters.size()) << text;
  for (const auto& item : start->named_parameters()) {
    const auto before = numbers(item.value());
    const auto &a = got.masters.at(item.key()), &b = expected.masters.at(item.key());
    ASSERT_EQ(a.size(), b.size()) << text;
    const double apart = length(minus(a, b));
    if (exact) {
      EXPECT_LT(apart, 1e-6 * length(b)) << text << " " << item.key();
    }
    EXPECT_LT(apart, (exact ? 2e-4 : 4e-2) * length(minus(b, before)))
        << text << " " << item.key() << ", of the update";
  }
}

const Result& by_hand(const Case& c, int world) {
  static std::map<std::string, Result> known;
  Case key = c;
  key.stage = 0;
  if (!key.variant->sum) key.variant = &kVariants[0];
  key.recipe = "fp32";
  const auto name = std::to_string(world) + key.name();
  if (const auto it = known.find(name); it != known.end()) return it->second;
  return known[name] = train_by_hand(key, world);
}

TEST(GradientSize, AloneAndWithRanksAsThreads) {
  at::set_num_threads(1);
  for (const auto& c : cases()) {
    expect_equal(train_engine(c, Communicator::local()), by_hand(c, 1), c, "alone");
    for (const int world : {2, 3}) {
      Result got;
      run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        at::set_num_threads(1);
        auto result = train_engine(c, comm);
        if (comm->rank() == 0) got = std::move(result);
      });
      expect_equal(got, by_hand(c, world), c, "threads, world " + std::to_string(world));
    }
    if (HasFailure()) break;  // the others would fail in the same way
  }
}

// What rank 0 wrote: for every case the norms, then the masters in the order of their names.
std::vector<double> all_numbers(const Result& result) {
  auto numbers = result.norms;
  for (const auto& [name, values] : result.masters) numbers.insert(numbers.end(), values.begin(), values.end());
  return numbers;
}

Result result_of(const double* from, const Result& like) {
  Result result;
  result.norms.assign(from, from + like.norms.size());
  from += like.norms.size();
  for (const auto& [name, values] : like.masters) {
    result.masters[name].assign(from, from + values.size());
    from += values.size();
  }
  return result;
}

class GradientSizeOfProcesses : public ::testing::TestWithParam<std::pair<const char*, int>> {};

constexpr const char* kFileVariable = "GRADIENT_SIZE_FILE";  // where rank 0 writes

TEST_P(GradientSizeOfProcesses, IsThatOfTheLoop) {
  at::set_num_threads(1);
  const auto& [transport, world] = GetParam();
  SpawnOptions options;
  options.world = world;
  options.transport = transport;
  options.limit = std::chrono::seconds(250);
  const TempFolder folder;
  const auto file = folder.path() / "numbers";
  options.environment = {{kFileVariable, file.string()}, {"GTEST_OUTPUT", ""}};
  const auto ends =
      spawn_ranks(options, "/proc/self/exe",
                  {"--gtest_also_run_disabled_tests", "--gtest_filter=GradientSize.DISABLED_ProgramOfOneRank"});
  for (const auto& end : ends) ASSERT_EQ(end.exit_code, 0) << end.err;
  std::vector<double> values(std::filesystem::file_size(file) / sizeof(double));
  std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(values.data()), values.size() * sizeof(double));
  const auto all = cases();
  const auto count = all_numbers(by_hand(all[0], world)).size();
  ASSERT_EQ(values.size(), all.size() * count);
  for (std::size_t i = 0; i < all.size() && !HasFailure(); ++i) {
    const auto& expected = by_hand(all[i], world);
    expect_equal(result_of(values.data() + i * count, expected), expected, all[i],
                 std::string(transport) + ", world " + std::to_string(world));
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, GradientSizeOfProcesses,
                         ::testing::Values(std::pair{"shm", 2}, std::pair{"shm", 3}, std::pair{"gloo", 2},
                                           std::pair{"gloo", 3}),
                         [](const auto& info) { return info.param.first + std::to_string(info.param.second); });

// What each rank of the test above runs.
TEST(GradientSize, DISABLED_ProgramOfOneRank) {
  const char* file = std::getenv(kFileVariable);
  ASSERT_NE(file, nullptr) << "this is a rank's program, started by another test";
  at::set_num_threads(1);
  auto comm = Communicator::from_env();
  std::ofstream out;
  if (comm->rank() == 0) out.open(file, std::ios::binary);
  for (const auto& c : cases()) {
    const auto numbers = all_numbers(train_engine(c, comm));
    if (comm->rank() == 0) out.write(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double));
  }
  if (comm->rank() == 0) EXPECT_TRUE(out.flush());
}

}  // namespace
}  // namespace zero::test::gradient_size_test
