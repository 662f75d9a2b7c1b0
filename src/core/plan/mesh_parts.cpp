// See mesh_parts.h. The formulas are those of docs/parallelism.md.
#include "plan/mesh_parts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <zero/errors.h>

#include "base/check.h"
#include "plan/model.h"
#include "sharding/cut_plan.h"

namespace zero::planning {
namespace {

using config::LayerSpec;
using config::PartitionType;
using Kind = PlanModel::Kind;

// The cut of the planner's own names of parameters. Heads stay whole, as `zero train` cuts the built-in GPT.
config::TpPlan default_plan(const PlanModel& m) {
  const auto width = m.head_width > 0 ? m.head_width : m.hidden / m.heads;
  config::TpPlan plan;
  const auto add = [&](const char* pattern, PartitionType type, std::int64_t multiple = 1, std::int64_t pieces = 1) {
    LayerSpec spec;
    spec.place = "zero plan";
    spec.patterns = {pattern};
    spec.type = type;
    spec.multiple = multiple;
    if (pieces > 1) spec.pieces = {pieces}, spec.equal_pieces = true;
    spec.preset = true;
    plan.specs.push_back(std::move(spec));
  };
  if (m.kind == Kind::Count) {
    add(R"(blocks\.\d+\.weight)", PartitionType::Column);
  } else {
    if (m.kind == Kind::Gpt)
      add(R"(.*\bqkv\.weight)", PartitionType::Column, width, 3);
    else
      add(R"(.*\b(query|key|value)\.weight)", PartitionType::Column, width);
    add(R"(.*\bprojection\.weight)", PartitionType::Row, width);
    add(R"(.*\b(up|gate)\.weight)", PartitionType::Column);
    add(R"(.*\bdown\.weight)", PartitionType::Row);
  }
  add(R"((token|output)\.weight)", PartitionType::Column);
  plan.specs.back().head = true;
  return plan;
}

// The elements of `name`'s first dimension that one rank has, as a fraction of all. 1: not there.
double fraction(const std::vector<Parameter>& parts, std::string_view ending) {
  for (const auto& parameter : parts)
    if (parameter.name.ends_with(ending))
      return parameter.parts == 1 ? 1 : static_cast<double>(parameter.numel) / static_cast<double>(parameter.whole);
  return 1;
}

std::int64_t rounded(double value) { return std::llround(value); }

struct Sums {
  std::int64_t calls = 0, bytes = 0;
  void add(const SplitProduct::Exchange& exchange) {
    if (!exchange.operation.empty()) ++calls, bytes += exchange.bytes;
  }
};

// Beyond a preset's entries.
bool has_own_plan(const config::Settings& settings) {
  const auto& specs = settings.mesh.plan.specs;
  return std::any_of(specs.begin(), specs.end(), [](const LayerSpec& spec) { return !spec.preset; });
}

// An own plan says what it does with heads.
void require_heads(const PlanModel& model, const config::Settings& settings) {
  const std::int64_t tensor = has_own_plan(settings) ? 1 : settings.mesh.tensor;
  if (model.kind == Kind::Count || model.heads >= tensor * settings.mesh.sequence) return;
  throw ConfigError(base::join(
      "[plan] got ", tensor > 1 ? base::join("tensor_parallel.autotp_size ", tensor, " x ") : "",
      "sequence_parallel_size ", settings.mesh.sequence, " and ", model.heads, model.heads == 1 ? " head" : " heads",
      ", expected at least one head for each rank. Hint: choose degrees whose product is at "
      "most ",
      model.heads, "."));
}

// Those of one rank of each expert group, all of which have equally many: the first. They form units of their own.
std::vector<Parameter> with_own_experts(const PlanModel& model, std::vector<Parameter> parameters) {
  const auto own = model.experts.count / model.experts.ep_size;
  std::erase_if(parameters, [&](const Parameter& parameter) { return parameter.expert >= own; });
  for (auto& parameter : parameters) {
    if (parameter.expert < 0) continue;
    parameter.ep_size = model.experts.ep_size;
    parameter.layer = parameter.unit;
    parameter.unit += ".mlp.experts";
  }
  return parameters;
}

}  // namespace

std::vector<Parameter> parts_of(const PlanModel& model, const config::Settings& settings, int tensor_rank) {
  auto parameters = parameters_of(model);
  const int parts = settings.mesh.tensor;
  require_heads(model, settings);
  if (model.experts.count > 0 && parts > 1)
    throw ConfigError("[plan] got experts and tensor_parallel.autotp_size " + std::to_string(parts) +
                      ", expected one of them");
  if (model.experts.ep_size > 1) return with_own_experts(model, std::move(parameters));
  if (parts == 1) return parameters;
  std::vector<sharding::NamedShape> shapes;
  for (const auto& parameter : parameters)
    shapes.push_back({.name = parameter.name, .aliases = {}, .sizes = parameter.sizes});
  auto by_names = settings;
  if (!has_own_plan(settings)) {
    const bool stays = settings.mesh.plan.vocab_parallel_lm_head;
    by_names.mesh.plan = default_plan(model);
    by_names.mesh.plan.vocab_parallel_lm_head = stays;
  }
  const auto cuts = sharding::cut_plan(by_names, shapes);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (cuts[i].kind == sharding::CutKind::Whole) continue;
    auto& parameter = parameters[i];
    parameter.parts = parts;
    parameter.whole = parameter.numel;
    parameter.cut = cuts[i];
    const int part = tensor_rank < 0 ? parts - 1 : tensor_rank;
    parameter.sizes = cuts[i].cut.part_sizes(part);
    parameter.numel = cuts[i].cut.part_numel(part);
  }
  return parameters;
}

