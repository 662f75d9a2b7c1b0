// The facts of a run, as an Engine would find them, and the walk through its steps. See schedule.h.
#include "plan/schedule.h"

#include <algorithm>
#include <charconv>

#include <zero/errors.h>

#include "base/check.h"
#include "plan/schedule_run.h"

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

const char* name(Phase phase) {
  constexpr const char* kNames[] = {"build", "forward", "backward", "step", "beside"};
  return kNames[static_cast<int>(phase)];
}

const char* name(What what) {
  constexpr const char* kNames[] = {"parameters", "gradients", "optimizer states"};
  return kNames[static_cast<int>(what)];
}

const char* name(How how) {
  constexpr const char* kNames[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast", "mapped in place",
                                    "file read",  "file write",     "copy",       "update"};
  return kNames[static_cast<int>(how)];
}

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
      if (it == index.end()) throw ConfigError(base::join("[plan] got a model without ", module, ".", name, ", expected a GPT"));
      reads.push_back(it->second);
    }
    return reads;
  };
  constexpr const char* kModules[] = {"norm1", "qkv", "projection", "norm2", "up", "down"};
  // Norms read their bias again in backward, linear layers do not.
  const auto forward = [&](std::int64_t layer, std::vector<Operator>& out) {
    for (const auto* module : kModules) out.push_back(of(base::join("blocks.", layer, ".", module), {"weight", "bias"}));
  };
  const auto backward = [&](std::int64_t layer, std::vector<Operator>& out) {
    for (auto module = std::rbegin(kModules); module != std::rend(kModules); ++module) {
      const auto path = base::join("blocks.", layer, ".", *module);
      out.push_back(std::string_view(*module).starts_with("norm") ? of(path, {"weight", "bias"}) : of(path, {"weight"}));
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

Schedule schedule(const ScheduleInput& input, const config::Settings& settings, std::int64_t accumulation,
                  std::int64_t first_step, int num_steps, const std::vector<bool>& overflowed) {
  const auto rules = rank_rules(settings, input.around, accumulation, input.movable);
  Schedule result;
  result.stage = settings.zero.stage;
  result.world = input.around.world;
  result.accumulation = accumulation;
  result.parameter_width = rules.parameter_width;
  result.gradient_width = rules.gradient_width;
  result.wire_width = rules.wire_width;
  result.num_slots = rules.num_slots;
  result.units = cut_into_units(input.parameters, settings, input.around.world,
                                rules.parameter_width, input.around.gpu);
  for (const auto& unit : result.units) {
    result.padded_numel += unit.padded_numel();
    if (unit.trainable) result.padded_trainable_numel += unit.padded_numel();
    if (unit.persistent) result.persistent_numel += unit.padded_numel();
  }
  Run run(rules, result.units, input.pass);
  run.build();
  for (int k = 0; k < num_steps; ++k)
    run.step(first_step + k, static_cast<std::size_t>(k) < overflowed.size() && overflowed[static_cast<std::size_t>(k)]);
  result.events = run.take_events();
  result.holdings = run.holdings();
  return result;
}

std::map<std::string, Sent> sent_by_operation(const std::vector<Event>& events) {
  std::map<std::string, Sent> all;
  const auto count = [&](const char* operation, std::int64_t bytes) {
    auto& row = all[operation];
    ++row.calls;
    row.bytes += static_cast<std::uint64_t>(bytes);
  };
  for (const auto& event : events) {
    if (event.neighbours) continue;
    switch (event.how) {
      case How::AllGather:
      case How::InPlace: count("all_gather", event.sent); break;
      case How::ReduceScatter: count(event.quantized ? "reduce_scatter_quantized" : "reduce_scatter", event.sent); break;
      case How::AllReduce:  // as the sum of parts and their gathering
        count("reduce_scatter", event.sent / 2);
        count("all_gather", event.sent / 2);
        break;
      case How::Broadcast: count("broadcast", event.sent); break;
      case How::Read:
      case How::Write:
      case How::Copy:
      case How::Update: break;
    }
  }
  return all;
}

}  // namespace zero::planning
