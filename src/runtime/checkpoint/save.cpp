#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/nn/module.h>
#include <torch/version.h>
#include <zero/version.h>

#include <algorithm>
#include <mutex>
#include <sstream>

#include "base/check.h"
#include "base/log.h"
#include "base/system.h"
#include "checkpoint/checkpoint.h"
#include "engine/rank_agreement.h"
#include "formats/hash.h"
#include "formats/rank_file.h"
#include "formats/root_folder.h"
#include "observe/status_page.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kWhere = "save_checkpoint";

// Describes a rank's file to the other ranks: one line per field, then the tensors.
std::string message_of(const formats::RankFile& file, std::size_t shared) {
  return base::join(file.file.name, "\n", file.file.bytes, "\n", file.file.hash, "\n", shared, "\n",
                    formats::tensors_text(file.tensors));
}

struct Report {
  formats::Manifest::FileEntry file;
  std::vector<formats::Tensor> shared, own;
};

Report report_in(const std::string& message) {
  std::istringstream in(message);
  Report report;
  std::size_t shared = 0;
  in >> report.file.name >> report.file.bytes >> report.file.hash >> shared;
  in.get();
  const auto at = in.tellg();
  ZERO_CHECK(in && at >= 0, "a rank's report");
  auto tensors =
      formats::parse_tensors(std::string_view(message).substr(static_cast<std::size_t>(at)), "a rank's report");
  ZERO_CHECK(shared <= tensors.size(), "a rank's report");
  for (std::size_t i = 0; i < tensors.size(); ++i)
    (i < shared ? report.shared : report.own).push_back(std::move(tensors[i]));
  return report;
}

// The save that a rank requests: tag, step and a hash of each buffer's contents.
struct Intent {
  std::string tag, step, buffers;
};

Intent intent_in(const std::string& text) {
  const auto first = text.find('\n'), second = text.find('\n', first + 1);
  ZERO_CHECK(first != std::string::npos && second != std::string::npos, "a rank's intent");
  return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
}

std::string contents_hash(const engine::StatePiece& piece) {
  const auto data = piece.read(0, piece.numel);
  return formats::hash_of(data.const_data_ptr(), data.nbytes());
}

// The piece must outlive the source.
formats::Source source_of(const engine::StatePiece& piece) {
  formats::Source source;
  source.kind = piece.kind;
  source.name = piece.name;
  source.dtype = file_dtype(piece.dtype, piece.name);
  source.shape = piece.shape;
  source.requires_grad = piece.requires_grad;
  source.start = piece.begin;
  source.numel = piece.numel;
  source.read = [&piece](std::int64_t at, std::int64_t numel) {
    const auto data = std::make_shared<at::Tensor>(piece.read(at, numel));
    return std::shared_ptr<const void>(data, data->const_data_ptr());
  };
  source.must_be_finite = piece.kind == "master" || piece.kind.starts_with("opt.");
  return source;
}

formats::Manifest describe(engine::State& state) {
  const auto& settings = state.parts.settings;
  const auto counters = state.exports->counters();
  formats::Manifest m;
  m.libzero_version = ZERO_VERSION;
  m.libtorch_version = TORCH_VERSION;
  m.created = base::utc_now();
  m.global_steps = counters.global_steps;
  m.applied_steps = counters.applied_steps;
  m.skipped_steps = counters.skipped_steps;
  // Informational only.
  if (__builtin_mul_overflow(counters.global_steps,
                             state.parts.accumulation * state.parts.micro_batch * state.parts.mesh->size("dp"),
                             &m.global_samples))
    m.global_samples = formats::kMostCount;
  m.global_samples = std::min(m.global_samples, formats::kMostCount);
  m.optimizer = optimizer_name(settings.optimizer.type);
  for (int k = 0; k < state.parts.optimizer->num_slots(); ++k) m.slots.push_back(state.parts.optimizer->slot_name(k));
  m.loss_scale = counters.scaler.scale;
  m.hysteresis = counters.scaler.hysteresis;
  m.good = counters.scaler.good;
  m.floor = counters.scaler.floor;
  m.world = state.parts.comm->size();
  m.sequence = state.parts.mesh->size("sp");
  m.tensor = state.parts.mesh->size("tp");
  m.stage = settings.zero.stage;
  m.parameter_dtype = file_dtype(engine::scalar_type(state.parts.run.precision.param), "parameters");
  m.gradient_dtype = file_dtype(engine::scalar_type(state.parts.run.precision.grad), "gradients");
  m.wire_dtype = file_dtype(engine::scalar_type(state.parts.run.precision.reduce), "gradients");
  m.transport = state.parts.comm->transport();
  m.torch_threads = at::get_num_threads();
  m.cpu_capability = at::get_cpu_capability();
  m.config = state.parts.options.effective();
  m.config_hash = state.parts.options.digest();
  m.user_state = state.user_state;
  m.set_rates = counters.set_rates;
  m.missed_steps = counters.missed_steps;
  m.aliases = state.exports->aliases();
  return m;
}

