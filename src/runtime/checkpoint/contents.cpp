// What a checkpoint holds of an engine: its tensors, their dtypes and slices. See checkpoint.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/nn/module.h>
#include <torch/version.h>
#include <zero/version.h>

#include <algorithm>
#include <mutex>

#include "base/check.h"
#include "base/system.h"
#include "checkpoint/checkpoint.h"
#include "engine/model_buffers.h"
#include "formats/hash.h"

namespace zero::checkpoint {
// The dtypes are those of engine::can_be_saved().
std::string file_dtype(at::ScalarType type, const std::string& name) {
  switch (type) {
    case at::kBool:
      return "BOOL";
    case at::kByte:
      return "U8";
    case at::kChar:
      return "I8";
    case at::kShort:
      return "I16";
    case at::kInt:
      return "I32";
    case at::kLong:
      return "I64";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kFloat:
      return "F32";
    case at::kDouble:
      return "F64";
    case at::kComplexFloat:
      return "C64";
    default:
      break;
  }
  throw ConfigError(base::join("[save_checkpoint] ", name, " has the type ", at::toString(type),
                               ", which checkpoints cannot hold. Hint: use a float, integer or bool tensor."));
}

std::vector<std::vector<formats::Box>> slices_of(const engine::ModelParameter& member) {
  std::vector<std::vector<formats::Box>> slices;
  if (!member.is_cut()) return slices;
  const auto& cut = member.cut.cut;
  for (int part = 0; part < cut.parts; ++part) {
    slices.emplace_back();
    for (const auto& range : cut.ranges(part)) {
      formats::Box box{std::vector<std::int64_t>(cut.sizes.size(), 0), cut.sizes};
      box.start[static_cast<std::size_t>(cut.dim)] = range.begin;
      box.size[static_cast<std::size_t>(cut.dim)] = range.numel();
      slices.back().push_back(std::move(box));
    }
  }
  return slices;
}

namespace {

// Other ranks have other experts at the same place of the group.
std::vector<std::string> names_of(const engine::ModelParameter& member) {
  if (!member.expert) return {member.name};
  std::vector<std::string> names;
  for (int place = 0; place < member.expert->ep_size; ++place) names.push_back(member.expert->at(place, member.name));
  return names;
}

}  // namespace

std::vector<formats::Tensor> tensors_of(engine::State& state) {
  std::vector<formats::Tensor> result;
  for (const auto& group : state.parts.binding().groups()) {
    const bool trainable = group->facts.trainable;
    for (const auto& member : group->members) {
      const auto add = [&](const std::string& kind, at::ScalarType type) {
        for (const auto& name : names_of(member))
          result.push_back({kind, name, file_dtype(type, name), member.sizes, trainable, {}, slices_of(member)});
      };
      if (!trainable) {
        add(kFrozen, engine::scalar_type(group->facts.precision.param));
        continue;
      }
      add("master", engine::dtype_of_state(group->facts, engine::kMaster));
      for (int k = 0; k < group->facts.num_slots(); ++k)
        add("opt." + group->facts.states[static_cast<std::size_t>(k)], engine::dtype_of_state(group->facts, 1 + k));
    }
  }
  const auto unsaved = engine::unsaved_buffers(*state.job.model);
  for (const auto& item : state.job.model->named_buffers()) {
    if (!item.value().defined() || unsaved.contains(item.key())) continue;
    engine::require_dense(item.value(), item.key());
    result.push_back({kBuffer,
                      item.key(),
                      file_dtype(item.value().scalar_type(), item.key()),
                      item.value().sizes().vec(),
                      false,
                      {},
                      {}});
  }
  return result;
}

std::map<std::string, std::string> dtypes_in_forward(engine::State& state) {
  std::map<std::string, std::string> dtypes;
  for (const auto& group : state.parts.binding().groups()) {
    const auto dtype = file_dtype(engine::scalar_type(group->facts.precision.param), group->facts.name);
    for (const auto& member : group->members)
      for (const auto& name : names_of(member)) dtypes[name] = dtype;
  }
  return dtypes;
}

engine::StatePiece generator_piece(engine::State& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  if (state.parts.products) state.parts.products->end_forward();  // a region has another generator
  at::Tensor values;
  {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    values = generator.get_state();
  }
  return {kPrivate,
          kGenerator,
          {values.numel()},
          0,
          values.numel(),
          at::kByte,
          false,
          [values](std::int64_t at, std::int64_t numel) { return values.narrow(0, at, numel); },
          nullptr};
}

Slices cut_slices(engine::State& state) {
  Slices result;
  for (auto& tensor : tensors_of(state))
    if (!tensor.slices.empty()) result[{tensor.kind, tensor.name}] = std::move(tensor.slices);
  return result;
}

std::string hashes_of_buffers(const std::vector<engine::StatePiece>& pieces) {
  std::string hashes;
  for (const auto& piece : pieces) {
    if (piece.kind != kBuffer) continue;
    const auto data = piece.read(0, piece.numel);
    hashes += formats::hash_of(data.const_data_ptr(), data.nbytes());
  }
  return hashes;
}

bool is_shared(const std::vector<std::string>& hashes, std::size_t buffer) {
  constexpr std::size_t kDigits = 32;  // of one hash
  const auto at = kDigits * buffer;
  return std::all_of(hashes.begin(), hashes.end(),
                     [&](const std::string& rank) { return rank.compare(at, kDigits, hashes[0], at, kDigits) == 0; });
}

formats::Manifest manifest_of(engine::State& state) {
  const auto& settings = state.job.settings;
  const auto& plan = state.parts.plan;
  const auto& mesh = *state.parts.ranks.mesh;
  const auto counters = state.exports.counters();
  formats::Manifest m;
  m.libzero_version = ZERO_VERSION;
  m.libtorch_version = TORCH_VERSION;
  m.created = base::utc_now();
  m.global_steps = counters.global_steps;
  m.applied_steps = counters.applied_steps;
  m.skipped_steps = counters.skipped_steps;
  m.global_samples = std::min(counters.global_samples, formats::kMostCount);
  m.micro_batch = plan.batch.micro;
  m.accumulation = plan.batch.accumulation;
  m.global_batch = plan.batch.train;
  m.optimizer = state.parts.optimizer->name();
  m.slots = state.parts.optimizer->states();
  m.loss_scale = counters.scaler.scale;
  m.hysteresis = counters.scaler.hysteresis;
  m.good = counters.scaler.good;
  m.floor = counters.scaler.floor;
  m.world = state.job.comm->size();
  m.sequence = mesh.size("sp");
  m.tensor = mesh.size("tp");
  m.stage = settings.zero.stage;
  m.parameter_dtype = file_dtype(engine::scalar_type(plan.run.precision.param), "parameters");
  m.gradient_dtype = file_dtype(engine::scalar_type(plan.run.precision.grad), "gradients");
  m.wire_dtype = file_dtype(engine::scalar_type(plan.run.precision.reduce), "gradients");
  m.transport = state.job.comm->transport();
  m.torch_threads = at::get_num_threads();
  m.cpu_capability = at::get_cpu_capability();
  m.config = state.job.options.effective();
  m.config_hash = state.job.options.digest();
  m.user_state = state.user_state;
  m.set_rates = counters.set_rates;
  m.missed_steps = counters.missed_steps;
  m.aliases = state.exports.aliases();
  m.tensors = tensors_of(state);
  return m;
}

}  // namespace zero::checkpoint
