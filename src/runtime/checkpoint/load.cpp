#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "base/check.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "engine/rank_agreement.h"
#include "formats/hash.h"
#include "formats/rank_file.h"
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
  return dtype == "BF16" ? at::kBFloat16 : dtype == "F16" ? at::kHalf : dtype == "F32" ? at::kFloat : at::kDouble;
}

using Names = std::map<std::pair<std::string, std::string>, const formats::Tensor*>;

Names by_name(const std::vector<formats::Tensor>& tensors) {
  Names result;
  for (const auto& tensor : tensors) result[{tensor.kind, tensor.name}] = &tensor;
  return result;
}

// The rank that saved the private state that this rank takes.
std::size_t source_rank(const formats::Manifest& manifest, int rank) {
  return static_cast<std::size_t>(rank) % manifest.ranks.size();
}

// The tensors of the checkpoint for this rank: shared ones and private ones.
Names stored_for(const formats::Manifest& manifest, int rank) {
  auto stored = by_name(manifest.tensors);
  stored.merge(by_name(manifest.ranks[source_rank(manifest, rank)]));
  return stored;
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

void require_same_optimizer(engine::State& state, const formats::Manifest& manifest, const std::string& label) {
  const auto optimizer = optimizer_name(state.parts.settings.optimizer.type);
  if (manifest.optimizer != optimizer)
    throw ConfigError("[load_checkpoint] " + label + " has the state of the optimizer " + manifest.optimizer +
                      ", this run has " + optimizer +
                      ". Hint: optimizer.type must be the one of the run that saved it.");
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
  auto stored = stored_for(manifest, state.parts.comm->rank());
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
    std::string private_buffers;
    for (const auto& tensor : manifest.ranks[0])
      if (tensor.kind == kBuffer) private_buffers += (private_buffers.empty() ? "" : ", ") + tensor.name;
    base::log(LogLevel::Info, base::join("checkpoint ", choice.tag, ": loading the checkpoint of ",
                                         layout_text(manifest.world, manifest.sequence, manifest.tensor), " on ",
                                         layout_text(state.parts.comm->size(), mesh.size("sp"), mesh.size("tp")),
                                         "; every rank's random numbers start anew, from a seed of the checkpoint's"));
    if (!private_buffers.empty())
      notice(base::join("buffers that differed between ranks: rank r takes those of rank r mod ", manifest.world, ": ",
                        private_buffers));
  }
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

class Loader {
 public:
  Loader(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag,
         const std::string& manifest_hash)
      : state_(state),
        folder_(formats::Folder::open(fs, root).folder(tag)),
        manifest_(formats::read_manifest(folder_, manifest_hash)),
        reader_(folder_, manifest_) {}

  const formats::Manifest& manifest() const { return manifest_; }
  std::string label() const { return folder_.path(); }

  // Reads and verifies everything this rank needs, without changing anything.
  void verify() {
    require_same_optimizer(state_, manifest_, label());
    require_same_model(state_, manifest_, label());
    counters_ = {manifest_.global_steps,  manifest_.skipped_steps,
                 manifest_.applied_steps, {manifest_.loss_scale, manifest_.hysteresis, manifest_.good, manifest_.floor},
                 manifest_.set_rates,     manifest_.missed_steps};
    optim::LossScaler(state_.parts.settings).set_state(counters_.scaler);
    if (counters_.applied_steps > counters_.global_steps || counters_.skipped_steps > counters_.global_steps)
      formats::fail_damaged(folder_.path_of(formats::kManifestName), "counts more applied or skipped steps than steps");
    const auto stored = stored_for(manifest_, state_.parts.comm->rank());
    for (const auto& tensor : tensors_of(state_))
      if (tensor.kind == "master" && was_frozen(stored, tensor.name))
        counters_.missed_steps[tensor.name] = counters_.applied_steps;
    for (const auto& [name, missed] : counters_.missed_steps)
      if (missed > counters_.applied_steps)
        formats::fail_damaged(folder_.path_of(formats::kManifestName),
                              "counts more steps without " + name + " than applied steps");
    state_.parts.optimizer->check_rates(counters_.set_rates);
    pieces_ = state_.exports->pieces_to_load();
    slices_.clear();
    for (auto& tensor : tensors_of(state_))
      if (!tensor.slices.empty()) slices_[{tensor.kind, tensor.name}] = std::move(tensor.slices);
    visit([](const engine::StatePiece&, const formats::Tensor&, std::int64_t, std::int64_t, const char*) {});
    read_generator();
    reader_.finish();
  }

  // Reads and verifies again, into the live state.
  void fill() {
    visit([](const engine::StatePiece& piece, const formats::Tensor& tensor, std::int64_t at, std::int64_t numel,
             const char* from) {
      const bool same = file_dtype(piece.dtype, piece.name) == tensor.dtype;
      auto stored = at::empty({numel}, same ? piece.dtype : scalar_type_of(tensor.dtype));
      std::memcpy(stored.mutable_data_ptr(), from, stored.nbytes());
      piece.write(at, stored);
    });
    reader_.finish();
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
  // Calls `take` for every range of elements that a piece and a part share: element `at` of the piece; its bytes in the
  // part begin at the pointer.
  template <class Take>
  void visit(Take&& take) {
    const auto stored = stored_for(manifest_, state_.parts.comm->rank());
    for (const auto& piece : pieces_) {
      const auto* const source = source_of(stored, piece.kind, piece.name);
      if (source == nullptr && was_frozen(stored, piece.name)) continue;
      ZERO_CHECK(source != nullptr, "no tensor ", piece.kind, " of ", piece.name);
      visit_piece(piece, *source, take);
    }
  }

  template <class Take>
  void visit_piece(const engine::StatePiece& piece, const formats::Tensor& tensor, const Take& take) {
    const auto cut = slices_.find({piece.kind, piece.name});
    const auto runs = formats::runs_between(tensor.shape, cut == slices_.end() ? Slices() : cut->second, tensor.slices,
                                            piece.begin, piece.begin + piece.numel);
    reader_.visit(tensor, runs, [&](const formats::Run& run, const char* bytes) {
      take(piece, tensor, run.wanted - piece.begin, run.numel, bytes);
    });
  }

  void fill_moments_of_frozen() {
    constexpr std::int64_t kMost = 1 << 20;  // elements at once
    const auto stored = stored_for(manifest_, state_.parts.comm->rank());
    for (const auto& piece : pieces_) {
      if (source_of(stored, piece.kind, piece.name) != nullptr) continue;
      const auto initial =
          at::full({std::min(kMost, piece.numel)}, state_.parts.optimizer->slot_initial_value(), piece.dtype);
      for (std::int64_t at = 0; at < piece.numel; at += kMost)
        piece.write(at, initial.narrow(0, 0, std::min(kMost, piece.numel - at)));
    }
  }

  void read_generator() {
    if (manifest_.ranks[0].empty()) return seed_generator(manifest_.id);  // of an import: no rank has saved one
    const bool same = same_layout(state_, manifest_);
    const auto rank = same ? state_.parts.comm->rank() : 0;
    const auto stored = by_name(manifest_.ranks[static_cast<std::size_t>(rank)]);
    const auto found = stored.find({kPrivate, kGenerator});
    const auto path = folder_.path_of(formats::kManifestName);
    if (found == stored.end()) formats::fail_damaged(path, base::join("has no random number generator of rank ", rank));
    const auto& tensor = *found->second;
    if (tensor.dtype != "U8" || tensor.parts.size() != 1 || tensor.shape.size() != 1)
      formats::fail_damaged(path, "has a random number generator of another form");
    generator_state_ = at::empty({tensor.shape[0]}, at::kByte);
    std::memcpy(generator_state_.mutable_data_ptr(), reader_.read(tensor, tensor.parts[0]), generator_state_.nbytes());
    auto probe = at::make_generator<at::CPUGeneratorImpl>();
    try {
      probe.set_state(generator_state_);
    } catch (const std::exception& e) {
      formats::fail_damaged(path, std::string("has a random number generator that libtorch refuses: ") + e.what());
    }
    if (!same) seed_generator(tensor.parts[0].hash);
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
  formats::PartReader reader_;
  std::vector<engine::StatePiece> pieces_;
  using Slices = std::vector<std::vector<formats::Box>>;
  std::map<std::pair<std::string, std::string>, Slices> slices_;  // of this run's cut tensors, by kind and name
  engine::StateCounters counters_{};
  at::Tensor generator_state_;
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

struct Phase {
  Phase() { observe::status_page().set_phase(observe::StatusPhase::Load); }
  ~Phase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

}  // namespace

std::string load(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag) {
  const Phase phase;
  const at::NoGradGuard no_grad;
  auto& comm = *state.parts.comm;
  formats::Choice choice;
  formats::Faults faults;
  std::string chosen;
  std::optional<Loader> loader;
  // Nothing changes before a checkpoint is verified, so without a tag an older one takes the place of a damaged one.
  for (bool verified = false; !verified;) {
    const auto answers = engine::agree(comm, kWhere, [&]() -> std::string {
      state.checks.require_boundary(kWhere);
      state.checks.require_no_scope(kWhere, /*reading_too=*/true);
      if (root.empty()) throw ConfigError("[load_checkpoint] got an empty directory name");
      if (comm.rank() != 0) return "";
      choice = chosen_in(fs, root, tag, faults);
      return choice.manifest_hash + choice.tag;
    });
    chosen = answers[0].substr(32);
    if (faults.empty()) state.backward->compare_unfrozen(kWhere);
    try {
      (void)engine::agree(comm, kWhere, [&] {
        state.backward->admit_unfrozen();
        loader.reset();
        loader.emplace(state, fs, root, chosen, answers[0].substr(0, 32));
        loader->verify();
        return "";
      });
      verified = true;
    } catch (const IoError& e) {  // the same on all ranks
      if (!tag.empty() || e.code() != ExitCode::kCheckpoint) throw;
      faults[chosen] = e.what();
    }
  }
  if (comm.rank() == 0) tell_differences(state, loader->manifest(), choice);
  // From here on the state changes: after a failure no rank is usable.
  state.parts.relay.reporting([&] {
    state.stepper->begin_replacing(kWhere);
    loader->fill();
  });
  (void)engine::agree(comm, kWhere, [] { return ""; });
  state.exports->adopt_loaded();
  return chosen;
}

}  // namespace zero::checkpoint
