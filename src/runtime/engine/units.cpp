#include "engine/units.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <zero/moe.h>
#include <zero/nn.h>
#include <zero/tiled_linear.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/name_pattern.h"
#include "base/plain_name.h"
#include "engine/checks.h"
#include "sharding/kept_fp32.h"
#include "torch_hooks/deferred_init.h"
#include "torch_hooks/gradient_hook.h"
#include "torch_hooks/interception.h"
#include "torch_hooks/storage_access.h"

namespace zero::engine {
namespace {

std::string child_path(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

// How a layer of zero/nn.h wants its parameter to be cut.
std::optional<sharding::ParameterCut> cut_by(const torch::nn::Module& module, const std::string& parameter) {
  const auto* const layer = dynamic_cast<const nn::ParallelLayer*>(&module);
  if (layer == nullptr) return {};
  for (const auto& wanted : layer->cuts()) {
    if (wanted.parameter != parameter) continue;
    sharding::ParameterCut cut;
    cut.kind = wanted.kind == nn::LayerCut::Kind::Column ? sharding::CutKind::Column
               : wanted.kind == nn::LayerCut::Kind::Row  ? sharding::CutKind::Row
                                                         : sharding::CutKind::Whole;
    cut.cut.pieces = wanted.pieces;
    cut.cut.multiple = wanted.multiple;
    cut.gather_output = wanted.gather_output;
    cut.scatter_input = wanted.scatter_input;
    cut.sequence = wanted.sequence;
    cut.sum_gradient = wanted.sum_gradient;
    return cut;
  }
  return sharding::ParameterCut{};
}

void note_embedding(const torch::nn::Module& module, ModelParameter& parameter) {
  const auto* const embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module);
  parameter.table |= embedding != nullptr || dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module) != nullptr;
  if (embedding == nullptr) return;
  const auto& options = embedding->options;
  parameter.padding_idx = options.padding_idx().value_or(-1);
  parameter.whole_only = options.max_norm()             ? "max_norm"
                         : options.sparse()             ? "sparse"
                         : options.scale_grad_by_freq() ? "scale_grad_by_freq"
                                                        : nullptr;
}

struct Walk {
  const std::vector<std::string>& named;
  std::vector<std::string> seen_units;
  std::unordered_map<c10::TensorImpl*, std::size_t> known;
  std::vector<ModelParameter> found;
  std::string faults;

  // expert: the one that the module belongs to, with the path of its modules below it in `rest`.
  void visit(torch::nn::Module& module, const std::string& path, const std::string& unit,
             const std::optional<ExpertParameter>& expert) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto name = child_path(path, item.key());
      const auto& tensor = item.value();
      if (!tensor.defined()) continue;
      const auto [it, fresh] = known.try_emplace(tensor.unsafeGetTensorImpl(), found.size());
      if (fresh)
        found.push_back(
            {name, {}, tensor, unit, tensor.sizes().vec(), cut_by(module, item.key()), tensor.sizes().vec()});
      else
        found[it->second].aliases.push_back(name);
      note_embedding(module, found[it->second]);
      note_expert(found[it->second], name, fresh, expert, item.key());
    }
    const auto* const layer = dynamic_cast<const ExpertLayer*>(&module);
    const bool divided = layer != nullptr && layer->ep_size() > 1;
    if (divided && expert)
      faults += base::join("\n  ", path, " is within an expert of ", expert->layer, ": experts cannot be nested");
    if (!expert && dynamic_cast<const TiledLayer*>(&module) != nullptr) return visit_tiles(module, path, unit);
    const bool list = module.as<torch::nn::ModuleList>() != nullptr || module.as<torch::nn::Sequential>() != nullptr;
    for (const auto& item : module.named_children()) {
      const auto child = child_path(path, item.key());
      if (divided && !expert && item.key() == "experts") {
        visit_experts(*layer, *item.value(), child);
        continue;
      }
      const bool starts_unit = starts(child, unit.empty() && list) && !expert;
      auto below = expert;
      if (below) below->rest = child_path(below->rest, item.key());
      visit(*item.value(), child, starts_unit ? child : unit, below);
    }
  }

  // by_rule: without libzero.units.
  bool starts(const std::string& path, bool by_rule) {
    const bool is_named = std::find(named.begin(), named.end(), path) != named.end();
    if (is_named) seen_units.push_back(path);
    return named.empty() ? by_rule : is_named;
  }

  // Every tile is a unit, whatever the module above it is: its size is why the layer has tiles.
  void visit_tiles(torch::nn::Module& layer, const std::string& path, const std::string& unit) {
    for (const auto& item : layer.named_children()) {
      const auto child = child_path(path, item.key());
      if (item.key() != "linears") {
        visit(*item.value(), child, starts(child, false) ? child : unit, {});
        continue;
      }
      (void)starts(child, false);
      for (const auto& row : item.value()->named_children()) {
        const auto row_path = child_path(child, row.key());
        (void)starts(row_path, false);
        for (const auto& tile : row.value()->named_children()) {
          const auto tile_path = child_path(row_path, tile.key());
          (void)starts(tile_path, true);
          visit(*tile.value(), tile_path, tile_path, {});
        }
      }
    }
  }

  // Experts that are divided over ranks: one unit, as ranks have different ones. Names of modules in it start none.
  void visit_experts(const ExpertLayer& layer, torch::nn::Module& experts, const std::string& path) {
    (void)starts(path, true);
    const auto layer_path = path.substr(0, path.size() - std::min(path.size(), std::string(".experts").size()));
    for (const auto& item : experts.named_children()) {
      (void)starts(child_path(path, item.key()), false);
      visit(*item.value(), child_path(path, item.key()), path,
            ExpertParameter{layer_path, std::stoll(item.key()), layer.num_experts(), layer.ep_size(), {}});
    }
  }

  void note_expert(ModelParameter& parameter, const std::string& name, bool fresh,
                   const std::optional<ExpertParameter>& expert, const std::string& key) {
    const auto of = [](const std::optional<ExpertParameter>& e) {
      return e ? std::make_pair(e->layer, e->index) : std::make_pair(std::string(), std::int64_t{-1});
    };
    if (!fresh && of(parameter.expert) != of(expert))
      faults += base::join("\n  parameter ", parameter.name, " is also ", name,
                           ": an expert that is divided over ranks shares no parameter with other modules");
    if (!fresh || !expert) return;
    parameter.expert = expert;
    parameter.expert->rest = child_path(expert->rest, key);
  }
};

