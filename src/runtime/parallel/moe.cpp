#include <zero/activation_checkpoint.h>
#include <zero/errors.h>
#include <zero/log.h>
#include <zero/moe.h>
#include <zero/tp.h>

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <cmath>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "parallel/dispatch.h"
#include "torch_hooks/deferred_init.h"

namespace zero {
namespace {

using Numbers = std::vector<std::int64_t>;

[[noreturn]] void fail_moe(const std::string& text) { throw ConfigError("[MoE] " + text); }

// What a recomputation has to repeat exactly.
struct Plan {
  parallel::Routing routing;
  Numbers sent, received;  // rows to and from each rank
  Numbers pieces;          // received rows by source rank, then by expert of this rank
  bool gradient = false;   // some rank's tokens need one
};

// How many rows every rank sends to each expert, and whether its tokens need a gradient: the lowest bit. If one rank's
// do, the backward of all ranks has the exchange of rows.
void exchange_counts(Plan& plan, Communicator* group, bool gradient, at::Device device) {
  const auto experts = static_cast<std::int64_t>(plan.routing.kept.size());
  const int ranks = group == nullptr ? 1 : group->size();
  const auto local = experts / ranks;
  plan.pieces = plan.routing.kept;
  if (ranks > 1) {
    const auto ours = (at::tensor(plan.routing.kept, at::kLong) * 2 + (gradient ? 1 : 0)).to(device);
    auto theirs = at::empty_like(ours);
    group->all_to_all(theirs, ours)->wait();
    theirs = theirs.cpu();
    const auto* const data = theirs.const_data_ptr<std::int64_t>();
    for (std::int64_t at = 0; at < experts; ++at) {
      plan.pieces[static_cast<std::size_t>(at)] = data[at] / 2;
      plan.gradient = plan.gradient || data[at] % 2 == 1;
    }
  }
  const auto by_rank = [&](const Numbers& counts) {
    Numbers sums;
    for (auto at = counts.begin(); at != counts.end(); at += local)
      sums.push_back(std::accumulate(at, at + local, std::int64_t{0}));
    return sums;
  };
  plan.sent = by_rank(plan.routing.kept);
  plan.received = by_rank(plan.pieces);
}

// Rows of this rank's tokens to the ranks of their experts, or back.
at::Tensor exchange(const at::Tensor& rows, const std::shared_ptr<Communicator>& group, const Numbers& to,
                    const Numbers& from) {
  if (!group || group->size() == 1) return rows;
  const auto width = rows.size(1);
  const auto numels = [&](Numbers counts) {
    for (auto& count : counts) count *= width;
    return counts;
  };
  return tp::all_to_all(rows.reshape({-1}), group, numels(from), numels(to)).view({-1, width});
}

using Expert = std::function<at::Tensor(const at::Tensor& rows)>;

at::Tensor run_expert(const Expert& expert, const at::Tensor& rows) {
  auto result = expert(rows);
  if (result.sizes() != rows.sizes())
    fail_moe(base::join("an expert returned a tensor of shape ", result.sizes(), " for rows of shape ", rows.sizes(),
                        ", expected the same shape"));
  return result.to(rows.scalar_type());  // autocast may have chosen another
}

// One call for the rows of all ranks.
std::vector<at::Tensor> run_merged(const Expert& expert, const std::vector<at::Tensor>& pieces) {
  Numbers counts;
  for (const auto& piece : pieces) counts.push_back(piece.size(0));
  const auto rows = at::cat(pieces);
  // One row alone is computed by another kernel, with other rounding.
  const bool single = rows.size(0) == 1;
  const auto result = run_expert(expert, single ? at::cat({rows, rows}) : rows);
  return (single ? result.narrow(0, 0, 1) : result).split_with_sizes(counts);
}

// Every expert of this rank runs, with 0 rows too: so all ranks that have a copy of it use its parameters in the same
// order, and get a gradient of it. pieces: by source rank, then by expert; so is the result.
template <class Run>
std::vector<at::Tensor> run_experts(const std::vector<at::Tensor>& pieces, std::size_t sources, std::size_t first,
                                    bool merged, const Run& run) {
  const auto local = pieces.size() / sources;
  std::vector<at::Tensor> outputs(pieces.size());
  for (std::size_t e = 0; e < local; ++e) {
    const Expert expert = [&](const at::Tensor& rows) { return run(static_cast<std::int64_t>(first + e), rows); };
    if (!merged || sources == 1) {
      for (auto at = e; at < pieces.size(); at += local) outputs[at] = run_expert(expert, pieces[at]);
      continue;
    }
    std::vector<at::Tensor> of_expert;
    for (auto at = e; at < pieces.size(); at += local) of_expert.push_back(pieces[at]);
    const auto parts = run_merged(expert, of_expert);
    for (std::size_t q = 0; q < parts.size(); ++q) outputs[q * local + e] = parts[q];
  }
  return outputs;
}

void check_input(const at::Tensor& x, const at::Tensor& used_token, const MoeOptions& options,
                 const std::shared_ptr<Communicator>& group) {
  const auto h = options.hidden_size;
  if (!x.defined() || x.dim() < 1 || x.size(-1) != h || !x.is_floating_point())
    fail_moe(base::join("got ", x.defined() ? base::join(x.toString(), x.sizes()) : "no tensor",
                        ", expected floating-point values of shape [.., ", h, "]"));
  if (used_token.defined()) {
    const auto tokens = x.sizes().slice(0, static_cast<std::size_t>(x.dim() - 1));
    const auto count = c10::multiply_integers(tokens);
    if (used_token.sizes() != tokens && used_token.sizes() != at::IntArrayRef{count})
      fail_moe(base::join("got used_token of shape ", used_token.sizes(), " for x of shape ", x.sizes(), ", expected ",
                          tokens, " or [", count, "]"));
  }
  if (options.ep_size > 1 && (!group || group->size() != options.ep_size))
    fail_moe(base::join("forward with ep_size ", options.ep_size,
                        " needs the ranks of an Engine, which this module does not have. Hint: construct the Engine "
                        "before the first forward, or set ep_size to 1."));
}

// In fp32, also under autocast.
at::Tensor logits_of(const at::Tensor& tokens, const at::Tensor& gate, bool jitter) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto input = tokens.to(at::kFloat);
  if (jitter) input = input * parallel::jitter(input.sizes(), input.options());
  return at::linear(input, gate.to(at::kFloat));
}

parallel::GateOptions gate_options(const MoeOptions& options, bool training) {
  return {.experts = options.num_experts,
          .k = options.k,
          .capacity_factor = training ? options.capacity_factor : options.eval_capacity_factor,
          .min_capacity = options.min_capacity,
          .drop_tokens = options.drop_tokens,
          .training = training,
          .noisy_logits = options.noisy_gate_policy == "RSample",
          .random_selection = options.use_rts,
          .second_sampling = options.top2_2nd_expert_sampling,
          .keep_likeliest = options.drop_policy == "probs"};
}

// A copy that is trained and frozen as the original; Cloneable's parameters all require grad.
torch::nn::AnyModule copy_of(const torch::nn::AnyModule& module) {
  auto copy = module.clone();
  const auto from = module.ptr()->named_parameters(), to = copy.ptr()->named_parameters();
  for (const auto& item : from)
    if (auto* const parameter = to.find(item.key())) parameter->requires_grad_(item.value().requires_grad());
  return copy;
}

// A Sequential whose forward is no template, as AnyModule needs it.
class Layers final : public torch::nn::SequentialImpl {
 public:
  Layers(const SequentialImpl& layers, const std::function<torch::nn::AnyModule(const torch::nn::AnyModule&)>& take) {
    auto layer = layers.begin();
    for (const auto& name : layers.named_children().keys()) push_back(name, take(*layer++));
    // train() sets the modes of all modules below; theirs stay.
    std::vector<std::pair<std::shared_ptr<Module>, bool>> modes;
    for (const auto& module : modules(/*include_self=*/false)) modes.emplace_back(module, module->is_training());
    train(layers.is_training());
    for (const auto& [module, training] : modes) module->train(training);
  }
  at::Tensor forward(const at::Tensor& rows) { return SequentialImpl::forward(rows); }
  std::shared_ptr<Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    return std::make_shared<Layers>(*this, [&](const torch::nn::AnyModule& layer) { return layer.clone(device); });
  }
};

}  // namespace

