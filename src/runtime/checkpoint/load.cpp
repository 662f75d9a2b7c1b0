// Loads a checkpoint of any layout: each rank reads the ranges that it stores. See checkpoint.h.
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "base/check.h"
#include "base/log.h"
#include "checkpoint/differences.h"
#include "checkpoint/kept.h"
#include "engine/rank_agreement.h"
#include "formats/hash.h"
#include "formats/range_reader.h"
#include "interchange/source.h"
#include "observe/status_page.h"
#include "optim/loss_scaler.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kLoading = "load_checkpoint";

using config::PrivateBuffers;
using config::VerifyOnLoad;

// For dtypes that can be converted.
at::ScalarType scalar_type_of(const std::string& dtype) {
  ZERO_CHECK(dtype == "BF16" || dtype == "F16" || dtype == "F32" || dtype == "F64", "values of ", dtype);
  return dtype == "BF16" ? at::kBFloat16 : dtype == "F16" ? at::kHalf : dtype == "F32" ? at::kFloat : at::kDouble;
}

class Loader {
 public:
  // in_memory: the manifest and files are of a kept snapshot, which hold this rank's states alone.
  Loader(engine::State& state, formats::Folder&& folder, formats::Manifest&& manifest, const LoadOptions& options,
         bool in_memory)
      : state_(state),
        options_(options),
        rule_(in_memory ? VerifyOnLoad::Used : state.job.settings.checkpoint.verify_on_load),
        folder_(std::move(folder)),
        manifest_(std::move(manifest)),
        reader_(folder_, manifest_, rule_ != VerifyOnLoad::Sizes),
        stored_(stored_for(state_, manifest_)) {}

  const formats::Manifest& manifest() const { return manifest_; }
  std::string label() const { return folder_.path(); }

  // Checks that the checkpoint fits, and reads what is small. Changes nothing.
  void prepare() {
    if (!options_.weights_only) {
      require_resumable(manifest_, label());
      require_same_slots(state_, manifest_, label());
    }
    left_out_ = compare_models(state_, manifest_, label(), options_);
    require_private_buffers(state_.job, manifest_, label());
    if (rule_ == VerifyOnLoad::Full) {
      const auto& comm = *state_.job.comm;
      formats::verify_share(folder_, manifest_, comm.rank(), comm.size());
    }
    pieces_ = state_.exports.pieces_to_load();
    std::erase_if(pieces_, [this](const engine::StatePiece& piece) {
      return piece.kind == kPrivate && (options_.weights_only || private_source(piece) == nullptr);
    });
    slices_ = cut_slices(state_);
    if (options_.weights_only) {
      counters_ = {0, 0, 0, 0, optim::LossScaler(state_.job.settings).state(), {}, {}};
      counters_.set_rates = state_.exports.counters().set_rates;
      return;
    }
    counters_ = {manifest_.global_steps,
                 manifest_.skipped_steps,
                 manifest_.applied_steps,
                 manifest_.global_samples,
                 {manifest_.loss_scale, manifest_.hysteresis, manifest_.good, manifest_.floor},
                 manifest_.set_rates,
                 manifest_.missed_steps};
    // The scale of a run in another type, or of one that scaled no loss, says nothing about this one's.
    optim::LossScaler fresh(state_.job.settings);
    const auto scaled = manifest_.config.find("libzero.loss_scaling");
    if (manifest_.parameter_dtype !=
            file_dtype(engine::scalar_type(state_.parts.plan.run.precision.param), "parameters") ||
        (state_.job.settings.precision != config::Precision::Fp16 && state_.job.settings.loss_scaling &&
         (scaled == manifest_.config.end() || scaled->second != "true")))
      counters_.scaler = fresh.state();
    fresh.set_state(counters_.scaler);
    if (counters_.applied_steps > counters_.global_steps || counters_.skipped_steps > counters_.global_steps)
      formats::fail_damaged(folder_.path_of(formats::kManifestName), "counts more applied or skipped steps than steps");
    for (const auto& tensor : tensors_of(state_))
      if (tensor.kind == "master" && (was_frozen(stored_, tensor.name) || left_out_.kept.contains(tensor.name)))
        counters_.missed_steps[tensor.name] = counters_.applied_steps;
    for (const auto& [name, missed] : counters_.missed_steps)
      if (missed > counters_.applied_steps)
        formats::fail_damaged(folder_.path_of(formats::kManifestName),
                              "counts more steps without " + name + " than applied steps");
    state_.parts.optimizer->check_rates(counters_.set_rates);
    read_generator();
  }

  const LeftOut& left_out() const { return left_out_; }

