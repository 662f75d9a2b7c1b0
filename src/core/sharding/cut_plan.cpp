#include "sharding/cut_plan.h"

#include <zero/errors.h>

#include <algorithm>
#include <regex>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace zero::sharding {
namespace {

using config::LayerSpec;
using config::PartitionType;

struct Rule {
  const LayerSpec& spec;
  std::vector<std::regex> patterns;
  bool used = false;

  explicit Rule(const LayerSpec& s) : spec(s) {
    for (const auto& pattern : s.patterns) patterns.emplace_back(pattern, std::regex::ECMAScript);
  }
  // Anchored at the start, as Python's re.match.
  bool matches(const std::string& name) const {
    return std::any_of(patterns.begin(), patterns.end(), [&](const std::regex& pattern) {
      return std::regex_search(name, pattern, std::regex_constants::match_continuous);
    });
  }
  bool matches(const NamedShape& parameter) const {
    return matches(parameter.name) || std::any_of(parameter.aliases.begin(), parameter.aliases.end(),
                                                  [&](const std::string& alias) { return matches(alias); });
  }
};

std::string text_of(const std::vector<std::int64_t>& sizes) {
  std::string text = "[";
  for (const auto size : sizes) text += base::join(text.size() == 1 ? "" : ", ", size);
  return text + "]";
}

bool ends_with(const std::string& name, const std::string& end) {
  return name == end || (name.size() > end.size() && name.ends_with("." + end));
}

bool is_head(const config::TpPlan& plan, const NamedShape& parameter) {
  const auto named = [&](const std::string& name) {
    return std::any_of(plan.lm_head_patterns.begin(), plan.lm_head_patterns.end(),
                       [&](const std::string& pattern) { return name.find(pattern) != std::string::npos; });
  };
  return named(parameter.name) || std::any_of(parameter.aliases.begin(), parameter.aliases.end(), named);
}

class Planner {
 public:
  Planner(const config::Settings& settings, const std::vector<NamedShape>& parameters)
      : plan_(settings.mesh.plan), parts_(settings.mesh.tensor), parameters_(parameters), result_(parameters.size()) {
    for (const auto& spec : plan_.specs) rules_.emplace_back(spec);
  }