// What a cut embedding cannot do. torch compares padding_idx with the rows of a part.
void check_embeddings(const std::vector<ModelParameter>& parameters) {
  std::string faults;
  for (const auto& parameter : parameters) {
    if (!parameter.is_cut()) continue;
    const auto& cut = parameter.cut.cut;
    auto least = cut.sizes[0];
    for (int part = 0; part < cut.parts; ++part) least = std::min(least, cut.part_sizes(part)[0]);
    if (parameter.whole_only)
      faults += base::join("\n  ", parameter.name, ": its embedding has ", parameter.whole_only);
    else if (parameter.padding_idx > 0 && parameter.padding_idx >= least)
      faults += base::join("\n  ", parameter.name, ": its embedding has padding_idx ", parameter.padding_idx,
                           ", expected less than ", least, ", the rows of the smallest part");
  }
  if (!faults.empty())
    throw ConfigError("[Engine] tensor parallelism cannot cut:" + faults +
                      "\nHint: \"skip\" it in tensor_parallel.partition_config.");
}

// Whether two tensors in one storage have no common element: parts of one tensor (chunk, unbind), or the weights of a
// recurrent module on a GPU.
bool apart(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) return false;
  if (a.is_contiguous() && b.is_contiguous())
    return a.storage_offset() + a.numel() <= b.storage_offset() || b.storage_offset() + b.numel() <= a.storage_offset();
  const auto elements = static_cast<std::int64_t>(a.storage().nbytes() / a.element_size());
  const auto taken = at::zeros({elements}, at::kBool);
  const auto place = [&](const at::Tensor& of) {
    return taken.as_strided(of.sizes(), of.strides(), of.storage_offset());
  };
  place(a).fill_(true);
  return !place(b).any().item<bool>();
}

}  // namespace

std::int64_t ModelParameter::elements_before(int part) const {
  std::int64_t elements = 0;
  for (int before = 0; is_cut() && before < part; ++before) elements += cut.cut.part_numel(before);
  return elements;
}