  // Reads and verifies everything that this rank needs, without changing anything.
  void verify() {
    if (rule_ == VerifyOnLoad::Sizes) return;
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
    fill_slots_without_source();
    state_.exports.set_counters(counters_);
    if (options_.weights_only) return;
    if (state_.parts.products) state_.parts.products->end_forward();  // it would bring back the generator from before
    auto generator = at::detail::getDefaultCPUGenerator();
    {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(generator_state_);
    }
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
      if (starts_anew(piece) || left_out_.kept.contains(piece.name)) continue;
      const auto* const source = piece.kind == kPrivate
                                     ? private_source(piece)
                                     : source_of(stored_, piece.kind, piece.name, options_.weights_only);
      ZERO_CHECK(source != nullptr, "no tensor ", piece.kind, " of ", piece.name);
      if (is_mean(piece, *source)) {
        means_[&piece] = at::zeros({piece.numel}, at::kDouble);
        for (const auto& rank : manifest_.ranks) {
          const auto names = by_name(rank);
          const auto found = names.find({piece.kind, piece.name});
          if (found == names.end() || found->second->shape != source->shape || found->second->dtype != source->dtype)
            formats::fail_damaged(folder_.path_of(formats::kManifestName),
                                  "has a buffer " + piece.name + " that differs between ranks");
          collect(piece, *found->second, true);
        }
      } else {
        collect(piece, *source, false);
      }
    }
  }

  // Of a buffer that is no part of the state dict; null: it stays as it is, as when the program made it.
  const formats::Tensor* private_source(const engine::StatePiece& piece) const {
    auto found = stored_.find({kPrivate, piece.name});
    // Written when such buffers were as all others, or by a program in which it is one.
    if (found == stored_.end()) found = stored_.find({kBuffer, engine::saved_name(piece.name)});
    const auto fits = [&](const formats::Tensor& tensor) {
      return tensor.shape == piece.shape && tensor.dtype == file_dtype(piece.dtype, piece.name);
    };
    return found == stored_.end() || !fits(*found->second) ? nullptr : found->second;
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
    const auto& settings = state_.job.settings.checkpoint;
    return settings.private_buffers == PrivateBuffers::Mean && piece.kind == kBuffer && manifest_.world > 1 &&
           manifest_.world != state_.job.comm->size() && at::isFloatingType(piece.dtype) &&
           !by_name(manifest_.tensors).contains({source.kind, source.name});
  }

  void write_means() {
    for (const auto& [piece, sum] : means_) piece->write(0, sum / static_cast<double>(manifest_.world));
  }

  // A state of the optimizer that is not taken from the checkpoint.
  bool starts_anew(const engine::StatePiece& piece) const {
    return is_slot(piece.kind) &&
           (options_.weights_only || left_out_.kept.contains(piece.name) ||
            (was_frozen(stored_, piece.name) && source_of(stored_, piece.kind, piece.name, false) == nullptr));
  }

  void fill_slots_without_source() {
    constexpr std::int64_t kMost = 1 << 20;  // elements at once
    for (const auto& piece : pieces_) {
      if (!starts_anew(piece)) continue;
      const auto initial =
          at::full({std::min(kMost, piece.numel)}, state_.parts.optimizer->slot_initial_value(), piece.dtype);
      for (std::int64_t at = 0; at < piece.numel; at += kMost)
        piece.write(at, initial.narrow(0, 0, std::min(kMost, piece.numel - at)));
    }
  }

  void read_generator() {
    const bool same = same_layout(*state_.parts.ranks.mesh, manifest_);
    const auto rank = same ? state_.job.comm->rank() : 0;
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

  // Another number of ranks: each gets a stream of its own, which none of those that saved had.
  void seed_generator(const std::string& origin) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>();
    const auto name = base::join("zero.rng/1 ", manifest_.global_steps, " ", state_.job.comm->size(), " ",
                                 state_.job.comm->rank(), " ", origin);
    generator.set_current_seed(std::stoull(formats::hash_of(name).substr(0, 16), nullptr, 16));
    generator_state_ = generator.get_state();
  }

  engine::State& state_;
  const LoadOptions& options_;
  const VerifyOnLoad rule_;
  formats::Folder folder_;
  formats::Manifest manifest_;
  formats::RangeReader reader_;
  const Names stored_;
  LeftOut left_out_;
  std::vector<engine::StatePiece> pieces_;
  std::vector<Target> targets_;
  std::map<const engine::StatePiece*, at::Tensor> means_;
  Slices slices_;  // of this run's tensors
  engine::StateCounters counters_{};
  at::Tensor generator_state_;
  bool verified_ = false;
};

