// The steps of one rank and their timing (experts_rank.h).
#include "lab/bench/experts_rank.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <zero/library.h>
#include <zero/moe.h>

#include <chrono>
#include <cmath>

#include "base/gathered_values.h"
#include "tools/support/pss.h"

namespace zero::cli {
namespace experts_rank_bench {
namespace {

constexpr std::uint64_t kSeed = 1;
constexpr std::int64_t kMemorySteps = 3;
constexpr double kAuxiliary = 0.01, kMarked = 4;

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

torch::nn::AnyModule expert_of(const ExpertsTask& task) {
  if (task.inner == 0) return torch::nn::AnyModule(torch::nn::Identity());
  struct FeedForward : torch::nn::Module {
    explicit FeedForward(std::int64_t hidden, std::int64_t inner)
        : up(register_module("up", torch::nn::Linear(hidden, inner))),
          down(register_module("down", torch::nn::Linear(inner, hidden))) {}
    at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x), "tanh")); }
    torch::nn::Linear up, down;
  };
  return torch::nn::AnyModule(std::make_shared<FeedForward>(task.hidden, task.inner));
}

struct Layers : torch::nn::Module {
  explicit Layers(const ExpertsTask& task) {
    const MoeOptions options{.hidden_size = task.hidden,
                             .num_experts = task.experts,
                             .ep_size = static_cast<int>(task.ep),
                             .k = static_cast<int>(task.top_k),
                             .capacity_factor = task.capacity_factor,
                             .noisy_gate_policy = {},
                             .drop_tokens = task.drop,
                             .merged_batches = task.merged};
    const at::NoGradGuard no_grad;
    for (std::int64_t i = 0; i < task.layers; ++i) {
      norms.push_back(register_module("norm" + std::to_string(i),
                                      torch::nn::LayerNorm(torch::nn::LayerNormOptions({task.hidden}))));
      moes.push_back(
          register_module("moe" + std::to_string(i), MoE(options, [&](std::int64_t) { return expert_of(task); })));
      moes.back()->named_parameters()["gate.wg.weight"].index({0, 0}) = task.skew;
    }
  }
  at::Tensor forward(at::Tensor x) {
    auto auxiliary = at::zeros({}, at::kFloat);
    for (std::size_t i = 0; i < moes.size(); ++i) {
      const auto [y, l_aux, counts] = moes[i](norms[i](x));
      x = x + y;
      auxiliary = auxiliary + l_aux;
    }
    return x.to(at::kFloat).square().mean() + kAuxiliary * auxiliary;
  }
  std::vector<torch::nn::LayerNorm> norms;
  std::vector<MoE> moes;
};

// The same for every configuration, different for every rank and step.
at::Tensor tokens_of(const ExpertsTask& task, int rank, std::int64_t step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(kSeed + static_cast<std::uint64_t>(step * 1000 + rank));
  auto x = at::randn({task.tokens, task.hidden}, generator);
  if (task.skew != 0) x.select(1, 0).fill_(kMarked);
  return x.to(task.recipe == "bf16" ? at::kBFloat16 : at::kFloat);
}

std::int64_t total(Communicator& comm, std::int64_t own) {
  std::int64_t sum = 0;
  for (const auto one : base::all_gather_values(comm, own)) sum += one;
  return sum;
}

// What the layers' last forward means for a step.
struct Routed {
  std::int64_t chosen = 0, kept = 0, bytes = 0;  // of this rank; bytes: by the formula
  double load = 0;

