// DeepSpeed's CIFAR-10 tutorial with its network, flags and configuration: dense, or with layers of experts, at any
// stage. docs/cifar10.md compares it with the tutorial's program.
//
//   build/bin/zero run -n 2 build/examples/cifar10                       # pictures that it draws itself
//   build/bin/zero run -n 2 build/examples/cifar10 --data DIR --stage 2 --moe --num-experts 2 --ep-world-size 2
#include <ATen/core/grad_mode.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <zero/config_tools.h>
#include <zero/device.h>
#include <zero/library.h>
#include <zero/moe.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "apps/data/corpus.h"
#include "apps/data/pictures.h"
#include "tools/support/options.h"
#include "tools/support/rank_failures.h"

namespace {

using zero::ConfigError;

struct Arguments {
  std::int64_t epochs = 30, log_interval = 2000, batch_size = 16, seed = 1, pictures = 10000;
  std::int64_t stage = 0, ep_world_size = 1, top_k = 1, min_capacity = 0, local_rank = 0;
  std::vector<std::int64_t> num_experts{1};
  double aux_loss = 0.01;
  bool moe = false, strict = false;
  std::string data, dtype, mlp_type = "standard", noisy_gate_policy = "None", config;
  std::vector<std::pair<std::string, std::string>> set;
};

void declare(zero::cli::Command& c, Arguments& a) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  c.prints_text();
  c.section("Training");
  c.option("-e,--epochs", a.epochs, "N", "passes over the training pictures (30)", 1, kMost);
  c.option("--log-interval", a.log_interval, "N", "print the loss every N steps, and after each epoch (2000)", 1,
           kMost);
  c.choice("--dtype", a.dtype, {"bf16", "fp16", "fp32"}, "of parameters and gradients (fp32)");
  c.option("--stage", a.stage, "S", "ZeRO stage (0)", 0, 3);
  c.option("--batch-size", a.batch_size, "N", "pictures of a step, over all ranks (16)", 1, kMost);
  c.option("--seed", a.seed, "N", "of initial values and of the order of pictures (1)", 0, kMost);
  c.section("Mixture of experts");
  c.flag("--moe", a.moe, "layers of experts before the last layer (--moe-param-group is taken, and not needed)");
  c.option("--ep-world-size", a.ep_world_size, "N", "ranks that share the experts of a layer (1)", 1, kMost);
  c.numbers("--num-experts", a.num_experts, "E [E ...]", "experts of each layer: one layer for each number (1)", 1,
            65536);
  c.choice("--mlp-type", a.mlp_type, {"standard", "residual"},
           "residual: with a dense expert in addition to the chosen ones");
  c.option("--top-k", a.top_k, "K", "experts of a picture (1)", 1, 2);
  c.option("--min-capacity", a.min_capacity, "N", "pictures that an expert takes in any case (0)", 0, kMost);
  c.choice("--noisy-gate-policy", a.noisy_gate_policy, {"None", "RSample", "Jitter"},
           "noise on the gate in training; RSample with --top-k 1 only");
  c.option("--aux-loss", a.aux_loss, "R", "this times the auxiliary loss is added to the loss (0.01)", 0, 1000);
  c.section("Data and configuration");
  c.option("--data", a.data, "DIR", "CIFAR-10's files, python or binary version; without it, drawn pictures");
  c.option("--pictures", a.pictures, "N", "drawn for training, and a fifth as many for the test (10000)", 10, kMost);
  c.config(a.config, a.set, a.strict);
  c.no_effect("--moe-param-group", false, "experts need no parameter groups of their own");
  c.no_effect("--deepspeed", false, "configurations are DeepSpeed's here in any case");
  c.no_effect("--local-rank", true, "the environment says which rank this is");
}

// The tutorial's configuration; adam_w_mode is what DeepSpeed's Adam does. --deepspeed_config gives another one.
const char* const kConfig = R"({
  "train_batch_size": 16,
  "optimizer": {
    "type": "Adam",
    "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "adam_w_mode": true}
  },
  "scheduler": {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}
  },
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 0}
})";
// Its loss scale, for --dtype fp16.
const char* const kLossScale[][2] = {{"fp16.loss_scale", "0"},
                                     {"fp16.loss_scale_window", "500"},
                                     {"fp16.hysteresis", "2"},
                                     {"fp16.min_loss_scale", "1"},
                                     {"fp16.initial_scale_power", "15"}};

