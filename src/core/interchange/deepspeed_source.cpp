// See deepspeed_source.h. Layouts as in deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py.
#include "interchange/deepspeed_source.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "base/printable.h"
#include "formats/safetensors.h"
#include "interchange/deepspeed_files.h"
#include "interchange/deepspeed_groups.h"
#include "interchange/deepspeed_scaler.h"
#include "interchange/deepspeed_stage0.h"
#include "interchange/stored_source.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;
using formats::numel_of;

// A flat tensor in one rank's file, with the place of its first element in the rank's flat elements.
struct Flat {
  std::size_t file = 0;
  StoredTensor stored;
  std::int64_t begin = 0;
  std::int64_t numel() const { return numel_of(stored.shape); }
};
// What a rank's file has of one kind: "master", "opt.exp_avg", ...; one or more flat tensors.
using RankFlats = std::map<std::string, std::vector<Flat>>;

struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t numel() const { return numel_of(shape); }
};

class DeepSpeedSource : public StoredSource {
 public:
  DeepSpeedSource(formats::Folder tag, const SourceOptions& options)
      : StoredSource("deepspeed", std::move(tag), options), names_(deepspeed_files(files_.root())) {
    read_model();
    if (names_.universal) {
      read_universal();
      read_rest_of_module();
    } else if (!names_.optim.empty()) {
      read_partitions();
    } else {
      read_stage0();
    }
    for (const auto& [name, stored] : ties_) {
      const bool there =
          std::any_of(tensors().begin(), tensors().end(),
                      [&, &stored = stored](const SourceTensor& one) { return one.name == own_name(stored); });
      if (there)
        alias(name, stored);
      else
        remark(name + " is tied to " + stored + ", which is not stored");
    }
    if (!optimizer_known_ && progress_) progress_->optimizer = optimizer_of_slots();
    sort();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { fail_damaged(files_.root().path(), what); }

  std::size_t world() const { return names_.optim.empty() ? names_.model.size() : names_.optim.size(); }

  // --- the model's files: shapes, buffers, frozen parameters, ties, counters ------------------------

  void read_model() {
    for (std::size_t rank = 0; rank < names_.model.size(); ++rank) {
      const auto file = files_.add(names_.model[rank]);
      const auto one = archive(file);
      const auto root = one.root();
      if (rank == 0) {
        read_counters(root);
        if (root.has("param_shapes"))
          for (const auto& group : root.at("param_shapes").items()) {
            groups_.emplace_back();
            for (const auto& [name, shape] : group.entries()) groups_.back().push_back({name, shape.shape()});
          }
        if (root.has("shared_params"))
          for (const auto& [name, stored] : root.at("shared_params").entries()) ties_[name] = stored.text();
        read_buffers(file, one);
        for (const auto& [key, value] : root.entries())
          if (!known_keys().contains(key) && !value.is_none())
            remark(base::printable(key + ": " + value.line(), base::Lines::Escape));
      }
      if (root.has("frozen_param_shapes")) read_frozen(rank, file, one);
    }
    if (!names_.optim.empty() && !names_.universal) read_rest_of_module();
    for (auto& [name, frozen] : frozen_) {
      const auto dtype = frozen.pieces.empty() ? "F32" : frozen.pieces[0].stored.dtype;
      add("param", name, dtype, frozen.shape, std::move(frozen.pieces));
    }
  }

  static const std::set<std::string>& known_keys() {
    static const std::set<std::string> keys{"module",
                                            "buffer_names",
                                            "optimizer",
                                            "param_shapes",
                                            "frozen_param_shapes",
                                            "frozen_param_fragments",
                                            "shared_params",
                                            "global_steps",
                                            "global_samples",
                                            "skipped_steps",
                                            "dp_world_size",
                                            "mp_world_size",
                                            "ds_version",
                                            "checkpoint_parallel_dimensions"};
    return keys;
  }

  void read_counters(const PickleView& root) {
    if (root.has("mp_world_size") && root.at("mp_world_size").count() != 1)
      fail(base::join("is of ", root.at("mp_world_size").count(), " tensor-parallel ranks, expected 1"));
    if (root.has("dp_world_size") && !names_.universal && world() > 1 &&
        root.at("dp_world_size").count() != static_cast<std::int64_t>(world()))
      fail(base::join("has files of ", world(), " ranks, expected ", root.at("dp_world_size").count()));
    progress_.emplace();
    const auto count = [&](const char* key, std::int64_t& out) {
      if (root.has(key)) out = root.at(key).count(formats::kMostCount);
    };
    count("global_steps", progress_->global_steps);
    count("skipped_steps", progress_->skipped_steps);
    count("global_samples", progress_->global_samples);
    progress_->applied_steps = std::max<std::int64_t>(0, progress_->global_steps - progress_->skipped_steps);
    if (!root.has("ds_config") || !root.at("ds_config").is_dict()) return;
    const auto config = root.at("ds_config");
    if (config.has("fp16") && config.at("fp16").is_dict() && config.at("fp16").has("enabled"))
      fp16_ = config.at("fp16").at("enabled").node().integer != 0;
    if (config.has("optimizer") && config.at("optimizer").is_dict() && config.at("optimizer").has("type")) {
      progress_->optimizer = config.at("optimizer").at("type").text();
      optimizer_known_ = true;
    }
  }

  void read_buffers(std::size_t file, const TorchArchive& one) {
    const auto root = one.root();
    if (!root.has("buffer_names") || !root.has("module")) return;
    const auto module = root.at("module");
    for (const auto& item : root.at("buffer_names").items()) {
      const auto name = item.text();
      buffers_.insert(name);
      if (module.has(name)) add("buffer", name, file, one.require_tensor(module.at(name)));
    }
  }

  // Whole tensors up to stage 2; at stage 3 each rank has the next ceil(n / W) elements, the last one fewer or padding.
  void read_frozen(std::size_t rank, std::size_t file, const TorchArchive& one) {
    const auto root = one.root();
    const auto fragments = root.at("frozen_param_fragments");
    for (const auto& [name, view] : root.at("frozen_param_shapes").entries()) {
      auto& frozen = frozen_[name];
      const auto shape = view.shape();
      if (rank == 0) frozen.shape = shape;
      if (frozen.shape != shape) view.fail("another shape than rank 0's", "the same");
      const auto ranks = static_cast<std::int64_t>(names_.model.size()), all = numel_of(shape);
      const auto share = (all + ranks - 1) / ranks;
      const auto begin = std::min(all, static_cast<std::int64_t>(rank) * share);
      Piece piece;
      piece.begin = begin;
      piece.numel = std::min(share, all - begin);
      piece.file = file;
      piece.stored = one.require_tensor(fragments.at(name));
      if (numel_of(piece.stored.shape) < piece.numel)
        fragments.at(name).fail(base::join("a part of ", numel_of(piece.stored.shape), " elements"),
                                base::join("at least ", piece.numel));
      frozen.pieces.push_back(std::move(piece));
    }
  }

  // Up to stage 2 the module is whole. Some of DeepSpeed's optimizers do not list frozen parameters in addition to it.
  void read_rest_of_module() {
    if (names_.model.size() != 1 || (groups_.empty() && !names_.universal)) return;
    std::set<std::string> known = buffers_;
    if (names_.universal) {
      const auto zero = files_.root().folder("zero").names();
      known.insert(zero.begin(), zero.end());
    }
    for (const auto& group : groups_)
      for (const auto& parameter : group) known.insert(parameter.name);
    const auto one = archive(0);
    if (!one.root().has("module")) return;
    for (const auto& [name, value] : one.root().at("module").entries())
      if (auto stored = one.tensor(value);
          stored && !known.contains(name) && !frozen_.contains(name) && !ties_.contains(name))
        add("param", name, 0, *std::move(stored));
  }

  // --- the optimizer's files of stages 1 to 3 -------------------------------------------------------

  void read_partitions() {
    std::vector<std::vector<RankFlats>> ranks;  // by rank and group; stage 3: one group
    int stage = -1;
    for (const auto& name : names_.optim) {
      const auto file = files_.add(name);
      const auto one = archive(file);
      const auto states = one.root().at("optimizer_state_dict");
      const auto own = stage_of(states.at("zero_stage"));
      if (stage >= 0 && own != stage) fail(base::join("has files of stages ", stage, " and ", own));
      stage = own;
      check_count(states.at("partition_count"));
      if (ranks.empty()) progress_->scaler = read_deepspeed_scaler(states, fp16_);
      if (ranks.empty()) progress_->settings = read_deepspeed_settings(states);
      ranks.push_back(stage == 3 ? stage3_flats(file, one, states) : stage2_flats(file, one, states));
      if (stage < 3 && ranks.size() == 1 && states.has("param_alignment_paddings"))
        for (const auto& group : states.at("param_alignment_paddings").items()) {
          paddings_.emplace_back();
          for (const auto& padding : group.items()) paddings_.back().push_back(padding.count(1 << 30));
        }
      slice_mappings_.emplace_back();
      if (stage < 3 && states.has("param_slice_mappings"))
        for (const auto& group : states.at("param_slice_mappings").items()) {
          slice_mappings_.back().emplace_back();
          for (const auto& [name_, address] : group.entries())
            slice_mappings_.back().back()[name_] = {address.attribute("start").count(),
                                                    address.attribute("numel").count()};
        }
    }
    if (groups_.empty()) fail("has no param_shapes in its model's file");
    for (const auto& rank : ranks)
      for (std::size_t g = 0; g < rank.size(); ++g)
        if (rank.size() != ranks[0].size() || keys_of(rank[g]) != keys_of(ranks[0][g]))
          fail("has other states of the optimizer on one rank than on rank 0");
    if (stage == 3)
      add_stage3(ranks);
    else
      add_stage2(ranks);
  }

  static std::set<std::string> keys_of(const RankFlats& flats) {
    std::set<std::string> keys;
    for (const auto& [kind, parts] : flats) keys.insert(kind);
    return keys;
  }

  static int stage_of(const PickleView& value) {
    // An enumeration is called with its number.
    if (value.is_object("deepspeed.runtime.zero.config.ZeroStageEnum") && value.node().arguments().size() == 1)
      return static_cast<int>(PickleView(*value.node().arguments()[0], value.path(), value.place()).count(3));
    return static_cast<int>(value.count(3));
  }

  void check_count(const PickleView& count) const {
    const auto check = [&](const PickleView& one) {
      if (one.count() != static_cast<std::int64_t>(world()))
        one.fail(base::join("of ", one.count(), " ranks"),
                 base::join(world(), ", as many as files of the optimizer: files are missing, or of experts"));
    };
    if (count.node().is(pickle::Kind::List))
      for (const auto& one : count.items()) check(one);
    else
      check(count);
  }

  // The states of one group: flat tensors become "opt.NAME", the step count is compared with the others'.
  void take_states(std::size_t file, const TorchArchive& one, const PickleView& states, std::int64_t begin,
                   std::int64_t least, RankFlats& flats) {
    for (const auto& [name, value] : states.entries()) {
      const auto stored = one.tensor(value);
      if (name == "step") {
        take_step(stored ? count_of(file, *stored) : value.count(formats::kMostCount));
      } else if (stored && stored->shape.size() == 1) {
        if (stored->shape[0] < least)
          value.fail(base::join(stored->shape[0], " elements"), base::join("at least ", least));
        flats["opt." + name].push_back({file, *stored, begin});
      } else if (stored) {
        value.fail(base::join("a tensor of ", stored->shape.size(), " dimensions"), "a flat one");
      }
    }
  }

  // torch's Adam and AdamW have the same states; AdamW says so in its groups.
  void note_groups(const PickleView& optimizer) {
    if (!optimizer.has("param_groups")) return;
    for (const auto& group : optimizer.at("param_groups").items())
      if (group.is_dict() && group.has("decoupled_weight_decay"))
        decoupled_ = !(group.at("decoupled_weight_decay").node().is(pickle::Kind::Bool) &&
                       group.at("decoupled_weight_decay").node().integer == 0);
  }

  void take_step(std::int64_t step) {
    if (applied_ && *applied_ != step && !steps_differ_) {
      steps_differ_ = true;
      remark(base::join("parameters have other step counts, such as ", *applied_, " and ", step,
                        ": the largest is taken"));
    }
    applied_ = std::max(applied_.value_or(0), step);
    progress_->applied_steps = *applied_;
  }

  std::vector<RankFlats> stage2_flats(std::size_t file, const TorchArchive& one, const PickleView& states) {
    std::vector<RankFlats> groups;
    const auto base = states.at("base_optimizer_state");
    // Elastic saves have a list of states; others torch's dictionary by group.
    std::map<std::string, PickleView> by_group;
    if (base.is_dict()) {
      note_groups(base);
      for (const auto& [key, value] : base.at("state").entries()) by_group.emplace(key, value);
    } else {
      const auto list = base.items();
      for (std::size_t g = 0; g < list.size(); ++g) by_group.emplace(std::to_string(g), list[g]);
    }
    for (const auto& master : states.at("single_partition_of_fp32_groups").items()) {
      RankFlats flats;
      const auto stored = one.require_tensor(master);
      if (stored.shape.size() != 1) master.fail("a tensor of another shape", "a flat one");
      flats["master"].push_back({file, stored, 0});
      const auto found = by_group.find(std::to_string(groups.size()));
      if (found != by_group.end()) take_states(file, one, found->second, 0, stored.shape[0], flats);
      groups.push_back(std::move(flats));
    }
    return groups;
  }

  std::vector<RankFlats> stage3_flats(std::size_t file, const TorchArchive& one, const PickleView& states) {
    RankFlats flats;
    std::map<std::string, PickleView> by_group;
    note_groups(states.at("optimizer_state_dict"));
    for (const auto& [key, value] : states.at("optimizer_state_dict").at("state").entries())
      by_group.emplace(key, value);
    std::int64_t begin = 0;
    std::size_t g = 0;
    for (const auto& master : states.at("fp32_flat_groups").items()) {
      const auto stored = one.require_tensor(master);
      if (stored.shape.size() != 1) master.fail("a tensor of another shape", "a flat one");
      flats["master"].push_back({file, stored, begin});
      const auto found = by_group.find(std::to_string(g++));
      if (found != by_group.end()) take_states(file, one, found->second, begin, stored.shape[0], flats);
      begin += stored.shape[0];
    }
    for (const auto& [kind, parts] : flats)
      if (parts.size() != flats["master"].size()) fail(kind + " is not there for all groups of a rank");
    return {std::move(flats)};
  }

  // Parameters of a group follow each other, each with its padding; rank r has the next run of them.
  void add_stage2(const std::vector<std::vector<RankFlats>>& ranks) {
    if (ranks[0].size() != groups_.size())
      fail(base::join("has ", ranks[0].size(), " groups of masters and ", groups_.size(), " of shapes"));
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      std::vector<std::int64_t> begins{0};  // of each rank's run
      for (const auto& rank : ranks) begins.push_back(begins.back() + rank[g].at("master")[0].numel());
      std::int64_t offset = 0;
      if (!paddings_.empty() && (paddings_.size() != groups_.size() || paddings_[g].size() != groups_[g].size()))
        fail("has param_alignment_paddings of another number of parameters");
      std::vector<std::map<std::string, std::pair<std::int64_t, std::int64_t>>> mapped(ranks.size());
      for (std::size_t p = 0; p < groups_[g].size(); ++p) {
        const auto& parameter = groups_[g][p];
        for (const auto& [kind, unused] : ranks[0][g]) {
          std::vector<Piece> pieces;
          for (std::size_t r = 0; r < ranks.size(); ++r) {
            const auto first = std::max(offset, begins[r]);
            const auto last = std::min(offset + parameter.numel(), begins[r + 1]);
            if (first >= last) continue;
            const auto& flat = ranks[r][g].at(kind)[0];
            pieces.push_back(piece_of(flat, first - offset, last - first, first - begins[r]));
            mapped[r][parameter.name] = {first - begins[r], last - first};
          }
          add_flat(kind, parameter, std::move(pieces));
        }
        offset += parameter.numel() + (paddings_.empty() ? 0 : paddings_[g][p]);
      }
      // Flat groups are padded to a multiple of 2 W, with or without masters of the padding.
      const auto unit = 2 * static_cast<std::int64_t>(ranks.size());
      const auto rounded = [&](std::int64_t numel) { return (numel + unit - 1) / unit * unit; };
      if (rounded(offset) != rounded(begins.back()))
        fail(base::join("has ", begins.back(), " elements of masters in group ", g, ", expected ", offset));
      for (std::size_t r = 0; r < ranks.size(); ++r)
        if (!slice_mappings_[r].empty() && (g >= slice_mappings_[r].size() || slice_mappings_[r][g] != mapped[r]))
          fail(base::join("has a param_slice_mappings of rank ", r, " and group ", g,
                          " that disagrees with its shapes"));
    }
  }