std::vector<ModelParameter> find_parameters(torch::nn::Module& model, const config::Settings& settings) {
  Walk walk{settings.units, {}, {}, {}, {}};
  walk.visit(model, "", "", {});
  auto faults = walk.faults;
  for (const auto& name : settings.units)
    if (std::find(walk.seen_units.begin(), walk.seen_units.end(), name) == walk.seen_units.end())
      faults += "\n  libzero.units names \"" + name + "\", which is no module of the model";
  std::vector<sharding::ParameterNames> named;
  for (const auto& parameter : walk.found) named.push_back({parameter.name, parameter.aliases});
  for (const auto& group : settings.parameter_groups)
    if (std::none_of(named.begin(), named.end(), [&](const sharding::ParameterNames& parameter) {
          return base::pattern_names(group.pattern, parameter.name, parameter.aliases);
        }))
      faults += "\n  " + sharding::pattern_fault("libzero.parameter_groups", group.pattern, named);
  const auto fp32 = sharding::kept_fp32(settings, named, model.named_buffers().keys());
  for (const auto& fault : fp32.faults) faults += "\n  " + fault;
  for (std::size_t i = 0; i < named.size(); ++i) walk.found[i].fp32 = fp32.kept[i];
  std::unordered_multimap<c10::StorageImpl*, const ModelParameter*> storages;
  for (const auto& parameter : walk.found) {
    const auto& tensor = parameter.tensor;
    const auto reject = [&](const std::string& why) { faults += "\n  parameter " + parameter.name + ": " + why; };
    std::vector<std::string> names{parameter.name};
    names.insert(names.end(), parameter.aliases.begin(), parameter.aliases.end());
    for (const auto& name : names)
      if (!base::is_plain_name(name, kMostModelNameBytes)) faults += "\n  parameter " + name_fault(name);
    if (torch_hooks::is_intercepted(tensor))
      reject("is held by another Engine. Hint: end that one first (engine.reset() before make_unique)");
    else if (!tensor.is_floating_point())
      reject(base::join("dtype ", c10::toString(tensor.scalar_type()), ", expected a floating-point type"));
    else if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kHalf &&
             tensor.scalar_type() != at::kBFloat16)
      reject(base::join("dtype ", c10::toString(tensor.scalar_type()),
                        ", expected Float, Half or BFloat16: masters are fp32. Hint: model->to(torch::kFloat)"));
    else if (tensor.is_inference())
      reject("was made inside c10::InferenceMode, and can never be trained. Hint: build the model outside");
    else if (torch_hooks::gradient_hook_of(tensor) == torch_hooks::HookPlace::Foreign)
      reject(
          "has a post-accumulate-grad hook, whose one place the Engine needs. Hint: remove it; tensor.register_hook() "
          "sees gradients too");
    else if (!tensor.has_storage() || tensor.layout() != at::kStrided)
      reject("no strided storage (a sparse or meta tensor)");
    else if (!tensor.device().is_cpu() && !tensor.is_cuda())
      reject("lies on " + tensor.device().str() + ", expected the CPU or a GPU (cuda)");
    else if (torch_hooks::has_no_data(tensor) && !torch_hooks::is_deferred(tensor))
      reject(
          "has no values: it was sharded, and its Engine has ended. Hint: save a checkpoint or full_state_dict() "
          "before "
          "a stage 3 Engine ends, and load it into a new model");
    else if (tensor.device() != walk.found.front().tensor.device())
      reject("lies on " + tensor.device().str() + " and " + walk.found.front().name + " on " +
             walk.found.front().tensor.device().str() +
             ", expected one device. Hint: model->to(zero::default_device(*comm))");
    else if (!tensor.is_leaf())
      reject("is not a leaf of the autograd graph");
    else if (tensor.numel() > 0) {
      auto* const storage = tensor.storage().unsafeGetStorageImpl();
      const auto [first, last] = storages.equal_range(storage);
      for (auto it = first; it != last; ++it) {
        if (apart(tensor, it->second->tensor)) continue;  // each gets separate memory
        reject("shares its storage with " + it->second->name +
               ", and elements of it, without being the same parameter; register one tensor twice to tie them");
        break;
      }
      storages.emplace(storage, &parameter);
    }
  }
  if (walk.found.empty())
    throw ConfigError("[Engine] the model has no parameters. Hint: register modules with register_module.");
  if (!faults.empty()) throw ConfigError("[Engine] the model cannot be taken:" + faults);
  return std::move(walk.found);
}

void cut_parameters(std::vector<ModelParameter>& parameters, const config::Settings& settings, int part) {
  if (settings.mesh.tensor == 1) return;
  std::vector<sharding::NamedShape> shapes;
  for (const auto& parameter : parameters)
    shapes.push_back({parameter.name, parameter.aliases, parameter.sizes, parameter.layer_cut});
  auto cuts = sharding::cut_plan(settings, shapes);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].cut = std::move(cuts[i]);
    if (parameters[i].is_cut()) parameters[i].part_sizes = parameters[i].cut.cut.part_sizes(part);
  }
  check_embeddings(parameters);
}