// Flags override either configuration.
zero::Options options_of(const zero::cli::Command& c, const Arguments& a) {
  std::vector<zero::Setting> settings;
  const auto add = [&](const char* flag, const char* key, const std::string& value) {
    if (c.given(flag)) settings.push_back({key, value, std::string("CLI ") + flag});
  };
  add("--batch-size", "train_batch_size", std::to_string(a.batch_size));
  add("--stage", "zero_optimization.stage", std::to_string(a.stage));
  add("--dtype", "bf16.enabled", a.dtype == "bf16" ? "true" : "false");
  add("--dtype", "fp16.enabled", a.dtype == "fp16" ? "true" : "false");
  if (a.dtype == "fp16" && a.config.empty())
    for (const auto& [key, value] : kLossScale) settings.push_back({key, value, "the tutorial"});
  add("--seed", "seed", std::to_string(a.seed));
  for (const auto& [key, value] : a.set) settings.push_back({key, value, "CLI --set"});
  auto options = a.config.empty() ? zero::Options::from_json(kConfig, "cifar10's configuration", settings)
                                  : zero::Options::from_file(a.config, settings);
  if (a.strict && !options.notices().empty())
    throw ConfigError("[--strict] got notices, expected none; the first: " + options.notices().front());
  return options;
}

// What flags must have in common with each other and with the ranks.
void check(const zero::cli::Command& c, const Arguments& a, const zero::Options& options, int world) {
  const auto fail = [](const std::string& flag, const std::string& text) {
    throw ConfigError("[" + flag + "] got " + text);
  };
  for (const char* const flag : {"--ep-world-size", "--num-experts", "--mlp-type", "--top-k", "--min-capacity",
                                 "--noisy-gate-policy", "--aux-loss"})
    if (c.given(flag) && !a.moe) fail(flag, "no --moe, expected it: without it the network has no experts");
  if (c.given("--pictures") && !a.data.empty())
    fail("--pictures", "--data too, expected one of the two: pictures are drawn or read");
  const auto ep = std::to_string(a.ep_world_size);
  for (const std::int64_t experts : a.num_experts) {
    const auto of = std::to_string(experts) + " experts of a layer (--num-experts)";
    if (a.top_k > experts)
      fail("--top-k", std::to_string(a.top_k) + ", expected at most the " + of + ". Hint: --num-experts 2, or more");
    if (experts % a.ep_world_size != 0) fail("--ep-world-size", ep + ", expected a divisor of the " + of);
  }
  if (world % a.ep_world_size != 0)
    fail("--ep-world-size",
         ep + ", expected a divisor of the number of ranks, " + std::to_string(world) + ". Hint: zero run -n " + ep);
  if (a.noisy_gate_policy == "RSample" && a.top_k != 1)
    fail("--noisy-gate-policy",
         "RSample and --top-k " + std::to_string(a.top_k) + ", expected --top-k 1. Hint: Jitter");
  if (const auto why = zero::cannot_start(options, world); !why.empty()) throw ConfigError("[batch sizes] " + why);
}

data::PictureSets pictures_of(const Arguments& a) {
  if (a.data.empty()) return data::draw_pictures(a.pictures, std::max<std::int64_t>(10, a.pictures / 5));
  try {
    return data::read_cifar10(a.data);
  } catch (const std::runtime_error& error) {
    throw ConfigError(error.what() + std::string(", or leave --data out for drawn pictures"));
  }
}

// ---- the network ----
zero::MoeOptions layer_of(const Arguments& a, std::int64_t experts) {
  zero::MoeOptions options;
  options.hidden_size = 84;
  options.num_experts = experts;
  options.ep_size = static_cast<int>(a.ep_world_size);
  options.k = static_cast<int>(a.top_k);
  options.min_capacity = a.min_capacity;
  options.use_residual = a.mlp_type == "residual";
  options.noisy_gate_policy = a.noisy_gate_policy;
  // In the test no picture is dropped: what is right must not depend on which pictures, or ranks, are tested together.
  options.eval_capacity_factor = static_cast<double>(experts);
  return options;
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Arguments& a) {
    using namespace torch::nn;
    conv1 = register_module("conv1", Conv2d(3, 6, 5));
    conv2 = register_module("conv2", Conv2d(6, 16, 5));
    fc1 = register_module("fc1", Linear(16 * 5 * 5, 120));
    fc2 = register_module("fc2", Linear(120, 84));
    fc3 = Linear(84, a.moe ? 84 : 10);
    if (!a.moe) {
      register_module("fc3", fc3);
      return;
    }
    moe_layers = register_module("moe_layer_list", ModuleList());
    for (const std::int64_t experts : a.num_experts)
      moe_layers->push_back(zero::MoE(layer_of(a, experts), AnyModule(fc3)));  // copies of it
    fc4 = register_module("fc4", Linear(84, 10));
  }

  // x: [n, 3, 32, 32]. Returns the scores [n, 10] and the sum of the layers' auxiliary losses, undefined without
  // layers.
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv1(x)), 2);
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    x = torch::relu(fc1(x.flatten(1)));
    x = torch::relu(fc2(x));
    if (!moe_layers) return {fc3(x), {}};
    at::Tensor auxiliary;
    for (const auto& layer : *moe_layers) {
      const auto [y, l_aux, counts] = layer->as<zero::MoEImpl>()->forward(x);
      x = y;
      auxiliary = auxiliary.defined() ? auxiliary + l_aux : l_aux;
    }
    return {fc4(x), auxiliary};
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr}, fc4{nullptr};
  torch::nn::ModuleList moe_layers{nullptr};
};
TORCH_MODULE(Net);

