// See weights.h: import_weights().
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "base/check.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "engine/model_buffers.h"
#include "engine/rank_agreement.h"
#include "formats/slices.h"
#include "interchange/element_types.h"
#include "interchange/named_source.h"
#include "observe/status_page.h"

namespace zero::checkpoint {
namespace {
using namespace interchange;

constexpr const char* kImporting = "import_weights";
constexpr std::int64_t kWindow = std::int64_t{1} << 20;  // elements that are read at once
constexpr std::size_t kFaultsShown = 20;

using Key = std::pair<std::string, std::string>;  // "" or the kind of an optimizer's state, and the name

Key key_in_files(const std::string& kind, const std::string& name) {
  return {kind.starts_with("opt.") ? kind : "", name};
}

// What a tensor of the model is read from.
struct Taken {
  const SourceTensor* source = nullptr;
  // Further tensors of the files that must have the same values.
  std::vector<const SourceTensor*> equal;
  bool chosen = false;  // by ImportOptions::untie: the others are ignored
};

class Importer {
 public:
  Importer(engine::State& state, formats::FsOps& fs, const std::string& path, const ImportOptions& options)
      : state_(state), options_(options), path_(path) {
    SourceOptions open;
    open.key = options.key;
    open.prefix = options.prefix;
    source_ = open_source(fs, path, open);
    std::optional<NameMap> map;
    if (!options.names.empty()) map = NameMap::find(fs, options.names);
    auto mapping = map ? map_names(*map, Direction::ToOurs, source_->tensors(), source_->aliases(), path)
                       : same_names(source_->tensors(), source_->aliases());
    ties_ = mapping.ties;
    view_ = named_source(*source_, std::move(mapping));
    for (auto& tensor : tensors_of(state))
      if ((options.optimizer || !tensor.kind.starts_with("opt.")) && is_wanted(tensor.name))
        tensors_.push_back(std::move(tensor));
  }