torch::nn::AnyModule expert_of(const torch::nn::Sequential& layers) {
  if (layers.is_empty() || layers->is_empty()) fail_moe("got an expert without layers");
  return torch::nn::AnyModule(
      std::make_shared<Layers>(*layers, [](const torch::nn::AnyModule& layer) { return layer; }));
}

MoeOutput mix_experts(const at::Tensor& x, const at::Tensor& gate, const MoeOptions& options, bool training,
                      const std::shared_ptr<Communicator>& group,
                      const std::function<at::Tensor(std::int64_t, const at::Tensor&)>& run,
                      const at::Tensor& used_token) {
  check_input(x, used_token, options, group);
  const auto ranks = options.ep_size > 1 ? group : nullptr;
  const auto rules = gate_options(options, training);
  const auto tokens = x.reshape({-1, options.hidden_size});
  const auto logits = logits_of(tokens, gate, training && options.noisy_gate_policy == "Jitter");
  const auto gates = logits.softmax(1);
  const auto plan = kept_in_checkpoint([&] {
    Plan made;
    made.routing = parallel::route(logits.detach(), gates.detach(), rules,
                                   used_token.defined() ? used_token.reshape({-1}) : at::Tensor());
    exchange_counts(made, ranks.get(), x.requires_grad(), x.device());
    return made;
  });
  const auto weights = parallel::choice_weights(gates, plan.routing, rules);

  auto rows = parallel::dispatch(tokens, plan.routing);
  if (plan.gradient && at::GradMode::is_enabled() && !rows.requires_grad()) rows = rows.detach().requires_grad_();
  const auto received = exchange(rows, ranks, plan.sent, plan.received);
  const auto local = plan.pieces.size() / plan.sent.size();
  const auto outputs =
      run_experts(received.split_with_sizes(plan.pieces), plan.sent.size(),
                  ranks ? static_cast<std::size_t>(ranks->rank()) * local : 0, options.merged_batches, run);
  auto own = at::cat(outputs);
  if (ranks && at::GradMode::is_enabled() && !own.requires_grad()) own.requires_grad_();  // as on the other ranks
  const auto back = exchange(own, ranks, plan.received, plan.sent);
  return {parallel::combine(back, weights, plan.routing).view(x.sizes()),
          parallel::auxiliary_loss(gates, plan.routing, rules),
          at::tensor(plan.routing.chosen, at::kLong).to(x.device()), plan.routing.rows()};
}

