// Applies a name map to the tensors of a source, in either direction: names.h.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/check.h"
#include "formats/manifest.h"
#include "interchange/element_types.h"
#include "interchange/name_pattern.h"
#include "interchange/names.h"

namespace zero::interchange {
namespace {

constexpr std::size_t kMostFaults = 20;

// States of optimizers are apart; all else of a model shares its names.
std::string class_of(const std::string& kind) { return kind.starts_with("opt.") ? kind : ""; }

std::int64_t rest_of(const std::vector<std::int64_t>& shape) {
  std::int64_t rest = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) rest *= shape[i];
  return rest;
}

// A rule that a name fits.
struct Found {
  std::size_t rule = 0, part = 0;  // part: of theirs
  Captures captures;
};

class Mapper {
 public:
  Mapper(const NameMap& map, const std::vector<SourceTensor>& tensors) : map_(map), tensors_(tensors) {}

  void to_ours() {
    struct Joint {
      std::vector<std::optional<std::size_t>> parts;
      Found found;
    };
    std::map<std::tuple<std::string, std::string>, Joint> joints;  // by class and name of ours
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const auto& tensor = tensors_[t];
      if (ignored(tensor.name)) continue;
      const auto found = theirs(tensor.name);
      if (!found) {
        faults_.push_back(tensor.name + ": no rule of the map takes it");
        continue;
      }
      const auto& rule = map_.rules()[found->rule];
      const auto ours = fill(rule.ours, found->captures);
      auto& joint = joints[{class_of(tensor.kind), ours}];
      if (joint.parts.empty()) {
        joint.parts.resize(rule.theirs.size());
        joint.found = *found;
      }
      if (joint.found.rule != found->rule || joint.parts[found->part]) {
        faults_.push_back(tensor.name + ": gives " + ours + ", which another tensor gives as well");
        continue;
      }
      joint.parts[found->part] = t;
    }
    for (const auto& [key, joint] : joints) join(std::get<1>(key), map_.rules()[joint.found.rule], joint);
  }