  // Of each parameter's n elements rank r has the next ceil(n / W), the last one fewer and padding.
  void add_stage3(const std::vector<std::vector<RankFlats>>& ranks) {
    const auto world = static_cast<std::int64_t>(ranks.size());
    std::int64_t offset = 0;
    for (const auto& group : groups_)
      for (const auto& parameter : group) {
        const auto share = (parameter.numel() + world - 1) / world;
        for (const auto& [kind, unused] : ranks[0][0]) {
          std::vector<Piece> pieces;
          for (std::int64_t r = 0; r < world; ++r) {
            const auto begin = std::min(parameter.numel(), r * share);
            const auto end = std::min(parameter.numel(), begin + share);
            for (const auto& flat : ranks[static_cast<std::size_t>(r)][0].at(kind)) {
              const auto first = std::max(offset, flat.begin);
              const auto last = std::min(offset + (end - begin), flat.begin + flat.numel());
              if (first < last)
                pieces.push_back(piece_of(flat, begin + (first - offset), last - first, first - flat.begin));
            }
          }
          add_flat(kind, parameter, std::move(pieces));
        }
        offset += share;
      }
    for (const auto& rank : ranks)
      for (const auto& [kind, flats] : rank[0])
        if (flats.back().begin + flats.back().numel() != offset)
          fail(base::join("has ", flats.back().begin + flats.back().numel(), " elements of ", kind,
                          " on one rank, expected ", offset));
  }