Share share_of(const PlanModel& model, const config::Settings& settings, const std::vector<Parameter>& parts) {
  Share share;
  share.tensor = settings.mesh.tensor, share.sequence = settings.mesh.sequence;
  share.tokens = model.sequence - model.sequence * (share.sequence - 1) / share.sequence;
  share.gathered_logits = !settings.mesh.plan.vocab_parallel_lm_head;
  if (share.tensor == 1) return share;
  for (const auto& parameter : parts) {
    if (parameter.unit.empty() || parameter.sizes.size() != 2) continue;
    if (parameter.parts > 1) share.split.push_back(parameter);
    share.ends_with_sum = parameter.cut.kind == sharding::CutKind::Row;
  }
  if (model.kind == Kind::Count) {
    share.heads = share.inner = fraction(parts, "blocks.0.weight");
    share.vocabulary = fraction(parts, "token.weight");
    return share;
  }
  share.heads = std::min(fraction(parts, "qkv.weight"), fraction(parts, "query.weight"));
  share.inner = fraction(parts, "up.weight");
  share.vocabulary = fraction(parts, model.tied ? "token.weight" : "output.weight");
  return share;
}

std::vector<SplitProduct> split_products(const Share& share, std::int64_t samples, std::int64_t element) {
  const auto t = std::int64_t{share.tensor}, tokens = samples * share.tokens;
  const auto reduced = [&](std::int64_t width) { return 2 * (t - 1) * tokens * width * element / t; };
  const auto gathered = [&](std::int64_t own_width) { return (t - 1) * tokens * own_width * element; };
  std::vector<SplitProduct> all;
  for (const auto& parameter : share.split) {
    SplitProduct product{.weight = parameter.name,
                         .unit = parameter.unit,
                         .part = parameter.sizes,
                         .row = parameter.cut.kind == sharding::CutKind::Row};
    const auto outputs = parameter.cut.cut.sizes[0], inputs = parameter.cut.cut.sizes[1];
    const bool same_input = !all.empty() && all.back().unit == product.unit && !all.back().row;
    if (product.row) {
      product.forward = {"g", "all-reduce", "output", reduced(outputs)};
      if (parameter.cut.scatter_input)
        product.backward = {"", "all-gather", "gradient of the input", gathered(parameter.sizes[1])};
    } else {
      if (!same_input) product.backward = {"f", "all-reduce", "gradient of the input", reduced(inputs)};
      if (parameter.cut.gather_output) product.forward = {"", "all-gather", "output", gathered(parameter.sizes[0])};
    }
    all.push_back(std::move(product));
  }
  return all;
}