// ---- one rank ----
class Tutorial {
 public:
  Tutorial(const Arguments& arguments, const zero::Options& options, const data::PictureSets& sets,
           const std::shared_ptr<zero::Communicator>& comm)
      : arguments_(arguments),
        sets_(sets),
        device_(zero::default_device(*comm)),
        net_(built(arguments, options, device_)),
        engine_(net_, options, comm),
        rank_(engine_.mesh().rank("dp")),
        ranks_(engine_.mesh().size("dp")),
        first_(comm->rank() == 0) {
    const auto values = options.effective();
    dtype_ = values.at("bf16.enabled") == "true"   ? at::kBFloat16
             : values.at("fp16.enabled") == "true" ? at::kHalf
                                                   : at::kFloat;
    std::int64_t parameters = 0;
    for (const auto& [name, elements] : engine_.units()) parameters += elements;
    say("%s: %lld pictures for training, %lld for the test; %d rank%s, stage %s, %s, %lld parameters on each\n",
        arguments.data.empty() ? "drawn pictures (not CIFAR-10)" : ("CIFAR-10 from " + arguments.data).c_str(),
        static_cast<long long>(sets.training.size()), static_cast<long long>(sets.test.size()), comm->size(),
        comm->size() == 1 ? "" : "s", values.at("zero_optimization.stage").c_str(),
        dtype_ == at::kBFloat16 ? "bf16"
        : dtype_ == at::kHalf   ? "fp16"
                                : "fp32",
        static_cast<long long>(parameters));
    torch::manual_seed(seed_of(options) + 1 + static_cast<std::uint64_t>(comm->rank()));  // which pictures experts drop
  }

  void train() {
    const std::int64_t m = engine_.micro_batch_size(), steps = sets_.training.size() / (m * ranks_);
    if (steps == 0)
      throw ConfigError("[train_batch_size] got " + std::to_string(m * ranks_) +
                        " pictures at once, expected at most the " + std::to_string(sets_.training.size()) +
                        " for training");
    for (std::int64_t epoch = 1; epoch <= arguments_.epochs; ++epoch) {
      // The same order on all ranks, which take turns. What is left of an epoch is in others.
      const data::Permutation order(sets_.training.size(),
                                    seed_of(engine_.options()) + static_cast<std::uint64_t>(epoch));
      double sum = 0;
      std::int64_t summed = 0;
      for (std::int64_t i = 1; i <= steps; ++i) {
        std::vector<std::int64_t> mine;
        for (std::int64_t j = 0; j < m; ++j) mine.push_back(order(((i - 1) * ranks_ + rank_) * m + j));
        const auto [pictures, labels] = batch(sets_.training, mine);
        const auto [scores, auxiliary] = net_->forward(pictures);
        const auto loss = torch::nn::functional::cross_entropy(scores.to(at::kFloat), labels);
        engine_.backward(auxiliary.defined() ? loss + arguments_.aux_loss * auxiliary : loss);
        engine_.step();
        sum += loss.item<double>();
        ++summed;
        if (i % arguments_.log_interval != 0 && i != steps) continue;
        const double mean = over_ranks({sum / static_cast<double>(summed)})[0] / ranks_;
        say("[%lld, %5lld] loss: %.6f\n", static_cast<long long>(epoch), static_cast<long long>(i), mean);
        sum = 0;
        summed = 0;
      }
    }
    say("Finished Training\n");
    if (engine_.skipped_steps() > 0)
      say("%lld of %lld steps were skipped because of Inf or NaN in 16 bits\n",
          static_cast<long long>(engine_.skipped_steps()), static_cast<long long>(engine_.global_step()));
  }