  void to_theirs() {
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const auto found = ours(tensors_[t].name);
      if (!found)
        faults_.push_back(tensors_[t].name + ": no rule of the map takes it");
      else
        divide(t, map_.rules()[found->rule], found->captures);
    }
  }

  // The name on the other side; "" if it has none of its own.
  std::string renamed(Direction direction, const std::string& name) const {
    const auto found = direction == Direction::ToOurs ? theirs(name) : ours(name);
    if (!found) return "";
    const auto& rule = map_.rules()[found->rule];
    if (rule.theirs.size() > 1) return "";
    return fill(direction == Direction::ToOurs ? rule.ours : rule.theirs[0], found->captures);
  }

  std::vector<MappedTensor> finish(Direction direction, const std::string& label) {
    std::sort(result_.begin(), result_.end(), [](const MappedTensor& a, const MappedTensor& b) {
      return std::tie(a.kind, a.name) < std::tie(b.kind, b.name);
    });
    std::set<std::pair<std::string, std::string>> seen;
    for (const auto& tensor : result_)
      if (!seen.insert({class_of(tensor.kind), tensor.name}).second)
        faults_.push_back(tensor.name + ": two tensors give it");
    if (faults_.empty()) return std::move(result_);
    std::string text = base::join("[names] the map ", map_.name(), " does not fit the tensors of ", label, " (",
                                  direction == Direction::ToOurs ? "from their names" : "to their names", "); ",
                                  faults_.size(), faults_.size() == 1 ? " fault:" : " faults:");
    for (std::size_t i = 0; i < std::min(faults_.size(), kMostFaults); ++i) text += "\n  " + faults_[i];
    if (faults_.size() > kMostFaults) text += base::join("\n  and ", faults_.size() - kMostFaults, " more");
    throw ConfigError(text);
  }

 private:
  // Their names may lack the map's prefix, as those of a model without its head do.
  std::vector<std::string> spellings(const std::string& name) const {
    return map_.prefix().empty() ? std::vector<std::string>{name}
                                 : std::vector<std::string>{name, map_.prefix() + name};
  }

  bool ignored(const std::string& name) const {
    return std::any_of(map_.ignore().begin(), map_.ignore().end(), [&](const std::string& pattern) {
      const auto names = spellings(name);
      return std::any_of(names.begin(), names.end(), [&](const auto& one) { return name_matches(pattern, one); });
    });
  }

  std::optional<Found> theirs(const std::string& name) const {
    for (const auto& spelling : spellings(name))
      for (std::size_t r = 0; r < map_.rules().size(); ++r) {
        const auto& rule = map_.rules()[r];
        for (std::size_t part = 0; part < rule.theirs.size(); ++part)
          if (auto captures = match(rule.theirs[part], spelling)) return Found{r, part, std::move(*captures)};
        for (const auto& other : rule.also)
          if (auto captures = match(other, spelling)) return Found{r, 0, std::move(*captures)};
      }
    return std::nullopt;
  }

  std::optional<Found> ours(const std::string& name) const {
    for (std::size_t r = 0; r < map_.rules().size(); ++r)
      if (auto captures = match(map_.rules()[r].ours, name)) return Found{r, 0, std::move(*captures)};
    return std::nullopt;
  }

  // A run of a tensor's rows in the rule's order; `shape` becomes the target's. False after a fault.
  bool segment(const NameMap::Rule& rule, Order order, const std::string& name, std::size_t source, std::int64_t begin,
               std::vector<std::int64_t>& shape, Segment& out) {
    out = {source, begin, shape.empty() ? 1 : shape[0], rest_of(shape), order, rule.heads};
    if (order == Order::Same) return true;
    if (order == Order::Transposed) {
      if (shape.size() != 2) {
        faults_.push_back(name + ": has the shape " + shape_text(shape) + ", expected two dimensions to transpose");
        return false;
      }
      std::swap(shape[0], shape[1]);
      std::swap(out.rows, out.cols);
      return true;
    }
    if (shape.empty() || shape[0] % (2 * rule.heads) != 0) {
      faults_.push_back(base::join(name, ": has the shape ", shape_text(shape), ", expected a multiple of 2 x ",
                                   rule.heads, " rows to permute heads"));
      return false;
    }
    return true;
  }

  template <class Joint>
  void join(const std::string& name, const NameMap::Rule& rule, const Joint& joint) {
    MappedTensor target;
    target.name = name;
    std::int64_t rows = 0;
    std::vector<std::int64_t> sizes;
    for (std::size_t part = 0; part < joint.parts.size(); ++part) {
      if (!joint.parts[part]) {
        faults_.push_back(name + ": lacks " + fill(rule.theirs[part], joint.found.captures));
        return;
      }
      const auto& tensor = tensors_[*joint.parts[part]];
      auto shape = tensor.shape;
      Segment one;
      if (!segment(rule, rule.order, tensor.name, *joint.parts[part], 0, shape, one)) return;
      if (part == 0) {
        target.kind = tensor.kind;
        target.dtype = tensor.dtype;
        target.shape = shape;
      } else if (shape.empty() || shape.size() != target.shape.size() ||
                 !std::equal(shape.begin() + 1, shape.end(), target.shape.begin() + 1) ||
                 tensor.dtype != target.dtype || tensor.kind != target.kind) {
        faults_.push_back(base::join(tensor.name, ": is ", tensor.kind, " ", tensor.dtype, " ", shape_text(shape),
                                     ", which cannot follow ", target.kind, " ", target.dtype, " ",
                                     shape_text(target.shape), " in ", name));
        return;
      }
      sizes.push_back(shape.empty() ? 1 : shape[0]);
      rows += sizes.back();
      target.segments.push_back(one);
    }
    if (joint.parts.size() > 1) {
      for (std::size_t part = 0; part < sizes.size(); ++part)
        if (sizes[part] * rule.shares[0] != sizes[0] * rule.shares[part]) {
          faults_.push_back(base::join(fill(rule.theirs[part], joint.found.captures), ": has ", sizes[part],
                                       " rows, which is not its share compared with ", sizes[0], " rows of the first"));
          return;
        }
      target.shape[0] = rows;
    }
    result_.push_back(std::move(target));
  }

  void divide(std::size_t source, const NameMap::Rule& rule, const Captures& captures) {
    const auto& tensor = tensors_[source];
    std::int64_t total = 0;
    for (const auto share : rule.shares) total += share;
    if (rule.theirs.size() > 1 && (tensor.shape.empty() || tensor.shape[0] % total != 0)) {
      faults_.push_back(base::join(tensor.name, ": has the shape ", shape_text(tensor.shape), ", expected rows in ",
                                   total, " equal shares"));
      return;
    }
    std::int64_t begin = 0;
    for (std::size_t part = 0; part < rule.theirs.size(); ++part) {
      auto shape = tensor.shape;
      if (rule.theirs.size() > 1) shape[0] = shape[0] / total * rule.shares[part];
      const auto numel = formats::numel_of(shape);
      MappedTensor target{tensor.kind, fill(rule.theirs[part], captures), tensor.dtype, {}, {}};
      Segment one;
      if (!segment(rule, inverse(rule.order), tensor.name, source, begin, shape, one)) return;
      target.shape = shape;
      target.segments = {one};
      begin += numel;
      result_.push_back(std::move(target));
    }
  }

  const NameMap& map_;
  const std::vector<SourceTensor>& tensors_;
  std::vector<MappedTensor> result_;
  std::vector<std::string> faults_;
};