  static Piece piece_of(const Flat& flat, std::int64_t begin, std::int64_t numel, std::int64_t at) {
    Piece piece;
    piece.begin = begin;
    piece.numel = numel;
    piece.file = flat.file;
    piece.stored = flat.stored;
    piece.at = at;
    return piece;
  }

  void add_flat(const std::string& kind, const Parameter& parameter, std::vector<Piece> pieces) {
    const auto dtype = pieces.empty() ? std::string("F32") : pieces[0].stored.dtype;
    add(kind, parameter.name, dtype, parameter.shape, std::move(pieces));
  }

  // --- universal checkpoints ------------------------------------------------------------------------

  void read_universal() {
    const auto zero = files_.root().folder("zero");
    if (zero.exists("optimizer_state.pt")) {
      const auto one = archive(files_.add("zero/optimizer_state.pt"));
      if (!progress_) progress_.emplace();
      if (one.root().is_dict()) progress_->scaler = read_deepspeed_scaler(one.root(), fp16_);
      progress_->settings = read_deepspeed_settings(one.root());
    }
    std::map<std::string, std::vector<std::int64_t>> shapes;
    for (const auto& group : groups_)
      for (const auto& parameter : group) shapes[parameter.name] = parameter.shape;
    for (const auto& name : zero.names()) {
      const auto info = zero.info_of(name);
      if (!info || !info->directory || buffers_.contains(name) || frozen_.contains(name) || ties_.contains(name))
        continue;
      const auto folder = zero.folder(name);
      const auto states = folder.names();
      const bool trained = shapes.contains(name) || std::any_of(states.begin(), states.end(), [](const auto& state) {
                             return state.ends_with(".pt") && state != "fp32.pt" && state != "step.pt";
                           });
      for (const auto& state : states) {
        if (!state.ends_with(".pt")) continue;
        const auto file = files_.add("zero/" + name + "/" + state);
        const auto one = archive(file);
        const auto slot = state.substr(0, state.size() - 3);
        const auto root = one.root();
        const auto value = root.is_dict() && root.has("param") ? root.at("param") : root;
        if (slot == "step") {
          const auto stored = one.tensor(value);
          if (!progress_) progress_.emplace();
          take_step(stored ? count_of(file, *stored) : value.count(formats::kMostCount));
          continue;
        }
        auto stored = one.require_tensor(value);
        const auto shape = shapes.contains(name) ? shapes.at(name) : stored.shape;
        if (numel_of(shape) != numel_of(stored.shape))
          value.fail(base::join(numel_of(stored.shape), " elements"), base::join(numel_of(shape)));
        Piece piece;
        piece.numel = numel_of(shape);
        piece.file = file;
        piece.stored = std::move(stored);
        const auto dtype = piece.stored.dtype;
        std::vector<Piece> pieces;
        pieces.push_back(std::move(piece));
        add(slot != "fp32" ? "opt." + slot : trained ? "master" : "param", name, dtype, shape, std::move(pieces));
      }
      shapes.erase(name);
    }
    for (const auto& [name, shape] : shapes)
      if (numel_of(shape) > 0) fail("has no zero/" + name + ", expected all parameters of its model's file");
  }

