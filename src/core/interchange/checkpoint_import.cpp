// See checkpoint_import.h.
#include "interchange/checkpoint_import.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include <zero/version.h>

#include "base/check.h"
#include "base/system.h"
#include "formats/blocks.h"
#include "formats/rank_file.h"
#include "formats/root_folder.h"
#include "interchange/element_types.h"
#include "interchange/named_source.h"

namespace zero::interchange {
namespace {

constexpr const char* kImport = "[zero checkpoint import] ";
constexpr std::int64_t kImportWindow = std::int64_t{1} << 20;  // elements
constexpr std::size_t kMostNamed = 20;

// Of the optimizers that libzero has, by their names in lower case: the name in a manifest, and the states.
struct KnownOptimizer {
  const char* lower;
  const char* name;
  std::vector<std::string> slots;
  std::vector<std::string> options{};  // states that some of its configurations have
};
const std::vector<KnownOptimizer>& known_optimizers() {
  static const std::vector<KnownOptimizer> known{
      {"adamw", "AdamW", {"exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}},
      {"adam", "Adam", {"exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}},
      {"lion", "Lion", {"exp_avg"}},
      {"sgd", "SGD", {"momentum_buffer"}},
      {"adagrad", "Adagrad", {"sum"}},
      {"rmsprop", "RMSprop", {"square_avg"}, {"momentum_buffer", "grad_avg"}},
      {"nadam", "NAdam", {"exp_avg", "exp_avg_sq"}},
      {"radam", "RAdam", {"exp_avg", "exp_avg_sq"}},
      {"adamax", "Adamax", {"exp_avg", "exp_inf"}},
      {"adadelta", "Adadelta", {"square_avg", "acc_delta"}}};
  return known;
}

const KnownOptimizer* find_optimizer(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const auto& one : known_optimizers())
    if (name == one.lower) return &one;
  return nullptr;
}

std::string names_of_optimizers() {
  std::string text;
  for (const auto& one : known_optimizers())
    text += (text.empty() ? "" : &one == &known_optimizers().back() ? " or " : ", ") + std::string(one.name);
  return text;
}

// A tensor of the checkpoint: elements of the view, converted, or zeros.
struct Target {
  std::string kind, name, dtype;
  std::vector<std::int64_t> shape;
  const SourceTensor* from = nullptr;
};

class Importer {
 public:
  Importer(formats::FsOps& fs, TensorSource& source, const std::string& label, const CheckpointImport& options)
      : options_(options), label_(label), optimizer_(find_optimizer(options.optimizer)) {
    std::optional<NameMap> map;
    if (!options.names.empty()) map = NameMap::find(fs, options.names);
    auto mapping = map ? map_names(*map, Direction::ToOurs, source.tensors(), source.aliases(), label)
                       : same_names(source.tensors(), source.aliases());
    ties_ = mapping.ties;
    view_ = named_source(source, std::move(mapping));
    aliases_ = view_->aliases();
    report_.format = source.format();
    if (const auto others = source.remarks().size(); others > 0)
      report_.remarks.push_back(base::join(others, others == 1 ? " other object is" : " other objects are",
                                           " left out. Hint: zero checkpoint inspect shows ",
                                           others == 1 ? "it" : "them"));
    progress_ = source.progress().value_or(SourceProgress{});
    join_ties();
    choose_optimizer();
    choose_kinds();
  }

  CheckpointImported write(formats::FsOps& fs, const std::string& root, const std::string& tag) {
    if (!formats::valid_tag(tag))
      throw ConfigError(kImport + ("got the tag \"" + tag) +
                        "\", expected a letter or digit and then up to 127 letters, digits, '.', '_' or '-', and not "
                        "\"latest\"");
    formats::Commit commit(fs, root, tag);
    const auto folder = formats::Folder::open(fs, root);
    if (folder.exists(tag))
      throw ConfigError(kImport + folder.path_of(tag) + " exists, expected a new tag. Hint: choose another --tag.");
    std::vector<formats::Source> sources;
    for (const auto& target : targets_) sources.push_back(source_of(target));
    const auto own = folder.folder(commit.folder_name());
    const auto file = formats::write_rank_file(own, formats::rank_file_name(0), sources);
    auto manifest = manifest_of(file);
    manifest.files.push_back(formats::write_blocks(own, {{file.file.name, file.rows}}));
    manifest.blocks = manifest.files.back().name;
    commit.publish(std::move(manifest));
    for (const auto& [name, change] : changes_)
      report_.remarks.push_back(base::join(name, ": F64 rounded to F32, largest relative change ", change));
    report_.bytes = file.file.bytes;
    return std::move(report_);
  }

 private:
  // Files may have both tensors that a map ties. Where they are equal, one is left.
  void join_ties() {
    std::map<std::string, const SourceTensor*> by_name;
    for (const auto& tensor : view_->tensors())
      if (!tensor.kind.starts_with("opt.")) by_name[tensor.name] = &tensor;
    std::set<std::string> chosen;
    for (const auto& [alias, owner] : ties_) {
      const auto mine = by_name.find(alias), other = by_name.find(owner);
      if (mine == by_name.end() || other == by_name.end()) continue;
      const bool first = is_chosen(alias), second = is_chosen(owner);
      if (first && second)
        throw ConfigError(kImport + ("got --untie " + alias) + " and --untie " + owner + ", expected one of them");
      if (first || second) {
        chosen.insert(first ? alias : owner);
        if (first) instead_[owner] = alias;
      } else if (!equal(*mine->second, *other->second)) {
        report_.remarks.push_back(alias + " and " + owner +
                                  " are tied by the map and differ: they stay two tensors. "
                                  "Hint: --untie with the name of the one that both take");
        continue;
      }
      aliases_[alias] = owner;
      left_out_.insert(alias);
    }
    for (const auto& name : options_.untie)
      if (!chosen.contains(name))
        throw ConfigError(kImport + ("got --untie " + name) + ", expected one of two tensors in " + label_ +
                          " that the map ties");
  }

  bool is_chosen(const std::string& name) const {
    return std::find(options_.untie.begin(), options_.untie.end(), name) != options_.untie.end();
  }

  bool equal(const SourceTensor& a, const SourceTensor& b) {
    if (a.shape != b.shape || a.dtype != b.dtype) return false;
    const auto width = width_of(a.dtype), numel = formats::numel_of(a.shape);
    std::vector<char> left(static_cast<std::size_t>(std::min(numel, kImportWindow) * width)), right(left.size());
    for (std::int64_t at = 0; at < numel; at += kImportWindow) {
      const auto some = std::min(kImportWindow, numel - at);
      view_->read(a, at, some, left.data());
      view_->read(b, at, some, right.data());
      if (std::memcmp(left.data(), right.data(), static_cast<std::size_t>(some * width)) != 0) return false;
    }
    return true;
  }

  void choose_optimizer() {
    for (const auto& tensor : view_->tensors())
      if (tensor.kind.starts_with("opt.")) slots_.insert(tensor.kind.substr(4));
    if (!options_.optimizer.empty() && !optimizer_)
      throw ConfigError(kImport + ("got the optimizer \"" + options_.optimizer) + "\", expected " +
                        names_of_optimizers());
    if (!optimizer_) optimizer_ = find_optimizer(progress_.optimizer);
    if (!optimizer_)
      optimizer_ = find_optimizer(slots_.contains("acc_delta")         ? "adadelta"
                                  : slots_.contains("square_avg")      ? "rmsprop"
                                  : slots_.contains("exp_inf")         ? "adamax"
                                  : slots_.contains("momentum_buffer") ? "sgd"
                                  : slots_.contains("sum")             ? "adagrad"
                                                                       : "adamw");
    std::set<std::string> wanted(optimizer_->slots.begin(), optimizer_->slots.end());
    for (const auto& slot : optimizer_->options)
      if (slots_.contains(slot)) wanted.insert(slot);
    for (const auto& slot : slots_)
      if (!wanted.contains(slot))
        report_.remarks.push_back("the optimizer's " + slot + " is left out: " + optimizer_->name + " has none");
    if (slots_.empty())
      report_.remarks.push_back(std::string("no states of an optimizer: those of ") + optimizer_->name +
                                " start at zero. Hint: --optimizer for another");
    slots_ = wanted;
  }

  static bool fits(const std::vector<std::string>& patterns, const std::string& name) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const auto& one) { return name_matches(one, name); });
  }

  // "weight": of a file that does not say what it trains.
  std::string kind_of(const SourceTensor& tensor, bool masters) const {
    if (fits(options_.buffers, tensor.name)) return "buffer";
    if (fits(options_.frozen, tensor.name)) return "param";
    if (tensor.kind != "weight") return tensor.kind;
    if (!is_floating(tensor.dtype)) return "buffer";
    return masters ? "param" : "master";
  }

  const SourceTensor& weight_named(const std::string& name) const {
    const auto& all = view_->tensors();
    return *std::find_if(all.begin(), all.end(),
                         [&](const auto& one) { return one.name == name && !one.kind.starts_with("opt."); });
  }

  void choose_kinds() {
    bool masters = false;
    std::map<std::pair<std::string, std::string>, const SourceTensor*> states;
    for (const auto& tensor : view_->tensors()) {
      masters = masters || tensor.kind == "master";
      states[{tensor.kind, tensor.name}] = &tensor;
    }
    std::vector<std::string> refused, without;
    for (const auto& named : view_->tensors()) {
      if (named.kind.starts_with("opt.") || left_out_.contains(named.name)) continue;
      // Another's values under this name.
      const auto other = instead_.find(named.name);
      const auto from = other == instead_.end() ? named.name : other->second;
      const auto& stored = other == instead_.end() ? named : weight_named(from);
      auto tensor = stored;
      tensor.name = named.name;
      const auto kind = kind_of(tensor, masters);
      if (kind != "master") {
        ++(kind == "buffer" ? report_.buffers : report_.frozen);
        targets_.push_back({kind, tensor.name, tensor.dtype, tensor.shape, &stored});
        continue;
      }
      if (!is_floating(tensor.dtype)) refused.push_back(tensor.name + " (" + tensor.dtype + ")");
      ++report_.masters;
      targets_.push_back({kind, tensor.name, "F32", tensor.shape, &stored});
      for (const auto& slot : slots_) {
        const auto found = states.find({"opt." + slot, from});
        const bool there = found != states.end();
        if (there)
          ++report_.states;
        else if (slot == *slots_.begin())
          without.push_back(tensor.name);
        if (there && found->second->shape != tensor.shape)
          throw ConfigError(kImport + label_ + ": " + slot + " of " + tensor.name + " has another shape than it");
        targets_.push_back({"opt." + slot, tensor.name, "F32", tensor.shape, there ? found->second : nullptr});
      }
    }
    if (!refused.empty())
      throw ConfigError(kImport + label_ + ": got parameters that are not floating-point: " + list(refused) +
                        ". Hint: dequantise them first, or --buffers PATTERN.");
    if (report_.masters == 0) throw ConfigError(kImport + label_ + ": got no trained parameter, expected at least one");
    if (report_.states > 0 && !without.empty())
      report_.remarks.push_back("without states of the optimizer, which start at zero: " + list(without));
  }

  static std::string list(const std::vector<std::string>& names) {
    std::string text;
    for (std::size_t i = 0; i < std::min(names.size(), kMostNamed); ++i) text += (i == 0 ? "" : ", ") + names[i];
    return names.size() <= kMostNamed ? text : base::join(text, " and ", names.size() - kMostNamed, " more");
  }

  formats::Source source_of(const Target& target) {
    formats::Source source;
    source.kind = target.kind;
    source.name = target.name;
    source.dtype = target.dtype;
    source.shape = target.shape;
    source.requires_grad = target.kind == "master" || target.kind.starts_with("opt.");
    source.numel = formats::numel_of(target.shape);
    source.must_be_finite = source.requires_grad;
    source.read = [this, &target](std::int64_t at, std::int64_t numel) {
      return std::shared_ptr<const void>(part_, convert(target, at, numel));
    };
    return source;
  }

  // A part of a tensor at a time, in one buffer.
  const char* convert(const Target& target, std::int64_t at, std::int64_t numel) {
    const auto width = width_of(target.dtype);
    part_->assign(static_cast<std::size_t>(numel * width), 0);
    if (!target.from) return part_->data();
    for (std::int64_t done = 0; done < numel; done += kImportWindow) {
      const auto some = std::min(kImportWindow, numel - done);
      char* const to = part_->data() + done * width;
      if (target.from->dtype == target.dtype) {
        view_->read(*target.from, at + done, some, to);
        continue;
      }
      raw_.resize(static_cast<std::size_t>(some * width_of(target.from->dtype)));
      view_->read(*target.from, at + done, some, raw_.data());
      const auto change = convert_elements(raw_.data(), target.from->dtype, some, to, target.dtype);
      if (target.from->dtype == "F64") {
        auto& largest = changes_[target.kind + " of " + target.name];
        largest = std::max(largest, change.largest_change);
      }
    }
    return part_->data();
  }

  formats::Manifest manifest_of(const formats::RankFile& file) {
    formats::Manifest m;
    m.libzero_version = ZERO_VERSION;
    m.created = base::utc_now();
    m.applied_steps = progress_.applied_steps;
    if (m.applied_steps == 0 && slots_.contains("momentum_buffer")) {  // the first update would drop it
      m.applied_steps = 1;
      report_.remarks.push_back("the source does not count updates, and has momenta: counts 1");
    }
    m.skipped_steps = progress_.skipped_steps;
    // Optimizers of others may count an update of their own before the first step.
    m.global_steps = std::max(progress_.global_steps, m.applied_steps + progress_.skipped_steps);
    if (m.global_steps != progress_.global_steps && progress_.global_steps > 0)
      report_.remarks.push_back(base::join("the optimizer was updated ", progress_.applied_steps, " times in ",
                                           progress_.global_steps, " steps: counts ", m.global_steps, " steps"));
    m.global_samples = progress_.global_samples;
    report_.global_steps = m.global_steps;
    report_.optimizer = m.optimizer = optimizer_->name;
    m.slots = optimizer_->slots;
    m.parameter_dtype = m.gradient_dtype = m.wire_dtype = progress_.scaler ? "F16" : "F32";
    if (const auto& scaler = progress_.scaler) {
      m.loss_scale = scaler->scale;
      m.hysteresis = scaler->hysteresis;
      m.good = scaler->good;
      m.config = {{"fp16.loss_scale_window", std::to_string(scaler->window)},
                  {"fp16.hysteresis", std::to_string(scaler->most_hysteresis)},
                  {"fp16.min_loss_scale", std::to_string(scaler->smallest)},
                  {"fp16.consecutive_hysteresis", scaler->consecutive ? "true" : "false"},
                  {"fp16.loss_scale", scaler->dynamic ? "0" : element_text(&scaler->scale, "F64")}};
    }
    m.user_state = "";
    m.aliases = aliases_;
    m.files.push_back(file.file);
    m.tensors = file.tensors;
    m.ranks.resize(1);  // no private state
    return m;
  }

  const CheckpointImport& options_;
  std::string label_;
  const KnownOptimizer* optimizer_;
  std::unique_ptr<TensorSource> view_;
  std::map<std::string, std::string> ties_, aliases_;
  std::map<std::string, std::string> instead_;  // name of a tensor -> the name of the one whose values it takes
  std::set<std::string> left_out_, slots_;
  SourceProgress progress_;
  std::vector<Target> targets_;
  CheckpointImported report_;
  std::shared_ptr<std::vector<char>> part_ = std::make_shared<std::vector<char>>();
  std::vector<char> raw_;
  std::map<std::string, double> changes_;
};

}  // namespace

CheckpointImported import_checkpoint(formats::FsOps& fs, TensorSource& source, const std::string& label,
                                     const std::string& root, const std::string& tag, const CheckpointImport& options) {
  return Importer(fs, source, label, options).write(fs, root, tag);
}

}  // namespace zero::interchange