at::Tensor mix_residual(const at::Tensor& experts, const at::Tensor& dense, const at::Tensor& coefficients) {
  const auto shares = coefficients.softmax(-1);
  return experts * shares.narrow(-1, 0, 1) + dense * shares.narrow(-1, 1, 1);
}

void MoeOptions::check() const {
  std::string faults;
  const auto expect = [&](bool good, const char* name, const auto& got, const std::string& expected) {
    if (!good) faults += base::join("\n  ", name, ": got ", got, ", expected ", expected);
  };
  expect(hidden_size >= 1, "hidden_size", hidden_size, "1 or more");
  expect(num_experts >= 1, "num_experts", num_experts, "1 or more");
  expect(ep_size >= 1 && (num_experts < 1 || num_experts % ep_size == 0), "ep_size", ep_size,
         base::join("a divisor of ", num_experts, " experts"));
  expect(k >= 1 && k <= std::max<std::int64_t>(num_experts, 1), "k", k,
         base::join("1 to ", num_experts, ", the number of experts"));
  expect(capacity_factor > 0 && std::isfinite(capacity_factor), "capacity_factor", capacity_factor, "a number above 0");
  expect(eval_capacity_factor > 0 && std::isfinite(eval_capacity_factor), "eval_capacity_factor", eval_capacity_factor,
         "a number above 0");
  expect(min_capacity >= 0, "min_capacity", min_capacity, "0 or more");
  const auto& noise = noisy_gate_policy;
  expect(noise.empty() || noise == "None" || noise == "Jitter" || noise == "RSample", "noisy_gate_policy", noise,
         "None, Jitter or RSample");
  expect(noise != "RSample" || k == 1, "noisy_gate_policy", noise, base::join("None or Jitter for k ", k));
  expect(drop_policy == "probs" || drop_policy == "position", "drop_policy", drop_policy, "probs or position");
  if (!faults.empty()) fail_moe("invalid options:" + faults);
}