  Routed(const Layers& model, const ExpertsTask& task, int place) {
    const auto element = task.recipe == "bf16" ? 2 : 4;
    // By the rule of zero/moe.h, and not by the code that it checks.
    const auto capacity =
        static_cast<std::int64_t>(std::max(4.0, std::ceil(static_cast<double>(task.tokens * task.top_k) /
                                                              static_cast<double>(task.experts) * task.capacity_factor -
                                                          1e-9)));
    for (const auto& moe : model.moes) {
      const auto& counts = moe->last_counts();
      const auto* const count = counts.const_data_ptr<std::int64_t>();
      std::int64_t most = 0, all = 0, crossing = 0;
      for (std::int64_t e = 0; e < task.experts; ++e) {
        most = std::max(most, count[e]);
        all += count[e];
        if (e * task.ep / task.experts != place) crossing += task.drop ? std::min(count[e], capacity) : count[e];
      }
      chosen += all;
      kept += moe->last_kept();
      load += static_cast<double>(most * task.experts) / static_cast<double>(all * task.layers);
      // A row goes and comes back in forward, and so does its gradient in backward.
      bytes += 4 * crossing * task.hidden * element + 8 * task.experts * (task.ep - 1) / task.ep;
    }
  }
};

std::int64_t exchanged(const CommStats& stats) {
  std::int64_t sum = 0;
  for (const auto* name : {"all_to_all", "ep.all_to_all"})
    if (const auto found = stats.by_op.find(name); found != stats.by_op.end())
      sum += static_cast<std::int64_t>(found->second.bytes_sent);
  return sum;
}

// Times of experts_rank.h's floor. rows: that this rank's experts compute in a step of one layer.
std::vector<double> floor_of(const ExpertsTask& task, Communicator& comm, std::int64_t rows) {
  if (task.inner == 0) return {};
  const auto local = task.experts / task.ep, batches = task.merged ? 1 : task.ep;
  const auto dtype = task.recipe == "bf16" ? at::kBFloat16 : at::kFloat;
  const auto batch = at::randn({std::max<std::int64_t>(1, rows / (local * batches)), task.hidden}).to(dtype);
  std::vector<torch::nn::AnyModule> experts;
  std::int64_t elements = 0;
  for (std::int64_t e = 0; e < local * task.layers; ++e) {
    experts.push_back(expert_of(task));
    experts.back().ptr()->to(dtype);
    for (const auto& parameter : experts.back().ptr()->parameters()) elements += parameter.numel();
  }
  const auto share = elements * task.ep / comm.size();
  const auto values = at::zeros({share}), gradients = at::full({share}, 1e-3), first = at::zeros({share}),
             second = at::zeros({share});
  auto count = at::zeros({});
  std::vector<double> times;
  for (std::int64_t k = 0; k < task.warmup + task.steps; ++k) {
    comm.barrier();  // so that no rank ever has the machine's memory bandwidth to itself
    const auto start = Clock::now();
    for (auto& expert : experts) {
      for (std::int64_t b = 0; b < batches; ++b) {
        const auto x = batch.detach().requires_grad_();
        expert.forward(x).backward(batch);
      }
    }
    {
      const at::NoGradGuard no_grad;
      count += 1;
      at::_fused_adamw_({values}, {gradients}, {first}, {second}, {}, {count}, 3e-4, 0.9, 0.999, 0.01, 1e-8,
                        /*amsgrad=*/false, /*maximize=*/false);
    }
    if (k >= task.warmup) times.push_back(seconds(start, Clock::now()));
    for (auto& expert : experts) expert.ptr()->zero_grad(/*set_to_none=*/true);
  }
  return times;
}

Options options_of(const ExpertsTask& task) {
  const Json config = {{"train_micro_batch_size_per_gpu", 1},
                       {"gradient_clipping", 1.0},
                       {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 3e-4}}}}},
                       {"bf16", {{"enabled", task.recipe == "bf16"}}},
                       {"zero_optimization", {{"stage", task.stage}}}};
  return Options::from_json(config.dump(), "<zero bench experts>");
}

}  // namespace
}  // namespace experts_rank_bench

Json ExpertsTask::json() const {
  using namespace experts_rank_bench;
  return {{"recipe", recipe}, {"stage", stage},     {"ep", ep},         {"steps", steps},
          {"warmup", warmup}, {"threads", threads}, {"layers", layers}, {"hidden", hidden},
          {"inner", inner},   {"experts", experts}, {"top_k", top_k},   {"tokens", tokens},
          {"skew", skew},     {"drop", drop},       {"merged", merged}, {"capacity_factor", capacity_factor}};
}