struct Phase {
  Phase() { observe::status_page().set_phase(observe::StatusPhase::Save); }
  ~Phase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

}  // namespace

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

std::string optimizer_name(config::OptimizerType type) {
  switch (type) {
    case config::OptimizerType::Adam:
      return "Adam";
    case config::OptimizerType::AdamW:
      return "AdamW";
    case config::OptimizerType::Sgd:
      return "SGD";
    case config::OptimizerType::Adagrad:
      return "Adagrad";
    case config::OptimizerType::Lion:
      return "Lion";
    case config::OptimizerType::None:
      break;
  }
  return "none";
}

// What each tensor-parallel rank holds of a parameter.
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

std::vector<formats::Tensor> tensors_of(engine::State& state) {
  std::vector<formats::Tensor> result;
  for (const auto& group : state.parts.binding().groups()) {
    const bool trainable = group->facts.trainable;
    for (const auto& member : group->members) {
      // Other ranks have other experts at the same place of the group.
      const int places = member.expert ? member.expert->ep_size : 1;
      const auto add = [&](const std::string& kind, at::ScalarType type) {
        for (int place = 0; place < places; ++place) {
          const auto name = member.expert ? member.expert->at(place, member.name) : member.name;
          result.push_back({kind, name, file_dtype(type, name), member.sizes, trainable, {}, slices_of(member)});
        }
      };
      if (!trainable) {
        add("param", engine::scalar_type(state.parts.run.precision.param));
        continue;
      }
      add("master", at::kFloat);
      for (int k = 0; k < state.parts.optimizer->num_slots(); ++k)
        add(std::string("opt.") + state.parts.optimizer->slot_name(k), at::kFloat);
    }
  }
  for (const auto& item : state.parts.model->named_buffers())
    if (item.value().defined())
      result.push_back({kBuffer,
                        item.key(),
                        file_dtype(item.value().scalar_type(), item.key()),
                        item.value().sizes().vec(),
                        false,
                        {},
                        {}});
  return result;
}