MoEImpl::MoEImpl(MoeOptions o, torch::nn::AnyModule expert) : torch::nn::Module("MoE"), options(std::move(o)) {
  options.check();
  if (expert.is_empty()) fail_moe("got no expert");
  for (const auto& parameter : expert.ptr()->parameters())
    if (torch_hooks::is_deferred(parameter)) {
      base::log(LogLevel::Warning,
                "[MoE] copies of an expert need its values, which zero::build would have deferred: they are allocated "
                "now. Hint: MoE(options, make) with a function that makes expert c.");
      break;
    }
  add_gate();
  // The original stays the caller's: several layers may be made of one.
  for (std::int64_t c = 0; c < options.num_experts; ++c) add_expert(c, copy_of(expert));
  if (options.use_residual) add_residual(copy_of(expert));
}

MoEImpl::MoEImpl(MoeOptions o, const std::function<torch::nn::AnyModule(std::int64_t)>& make)
    : torch::nn::Module("MoE"), options(std::move(o)) {
  options.check();
  add_gate();
  for (std::int64_t c = 0; c < options.num_experts; ++c) add_expert(c, make(c));
  if (options.use_residual) add_residual(make(options.num_experts));
}

void MoEImpl::add_gate() {
  const auto gate = register_module("gate", std::make_shared<torch::nn::Module>("TopKGate"));
  const auto linear = gate->register_module(
      "wg", torch::nn::Linear(torch::nn::LinearOptions(options.hidden_size, options.num_experts).bias(false)));
  gate_weight_ = linear->weight;
  experts_module_ = register_module("experts", std::make_shared<torch::nn::Module>("Experts"));
}

void MoEImpl::add_expert(std::int64_t c, torch::nn::AnyModule expert) {
  if (expert.is_empty()) fail_moe(base::join("got no expert ", c));
  experts_module_->register_module(std::to_string(c), expert.ptr());
  experts_.push_back(std::move(expert));
}

void MoEImpl::add_residual(torch::nn::AnyModule expert) {
  if (expert.is_empty()) fail_moe("got no expert for use_residual");
  register_module("mlp", expert.ptr());
  mlp_ = std::move(expert);
  coefficient_ = register_module("coefficient", torch::nn::Linear(options.hidden_size, 2));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> MoEImpl::forward(const at::Tensor& x, const at::Tensor& used_token) {
  auto result = mix_experts(
      x, gate_weight_, options, is_training(), group_,
      [this](std::int64_t c, const at::Tensor& rows) {
        return experts_[static_cast<std::size_t>(c)].forward<at::Tensor>(rows);
      },
      used_token);
  if (options.use_residual) {
    const auto coefficients = coefficient_->forward(x);
    result.output = mix_residual(result.output, mlp_.forward<at::Tensor>(x), coefficients);
  }
  last_counts_ = result.exp_counts;
  last_kept_ = result.kept;
  return {result.output, result.l_aux, result.exp_counts};
}

}  // namespace zero