ExpertsTask ExpertsTask::from(const Json& json) {
  using namespace experts_rank_bench;
  ExpertsTask task;
  json.at("recipe").get_to(task.recipe);
  for (const auto& [name, field] :
       std::initializer_list<std::pair<const char*, std::int64_t*>>{{"stage", &task.stage},
                                                                    {"ep", &task.ep},
                                                                    {"steps", &task.steps},
                                                                    {"warmup", &task.warmup},
                                                                    {"threads", &task.threads},
                                                                    {"layers", &task.layers},
                                                                    {"hidden", &task.hidden},
                                                                    {"inner", &task.inner},
                                                                    {"experts", &task.experts},
                                                                    {"top_k", &task.top_k},
                                                                    {"tokens", &task.tokens}})
    json.at(name).get_to(*field);
  json.at("skew").get_to(task.skew);
  json.at("drop").get_to(task.drop);
  json.at("merged").get_to(task.merged);
  json.at("capacity_factor").get_to(task.capacity_factor);
  return task;
}

Json measure_experts(const ExpertsTask& task, const std::shared_ptr<Communicator>& comm) {
  using namespace experts_rank_bench;
  at::set_num_threads(static_cast<int>(task.threads));
  const auto options = options_of(task);
  comm->barrier();
  const auto before = pss_bytes();
  torch::manual_seed(kSeed);
  const auto model = std::make_shared<Layers>(task);
  const auto mesh = Mesh::of(options, comm);
  Engine engine(model, options, mesh);
  torch::manual_seed(kSeed + static_cast<std::uint64_t>(comm->rank()));  // of the gate's draws
  std::vector<double> step_s, forward_s, backward_s, optimizer_s, losses;
  const auto step = [&](std::int64_t k, bool measured) {
    const auto x = tokens_of(task, comm->rank(), k);
    const auto start = Clock::now();
    auto loss = model->forward(x);
    const auto forward = Clock::now();
    engine.backward(loss);
    const auto backward = Clock::now();
    engine.step();
    const auto end = Clock::now();
    losses.push_back(loss.item<double>());
    if (!measured) return;
    step_s.push_back(seconds(start, end));
    forward_s.push_back(seconds(start, forward));
    backward_s.push_back(seconds(forward, backward));
    optimizer_s.push_back(seconds(backward, end));
  };
  std::int64_t chosen = 0, kept = 0, formula = 0;
  double load = 0;
  for (std::int64_t k = 0; k < task.warmup + task.steps; ++k) {
    if (k == task.warmup) {
      comm->barrier();
      comm->reset_stats();
    }
    step(k, k >= task.warmup);
    if (k < task.warmup) continue;
    const Routed routed(*model, task, comm->rank() % static_cast<int>(task.ep));
    chosen += routed.chosen, kept += routed.kept, formula += routed.bytes;
    load += routed.load / static_cast<double>(task.steps);
  }
  const auto sent = comm->stats();
  comm->barrier();
  PssSampler sampler;
  for (std::int64_t k = 0; k < kMemorySteps; ++k) step(k, false);
  const auto peak = sampler.stop();
  const auto all_kept = total(*comm, kept);
  const auto per_step = [&](std::int64_t own) {
    return static_cast<double>(total(*comm, own)) / static_cast<double>(task.steps);
  };
  return {
      {"transport", comm->transport()},
      {"step_s", step_s},
      {"forward_s", forward_s},
      {"backward_s", backward_s},
      {"optimizer_s", optimizer_s},
      {"floor_s", floor_of(task, *comm, all_kept / (comm->size() * task.steps * task.layers))},
      {"losses", losses},
      {"peak_pss_bytes", base::all_gather_values(*comm, static_cast<std::int64_t>(peak > before ? peak - before : 0))},
      {"bytes_sent_per_step", per_step(static_cast<std::int64_t>(sent.bytes_sent()))},
      {"exchanged_bytes_per_step", per_step(exchanged(sent))},
      {"formula_bytes_per_step", per_step(formula)},
      {"dropped", 1 - static_cast<double>(all_kept) / static_cast<double>(total(*comm, chosen))},
      {"load", load}};
}

}  // namespace zero::cli