std::vector<Exchange> exchanges_of(const ActivationExchange& in) {
  const auto& m = in.model;
  const auto& share = in.share;
  std::vector<Exchange> all;
  const auto add = [&](const char* operation, const char* phase, const char* purpose, std::int64_t calls,
                       std::int64_t bytes_of_a_call) {
    if (calls > 0) all.push_back({operation, phase, purpose, calls, calls * bytes_of_a_call});
  };
  const auto total = [&](const char* operation, const char* phase, const char* purpose, const Sums& sums) {
    if (sums.calls > 0) all.push_back({operation, phase, purpose, sums.calls, sums.bytes});
  };
  const auto t = std::int64_t{share.tensor}, u = std::int64_t{share.sequence};
  const auto tokens = in.samples * share.tokens, wide = tokens * m.hidden * in.element;
  const auto segments = std::min(in.segments, m.layers);
  if (t > 1) {
    const auto sum = 2 * (t - 1) * wide / t;
    Sums forward, backward, outputs, inputs;
    std::int64_t spared = 0;  // last sums of segments, which a second run ends before
    const auto products = split_products(share, in.samples, in.element);
    for (const auto& product : products) {
      (product.row ? forward : outputs).add(product.forward);
      (product.row ? inputs : backward).add(product.backward);
    }
    if (share.ends_with_sum) spared = products.back().forward.bytes;
    // A model that is only counted has no products: attention and MLP of a GPT's layer.
    if (m.kind == Kind::Count) forward = backward = {2 * m.layers, 2 * m.layers * sum}, spared = sum;
    const bool head = share.vocabulary < 1;
    if (head) add("tp.all_reduce", "forward", "g: embedding", 1, sum);
    total("tp.all_reduce", "forward", "g: outputs of row layers", forward);
    total("tp.all_gather", "forward", "gathered outputs of column layers", outputs);
    if (head && share.gathered_logits)
      add("tp.all_gather", "forward", "logits", 1,
          (t - 1) * tokens * rounded(share.vocabulary * static_cast<double>(m.vocabulary)) * in.element);
    if (head && !share.gathered_logits)
      add("tp.all_gather", "forward", "maxima and sums of the loss", 1, (t - 1) * 12 * tokens);
    if (head) add("tp.all_reduce", "backward", "f: gradient of the output layer's input", 1, sum);
    if (segments > 0) {
      total("tp.all_reduce", "recomputation", "g: outputs of row layers",
            {forward.calls - (spared > 0 ? segments : 0), forward.bytes - segments * spared});
      total("tp.all_gather", "recomputation", "gathered outputs of column layers", outputs);
    }
    total("tp.all_reduce", "backward", "f: gradients of inputs of column layers", backward);
    total("tp.all_gather", "backward", "gradients of whole inputs of row layers", inputs);
    if (segments > 0 && in.settings.activations.partition) {
      const auto part = (wide + 8 * t - 1) / (8 * t) * 8;
      add("tp.all_gather", "recomputation", "inputs of segments", segments, (t - 1) * part);
    }
  }
  if (const auto ep = std::int64_t{m.experts.ep_size}; ep > 1) {
    const auto rows = kept_rows(m.experts, tokens) * (ep - 1) / ep * m.hidden * in.element, layers = expert_layers(m);
    const auto pass = [&](const char* phase, std::int64_t calls, const char* there, const char* back) {
      add("ep.all_to_all", phase, there, calls, rows);
      add("ep.all_to_all", phase, back, calls, rows);
    };
    add("ep.all_to_all", "forward", "numbers of rows", layers, 8 * m.experts.count * (ep - 1) / ep);
    pass("forward", layers, "rows of tokens to experts", "results back to tokens");
    pass("recomputation", segments == 0 ? 0 : layers, "rows of tokens to experts", "results back to tokens");
    pass("backward", layers, "gradients of results to experts", "gradients of rows back to tokens");
  }
  if (u > 1) {
    // Of the last rank: heads and tokens of its own stay.
    const auto heads = rounded(static_cast<double>(m.heads) * share.heads), own = heads - heads * (u - 1) / u;
    const auto kv_all = m.kv_heads > 0 ? m.kv_heads : m.heads;
    const auto kv = rounded(static_cast<double>(kv_all) * share.heads), own_kv = kv - kv * (u - 1) / u;
    const auto width = m.head_width > 0 ? m.head_width : m.hidden / m.heads;
    const auto there = tokens * width * ((heads - own) + 2 * (kv - own_kv)) * in.element;
    const auto back = in.samples * own * width * (m.sequence - share.tokens) * in.element;
    const auto pass = [&](const char* phase, std::int64_t layers) {
      add("sp.all_to_all", phase, "queries, keys and values to heads", layers, there);
      add("sp.all_to_all", phase, "attention back to tokens", layers, back);
    };
    pass("forward", m.layers);
    pass("recomputation", segments == 0 ? 0 : m.layers);
    // The gradients go the opposite ways.
    add("sp.all_to_all", "backward", "gradients of attention to heads", m.layers,
        tokens * width * (heads - own) * in.element);
    add("sp.all_to_all", "backward", "gradients of queries, keys and values back to tokens", m.layers,
        in.samples * width * (own + 2 * own_kv) * (m.sequence - share.tokens) * in.element);
  }
  return all;
}

}  // namespace zero::planning
