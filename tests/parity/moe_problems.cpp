#include "parity/moe_problems.h"

#include <torch/optim/adamw.h>
#include <algorithm>
#include <cmath>
#include <sstream>

#include "parity/mesh_problems.h"

namespace zero::test::moe {

void ExpertImpl::reset() {
  up = register_module("up", torch::nn::Linear(kHidden, 20));
  down = register_module("down", torch::nn::Linear(20, kHidden));
}

NetImpl::NetImpl(MoeOptions options) {
  in = register_module("in", torch::nn::Linear(kIn, kHidden));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int i = 0; i < 2; ++i)
    blocks->push_back(MoE(options, [](std::int64_t) { return torch::nn::AnyModule(Expert()); }));
  head = register_module("head", torch::nn::Linear(kHidden, kOut));
}

at::Tensor NetImpl::forward(const at::Tensor& x, double aux) {
  outputs.clear();
  counts.clear();
  auto h = torch::tanh(in(x));
  loss = at::zeros({});
  for (const auto& block : *blocks) {
    const auto [y, l_aux, chosen] = block->as<MoEImpl>()->forward(h);
    outputs.push_back(y.detach().clone());
    counts.push_back(chosen);
    loss = loss + aux * l_aux;
    h = h + y;
  }
  return head(h);
}

at::Tensor NetImpl::layer_by_mask(MoEImpl& layer, const at::Tensor& x, at::Tensor& l_aux) const {
  const auto& o = layer.options;
  const auto n = x.size(0);
  const auto parameters = layer.named_parameters();
  const auto gates = at::linear(x, parameters["gate.wg.weight"]).softmax(1);
  // [n, experts]: the rank of a choice, 0 first; and whether it is kept, the first ones of an expert first.
  auto chosen = at::zeros({n, o.num_experts}), first = at::zeros({n, o.num_experts}), kept = chosen.clone();
  const auto order = gates.detach().argsort(1, /*descending=*/true);
  const auto capacity = static_cast<std::int64_t>(std::ceil(
      static_cast<double>(n) / static_cast<double>(o.num_experts) * o.capacity_factor * static_cast<double>(o.k)));
  std::vector<std::int64_t> taken(static_cast<std::size_t>(o.num_experts));
  const auto take = [&](std::int64_t s, std::int64_t c) {
    const auto e = order[s][c].item<std::int64_t>();
    chosen[s][e] = 1;
    if (c == 0) first[s][e] = 1;
    auto& count = taken[static_cast<std::size_t>(e)];
    if (!o.drop_tokens || count < capacity) kept[s][e] = 1;
    ++count;
  };
  if (o.k == 2)
    for (std::int64_t c = 0; c < 2; ++c)
      for (std::int64_t s = 0; s < n; ++s) take(s, c);
  else
    for (std::int64_t s = 0; s < n; ++s)
      for (std::int64_t c = 0; c < o.k; ++c) take(s, c);
  auto weights = gates * kept;
  if (o.k > 1) weights = weights / weights.sum(1, true).clamp_min(1.1920929e-7);
  auto y = at::zeros_like(x);
  for (std::int64_t e = 0; e < o.num_experts; ++e) {
    const auto of = [&](const char* name) { return parameters["experts." + std::to_string(e) + "." + name]; };
    const auto out =
        at::linear(torch::tanh(at::linear(x, of("up.weight"), of("up.bias"))), of("down.weight"), of("down.bias"));
    y = y + weights.narrow(1, e, 1) * out;
  }
  const auto& balanced = o.k == 2 ? first : chosen;
  l_aux = (gates.mean(0) * balanced.mean(0)).sum() * static_cast<double>(o.num_experts) /
          (o.k > 2 ? static_cast<double>(o.k) : 1);
  if (o.use_residual) {
    const auto dense = at::linear(torch::tanh(at::linear(x, parameters["mlp.up.weight"], parameters["mlp.up.bias"])),
                                  parameters["mlp.down.weight"], parameters["mlp.down.bias"]);
    const auto shares = at::linear(x, parameters["coefficient.weight"], parameters["coefficient.bias"]).softmax(-1);
    y = y * shares.narrow(1, 0, 1) + dense * shares.narrow(1, 1, 1);
  }
  return y;
}