  // Chooses what every tensor is read from. All faults in one error.
  void match() {
    std::map<Key, const SourceTensor*> stored;
    for (const auto& tensor : view_->tensors())
      if (options_.optimizer || !tensor.kind.starts_with("opt."))
        stored[key_in_files(tensor.kind, tensor.name)] = &tensor;
    // Every name that means the same tensor as another.
    std::map<std::string, std::set<std::string>> same;
    for (const auto& pairs : {view_->aliases(), ties_, state_.exports.aliases()})
      for (const auto& [alias, owner] : pairs) {
        same[alias].insert(owner);
        same[owner].insert(alias);
      }
    std::set<Key> used;
    for (const auto& tensor : tensors_) {
      const auto kind = key_in_files(tensor.kind, "").first;
      Taken taken;
      // States go with the values that were chosen.
      const auto chosen = kind.empty() ? choices_.end() : choices_.find(tensor.name);
      const auto& own = chosen == choices_.end() ? tensor.name : chosen->second.front();
      if (const auto found = stored.find({kind, own}); found != stored.end()) taken.source = found->second;
      if (chosen != choices_.end())
        for (const auto& other : chosen->second) used.insert({kind, other});
      const bool tied = taken.source == nullptr;
      if (kind.empty())
        for (const auto& other : others_of(tensor.name, same)) {
          const auto found = stored.find({"", other});
          if (found == stored.end()) continue;
          // Another tensor of the model is no second copy: the files need not tie it.
          const bool mine = std::any_of(tensors_.begin(), tensors_.end(), [&](const formats::Tensor& one) {
            return one.name == other && !one.kind.starts_with("opt.");
          });
          if (taken.source == nullptr)
            taken.source = found->second;
          else if (!mine)
            taken.equal.push_back(found->second);
        }
      const auto label = kind.empty() ? tensor.name : tensor.kind + " of " + tensor.name;
      if (taken.source == nullptr) {
        if (is_partial(tensor.name))
          report_.missing.push_back(label);
        else
          faults_.push_back(label + ": missing, not in the files");
        continue;
      }
      choose(tensor.name, taken);
      used.insert(key_in_files(taken.source->kind, taken.source->name));
      if (taken.source->shape != tensor.shape && is_partial(tensor.name)) {
        report_.missing.push_back(label);
        continue;
      }
      for (const auto* const one : taken.equal) {
        used.insert(key_in_files(one->kind, one->name));
        report_.unexpected.push_back(one->name);
      }
      if (taken.chosen) taken.equal.clear();
      check(tensor, *taken.source, label);
      for (const auto* const one : taken.equal) {
        check(tensor, *one, label);
        if (one->dtype != taken.source->dtype)
          faults_.push_back(one->name + ": is tied to " + label + ", and stored as " + one->dtype + ", not as " +
                            taken.source->dtype);
      }
      report_.taken.push_back(label);
      if (tied || (taken.chosen && taken.source->name != tensor.name)) report_.tied.push_back(label);
      taken_[{tensor.kind, tensor.name}] = taken;
    }
    for (const auto& name : options_.untie)
      if (!chosen_.contains(name))
        faults_.push_back("untie " + name + ": is not stored as one of several tensors that are tied");
    const auto unsaved = engine::unsaved_buffers(*state_.job.model);
    for (const auto& [key, tensor] : stored)
      if (used.contains(key))
        continue;
      else if (is_partial(key.second) || unsaved.contains(key.second))
        report_.unexpected.push_back(key.second);
      else
        faults_.push_back((key.first.empty() ? "" : key.first + " of ") + key.second +
                          ": unexpected, not in the model");
    if (faults_.empty() && taken_.empty())
      throw ConfigError("[import_weights] " + path_ +
                        " has nothing that the model has. Hint: names translates them; partial names what may be "
                        "missing, not everything.");
    if (faults_.empty()) return;
    std::string text = base::join("[import_weights] ", path_, " does not fit the model; ", faults_.size(),
                                  faults_.size() == 1 ? " difference:" : " differences:");
    for (std::size_t i = 0; i < std::min(faults_.size(), kFaultsShown); ++i) text += "\n  " + faults_[i];
    if (faults_.size() > kFaultsShown) text += base::join("\n  and ", faults_.size() - kFaultsShown, " more");
    throw ConfigError(text +
                      "\nHint: names translates them (gpt2, llama, bert, t5, vit, or a file); partial lets some be "
                      "missing or have another shape.");
  }

  // Tensors that are stored twice must be equal, where this rank has them.
  void compare_copies() {
    pieces_ = state_.exports.pieces_to_load();
    std::vector<char> a, b;
    for (const auto& piece : pieces_) {
      const auto found = taken_.find({piece.kind, piece.name});
      if (found == taken_.end() || found->second.equal.empty()) continue;
      for (const auto* const other : found->second.equal)
        visit(piece, [&](std::int64_t, std::int64_t from, std::int64_t numel) {
          const auto& source = *found->second.source;
          const auto width = static_cast<std::size_t>(width_of(source.dtype));
          read(source, from, numel, a);
          read(*other, from, numel, b);
          const auto bytes = static_cast<std::size_t>(numel) * width;
          const auto at = static_cast<std::size_t>(
              std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(bytes), b.begin()).first - a.begin());
          if (at >= bytes) return;
          const auto first = at / width;
          throw ConfigError(base::join("[import_weights] ", source.name, " and ", other->name, " are tied, and ", path_,
                                       " has different values: element ", from + static_cast<std::int64_t>(first),
                                       " is ", element_text(a.data() + first * width, source.dtype), " and ",
                                       element_text(b.data() + first * width, source.dtype), ". Hint: untie ",
                                       source.name, " or ", other->name, " takes that one."));
        });
    }
  }

