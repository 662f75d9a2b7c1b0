// See pass.h.
#include "plan/pass.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::planning {
namespace {

// Of "blocks.12.qkv.weight": 12; negative: of no block.
std::int64_t block_of(const std::string& name) {
  constexpr std::string_view kPrefix = "blocks.";
  std::int64_t block = -1;
  if (name.compare(0, kPrefix.size(), kPrefix) == 0)
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), block);
  return block;
}

}  // namespace

Pass gpt_pass(const std::vector<Parameter>& parameters, std::int64_t segments) {
  std::map<std::string, std::size_t> index;
  std::int64_t layers = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    index[parameters[i].name] = i;
    layers = std::max(layers, block_of(parameters[i].name) + 1);
  }
  using Operator = std::vector<std::size_t>;
  const auto of = [&](const std::string& module, std::initializer_list<const char*> names) {
    Operator reads;
    for (const char* name : names) {
      const auto it = index.find(base::join(module, ".", name));
      if (it == index.end())
        throw ConfigError(base::join("[plan] got a model without ", module, ".", name, ", expected a GPT"));
      reads.push_back(it->second);
    }
    return reads;
  };
  constexpr const char* kModules[] = {"norm1", "qkv", "projection", "norm2", "up", "down"};
  // Norms read their bias again in backward, linear layers do not.
  const auto forward = [&](std::int64_t layer, std::vector<Operator>& out) {
    for (const auto* module : kModules)
      out.push_back(of(base::join("blocks.", layer, ".", module), {"weight", "bias"}));
  };
  const auto backward = [&](std::int64_t layer, std::vector<Operator>& out) {
    for (auto module = std::rbegin(kModules); module != std::rend(kModules); ++module) {
      const auto path = base::join("blocks.", layer, ".", *module);
      out.push_back(std::string_view(*module).starts_with("norm") ? of(path, {"weight", "bias"})
                                                                  : of(path, {"weight"}));
    }
  };
  const auto head = of(index.count("output.weight") != 0 ? "output" : "token", {"weight"});
  const auto norm = of("norm", {"weight", "bias"});
  Pass pass{{of("token", {"weight"}), of("position", {"weight"})}, {head, norm}};
  for (std::int64_t layer = 0; layer < layers; ++layer) forward(layer, pass.forward);
  pass.forward.push_back(norm);
  pass.forward.push_back(head);
  const auto parts = segments == 0 ? layers : std::min(segments, layers);
  for (auto part = parts; part-- > 0;) {
    const auto begin = part * layers / parts, end = (part + 1) * layers / parts;
    if (segments > 0)
      for (auto layer = begin; layer < end; ++layer) forward(layer, pass.backward);
    for (auto layer = end; layer-- > begin;) backward(layer, pass.backward);
  }
  return pass;
}

Pass pass_by_units(const std::vector<Parameter>& parameters) {
  Pass pass;
  std::vector<std::size_t> root;
  std::string unit;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].unit.empty()) {
      root.push_back(i);
      continue;
    }
    if (pass.forward.empty() || parameters[i].unit != unit) pass.forward.emplace_back();
    unit = parameters[i].unit;
    pass.forward.back().push_back(i);
  }
  pass.backward.assign(pass.forward.rbegin(), pass.forward.rend());
  for (auto* order : {&pass.forward, &pass.backward}) {
    order->insert(order->begin(), root);
    order->push_back(root);
  }
  return pass;
}

void run_forward(const Pass& pass, PassSink& sink) {
  for (const auto& parameters : pass.forward) sink.use(std::span(parameters));
}

void run_backward(const Pass& pass, const std::vector<Unit>& units, int width, PassSink& sink) {
  const auto last = pass.backward.empty() ? 0 : pass.backward.size() - 1;
  std::vector<std::size_t> ready(units.size(), last);  // operator after which a unit's gradients are there
  std::map<std::size_t, std::size_t> unit_of;
  for (std::size_t u = 0; u < units.size(); ++u)
    for (const auto i : units[u].parameters) unit_of[i] = u;
  std::vector<char> seen(units.size());
  for (auto k = pass.backward.size(); k-- > 0;)
    for (const auto i : pass.backward[k])
      if (const auto u = unit_of.at(i); !units[u].root && !std::exchange(seen[u], 1)) ready[u] = k;
  const auto order = step::reduce_order(units);
  std::size_t next = 0;
  sink.begin_backward();
  for (std::size_t k = 0; k < pass.backward.size(); ++k) {
    sink.use(std::span(pass.backward[k]));
    for (; next < order.size() && ready[order[next]] <= k; ++next) {
      const auto& unit = units[order[next]];
      for (std::size_t i = 0; i < unit.parameters.size(); ++i)
        sink.gradient(unit.parameters[i], sink.make(unit.layout.parameter_numel(i) * width));
    }
  }
  sink.end_backward();
}

}  // namespace zero::planning