  // --- stage 0 --------------------------------------------------------------------------------------

  void read_stage0() {
    if (names_.model.size() != 1)
      fail("has no files *_optim_states.pt next to those of each rank's model, expected both");
    const auto file = files_.add(names_.model[0]);
    const auto one = archive(file);
    if (const auto root = one.root(); root.has("optimizer") && root.at("optimizer").is_dict()) {
      progress_->scaler = read_deepspeed_scaler(root.at("optimizer"), fp16_);
      progress_->settings = read_deepspeed_settings(root.at("optimizer"));
    }
    const auto plan = plan_stage0(one, buffers_);
    for (const auto& entry : plan.tensors) add(entry.kind, entry.name, file, entry.stored);
    for (const auto& [name, stored] : plan.ties) ties_[name] = stored;
    for (const auto& text : plan.remarks) remark(text);
    for (const auto& step : plan.steps) take_step(count_of(file, step));
  }

  std::string optimizer_of_slots() const {
    std::set<std::string> kinds;
    for (const auto& tensor : tensors()) kinds.insert(tensor.kind);
    if (kinds.contains("opt.exp_avg_sq")) return decoupled_ ? "AdamW" : "Adam";
    return kinds.contains("opt.acc_delta")         ? "Adadelta"
           : kinds.contains("opt.square_avg")      ? "RMSprop"
           : kinds.contains("opt.exp_inf")         ? "Adamax"
           : kinds.contains("opt.momentum_buffer") ? "SGD"
           : kinds.contains("opt.sum")             ? "Adagrad"
                                                   : "";
  }