  void fill() {
    std::map<std::string, double> changes;
    std::vector<char> bytes;
    for (const auto& piece : pieces_) {
      const auto found = taken_.find({piece.kind, piece.name});
      if (found == taken_.end()) continue;
      observe::status_page().set_unit(piece.name);
      const auto& source = *found->second.source;
      const auto own = file_dtype(piece.dtype, piece.name);
      visit(piece, [&](std::int64_t at, std::int64_t from, std::int64_t numel) {
        read(source, from, numel, bytes);
        // Through fp32 to narrower types, as masters are.
        const bool narrow = is_floating(source.dtype) && own != source.dtype;
        auto values = at::empty({numel}, narrow && own != "F64" ? at::kFloat : piece.dtype);
        const auto result = convert_elements(bytes.data(), source.dtype, numel, values.mutable_data_ptr(),
                                             narrow && own != "F64" ? "F32" : own);
        if (source.dtype == "F64" && own != "F64")
          changes[piece.name] = std::max(changes[piece.name], result.largest_change);
        piece.write(at, values);
      });
    }
    for (const auto& [name, change] : changes) changes_ += base::join(change, " ", name, "\n");
  }

  // Of a source with optimizer states.
  void take_counters() {
    const auto& progress = *source_->progress();
    auto counters = state_.exports.counters();
    counters.global_steps = progress.global_steps;
    counters.applied_steps = progress.applied_steps;
    counters.skipped_steps = progress.skipped_steps;
    counters.global_samples = progress.global_samples;
    const auto of_run = engine::scalar_type(state_.parts.plan.run.precision.param);
    if (const auto& scaler = progress.scaler; scaler && of_run == at::kHalf)
      counters.scaler = {scaler->scale, scaler->hysteresis, scaler->good, 0};
    state_.exports.set_counters(counters);
  }

  const std::string& changes() const { return changes_; }
  ImportReport& report() { return report_; }
  const std::optional<SourceProgress>& progress() const { return source_->progress(); }

  void describe_conversions(const std::map<std::string, double>& changes) {
    for (const auto& tensor : tensors_) {
      const auto found = taken_.find({tensor.kind, tensor.name});
      if (found == taken_.end() || found->second.source->dtype == tensor.dtype) continue;
      const auto change = changes.find(tensor.name);
      report_.converted.push_back(
          base::join(tensor.name, ": ", found->second.source->dtype,
                     change == changes.end() ? "" : base::join(", largest relative change ", change->second)));
    }
  }

 private:
  static std::set<std::string> others_of(const std::string& name,
                                         const std::map<std::string, std::set<std::string>>& same) {
    std::set<std::string> all{name};
    std::vector<std::string> open{name};
    while (!open.empty()) {
      const auto found = same.find(open.back());
      open.pop_back();
      if (found == same.end()) continue;
      for (const auto& other : found->second)
        if (all.insert(other).second) open.push_back(other);
    }
    all.erase(name);
    return all;
  }

  // Which of several stored tensors is taken, if the options say so.
  void choose(const std::string& name, Taken& taken) {
    if (taken.equal.empty()) return;
    std::vector<const SourceTensor*> all{taken.source};
    all.insert(all.end(), taken.equal.begin(), taken.equal.end());
    for (const auto* const one : all) {
      if (std::find(options_.untie.begin(), options_.untie.end(), one->name) == options_.untie.end()) continue;
      chosen_.insert(one->name);
      if (taken.chosen) {
        faults_.push_back("untie " + taken.source->name + " and " + one->name + ": one of them can be the values of " +
                          name);
        continue;
      }
      taken.chosen = true;
      taken.source = one;
    }
    if (!taken.chosen) return;
    std::erase(all, taken.source);
    taken.equal = all;
    auto& names = choices_[name] = {taken.source->name};
    for (const auto* const one : all) names.push_back(one->name);
  }