// Names that a tensor's data are stored under once more, or not at all.
void add_ties(const NameMap& map, Direction direction, const Mapper& mapper,
              const std::map<std::string, std::string>& aliases, Mapping& mapping) {
  std::map<std::string, MappedTensor*> stored;
  for (auto& tensor : mapping.tensors)
    if (class_of(tensor.kind).empty()) stored[tensor.name] = &tensor;
  const auto tie = [&](const std::string& alias, const std::string& owner) {
    if (!alias.empty() && alias != owner && stored.contains(owner) && !stored.contains(alias))
      mapping.aliases[alias] = owner;
  };
  for (const auto& [alias, owner] : aliases) tie(mapper.renamed(direction, alias), mapper.renamed(direction, owner));
  for (const auto& [alias, owner, condition] : map.ties()) {
    const auto fits = [&condition = condition](const MappedTensor& tensor) {
      return name_matches(condition, tensor.name);
    };
    if (direction == Direction::ToOurs) {
      const auto mine = mapper.renamed(direction, alias), other = mapper.renamed(direction, owner);
      if (!mine.empty() && !other.empty()) mapping.ties[mine] = other;
      tie(mine, other);
      continue;
    }
    // Files have the data under one name of a group of ties, which need not be the one that the model has them under.
    if (const auto swapped = mapping.aliases.find(owner); swapped != mapping.aliases.end()) {
      const auto old = swapped->second;
      for (auto& tensor : mapping.tensors)
        if (tensor.name == old) tensor.name = owner;
      mapping.aliases.erase(swapped);
      for (auto& [name, target] : mapping.aliases)
        if (target == old) target = owner;
      mapping.aliases[old] = owner;
      stored[owner] = stored[old];
      stored.erase(old);
    }
    if (condition.empty() || std::any_of(mapping.tensors.begin(), mapping.tensors.end(), fits)) tie(alias, owner);
  }
}

}  // namespace

Mapping map_names(const NameMap& map, Direction direction, const std::vector<SourceTensor>& tensors,
                  const std::map<std::string, std::string>& aliases, const std::string& label) {
  Mapper mapper(map, tensors);
  if (direction == Direction::ToOurs)
    mapper.to_ours();
  else
    mapper.to_theirs();
  Mapping mapping;
  mapping.tensors = mapper.finish(direction, label);
  add_ties(map, direction, mapper, aliases, mapping);
  std::sort(mapping.tensors.begin(), mapping.tensors.end(), [](const MappedTensor& a, const MappedTensor& b) {
    return std::tie(a.kind, a.name) < std::tie(b.kind, b.name);
  });
  return mapping;
}

Mapping same_names(const std::vector<SourceTensor>& tensors, const std::map<std::string, std::string>& aliases) {
  Mapping mapping;
  mapping.aliases = aliases;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto& tensor = tensors[t];
    const auto numel = formats::numel_of(tensor.shape);
    mapping.tensors.push_back({tensor.kind, tensor.name, tensor.dtype, tensor.shape, {{t, 0, 1, numel}}});
  }
  return mapping;
}

}  // namespace zero::interchange