  struct Frozen {
    std::vector<std::int64_t> shape;
    std::vector<Piece> pieces;
  };

  DeepSpeedFiles names_;
  std::vector<std::vector<Parameter>> groups_;
  std::map<std::string, std::string> ties_;
  std::map<std::string, Frozen> frozen_;
  std::set<std::string> buffers_;
  std::vector<std::vector<std::int64_t>> paddings_;  // after each parameter of a group
  // By rank and group: where a parameter begins in the rank's run, and how many of its elements are there.
  std::vector<std::vector<std::map<std::string, std::pair<std::int64_t, std::int64_t>>>> slice_mappings_;
  std::optional<std::int64_t> applied_;
  bool fp16_ = false;  // as far as the configuration in the files says
  bool optimizer_known_ = false, decoupled_ = true, steps_differ_ = false;
};

// "step100\n" in a file of the directory; empty if it is not there.
std::string tag_in(const formats::Folder& folder, const char* name) {
  if (!folder.exists(name)) return "";
  auto text = folder.read_file(name, 4096);
  while (text.ends_with('\n') || text.ends_with('\r') || text.ends_with(' ')) text.pop_back();
  return formats::valid_file_name(text) ? text : "";
}

}  // namespace

bool has_deepspeed(const formats::Folder& folder) {
  if (is_deepspeed_tag(folder)) return true;
  for (const char* const latest : {"latest", "latest_universal"}) {
    const auto tag = tag_in(folder, latest);
    const auto info = tag.empty() ? std::nullopt : folder.info_of(tag);
    if (info && info->directory && is_deepspeed_tag(folder.folder(tag))) return true;
  }
  return false;
}

std::unique_ptr<TensorSource> open_deepspeed(formats::FsOps& fs, const std::string& path,
                                             const SourceOptions& options) {
  auto folder = formats::Folder::open(fs, path);
  if (options.tag.empty() && is_deepspeed_tag(folder))
    return std::make_unique<DeepSpeedSource>(std::move(folder), options);
  auto tag = options.tag;
  if (tag.empty()) tag = tag_in(folder, "latest");
  if (tag.empty()) tag = tag_in(folder, "latest_universal");
  if (!formats::valid_file_name(tag))
    fail_damaged(path, "has no file \"latest\" with the name of a checkpoint. Hint: --tag");
  return std::make_unique<DeepSpeedSource>(folder.folder(tag), options);
}

}  // namespace zero::interchange
