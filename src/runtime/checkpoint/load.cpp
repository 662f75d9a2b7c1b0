// Loads a checkpoint of any layout: each rank reads the ranges that it stores. See checkpoint.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/kept.h"
#include "engine/rank_agreement.h"
#include "formats/hash.h"
#include "formats/range_reader.h"
#include "formats/root_folder.h"
#include "interchange/source.h"
#include "observe/status_page.h"
#include "optim/loss_scaler.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kWhere = "load_checkpoint";
constexpr std::size_t kMostShown = 20;

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += base::join(i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

// Whether the wanted dtype holds all values of the stored one.
bool fits(const std::string& stored, const std::string& wanted) {
  return stored == wanted || (wanted == "F32" && (stored == "BF16" || stored == "F16")) ||
         (wanted == "F64" && stored == "F32");
}

// For dtypes that can be converted.
at::ScalarType scalar_type_of(const std::string& dtype) {
  ZERO_CHECK(dtype == "BF16" || dtype == "F16" || dtype == "F32" || dtype == "F64", "values of ", dtype);
  return dtype == "BF16" ? at::kBFloat16 : dtype == "F16" ? at::kHalf : dtype == "F32" ? at::kFloat : at::kDouble;
}

using Names = std::map<std::pair<std::string, std::string>, const formats::Tensor*>;

Names by_name(const std::vector<formats::Tensor>& tensors) {
  Names result;
  for (const auto& tensor : tensors) result[{tensor.kind, tensor.name}] = &tensor;
  return result;
}

using config::PrivateBuffers;

// The rank that saved the private state that this rank takes.
std::size_t source_rank(engine::State& state, const formats::Manifest& manifest) {
  const auto saved = manifest.ranks.size();
  const auto& comm = *state.parts.comm;
  const auto rule = state.parts.settings.checkpoint.private_buffers;
  if (static_cast<std::size_t>(comm.size()) == saved || rule == PrivateBuffers::Modulo)
    return static_cast<std::size_t>(comm.rank()) % saved;
  return 0;
}

// The tensors of the checkpoint for this rank: shared ones and private ones.
Names stored_for(engine::State& state, const formats::Manifest& manifest) {
  auto stored = by_name(manifest.tensors);
  stored.merge(by_name(manifest.ranks[source_rank(state, manifest)]));
  return stored;
}

std::string private_buffers(const formats::Manifest& manifest) {
  std::string names;
  for (const auto& tensor : manifest.ranks[0])
    if (tensor.kind == kBuffer) names += (names.empty() ? "" : ", ") + tensor.name;
  return names;
}

bool same_layout(engine::State& state, const formats::Manifest& manifest) {
  const auto& mesh = *state.parts.mesh;
  return manifest.world == state.parts.comm->size() && manifest.sequence == mesh.size("sp") &&
         manifest.tensor == mesh.size("tp");
}

std::string layout_text(std::int64_t world, std::int64_t sequence, std::int64_t tensor) {
  return base::join(world, world == 1 ? " rank" : " ranks", sequence > 1 ? base::join(" (sp ", sequence, ")") : "",
                    tensor > 1 ? base::join(" (tp ", tensor, ")") : "");
}

std::string slots_text(const std::vector<std::string>& slots) {
  std::string text;
  for (const auto& slot : slots) text += (text.empty() ? "" : ", ") + slot;
  return text.empty() ? "none" : text;
}

// Optimizers with the same states may take each other's: Adam and AdamW.
void require_same_slots(engine::State& state, const formats::Manifest& manifest, const std::string& label) {
  const auto optimizer = optimizer_name(state.parts.settings.optimizer.type);
  std::vector<std::string> slots;
  for (int k = 0; k < state.parts.optimizer->num_slots(); ++k) slots.emplace_back(state.parts.optimizer->slot_name(k));
  if (manifest.optimizer != optimizer && manifest.slots != slots)
    throw ConfigError("[load_checkpoint] " + label + " has the states of the optimizer " + manifest.optimizer + " (" +
                      slots_text(manifest.slots) + "), this run has " + optimizer + " (" + slots_text(slots) +
                      "). Hint: optimizer.type must be the one of the run that saved it; import_weights() takes the "
                      "weights alone.");
}

// The stored tensor that a tensor is loaded from: that of its kind; for the master of a parameter that was frozen when
// saved, the parameter. null: none, for the optimizer states of such a parameter.
const formats::Tensor* source_of(const Names& stored, const std::string& kind, const std::string& name) {
  if (const auto found = stored.find({kind, name}); found != stored.end()) return found->second;
  const auto frozen = kind == "master" ? stored.find({"param", name}) : stored.end();
  return frozen == stored.end() ? nullptr : frozen->second;
}

bool was_frozen(const Names& stored, const std::string& name) { return stored.contains({"param", name}); }

void require_same_model(engine::State& state, const formats::Manifest& manifest, const std::string& label) {
  const auto wanted = tensors_of(state);
  const auto stored = stored_for(state, manifest);
  std::vector<std::string> differences;
  std::set<std::string> frozen_here;  // but trained in the checkpoint: one line each
  std::set<std::pair<std::string, std::string>> taken;
  for (const auto& tensor : wanted) {
    const auto name = tensor.kind + " of " + tensor.name;
    const auto* const found = source_of(stored, tensor.kind, tensor.name);
    if (found == nullptr) {
      if (tensor.kind == "param" && stored.contains({"master", tensor.name})) {
        frozen_here.insert(tensor.name);
        differences.push_back(tensor.name +
                              ": frozen in the model, trained in the checkpoint. Hint: requires_grad_(true) before "
                              "load_checkpoint");
      } else if (tensor.kind == kBuffer || !was_frozen(stored, tensor.name)) {
        differences.push_back(name + ": not in the checkpoint");
      }
      continue;
    }
    if (found->shape != tensor.shape)
      differences.push_back(name + ": has the shape " + text_of(found->shape) + " in the checkpoint, " +
                            text_of(tensor.shape) + " in the model");
    if (!fits(found->dtype, tensor.dtype))
      differences.push_back(name + ": is " + found->dtype + " in the checkpoint, " + tensor.dtype + " in the model");
    taken.insert({found->kind, found->name});
  }
  for (const auto& [key, tensor] : stored)
    if (key.first != kPrivate && !taken.contains(key) && (key.first == kBuffer || !frozen_here.contains(key.second)))
      differences.push_back(key.first + " of " + key.second + ": in the checkpoint, not in the model");
  const auto aliases = state.exports->aliases();
  for (const auto& [alias, owner] : aliases)
    if (const auto found = manifest.aliases.find(alias); found == manifest.aliases.end() || found->second != owner)
      differences.push_back(alias + ": tied to " + owner + " in the model, not in the checkpoint");
  for (const auto& [alias, owner] : manifest.aliases)
    if (!aliases.contains(alias))
      differences.push_back(alias + ": tied to " + owner + " in the checkpoint, not in the model");
  if (differences.empty()) return;
  std::string text =
      base::join("[load_checkpoint] ", label, " does not fit the model; ", differences.size(), " differences:");
  for (std::size_t i = 0; i < std::min(differences.size(), kMostShown); ++i) text += "\n  " + differences[i];
  if (differences.size() > kMostShown) text += base::join("\n  and ", differences.size() - kMostShown, " more");
  throw ConfigError(text);
}

void tell_differences(engine::State& state, const formats::Manifest& manifest, const formats::Choice& choice) {
  const auto notice = [&](const std::string& text) {
    base::log(LogLevel::Warning, "checkpoint " + choice.tag + ": " + text);
  };
  for (const auto& text : choice.notices) notice(text);
  if (!same_layout(state, manifest)) {
    const auto& mesh = *state.parts.mesh;
    base::log(LogLevel::Info, base::join("checkpoint ", choice.tag, ": loading the checkpoint of ",
                                         layout_text(manifest.world, manifest.sequence, manifest.tensor), " on ",
                                         layout_text(state.parts.comm->size(), mesh.size("sp"), mesh.size("tp")),
                                         "; every rank's random numbers start anew, from a seed of the checkpoint's"));
    const auto names = private_buffers(manifest);
    const auto rule = state.parts.settings.checkpoint.private_buffers;
    if (!names.empty() && manifest.world != state.parts.comm->size())
      notice(base::join("buffers that differed between ranks: ",
                        rule == PrivateBuffers::Mean ? "every rank takes their mean"
                        : rule == PrivateBuffers::Rank0
                            ? "every rank takes those of rank 0"
                            : base::join("rank r takes those of rank r mod ", manifest.world),
                        " (libzero.private_buffers): ", names));
  }
  const auto batch = state.parts.micro_batch * state.parts.accumulation * state.parts.mesh->size("dp");
  if (manifest.global_batch > 0 && manifest.global_batch != batch)
    notice(base::join("was trained with ", manifest.global_batch, " samples a step, this run has ", batch,
                      "; schedules go on by steps"));
  if (const auto optimizer = optimizer_name(state.parts.settings.optimizer.type); manifest.optimizer != optimizer)
    notice("was trained with " + manifest.optimizer + ", this run has " + optimizer + ", which has the same states");
  const auto parameter = file_dtype(engine::scalar_type(state.parts.run.precision.param), "parameters");
  if (manifest.parameter_dtype != parameter)
    notice("was trained in " + manifest.parameter_dtype + ", this run computes in " + parameter +
           "; masters are taken and cast again");
  const bool imported = manifest.cpu_capability.empty();  // was not written by a run
  if (!imported &&
      (manifest.torch_threads != at::get_num_threads() || manifest.cpu_capability != at::get_cpu_capability()))
    notice(base::join("was written with ", manifest.torch_threads, " torch threads on ", manifest.cpu_capability,
                      ", this run has ", at::get_num_threads(), " on ", at::get_cpu_capability(),
                      "; results may differ in the last bits"));
}

void require_private_buffers(engine::State& state, const formats::Manifest& manifest, const std::string& label) {
  if (state.parts.settings.checkpoint.private_buffers != PrivateBuffers::Error ||
      manifest.world == state.parts.comm->size())
    return;
  if (const auto names = private_buffers(manifest); !names.empty())
    throw ConfigError(
        base::join("[load_checkpoint] ", label, " has buffers that differed between its ", manifest.world,
                   " ranks, this run has ", state.parts.comm->size(), ": ", names,
                   ". Hint: libzero.private_buffers \"modulo\", \"rank0\" or \"mean\" says which to take."));
}

class Loader {
 public:
  Loader(engine::State& state, formats::Folder&& folder, formats::Manifest&& manifest)
      : state_(state),
        folder_(std::move(folder)),
        manifest_(std::move(manifest)),
        reader_(folder_, manifest_),
        stored_(stored_for(state_, manifest_)) {}

  const formats::Manifest& manifest() const { return manifest_; }
  std::string label() const { return folder_.path(); }

  // Checks that the checkpoint fits, and reads what is small. Changes nothing.
  void prepare() {
    require_same_slots(state_, manifest_, label());
    require_same_model(state_, manifest_, label());
    require_private_buffers(state_, manifest_, label());
    counters_ = {manifest_.global_steps,
                 manifest_.skipped_steps,
                 manifest_.applied_steps,
                 manifest_.global_samples,
                 {manifest_.loss_scale, manifest_.hysteresis, manifest_.good, manifest_.floor},
                 manifest_.set_rates,
                 manifest_.missed_steps};
    // The scale of a run in another type says nothing about this one's.
    optim::LossScaler fresh(state_.parts.settings);
    if (manifest_.parameter_dtype != file_dtype(engine::scalar_type(state_.parts.run.precision.param), "parameters"))
      counters_.scaler = fresh.state();
    fresh.set_state(counters_.scaler);
    if (counters_.applied_steps > counters_.global_steps || counters_.skipped_steps > counters_.global_steps)
      formats::fail_damaged(folder_.path_of(formats::kManifestName), "counts more applied or skipped steps than steps");
    for (const auto& tensor : tensors_of(state_))
      if (tensor.kind == "master" && was_frozen(stored_, tensor.name))
        counters_.missed_steps[tensor.name] = counters_.applied_steps;
    for (const auto& [name, missed] : counters_.missed_steps)
      if (missed > counters_.applied_steps)
        formats::fail_damaged(folder_.path_of(formats::kManifestName),
                              "counts more steps without " + name + " than applied steps");
    state_.parts.optimizer->check_rates(counters_.set_rates);
    pieces_ = state_.exports->pieces_to_load();
    slices_ = cut_slices(state_);
    read_generator();
  }

  // Reads and verifies everything that this rank needs, without changing anything.
  void verify() {
    collect();
    reader_.read([](std::size_t, const formats::Run&, const char*) {});
    reader_.finish();
    verified_ = true;
  }

  // Reads and verifies, into the live state.
  void fill() {
    collect();
    reader_.read([this](std::size_t id, const formats::Run& run, const char* bytes) { take(id, run, bytes); },
                 /*once=*/!verified_);
    reader_.finish();
    write_means();
    fill_moments_of_frozen();
    if (state_.parts.products) state_.parts.products->end_forward();  // it would bring back the generator from before
    auto generator = at::detail::getDefaultCPUGenerator();
    {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(generator_state_);
    }
    state_.exports->set_counters(counters_);
    state_.user_state = manifest_.user_state;
  }

 private:
  // What a range of a file is read for.
  struct Target {
    const engine::StatePiece* piece;
    at::ScalarType dtype;  // of the file
    bool mean;
  };

  void collect() {
    targets_.clear();
    means_.clear();
    for (const auto& piece : pieces_) {
      const auto* const source = source_of(stored_, piece.kind, piece.name);
      if (source == nullptr && was_frozen(stored_, piece.name)) continue;
      ZERO_CHECK(source != nullptr, "no tensor ", piece.kind, " of ", piece.name);
      if (is_mean(piece, *source)) {
        means_[&piece] = at::zeros({piece.numel}, at::kDouble);
        for (const auto& rank : manifest_.ranks) {
          const auto names = by_name(rank);
          const auto found = names.find({piece.kind, piece.name});
          if (found == names.end() || found->second->shape != source->shape || found->second->dtype != source->dtype)
            formats::fail_damaged(folder_.path_of(formats::kManifestName),
                                  "has a buffer " + piece.name + " that not all ranks have alike");
          collect(piece, *found->second, true);
        }
      } else {
        collect(piece, *source, false);
      }
    }
  }

  void collect(const engine::StatePiece& piece, const formats::Tensor& source, bool mean) {
    const auto cut = slices_.find({piece.kind, piece.name});
    const bool same = file_dtype(piece.dtype, piece.name) == source.dtype;
    reader_.add(targets_.size(), source,
                formats::runs_between(source.shape, cut == slices_.end() ? Slices::mapped_type() : cut->second,
                                      source.slices, piece.begin, piece.begin + piece.numel));
    targets_.push_back({&piece, same ? piece.dtype : scalar_type_of(source.dtype), mean});
  }

  void take(std::size_t id, const formats::Run& run, const char* bytes) {
    const auto& target = targets_[id];
    // Only read, by a copy to where it belongs.
    const auto values = at::from_blob(const_cast<char*>(bytes), {run.numel}, target.dtype);
    const auto at = run.wanted - target.piece->begin;
    if (target.mean)
      means_.at(target.piece).narrow(0, at, run.numel).add_(values);
    else
      target.piece->write(at, values);
  }

  // Whether a buffer becomes the mean of what the ranks that saved had.
  bool is_mean(const engine::StatePiece& piece, const formats::Tensor& source) const {
    const auto& settings = state_.parts.settings.checkpoint;
    return settings.private_buffers == PrivateBuffers::Mean && piece.kind == kBuffer && manifest_.world > 1 &&
           manifest_.world != state_.parts.comm->size() && at::isFloatingType(piece.dtype) &&
           !by_name(manifest_.tensors).contains({source.kind, source.name});
  }

  void write_means() {
    for (const auto& [piece, sum] : means_) piece->write(0, sum / static_cast<double>(manifest_.world));
  }

  void fill_moments_of_frozen() {
    constexpr std::int64_t kMost = 1 << 20;  // elements at once
    for (const auto& piece : pieces_) {
      if (source_of(stored_, piece.kind, piece.name) != nullptr) continue;
      const auto initial =
          at::full({std::min(kMost, piece.numel)}, state_.parts.optimizer->slot_initial_value(), piece.dtype);
      for (std::int64_t at = 0; at < piece.numel; at += kMost)
        piece.write(at, initial.narrow(0, 0, std::min(kMost, piece.numel - at)));
    }
  }

  void read_generator() {
    const bool same = same_layout(state_, manifest_);
    const auto rank = same ? state_.parts.comm->rank() : 0;
    if (manifest_.ranks[static_cast<std::size_t>(rank)].empty())
      return seed_generator(manifest_.id);  // of an import: no rank has saved one
    const auto stored = by_name(manifest_.ranks[static_cast<std::size_t>(rank)]);
    const auto found = stored.find({kPrivate, kGenerator});
    const auto path = folder_.path_of(formats::kManifestName);
    if (found == stored.end()) formats::fail_damaged(path, base::join("has no random number generator of rank ", rank));
    const auto& tensor = *found->second;
    if (tensor.dtype != "U8" || tensor.parts.size() != 1 || tensor.shape.size() != 1)
      formats::fail_damaged(path, "has a random number generator of another form");
    generator_state_ = at::empty({tensor.shape[0]}, at::kByte);
    reader_.add(0, tensor, {{0, 0, tensor.shape[0]}});
    reader_.read([this](std::size_t, const formats::Run& run, const char* bytes) {
      std::memcpy(generator_state_.mutable_data_ptr<std::uint8_t>() + run.wanted, bytes,
                  static_cast<std::size_t>(run.numel));
    });
    auto probe = at::make_generator<at::CPUGeneratorImpl>();
    try {
      probe.set_state(generator_state_);
    } catch (const std::exception& e) {
      formats::fail_damaged(path, std::string("has a random number generator that libtorch refuses: ") + e.what());
    }
    if (!same) seed_generator(formats::hash_of(generator_state_.const_data_ptr(), generator_state_.nbytes()));
  }

  // Other ranks than those that saved: no stream is that of one of them, and none is used twice.
  void seed_generator(const std::string& origin) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>();
    const auto name = base::join("zero.rng/1 ", manifest_.global_steps, " ", state_.parts.comm->size(), " ",
                                 state_.parts.comm->rank(), " ", origin);
    generator.set_current_seed(std::stoull(formats::hash_of(name).substr(0, 16), nullptr, 16));
    generator_state_ = generator.get_state();
  }

  engine::State& state_;
  formats::Folder folder_;
  formats::Manifest manifest_;
  formats::RangeReader reader_;
  const Names stored_;
  std::vector<engine::StatePiece> pieces_;
  std::vector<Target> targets_;
  std::map<const engine::StatePiece*, at::Tensor> means_;
  Slices slices_;  // of this run's tensors
  engine::StateCounters counters_{};
  at::Tensor generator_state_;
  bool verified_ = false;
};

