// The facts of a run, as an Engine would find them, and the walk through its steps. See schedule.h.
#include "plan/schedule.h"

#include <algorithm>
#include <charconv>

#include <zero/errors.h>

#include "base/check.h"
#include "plan/schedule_run.h"

namespace zero::planning {
namespace {

int width_of(config::Precision precision) { return precision == config::Precision::Fp32 ? 4 : 2; }

int slots_of(const config::OptimizerSettings& optimizer) {
  using config::OptimizerType;
  switch (optimizer.type) {
    case OptimizerType::None:
    case OptimizerType::Adam:
    case OptimizerType::AdamW: return 2;
    case OptimizerType::Sgd: return optimizer.momentum != 0 ? 1 : 0;
    case OptimizerType::Adagrad:
    case OptimizerType::Lion: break;
  }
  return 1;
}

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
  const auto& around = input.around;
  const auto& zero = settings.zero;
  Facts facts{.settings = settings, .around = around, .accumulation = accumulation};
  const auto parameter = settings.precision,
             gradient = settings.grad_accum_dtype.value_or(accumulation > 1 ? config::Precision::Fp32 : parameter),
             wire = settings.communication_dtype.value_or(parameter);
  facts.parameter_width = width_of(parameter);
  facts.gradient_width = width_of(gradient);
  facts.wire_width = width_of(wire);
  facts.num_slots = slots_of(settings.optimizer);
  const bool one_dtype = gradient == parameter && wire == parameter;
  const int world = around.world;
  // Between processes of one host; ranks as threads copy, as GPUs do.
  facts.in_place = !around.gpu && world > 1 && around.transport == "shm";
  facts.reads_gradients = facts.in_place && (zero.stage >= 2 || one_dtype);
  const bool mean = settings.reduce_op == config::ReduceOp::Mean;
  const double ahead = settings.prescale_gradients ? world : settings.predivide_factor;
  const bool divides = mean && static_cast<float>(1.0 / ahead) != 1.0f;
  facts.direct_gradients = one_dtype && (world == 1 ? !divides : facts.reads_gradients && zero.stage <= 1);
  const bool over_network = zero.stage == 3 && world > 1 && !around.gpu &&
                            (around.transport == "gloo" || around.transport == "shm+gloo");
  if (over_network) {
    facts.trainable_bits = zero.quantized_weights ? 8 : 0;
    facts.frozen_bits = zero.quantized_weights || zero.quantized_nontrainable_weights ? 8 : 0;
    facts.gradient_bits = zero.quantized_gradients ? 4 : 0;
  }
  if (zero.stage == 3 && world > 1 && !facts.in_place && zero.hpz_ranks > 1) facts.neighbours = zero.hpz_ranks;
  facts.overlap = zero.overlap_comm.value_or(zero.stage == 3 || facts.reads_gradients);

  Schedule result;
  result.stage = zero.stage;
  result.world = world;
  result.accumulation = accumulation;
  result.parameter_width = facts.parameter_width;
  result.gradient_width = facts.gradient_width;
  result.wire_width = facts.wire_width;
  result.num_slots = facts.num_slots;
  result.units = cut_into_units(input.parameters, settings, world, unit_alignment(facts.parameter_width, around.gpu));
  for (const auto& unit : result.units) {
    result.padded_numel += unit.padded_numel();
    if (unit.trainable) result.padded_trainable_numel += unit.padded_numel();
    if (unit.persistent) result.persistent_numel += unit.padded_numel();
  }
  facts.movable = input.movable;
  Run run(facts, result.units, input.pass);
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