void save(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& wanted_tag) {
  const Phase phase;
  const at::NoGradGuard no_grad;
  auto& comm = *state.parts.comm;
  state.stepper->flush();
  std::vector<engine::StatePiece> pieces;

  // Step 0: all ranks request the same save, at a valid time.
  (void)engine::agree(comm, kWhere, [&] {
    state.checks.require_boundary(kWhere);
    state.checks.require_no_scope(kWhere, /*reading_too=*/false);
    return "";
  });
  if (state.parts.experts) state.parts.experts->share_buffers();
  const auto intents = engine::agree(comm, kWhere, [&] {
    if (root.empty()) throw ConfigError("[save_checkpoint] got an empty directory name");
    if (!formats::valid_tag(wanted_tag))
      throw ConfigError(
          "[save_checkpoint] got the tag \"" + wanted_tag +
          "\", expected a letter or digit and then up to 127 letters, digits, '.', '_' or '-', and not \"latest\"");
    pieces = state.exports->pieces_to_save();
    std::string text = base::join(wanted_tag, "\n", state.parts.program->steps(), "\n");
    for (const auto& piece : pieces) {
      (void)file_dtype(piece.dtype, piece.name);
      if (piece.kind == kBuffer) text += contents_hash(piece);
    }
    return text;
  });
  std::vector<Intent> ranks;
  for (const auto& text : intents) ranks.push_back(intent_in(text));
  const auto& tag = ranks[0].tag;
  (void)engine::agree(comm, kWhere, [&] {
    const auto& rule = state.parts.settings.checkpoint_tag_validation;
    for (std::size_t r = 1; r < ranks.size(); ++r) {
      const auto difference =
          base::join("[save_checkpoint] rank ", r, " saves the tag \"", ranks[r].tag, "\", rank 0 \"", tag, "\"");
      if (ranks[r].tag != tag && rule == "Fail")
        throw ConfigError(difference + ". Hint: all ranks must pass the same tag (checkpoint.tag_validation).");
      if (ranks[r].tag != tag && rule == "Warn" && comm.rank() == 0)
        base::log(LogLevel::Warning, difference + "; rank 0's is taken");
      if (ranks[r].step != ranks[0].step || ranks[r].buffers.size() != ranks[0].buffers.size())
        throw ConfigError(base::join("[save_checkpoint] rank ", r, " saves after step ", ranks[r].step,
                                     ", rank 0 after ", ranks[0].step,
                                     ". Hint: all ranks must call it at the same place."));
    }
    return "";
  });

  // Tensor-parallel ranks that have drifted apart would be saved as one of them only.
  if (const auto degree = static_cast<std::size_t>(state.parts.tensor_group->size()); degree > 1) {
    const auto sums = engine::agree(comm, kWhere, [&] { return std::to_string(state.exports->replicated_sum()); });
    std::vector<std::uint64_t> totals(degree);
    for (std::size_t r = 0; r < sums.size(); ++r) totals[r % degree] += std::stoull(sums[r]);
    for (std::size_t j = 1; j < degree; ++j)
      if (totals[j] != totals[0])
        throw InternalError(base::join("[save_checkpoint] parameters that are not cut differ between tp 0 and tp ", j,
                                       ". Hint: give all ranks of a tensor-parallel group the same samples, and write "
                                       "parameters only inside gathered_parameters(true)."));
  }

  // Step 1: rank 0 inspects the directory.
  std::optional<formats::Commit> commit;
  const auto folders = engine::agree(comm, kWhere, [&]() -> std::string {
    if (comm.rank() != 0) return "";
    commit.emplace(fs, root, tag);
    return commit->folder_name();
  });

  // Steps 2 and 3: every rank writes its file.
  auto generator = at::detail::getDefaultCPUGenerator();
  at::Tensor generator_state;
  const auto reports = engine::agree(comm, kWhere, [&] {
    std::vector<formats::Source> shared, own;
    std::size_t buffer = 0;
    for (const auto& piece : pieces) {
      if (piece.kind != kBuffer) {
        shared.push_back(source_of(piece));
        continue;
      }
      // Buffers that are equal on all ranks are stored once. Otherwise (running statistics) each rank stores its own.
      const auto at = 32 * buffer++;
      const bool equal = std::all_of(ranks.begin(), ranks.end(), [&](const Intent& rank) {
        return rank.buffers.compare(at, 32, ranks[0].buffers, at, 32) == 0;
      });
      if (!equal)
        own.push_back(source_of(piece));
      else if (comm.rank() == 0)
        shared.push_back(source_of(piece));
    }
    if (state.parts.products) state.parts.products->end_forward();  // a region has another generator
    {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator_state = generator.get_state();
    }
    const engine::StatePiece generator_piece{
        kPrivate,
        kGenerator,
        {generator_state.numel()},
        0,
        generator_state.numel(),
        at::kByte,
        false,
        [&](std::int64_t at, std::int64_t numel) { return generator_state.narrow(0, at, numel); },
        nullptr};
    own.push_back(source_of(generator_piece));
    const auto num_shared = shared.size();
    shared.insert(shared.end(), own.begin(), own.end());
    const auto folder = formats::Folder::open(fs, root).folder(folders[0]);
    return message_of(formats::write_rank_file(folder, formats::rank_file_name(comm.rank()), shared), num_shared);
  });

  // Steps that experts of other ranks missed.
  std::map<std::string, std::int64_t> missed_steps;
  if (state.parts.experts)
    for (const auto& text : engine::agree(comm, kWhere, [&] {
           std::string lines;
           for (const auto& [name, steps] : state.exports->counters().missed_steps)
             lines += base::join(steps, " ", name, "\n");
           return lines;
         })) {
      std::istringstream in(text);
      std::int64_t steps = 0;
      for (std::string name; in >> steps && in.get() && std::getline(in, name);) missed_steps[name] = steps;
    }

  // Steps 4 to 7: rank 0 checks that the checkpoint is complete and publishes it.
  (void)engine::agree(comm, kWhere, [&] {
    if (comm.rank() != 0) return "";
    auto manifest = describe(state);
    manifest.missed_steps.merge(missed_steps);
    manifest.tensors = tensors_of(state);
    std::map<std::pair<std::string, std::string>, formats::Tensor*> by_name;
    for (auto& tensor : manifest.tensors) by_name[{tensor.kind, tensor.name}] = &tensor;
    std::vector<std::pair<std::string, std::string>> private_names;
    for (const auto& message : reports) {
      auto report = report_in(message);
      manifest.files.push_back(report.file);
      for (auto& tensor : report.shared) {
        const auto found = by_name.find({tensor.kind, tensor.name});
        ZERO_CHECK(found != by_name.end(), "no tensor ", tensor.kind, " of ", tensor.name);
        for (auto& part : tensor.parts) found->second->parts.push_back(std::move(part));
      }
      for (const auto& tensor : report.own) private_names.emplace_back(tensor.kind, tensor.name);
      manifest.ranks.push_back(std::move(report.own));
    }
    std::erase_if(manifest.tensors, [&](const formats::Tensor& tensor) {
      return std::find(private_names.begin(), private_names.end(), std::make_pair(tensor.kind, tensor.name)) !=
             private_names.end();
    });
    for (auto& tensor : manifest.tensors)
      std::sort(tensor.parts.begin(), tensor.parts.end(),
                [](const formats::Part& a, const formats::Part& b) { return a.start < b.start; });
    commit->publish(std::move(manifest));
    return "";
  });
  observe::status_page().note_commit();
}

}  // namespace zero::checkpoint