formats::Choice chosen_in(formats::FsOps& fs, const std::string& root, const std::string& tag,
                          const formats::Faults& faults) try {
  return formats::choose(fs, root, tag, faults);
} catch (const IoError& e) {
  if (e.code() != ExitCode::kCheckpoint || interchange::foreign_checkpoints(fs, root).empty()) throw;
  throw IoError(std::string(e.what()) + ". Hint: it is of another program: zero checkpoint import " + root +
                    " --into DIR --tag TAG makes a checkpoint of it",
                ExitCode::kCheckpoint);
}

// What rank 0 finds on disk.
struct OnDisk {
  formats::Choice choice;
  std::int64_t step = -1;  // if `compare`; -1: there is no checkpoint
  std::optional<IoError> none;
};

// compare: there may be something newer in memory, and it is no error if there is nothing here.
OnDisk look_on_disk(formats::FsOps& fs, const std::string& root, const std::string& tag, const formats::Faults& faults,
                    bool compare) {
  OnDisk found;
  try {
    found.choice = chosen_in(fs, root, tag, faults);
    if (compare)
      found.step =
          formats::read_manifest(formats::Folder::open(fs, root).folder(found.choice.tag), found.choice.manifest_hash)
              .global_steps;
  } catch (const IoError& e) {
    if (!compare || e.code() != ExitCode::kCheckpoint) throw;
    found.none = e;
  }
  return found;
}