  // Each rank tests the pictures i with i % ranks == rank, in as many forwards as the others.
  void test() {
    engine_.flush();
    net_->eval();
    const torch::NoGradGuard no_grad;
    std::vector<double> counts(20);  // pictures of each class, right answers of each class
    const std::int64_t at_once = 250 * ranks_;
    for (std::int64_t start = 0; start < sets_.test.size(); start += at_once) {
      std::vector<std::int64_t> mine;
      for (std::int64_t i = start + rank_; i < std::min(start + at_once, sets_.test.size()); i += ranks_)
        mine.push_back(i);
      const auto [pictures, labels] = batch(sets_.test, mine);
      const auto scores = net_->forward(pictures).first.to(at::kCPU, at::kFloat);
      for (std::size_t i = 0; i < mine.size(); ++i) {
        const auto label = sets_.test.labels[static_cast<std::size_t>(mine[i])];
        counts[label] += 1;
        counts[10 + label] += scores[static_cast<std::int64_t>(i)].argmax().item<std::int64_t>() == label;
      }
    }
    counts = over_ranks(counts);
    double of = 0, right = 0;
    for (std::size_t c = 0; c < 10; ++c) {
      of += counts[c];
      right += counts[10 + c];
    }
    say("Accuracy of the network on the %.0f test images: %.2f %%\n", of, 100 * right / of);
    for (std::size_t c = 0; c < 10; ++c)
      if (counts[c] > 0)
        say("Accuracy of %10s: %5.1f %% of %.0f\n", sets_.names[c].c_str(), 100 * counts[10 + c] / counts[c],
            counts[c]);
  }

 private:
  static std::uint64_t seed_of(const zero::Options& options) { return std::stoull(options.effective().at("seed")); }

  static Net built(const Arguments& arguments, const zero::Options& options, c10::Device device) {
    torch::manual_seed(seed_of(options));
    Net net(arguments);
    net->to(device);
    return net;
  }

  // Pictures with values from -1 to 1 and their labels.
  std::pair<at::Tensor, at::Tensor> batch(const data::Pictures& from, const std::vector<std::int64_t>& which) const {
    const auto n = static_cast<std::int64_t>(which.size());
    auto bytes = torch::empty({n, 3, data::Pictures::kSide, data::Pictures::kSide}, at::kByte);
    auto labels = torch::empty({n}, at::kLong);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto index = static_cast<std::size_t>(which[static_cast<std::size_t>(i)]);
      std::memcpy(bytes.data_ptr<std::uint8_t>() + i * data::Pictures::kBytes, from.pixels[index],
                  data::Pictures::kBytes);
      labels.data_ptr<std::int64_t>()[i] = from.labels[index];
    }
    return {(bytes.to(device_, at::kFloat) / 127.5 - 1).to(dtype_), labels.to(device_)};
  }

  // Sums over the ranks that have different pictures.
  std::vector<double> over_ranks(const std::vector<double>& values) const {
    auto sums = torch::tensor(values, at::kDouble).to(device_, at::kFloat);
    engine_.mesh().group("dp")->all_reduce(sums)->wait();
    sums = sums.to(at::kCPU, at::kDouble);
    return {sums.data_ptr<double>(), sums.data_ptr<double>() + sums.numel()};
  }

  template <class... Values>
  void say(const char* format, const Values&... values) const {
    if (!first_) return;
    char line[512];
    std::snprintf(line, sizeof line, format, values...);
    zero::cli::print_result(line);
  }

  const Arguments& arguments_;
  const data::PictureSets& sets_;
  c10::Device device_;
  Net net_;
  zero::Engine engine_;
  std::int64_t rank_, ranks_;
  bool first_;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace

int main(int argc, char** argv) {
  using namespace zero::cli;
  name_program("cifar10");
  Arguments arguments;
  Command command("", "DeepSpeed's CIFAR-10 tutorial, alone or as one of many ranks", "[options]",
                  "  zero run -n 2 cifar10 --stage 2 --moe --num-experts 2 --ep-world-size 2\n");
  declare(command, arguments);
  bool parsed = false;
  Failure failure = failure_of([&] { parsed = command.parse(argc, argv); });
  if (failure.code != zero::ExitCode::kOk) return fail_alike("", failure);
  if (!parsed) return 0;

  std::shared_ptr<zero::Communicator> comm;
  failure = failure_of([&] { comm = zero::Communicator::from_env(); });
  if (failure.code != zero::ExitCode::kOk) {
    publish(failure);
    print_error("", failure.text);
    return static_cast<int>(failure.code);
  }
  zero::Options options;
  data::PictureSets sets;
  failure = failure_of([&] {
    options = options_of(command, arguments);
    check(command, arguments, options, comm->size());
    sets = pictures_of(arguments);
  });
  if (const int code = agree_on_start("", *comm, failure); code != 0) return code;

  failure = failure_of([&] {
    Global global = command.global();
    if (comm->rank() != 0) global.log_level = "error";  // rank 0 prints the notices of all
    install_log_sink("", global);
    for (const auto& all : {command.notices(), options.notices()})
      for (const auto& notice : all)
        if (log_threshold(global) <= zero::LogLevel::Warning) print_note("", zero::LogLevel::Warning, notice);
    Tutorial tutorial(arguments, options, sets, comm);
    tutorial.train();
    tutorial.test();
  });
  if (failure.code == zero::ExitCode::kOk) return 0;
  comm->abort(failure.text);
  if (failure.code == zero::ExitCode::kConfig) return fail_alike("", failure);
  publish(failure);
  print_error("", failure.text);
  return static_cast<int>(failure.code);
}
