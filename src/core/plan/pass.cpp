// See pass.h.
#include "plan/pass.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "plan/model_pass.h"

namespace zero::planning {
namespace {

// Units one after the other; in backward, a segment's layers run again before it.
Pass pass_by_units(const std::vector<Parameter>& parameters, std::int64_t segments) {
  Pass pass;
  std::vector<std::size_t> root;
  std::vector<std::size_t> first_of_layer;  // in pass.forward
  std::string unit, layer;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    if (parameter.unit.empty()) {
      root.push_back(i);
      continue;
    }
    const auto& its_layer = layer_of(parameter);
    if (pass.forward.empty() || its_layer != layer) first_of_layer.push_back(pass.forward.size());
    if (pass.forward.empty() || parameter.unit != unit) pass.forward.emplace_back();
    unit = parameter.unit, layer = its_layer;
    pass.forward.back().push_back(i);
  }
  const auto layers = static_cast<std::int64_t>(first_of_layer.size());
  const auto parts = std::max<std::int64_t>(std::min(segments, layers), 1);
  const auto begin_of = [&](std::int64_t part) {
    const auto first = static_cast<std::size_t>(part * layers / parts);
    return pass.forward.begin() +
           static_cast<std::ptrdiff_t>(part == parts ? pass.forward.size() : first_of_layer[first]);
  };
  for (auto part = layers == 0 ? 0 : parts; part-- > 0;) {
    const auto begin = begin_of(part), end = begin_of(part + 1);
    if (segments > 0) pass.backward.insert(pass.backward.end(), begin, end);
    pass.backward.insert(pass.backward.end(), std::make_reverse_iterator(end), std::make_reverse_iterator(begin));
  }
  for (auto* order : {&pass.forward, &pass.backward}) {
    order->insert(order->begin(), root);
    order->push_back(root);
  }
  return pass;
}

// Records which parameters each operator reads.
class UseRecorder final : public PassSink {
 public:
  Tensor make(std::int64_t) override { return {}; }
  void put_away(Tier, std::int64_t) override {}
  void bring_back(Tier, std::int64_t) override {}
  using PassSink::use;
  void use(std::span<const std::size_t> parameters) override {
    (backward_ ? pass.backward : pass.forward).emplace_back(parameters.begin(), parameters.end());
  }
  void begin_backward() override { backward_ = true; }
  void gradient(std::size_t, Tensor) override {}
  void end_backward() override {}
  bool on_gpu() const override { return false; }

  Pass pass;

 private:
  bool backward_ = false;
};

}  // namespace

Pass pass_of(const PlanModel& model, const std::vector<Parameter>& parameters, std::int64_t segments) {
  if (!model.pass) return pass_by_units(parameters, segments);
  UseRecorder recorder;
  run_micro_batch(model, parameters, {.segments = segments}, recorder);
  return std::move(recorder.pass);
}

void run_forward(const Pass& pass, PassSink& sink) {
  for (const auto& parameters : pass.forward) sink.use(std::span(parameters));
}

void run_backward(const Pass& pass, const std::vector<Unit>& units, int width, PassSink& sink) {
  const auto last = pass.backward.empty() ? 0 : pass.backward.size() - 1;
  std::vector<std::size_t> ready(units.size(), last);  // the operator after which a unit's gradients are complete
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