struct Phase {
  Phase() { observe::status_page().set_phase(observe::StatusPhase::Load); }
  ~Phase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

}  // namespace

std::string load(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag,
                 const base::KeptMemory& memory) {
  (void)finish_save(state);
  state.parts.progress.kept.reset();  // completes what is being kept
  const Phase phase;
  const at::NoGradGuard no_grad;
  auto& comm = *state.parts.comm;
  auto& progress = state.parts.progress;
  // A state that is worth nothing is filled while it is verified, otherwise everything is verified first.
  const bool fresh = state.parts.program->steps() == 0 && !progress.worth_keeping;
  const bool one_pass = fresh || !progress.half_loaded.empty();
  formats::Faults faults;
  std::string chosen;
  std::optional<KeptSnapshots> kept;  // outlives the loader that reads it
  std::optional<Loader> loader;
  // Without a tag, an older checkpoint takes the place of a damaged one.
  for (bool done = false; !done;) {
    OnDisk disk;
    const auto answers = engine::agree_while_moving(comm, kWhere, formats::bytes_moved(), [&]() -> std::string {
      state.checks.require_boundary(kWhere, /*loading=*/true);
      state.checks.require_no_scope(kWhere, /*reading_too=*/true);
      if (root.empty()) throw ConfigError("[load_checkpoint] got an empty directory name");
      if (!kept) kept.emplace(state, fs, memory, root);
      const auto offers = fresh && tag.empty() ? kept->offers() : "";
      if (comm.rank() != 0) return offers;
      disk = look_on_disk(fs, root, tag, faults, !offers.empty());
      return offers + "disk " + base::join(disk.step, " ", disk.choice.manifest_hash, disk.choice.tag);
    });
    const auto& first = answers[0];
    const auto at = first.rfind("disk ") + 5, end = first.find(' ', at);
    const auto disk_step = std::stoll(first.substr(at, end - at));
    const auto in_memory = KeptSnapshots::newest(answers, disk_step);
    if (!in_memory)
      (void)engine::agree(comm, kWhere, [&] {
        if (disk.none) throw *disk.none;
        return "";
      });
    chosen = in_memory ? in_memory->name() : first.substr(end + 33);
    if (faults.empty()) state.backward->compare_unfrozen(kWhere);
    try {
      (void)engine::agree_while_moving(comm, kWhere, formats::bytes_moved(), [&] {
        state.backward->admit_unfrozen();
        loader.reset();
        if (in_memory) {
          loader.emplace(state, kept->folder(in_memory->slot), kept->manifest(in_memory->slot));
        } else {
          auto folder = formats::Folder::open(fs, root).folder(chosen);
          auto manifest = formats::read_manifest(folder, first.substr(end + 1, 32));
          loader.emplace(state, std::move(folder), std::move(manifest));
        }
        loader->prepare();
        return "";
      });
      // Without a checkpoint that could take its place, damage must leave the state as it is.
      if (!one_pass || (in_memory && disk_step < 0))
        (void)engine::agree_while_moving(comm, kWhere, formats::bytes_moved(), [&] {
          loader->verify();
          return "";
        });
      if (comm.rank() == 0 && !in_memory) tell_differences(state, loader->manifest(), disk.choice);
      state.parts.relay.reporting([&] { state.stepper->begin_replacing(kWhere); });
      progress.half_loaded = "a load that failed halfway";
      (void)engine::agree_while_moving(comm, kWhere, formats::bytes_moved(), [&] {
        loader->fill();
        if (!in_memory) kept->forget();
        return "";
      });
      progress.kept_slot = in_memory ? in_memory->slot : -1;
      done = true;
    } catch (const IoError& e) {  // the same on all ranks
      if (!progress.half_loaded.empty()) progress.half_loaded = e.what();
      if (!tag.empty() || e.code() != ExitCode::kCheckpoint) throw;
      if (in_memory) {
        if (comm.rank() == 0) base::log(LogLevel::Warning, "skipped the " + chosen + ": " + e.what());
        kept->refuse(in_memory->slot);
      } else {
        faults[chosen] = e.what();
      }
    }
  }
  state.exports->adopt_loaded();
  progress.half_loaded.clear();
  progress.worth_keeping = true;
  return chosen;
}

}  // namespace zero::checkpoint