std::string ExpertParameter::at(int other, const std::string& own) const {
  const auto path = child_path(layer, "experts.");
  const auto prefix = base::join(path, index, ".");
  if (!own.starts_with(prefix)) return own;
  return base::join(path, index + (other - place()) * per_rank(), ".", own.substr(prefix.size()));
}

namespace {

const char* frozen(const ModelParameter& parameter) { return parameter.tensor.requires_grad() ? "trained" : "frozen"; }

// Faults of one layer, whose first parameter is `first`. Its experts have consecutive parameters.
std::string faults_of_layer(const std::vector<ModelParameter>& parameters, std::size_t first) {
  const auto& layer = *parameters[first].expert;
  std::vector<const ModelParameter*> of_first;
  std::string faults;
  std::size_t next = 0;
  std::int64_t expert = 0;
  const auto close = [&] {
    if (expert > 0 && next != of_first.size())
      faults += base::join("\n  expert ", expert, " of ", layer.layer, " has ", next, " parameters and expert 0 ",
                           of_first.size(), "; with ep_size above 1 all have the same");
  };
  for (auto i = first; i < parameters.size() && parameters[i].expert && parameters[i].expert->layer == layer.layer;
       ++i) {
    const auto& parameter = parameters[i];
    if (parameter.expert->index != expert) {
      close();
      expert = parameter.expert->index;
      next = 0;
    }
    if (expert == 0) {
      of_first.push_back(&parameter);
      ++next;
      continue;
    }
    if (next < of_first.size()) {
      const auto& other = *of_first[next];
      if (other.expert->rest != parameter.expert->rest || other.sizes != parameter.sizes)
        faults += base::join("\n  ", parameter.name, " of shape ", at::IntArrayRef(parameter.sizes),
                             " is at the place of ", other.name, " of shape ", at::IntArrayRef(other.sizes),
                             "; with ep_size above 1 all experts must have the same parameters");
      else if (other.tensor.requires_grad() != parameter.tensor.requires_grad())
        faults += base::join("\n  ", parameter.name, " is ", frozen(parameter), " and ", other.name, " is ",
                             frozen(other), "; with ep_size above 1 all experts must have the same frozen parameters");
      else if (other.fp32 != parameter.fp32)
        faults += base::join("\n  ", parameter.name, parameter.fp32 ? " stays" : " does not stay", " fp32, unlike ",
                             other.name, "; libzero.keep_fp32 must name a parameter in all experts or in none");
    }
    ++next;
  }
  close();
  return faults;
}

}  // namespace

std::vector<int> expert_degrees(const torch::nn::Module& model, const std::vector<ModelParameter>& parameters,
                                int ranks) {
  std::set<int> degrees;
  std::set<std::string> seen;
  std::string faults;
  // Experts may have no parameters.
  for (const auto& item : model.named_modules()) {
    const auto* const layer = dynamic_cast<const ExpertLayer*>(item.value().get());
    if (layer == nullptr || layer->ep_size() <= 1) continue;
    const auto degree = layer->ep_size();
    degrees.insert(degree);
    if (ranks % degree == 0 && layer->num_experts() % degree == 0) continue;
    seen.insert(item.key());
    faults += base::join("\n  MoE of ", item.key().empty() ? "the model" : item.key(), ": ep_size ", degree,
                         ", expected a divisor of ", ranks, " ranks and of ", layer->num_experts(), " experts");
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& expert = parameters[i].expert;
    if (expert && seen.insert(expert->layer).second) faults += faults_of_layer(parameters, i);
  }
  if (!faults.empty()) throw ConfigError("[Engine] experts cannot be divided:" + faults);
  return {degrees.begin(), degrees.end()};
}

std::vector<Unit> find_units(const std::vector<ModelParameter>& parameters, const UnitRules& rules) {
  std::vector<sharding::UnitMember> members;
  std::vector<std::size_t> index;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    if (!parameter.here) continue;
    // Parts may be uneven, and units must be the same on all ranks.
    const auto whole = parameter.tensor.numel();
    members.push_back({parameter.is_cut() ? (whole + parameter.cut.cut.parts - 1) / parameter.cut.cut.parts : whole,
                       parameter.unit, parameter.tensor.requires_grad(), parameter.axis, parameter.fp32,
                       parameter.kind});
    index.push_back(i);
  }
  auto units = sharding::cut_units(members, rules);
  for (auto& unit : units)
    for (auto& i : unit.parameters) i = index[i];
  // Replicated parameters come first, so that those of a unit are one range.
  for (auto& unit : units)
    std::stable_partition(unit.parameters.begin(), unit.parameters.end(),
                          [&](std::size_t i) { return !parameters[i].is_cut(); });
  return units;
}

}  // namespace zero::engine