  std::vector<ParameterCut> all() {
    const bool any_given =
        std::any_of(parameters_.begin(), parameters_.end(), [](const NamedShape& p) { return p.given.has_value(); });
    if (plan_.empty() && !any_given)
      fail_without_plan("without tensor_parallel.partition_config or preset_model, which say what to cut");
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].given)
        take(i);
      else if (!is_bias(i))
        decide(i);
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (!parameters_[i].given && is_bias(i)) follow(i);
    for (const auto& rule : rules_) {
      if (rule.used) continue;
      const auto text =
          base::join("entry ", rule.spec.place, " (", rule.spec.patterns.front(), ") matches no parameter",
                     ". Hint: patterns match from the start of a name, such as ", example());
      if (rule.spec.preset)
        base::log(LogLevel::Info, "tensor_parallel: " + text);
      else
        add_fault(text);
    }
    if (faults_.empty() &&
        std::all_of(result_.begin(), result_.end(), [](const ParameterCut& cut) { return cut.kind == CutKind::Whole; }))
      fail_without_plan("with a plan that cuts no parameter");
    if (!faults_.empty())
      throw ConfigError("[Engine] the model cannot be cut over " + std::to_string(parts_) +
                        " tensor-parallel ranks:" + faults_);
    return std::move(result_);
  }

 private:
  void add_fault(const std::string& text) { faults_ += "\n  " + text; }

  // By name or alias; npos if there is none.
  std::size_t index_of(const std::string& name) const {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].name == name ||
          std::find(parameters_[i].aliases.begin(), parameters_[i].aliases.end(), name) != parameters_[i].aliases.end())
        return i;
    return std::string::npos;
  }
  // The weight of the same module.
  std::size_t weight_of(std::size_t bias) const {
    const auto& name = parameters_[bias].name;
    return index_of(name.substr(0, name.size() - 4) + "weight");
  }
  // Projections of torch's MultiheadAttention, which views their outputs as all heads, by the names that it gives all
  // of its weights. Recurrent layers read their weights in operators of their own, which are refused when they run.
  bool is_of_attention(const NamedShape& parameter) const {
    const auto is = [&](const std::string& name) {
      const auto dot = name.rfind('.');
      const auto path = dot == std::string::npos ? "" : name.substr(0, dot + 1), last = name.substr(path.size());
      const bool one_of_three = last == "q_proj_weight" || last == "k_proj_weight" || last == "v_proj_weight";
      if (!one_of_three && last != "in_proj_weight") return false;
      return has(path + "out_proj.weight") &&
             (!one_of_three ||
              (has(path + "q_proj_weight") && has(path + "k_proj_weight") && has(path + "v_proj_weight")));
    };
    return is(parameter.name) || std::any_of(parameter.aliases.begin(), parameter.aliases.end(), is);
  }
  // The name of a weight of two dimensions, or of any parameter.
  std::string example() const {
    for (const auto& parameter : parameters_)
      if (parameter.sizes.size() == 2) return parameter.name;
    return parameters_.empty() ? "blocks.0.up.weight" : parameters_.front().name;
  }
  bool has(const std::string& name) const { return index_of(name) != std::string::npos; }

  bool is_bias(std::size_t i) const {
    return ends_with(parameters_[i].name, "bias") && weight_of(i) != std::string::npos;
  }

  Rule* rule_for(const NamedShape& parameter) {
    Rule* first = nullptr;
    for (auto& rule : rules_) {
      if (!rule.matches(parameter)) continue;
      rule.used = true;
      if (first == nullptr)
        first = &rule;
      else if (!rule.spec.preset)
        base::log(LogLevel::Info, base::join("tensor_parallel: ", parameter.name, " matches ", first->spec.place,
                                             " and ", rule.spec.place, "; the first decides"));
    }
    return first;
  }

  void decide(std::size_t i) {
    const auto& parameter = parameters_[i];
    auto& result = result_[i];
    const auto* const rule = rule_for(parameter);
    if (rule == nullptr) {
      if (plan_.strict && parameter.sizes.size() == 2)
        add_fault(
            parameter.name + " " + text_of(parameter.sizes) +
            " matches no entry, and strict_mode is true. Hint: an entry of partition_type \"skip\" leaves it whole");
      return;
    }
    const auto& spec = rule->spec;
    if (spec.type == PartitionType::Skip) {
      result.sum_gradient = spec.grad_allreduce;
      return;
    }
    const auto fail = [&](const std::string& why) {
      add_fault(base::join(parameter.name, " ", text_of(parameter.sizes), " (", spec.place, "): ", why));
    };
    if (parameter.sizes.size() != 2)
      return fail("expected a weight of two dimensions. Hint: end the pattern in weight, or \"skip\" the parameter");
    if (is_of_attention(parameter))
      return fail(
          "MultiheadAttention takes the number of heads from its options, and cannot be cut; write its projections as "
          "Linear layers, or \"skip\" it");
    const bool by_column = spec.type == PartitionType::Column;
    auto& cut = result.cut;
    cut = {.sizes = parameter.sizes, .dim = by_column ? 0 : 1, .multiple = spec.multiple, .parts = parts_};
    const auto length = parameter.sizes[static_cast<std::size_t>(cut.dim)];
    if (spec.equal_pieces) {
      const auto count = spec.pieces.front();
      if (count > length || length % count != 0)
        return fail(base::join(length, " rows are not ", count,
                               " equal pieces. Hint: \"shape\": [number of pieces, -1] or [[lengths], -1]"));
      cut.pieces.assign(static_cast<std::size_t>(count), length / count);
    } else {
      cut.pieces = spec.pieces;
    }
    if (const auto why = cut.fault(); !why.empty()) return fail(why);
    result.kind = by_column ? CutKind::Column : CutKind::Row;
    const bool head = result.head = by_column && (spec.head || is_head(plan_, parameter));
    result.gather_output = by_column && (head ? !plan_.vocab_parallel_lm_head && spec.gather_output.value_or(true)
                                              : spec.gather_output.value_or(false));
    result.scatter_input = !by_column && spec.scatter_input;
  }

  void take(std::size_t i) {
    auto& result = result_[i] = *parameters_[i].given;
    if (result.kind == CutKind::Whole) return;
    result.cut.sizes = parameters_[i].sizes;
    result.cut.dim = result.kind == CutKind::Row ? 1 : 0;
    result.cut.parts = parts_;
    if (const auto why = result.cut.fault(); !why.empty())
      add_fault(parameters_[i].name + " " + text_of(parameters_[i].sizes) + ": " + why);
  }

  // A bias is cut with the outputs of its weight, and summed as its weight.
  void follow(std::size_t i) {
    const auto& weight = result_[weight_of(i)];
    for (auto& rule : rules_) rule.used |= rule.matches(parameters_[i]);
    auto& result = result_[i];
    result.sum_gradient = weight.sum_gradient;
    if (weight.kind != CutKind::Column || weight.gather_output) return;
    result.kind = CutKind::Column;
    result.cut = weight.cut;
    result.cut.sizes = parameters_[i].sizes;
    if (const auto why = result.cut.fault(); !why.empty()) add_fault(parameters_[i].name + ": " + why);
  }

  [[noreturn]] void fail_without_plan(const char* why) const {
    std::string weights;
    for (const auto& parameter : parameters_)
      if (parameter.sizes.size() == 2) weights += "\n  " + parameter.name + " " + text_of(parameter.sizes);
    throw ConfigError(base::join("[Engine] tensor_parallel.autotp_size: got ", parts_, " ", why,
                                 ". Hint: preset_model for a known model, or layer_specs for these weights:", weights));
  }

  const config::TpPlan& plan_;
  const int parts_;
  const std::vector<NamedShape>& parameters_;
  std::vector<ParameterCut> result_;
  std::vector<Rule> rules_;
  std::string faults_;
};

}  // namespace

std::vector<ParameterCut> cut_plan(const config::Settings& settings, const std::vector<NamedShape>& parameters) {
  return Planner(settings, parameters).all();
}

}  // namespace zero::sharding