  static bool fits_one(const std::vector<std::string>& patterns, const std::string& name) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const std::string& pattern) { return name_matches(pattern, name); });
  }
  bool is_partial(const std::string& name) const { return fits_one(options_.partial, name); }
  bool is_wanted(const std::string& name) const { return options_.only.empty() || fits_one(options_.only, name); }

  void check(const formats::Tensor& tensor, const SourceTensor& source, const std::string& label) {
    if (source.shape != tensor.shape)
      faults_.push_back(base::join(label, ": has the shape ", shape_text(source.shape), " in the files, ",
                                   shape_text(tensor.shape), " in the model"));
    const bool same = source.dtype == tensor.dtype;
    if (tensor.kind == kBuffer) {
      const bool converted = is_floating(source.dtype) && is_floating(tensor.dtype);
      if (!same && !converted)
        faults_.push_back(label + ": is " + source.dtype + " in the files, " + tensor.dtype + " in the model");
    } else if (!same && !is_floating(source.dtype)) {
      faults_.push_back(label + ": is " + source.dtype +
                        " in the files, expected floating-point values; dequantise them first");
    }
  }

  // Calls take(at, from, numel) for the elements of a piece: from `at` in the piece, from `from` in the tensor.
  template <class Take>
  void visit(const engine::StatePiece& piece, const Take& take) {
    const auto tensor = std::find_if(tensors_.begin(), tensors_.end(), [&](const formats::Tensor& one) {
      return one.kind == piece.kind && one.name == piece.name;
    });
    for (const auto& run :
         formats::runs_between(piece.shape, tensor->slices, {}, piece.begin, piece.begin + piece.numel))
      for (std::int64_t done = 0; done < run.numel; done += kWindow)
        take(run.wanted - piece.begin + done, run.stored + done, std::min(kWindow, run.numel - done));
  }

  void read(const SourceTensor& source, std::int64_t from, std::int64_t numel, std::vector<char>& out) {
    out.resize(static_cast<std::size_t>(numel * width_of(source.dtype)));
    view_->read(source, from, numel, out.data());
    report_.bytes_read += static_cast<std::int64_t>(out.size());
  }

  engine::State& state_;
  const ImportOptions& options_;
  const std::string path_;
  std::unique_ptr<TensorSource> source_, view_;
  std::map<std::string, std::string> ties_;
  std::vector<formats::Tensor> tensors_;  // of the model that are wanted
  std::map<Key, Taken> taken_;            // by kind and name
  std::vector<std::string> faults_;
  std::set<std::string> chosen_;                             // names of ImportOptions::untie that had a choice
  std::map<std::string, std::vector<std::string>> choices_;  // by name of a tensor: the one taken, and the others
  std::vector<engine::StatePiece> pieces_;
  std::string changes_;
  ImportReport report_;
};

std::string options_text(const std::string& path, const ImportOptions& options) {
  std::string text =
      base::join(path, "\n", options.names, "\n", options.key, "\n", options.prefix, "\n", options.optimizer);
  for (const auto& pattern : options.partial) text += "\npartial " + pattern;
  for (const auto& name : options.untie) text += "\nuntie " + name;
  for (const auto& pattern : options.only) text += "\nonly " + pattern;
  return text;
}

// Of the parameters that are trained, as SourceSettings. current: the rates of the next step, not those that schedules
// begin with.
SourceSettings settings_of_run(engine::State& state, bool current) {
  const auto& settings = state.job.settings;
  const auto& optimizer = settings.optimizer;
  using Type = config::OptimizerType;
  SourceSettings run;
  for (std::size_t g = 0; g < state.parts.groups.size(); ++g) {
    if (!state.parts.groups[g].trainable) continue;
    for (const auto& member : state.parts.binding().group(static_cast<int>(g)).members) {
      const int number = state.parts.optimizer->parameter_group_of(member.name, member.aliases);
      const auto group =
          number == 0 ? config::ParameterGroup{} : settings.parameter_groups[static_cast<std::size_t>(number) - 1];
      run["lr"].insert(current ? state.parts.optimizer->lr(number) : group.lr.value_or(optimizer.lr));
      run["weight_decay"].insert(group.weight_decay.value_or(optimizer.weight_decay));
    }
  }
  const bool adam = optimizer.type == Type::Adam || optimizer.type == Type::AdamW;
  if (adam || optimizer.type == Type::Lion) run["beta1"] = {optimizer.beta1}, run["beta2"] = {optimizer.beta2};
  if (adam || optimizer.type == Type::Adagrad) run["eps"] = {optimizer.eps};
  return run;
}

