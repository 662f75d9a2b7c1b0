// See live_steps.h.
#include "tools/explain/live_steps.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>
#include <zero/library.h>

#include <fstream>
#include <mutex>

#include "config/settings.h"
#include "models/gpt.h"
#include "tools/support/gpt_experts.h"
#include "tools/support/gpt_json.h"
#include "tools/support/gpt_mesh.h"
#include "tools/support/gpt_segments.h"
#include "tools/support/mesh_traffic.h"

namespace zero::cli {
namespace {

using planning::Phase;
using planning::Sent;

// By operation of ZeRO, and of the exchanges of activations all of a dimension.
std::map<std::string, Sent> since(const CommStats& before, const CommStats& now, const report::Degrees& degrees,
                                  bool building) {
  std::map<std::string, Sent> rows;
  for (const auto& [operation, row] : counted_between(before, now, degrees)) {
    const bool activations =
        operation.starts_with("tp.") || operation.starts_with("sp.") || operation.starts_with("ep.");
    if (activations && building) continue;  // states of generators
    auto& sum = rows[activations ? operation.substr(0, 2) : operation];
    sum.calls += row.calls;
    sum.bytes += row.bytes_sent;
  }
  return rows;
}

// Ranks that are threads share the process's generator of initial values.
models::Gpt make_model(const Options& options, const models::GptConfig& shape) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(options.settings().seed);
  auto model = zero::build([&] { return models::Gpt(shape); });
  place_segments(model, segments_of(options, shape));
  return model;
}

void note_resting(const MemoryReport& memory, LiveRecord& record) {
  using Tier = MemoryReport::Tier;
  using Purpose = MemoryReport::Purpose;
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File})
    for (const auto purpose :
         {Purpose::Parameters, Purpose::Gradients, Purpose::MasterParameters, Purpose::OptimizerStates})
      if (const auto bytes = memory.current(tier, purpose); bytes > 0)
        record.resting[{tier, purpose}] = static_cast<std::int64_t>(bytes);
}

}  // namespace

LiveRun live_steps(const LiveTask& task, const std::shared_ptr<Communicator>& comm) {
  auto shape = task.gpt;
  const auto options = with_heads_whole(task.options(), shape);
  add_experts(shape, options.settings().model.experts);
  LiveRun run;
  LiveRecord mine;
  run.transport = comm->transport();
  const auto mesh = Mesh::of(options, comm);
  const auto degrees = degrees_of(*mesh, options.settings().model.experts.degree());
  auto before = comm->stats();
  const auto note = [&](int step, int micro, Phase phase) {
    const auto now = comm->stats();
    if (step < task.steps) mine.sent[{step, micro, phase}] = since(before, now, degrees, phase == Phase::Build);
    before = now;
  };
  auto model = make_model(options, shape);
  Engine engine(model, options, mesh);
  GptShare share(model, *mesh, options);
  note(0, 0, Phase::Build);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(mesh->rank("dp")) + 1);
  const auto file = task.folder + "/trace.json";
  engine.start_trace(file);
  before = comm->stats();
  for (int step = 0; step < task.steps + 2; ++step) {
    if (step == task.steps - 1) {  // the order of use is known and all buffers are allocated
      engine.reset_peak_memory();  // frees idle buffers
      note_resting(engine.memory(), mine);
    }
    StepResult result;
    for (int micro = 0; micro < engine.accumulation_steps(); ++micro) {
      const auto tokens = at::randint(0, shape.vocabulary, {1, shape.sequence + 1}, generator, at::kLong);
      auto loss = share.loss_of(tokens);
      note(step, micro, Phase::Forward);
      share.backward(engine, loss, 1);
      note(step, micro, Phase::Backward);
      loss = at::Tensor();
      if (options.settings().managed_gradient_accumulation || micro + 1 == engine.accumulation_steps())
        result = engine.step();
    }
    note(step, 0, Phase::Step);
    if (step < task.steps) run.overflowed.push_back(result.overflow);
  }
  engine.stop_trace();
  LiveRun alone;
  alone.ranks.push_back(mine);
  const auto all = comm->all_gather_bytes(alone.json().dump());
  if (comm->rank() != 0) return run;
  std::ifstream in(file);
  const auto trace = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (trace.is_discarded()) throw InternalError("[zero explain] got no trace of all ranks in " + file);
  const auto& zero = options.settings().zero;
  TracedSteps traced{.count = task.steps};
  // As in the engine: the update is delayed if states are offloaded.
  if (zero.delayed_update.enabled && zero.stage >= 1 && zero.offload_optimizer.device != config::OffloadDevice::None &&
      zero.offload_optimizer.ratio > 0)
    traced.first_late = static_cast<int>(std::min<std::int64_t>(zero.delayed_update.start_step, task.steps + 1));
  for (int rank = 0; rank < comm->size(); ++rank) {
    auto record = LiveRun::from(Json::parse(all[static_cast<std::size_t>(rank)])).ranks.at(0);
    record.events = events_of_trace(trace, rank, traced);
    run.ranks.push_back(std::move(record));
  }
  return run;
}

Json LiveTask::json() const {
  Json set = Json::array();
  for (const auto& s : settings) set.push_back({s.key, s.value, s.source, s.only_auto});
  return {{"config", config}, {"text", text},           {"settings", set}, {"gpt", gpt},
          {"folder", folder}, {"transport", transport}, {"world", world},  {"steps", steps}};
}

LiveTask LiveTask::from(const Json& json) {
  LiveTask task;
  json.at("config").get_to(task.config);
  json.at("text").get_to(task.text);
  for (const auto& s : json.at("settings"))
    task.settings.push_back(
        {s.at(0).get<std::string>(), s.at(1).get<std::string>(), s.at(2).get<std::string>(), s.at(3).get<bool>()});
  json.at("gpt").get_to(task.gpt);
  json.at("folder").get_to(task.folder);
  json.at("transport").get_to(task.transport);
  json.at("world").get_to(task.world);
  json.at("steps").get_to(task.steps);
  return task;
}

}  // namespace zero::cli