formats::Choice chosen_in(formats::FsOps& fs, const std::string& root, const std::string& tag, formats::Needs needs,
                          const formats::Faults& faults) try {
  return formats::choose(fs, root, tag, needs, faults);
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
OnDisk look_on_disk(formats::FsOps& fs, const std::string& root, const std::string& tag, formats::Needs needs,
                    const formats::Faults& faults, bool compare) {
  OnDisk found;
  try {
    found.choice = chosen_in(fs, root, tag, needs, faults);
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

std::string options_text(const LoadOptions& options) {
  std::string text = options.weights_only ? "weights only" : "everything";
  for (const auto& pattern : options.partial) text += "\npartial " + pattern;
  return text;
}

struct LoadPhase {
  LoadPhase() { observe::status_page().set_phase(observe::StatusPhase::Load); }
  ~LoadPhase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

}  // namespace

std::string load(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag,
                 const LoadOptions& options, const base::KeptMemory& memory) {
  (void)finish_save(state);
  state.parts.progress.kept.reset();  // completes what is being kept
  const LoadPhase phase;
  const at::NoGradGuard no_grad;
  auto& comm = *state.job.comm;
  auto& progress = state.parts.progress;
  // A state that is worth nothing is filled while it is verified, otherwise everything is verified first.
  const bool fresh = state.parts.program->steps() == 0 && !progress.worth_keeping;
  const bool one_pass = fresh || !progress.half_loaded.empty();
  formats::Faults faults;
  std::string chosen;
  std::optional<KeptSnapshots> kept;  // outlives the loader that reads it
  std::optional<Loader> loader;
  const auto needs = options.weights_only ? formats::Needs::Weights : formats::Needs::Training;
  engine::agree_on(state.relay, comm, kLoading, "[load_checkpoint] the options", [&] { return options_text(options); });
  // Without a tag, an older checkpoint takes the place of a damaged one.
  for (bool done = false; !done;) {
    OnDisk disk;
    const auto answers = engine::agree_while_moving(comm, kLoading, formats::bytes_moved(), [&]() -> std::string {
      state.checks.require_boundary(kLoading, /*loading=*/true);
      state.checks.require_no_scope(kLoading, /*reading_too=*/true);
      if (root.empty()) throw ConfigError("[load_checkpoint] got an empty directory name");
      // What it leaves out might have values of both.
      if (!progress.half_loaded.empty() && !options.partial.empty())
        throw ConfigError("[load_checkpoint] got partial after " + progress.half_loaded +
                          ". Hint: load a checkpoint that has everything, or make a new engine.");
      if (!kept) kept.emplace(state, fs, memory, root);
      const bool whole = !options.weights_only && options.partial.empty();
      const auto offers = fresh && tag.empty() && whole ? kept->offers() : "";
      if (comm.rank() != 0) return offers;
      disk = look_on_disk(fs, root, tag, needs, faults, !offers.empty());
      return offers + "disk " + base::join(disk.step, " ", disk.choice.manifest_hash, disk.choice.tag);
    });
    const auto& first = answers[0];
    const auto at = first.rfind("disk ") + 5, end = first.find(' ', at);
    const auto disk_step = std::stoll(first.substr(at, end - at));
    const auto in_memory = KeptSnapshots::newest(answers, disk_step);
    if (!in_memory)
      (void)engine::agree(comm, kLoading, [&] {
        if (disk.none) throw *disk.none;
        return "";
      });
    chosen = in_memory ? in_memory->name() : first.substr(end + 33);
    if (faults.empty()) state.backward.compare_unfrozen(kLoading);
    try {
      (void)engine::agree_while_moving(comm, kLoading, formats::bytes_moved(), [&] {
        state.backward.admit_unfrozen();
        loader.reset();
        if (in_memory) {
          loader.emplace(state, kept->folder(in_memory->slot), kept->manifest(in_memory->slot), options, true);
        } else {
          auto folder = formats::Folder::open(fs, root).folder(chosen);
          auto manifest = formats::read_manifest(folder, first.substr(end + 1, 32));
          loader.emplace(state, std::move(folder), std::move(manifest), options, false);
        }
        loader->prepare();
        return "";
      });
      // Without a checkpoint that could take its place, damage must leave the state as it is.
      if (!one_pass || (in_memory && disk_step < 0))
        (void)engine::agree_while_moving(comm, kLoading, formats::bytes_moved(), [&] {
          loader->verify();
          return "";
        });
      if (comm.rank() == 0 && !in_memory)
        tell_differences(state, loader->manifest(), disk.choice, options, loader->left_out());
      state.relay.reporting([&] { state.stepper.begin_replacing(kLoading); });
      progress.half_loaded = "a load that failed halfway";
      (void)engine::agree_while_moving(comm, kLoading, formats::bytes_moved(), [&] {
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
  state.exports.adopt_loaded();
  progress.half_loaded.clear();
  progress.worth_keeping = true;
  return chosen;
}

}  // namespace zero::checkpoint