bool same_values(const std::set<double>& a, const std::set<double>& b) {
  constexpr double kRounding = 1e-6;  // relative; rates that schedules have computed
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
    return std::abs(x - y) <= kRounding * std::max(std::abs(x), std::abs(y));
  });
}

std::string text_of(const std::set<double>& values) {
  std::string text;
  for (const double value : values) text += base::join(text.empty() ? "" : ", ", value);
  return text;
}

// The configuration's count. On rank 0.
void tell_other_settings(engine::State& state, const SourceSettings& stored) {
  const auto current = settings_of_run(state, true), initial = settings_of_run(state, false);
  for (const auto& [name, values] : stored) {
    const auto own = current.find(name);
    if (own == current.end() || same_values(values, own->second) || same_values(values, initial.at(name))) continue;
    base::log(LogLevel::Warning, "import: " + name + " is " + text_of(values) + " in the files and " +
                                     text_of(own->second) + " in the configuration, which is used");
  }
}

struct ImportPhase {
  ImportPhase() { observe::status_page().set_phase(observe::StatusPhase::Load); }
  ~ImportPhase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

}  // namespace

ImportReport import_weights(engine::State& state, formats::FsOps& fs, const std::string& path,
                            const ImportOptions& options) {
  const ImportPhase phase;
  const at::NoGradGuard no_grad;
  auto& comm = *state.job.comm;
  engine::agree_on(state.relay, comm, kImporting, "[import_weights] the arguments", [&] {
    state.checks.require_boundary(kImporting);
    state.checks.require_no_scope(kImporting, /*reading_too=*/true);
    return options_text(path, options);
  });
  state.stepper.flush();
  state.backward.compare_unfrozen(kImporting);
  std::optional<Importer> importer;
  (void)engine::agree_while_moving(comm, kImporting, formats::bytes_moved(), [&] {
    state.backward.admit_unfrozen();
    importer.emplace(state, fs, path, options);
    importer->match();
    if (options.optimizer && !importer->progress())
      throw ConfigError("[import_weights] " + path + " has no optimizer states. Hint: import it without optimizer.");
    importer->compare_copies();
    return "";
  });
  std::vector<std::string> all_changes;
  auto& half_loaded = state.parts.progress.half_loaded;
  state.relay.reporting([&] { state.stepper.begin_replacing(kImporting); });
  // From here on the state changes. An import need not replace all of it, so after a failure only a load makes the
  // state whole.
  half_loaded = "an import that failed halfway";
  try {
    all_changes = engine::agree_while_moving(comm, kImporting, formats::bytes_moved(), [&] {
      importer->fill();
      if (options.optimizer) importer->take_counters();
      return importer->changes();
    });
  } catch (const Error& e) {  // the same on all ranks
    half_loaded = e.what();
    throw;
  }
  half_loaded.clear();
  std::map<std::string, double> changes;
  for (const auto& text : all_changes) {
    std::istringstream in(text);
    double change = 0;
    for (std::string name; in >> change && in.get() && std::getline(in, name);)
      changes[name] = std::max(changes[name], change);
  }
  state.exports.adopt_loaded();
  state.parts.progress.worth_keeping = true;
  importer->describe_conversions(changes);
  for (const auto& line : importer->report().converted)
    if (comm.rank() == 0 && line.find("largest") != std::string::npos) base::log(LogLevel::Warning, "import: " + line);
  if (comm.rank() == 0 && importer->progress()) tell_other_settings(state, importer->progress()->settings);
  return std::move(importer->report());
}

}  // namespace zero::checkpoint