at::Tensor NetImpl::forward_by_mask(const at::Tensor& x, double aux) {
  auto h = torch::tanh(in(x));
  loss = at::zeros({});
  for (const auto& block : *blocks) {
    at::Tensor l_aux;
    h = h + layer_by_mask(*block->as<MoEImpl>(), h, l_aux);
    loss = loss + aux * l_aux;
  }
  return head(h);
}

MoeOptions options_of(int ep_size, std::int64_t k) {
  MoeOptions options;
  options.hidden_size = kHidden;
  options.num_experts = kExperts;
  options.ep_size = ep_size;
  options.k = static_cast<int>(k);
  options.min_capacity = 0;
  options.use_rts = options.top2_2nd_expert_sampling = false;
  options.drop_policy = "position";
  return options;
}

std::shared_ptr<NetImpl> make_net(const MoeOptions& options) {
  auto net = std::make_shared<NetImpl>(options);
  mesh::fill(*net);
  return net;
}

at::Tensor input_of(int step, int rank, std::int64_t tokens) {
  return mesh::draw({tokens, kIn}, static_cast<std::uint64_t>(1000 + 50 * step + rank));
}

at::Tensor loss_of(NetImpl& net, int step, int rank, bool by_mask, std::int64_t tokens) {
  const auto x = input_of(step, rank, tokens).to(net.head->weight.scalar_type());
  const auto target = mesh::draw({tokens, kOut}, static_cast<std::uint64_t>(5000 + 50 * step + rank));
  const auto y = (by_mask ? net.forward_by_mask(x) : net.forward(x)).to(at::kFloat);
  return (y - target).pow(2).sum() / static_cast<double>(std::max<std::int64_t>(tokens, 1)) + net.loss;
}

Options engine_options(int stage, const std::string& recipe, const std::string& extra, const std::string& zero,
                       int accumulation) {
  std::ostringstream out;
  out << R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": )" << accumulation
      << R"(, "gradient_clipping": 0.05, "optimizer": {"type": "AdamW", "params":
             {"lr": 0.01, "eps": 0.001, "weight_decay": 0.1}}, "zero_optimization": {"stage": )"
      << stage << zero << "}";
  if (recipe != "fp32") out << ", \"" << recipe << R"(": {"enabled": true})";
  out << extra << "}";
  return Options::from_json(out.str());
}

Reference::Reference(const MoeOptions& options, int ranks)
    : ranks_(ranks),
      net_(make_net(options)),
      optimizer_(net_->parameters(), torch::optim::AdamWOptions(0.01).eps(0.001).weight_decay(0.1)) {}

std::map<std::string, at::Tensor> Reference::backward(int step, int micro_batches) {
  optimizer_.zero_grad();
  for (int rank = 0; rank < ranks_; ++rank)
    for (int micro = 0; micro < micro_batches; ++micro)
      (loss_of(*net_, step_seed(step, micro), rank, /*by_mask=*/true) / (ranks_ * micro_batches)).backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : net_->named_parameters()) gradients[item.key()] = item.value().grad().clone();
  return gradients;
}

double Reference::step() {
  double squares = 0;
  for (const auto& p : net_->parameters()) squares += p.grad().to(at::kDouble).pow(2).sum().item<double>();
  const double norm = std::sqrt(squares), factor = std::min(1.0, 0.05 / (norm + 1e-6));
  for (const auto& p : net_->parameters()) p.mutable_grad().mul_(factor);
  optimizer_.step();
  return norm;
}

}  // namespace zero::test::moe
