// See model.h. The catalog's shapes are those of the publications and of the released weights.
#include "plan/model.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include <zero/config_tools.h>
#include <zero/errors.h>

#include "base/check.h"
#include "config/optimizers.h"
#include "sharding/expert_capacity.h"

namespace zero {
namespace {

using Kind = PlanModel::Kind;

PlanModel gpt(const char* name, std::int64_t layers, std::int64_t hidden, std::int64_t heads,
              std::int64_t sequence = 1024, std::int64_t vocabulary = 50257) {
  PlanModel m;
  m.name = name, m.layers = layers, m.hidden = hidden, m.heads = heads;
  m.sequence = sequence, m.vocabulary = vocabulary;
  return m;
}

PlanModel bert(const char* name, std::int64_t layers, std::int64_t hidden, std::int64_t heads) {
  auto m = gpt(name, layers, hidden, heads, 512, 30522);
  m.kind = Kind::Bert;
  return m;
}

PlanModel t5(const char* name, std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t head_width,
             std::int64_t inner) {
  auto m = gpt(name, layers, hidden, heads, 512, 32128);
  m.kind = Kind::T5;
  m.head_width = head_width, m.inner = inner;
  return m;
}

PlanModel llama(const char* name, std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t kv_heads,
                std::int64_t inner, std::int64_t sequence, std::int64_t vocabulary, bool tied = false) {
  auto m = gpt(name, layers, hidden, heads, sequence, vocabulary);
  m.kind = Kind::Llama;
  m.kv_heads = kv_heads, m.inner = inner, m.tied = tied;
  return m;
}

const std::vector<PlanModel>& catalog() {
  static const std::vector<PlanModel> all = {
      gpt("gpt-1m", 4, 144, 4, 128, 256),
      gpt("gpt-10m", 6, 368, 8, 256, 256),
      gpt("gpt2", 12, 768, 12),
      gpt("gpt2-medium", 24, 1024, 16),
      gpt("gpt2-large", 36, 1280, 20),
      gpt("gpt2-xl", 48, 1600, 25),
      gpt("gpt3-175b", 96, 12288, 96, 2048),
      bert("bert-base", 12, 768, 12),
      bert("bert-large", 24, 1024, 16),
      t5("t5-small", 6, 512, 8, 64, 2048),
      t5("t5-base", 12, 768, 12, 64, 3072),
      t5("t5-large", 24, 1024, 16, 64, 4096),
      t5("t5-3b", 24, 1024, 32, 128, 16384),
      t5("t5-11b", 24, 1024, 128, 128, 65536),
      llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 8192, 128256, true),
      llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 8192, 128256, true),
      llama("llama-2-7b", 32, 4096, 32, 32, 11008, 4096, 32000),
      llama("llama-3-8b", 32, 4096, 32, 8, 14336, 8192, 128256),
      llama("llama-2-13b", 40, 5120, 40, 40, 13824, 4096, 32000),
      llama("llama-2-70b", 80, 8192, 64, 8, 28672, 4096, 32000),
      llama("llama-3-70b", 80, 8192, 64, 8, 28672, 8192, 128256),
      llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 8192, 128256),
  };
  return all;
}

std::string plain(std::string_view name) {
  std::string out;
  for (const char c : name)
    out += c == '_' || c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (out == "gpt2-small" || out == "gpt-2" || out == "gpt-2-small") return "gpt2";
  if (out.rfind("gpt-2-", 0) == 0) return "gpt2-" + out.substr(6);
  if (out == "gpt3" || out == "gpt-3" || out == "gpt-3-175b") return "gpt3-175b";
  return out;
}

// Appends one layer's parameters to `all`.
struct Collector {
  std::vector<planning::Parameter>& all;
  std::string unit;
  void add(const std::string& name, std::vector<std::int64_t> sizes) {
    std::int64_t numel = 1;
    for (const auto size : sizes) numel *= size;
    all.push_back({unit.empty() ? name : unit + "." + name, numel, unit, true, std::move(sizes)});
  }
  void table(const std::string& name, std::vector<std::int64_t> sizes) {
    add(name + ".weight", std::move(sizes));
    all.back().table = true;
  }
  void linear(const std::string& name, std::int64_t in, std::int64_t out, bool bias = true) {
    add(name + ".weight", {out, in});
    if (bias) add(name + ".bias", {out});
  }
  void norm(const std::string& name, std::int64_t width, bool bias = true) {
    add(name + ".weight", {width});
    if (bias) add(name + ".bias", {width});
  }
};

// In the order of registration of zero::MoE.
void expert_parameters(const PlanModel& m, std::int64_t block, std::vector<planning::Parameter>& all) {
  const auto h = m.hidden, wide = m.mlp_width();
  Collector layer{all, "blocks." + std::to_string(block)};
  layer.add("mlp.gate.wg.weight", {m.experts.count, h});
  for (std::int64_t c = 0; c < m.experts.count; ++c) {
    const auto begin = all.size();
    const auto name = "mlp.experts." + std::to_string(c);
    layer.linear(name + ".up", h, wide);
    layer.linear(name + ".down", wide, h);
    for (auto i = begin; i < all.size(); ++i) all[i].expert = c;
  }
  if (!m.experts.residual) return;
  layer.linear("mlp.mlp.up", h, wide);
  layer.linear("mlp.mlp.down", wide, h);
  layer.linear("mlp.coefficient", h, 2);
}

void gpt_parameters(const PlanModel& m, std::vector<planning::Parameter>& all) {
  const auto h = m.hidden, wide = m.mlp_width();
  Collector root{all, ""};
  root.table("token", {m.vocabulary, h});
  root.table("position", {m.sequence, h});
  for (std::int64_t i = 0; i < m.layers; ++i) {
    Collector layer{all, "blocks." + std::to_string(i)};
    layer.norm("norm1", h);
    layer.linear("qkv", h, 3 * h);
    layer.linear("projection", h, h);
    layer.norm("norm2", h);
    if (planning::has_experts(m, i)) {
      expert_parameters(m, i, all);
      continue;
    }
    layer.linear("up", h, wide);
    layer.linear("down", wide, h);
  }
  root.norm("norm", h);
  if (!m.tied) root.add("output.weight", {m.vocabulary, h});
}

void bert_parameters(const PlanModel& m, std::vector<planning::Parameter>& all) {
  const auto h = m.hidden;
  Collector root{all, ""};
  root.table("token", {m.vocabulary, h});
  root.table("position", {512, h});
  root.table("segment", {2, h});
  root.norm("embedding_norm", h);
  for (std::int64_t i = 0; i < m.layers; ++i) {
    Collector layer{all, "layers." + std::to_string(i)};
    for (const char* name : {"query", "key", "value", "projection"}) layer.linear(name, h, h);
    layer.norm("norm1", h);
    layer.linear("up", h, m.mlp_width());
    layer.linear("down", m.mlp_width(), h);
    layer.norm("norm2", h);
  }
  root.linear("pooler", h, h);
}

void t5_parameters(const PlanModel& m, std::vector<planning::Parameter>& all) {
  const auto h = m.hidden, width = m.heads * (m.head_width > 0 ? m.head_width : h / m.heads);
  constexpr std::int64_t kDistances = 32;  // of the relative bias
  Collector root{all, ""};
  root.table("token", {m.vocabulary, h});
  for (const char* half : {"encoder", "decoder"}) {
    const bool decoder = half[0] == 'd';
    for (std::int64_t i = 0; i < m.layers; ++i) {
      Collector layer{all, std::string(half) + "." + std::to_string(i)};
      for (const char* attention :
           decoder ? std::vector<const char*>{"self", "cross"} : std::vector<const char*>{"self"}) {
        for (const char* name : {".query", ".key", ".value"})
          layer.linear(attention + std::string(name), h, width, false);
        layer.linear(attention + std::string(".projection"), width, h, false);
        if (i == 0 && attention[0] == 's') layer.table("self.distance", {kDistances, m.heads});
        layer.norm(attention + std::string(".norm"), h, false);
      }
      layer.linear("up", h, m.mlp_width(), false);
      layer.linear("down", m.mlp_width(), h, false);
      layer.norm("norm", h, false);
    }
    root.norm(std::string(half) + "_norm", h, false);
  }
}

void llama_parameters(const PlanModel& m, std::vector<planning::Parameter>& all) {
  const auto h = m.hidden, kv = h / m.heads * (m.kv_heads > 0 ? m.kv_heads : m.heads);
  Collector root{all, ""};
  root.table("token", {m.vocabulary, h});
  for (std::int64_t i = 0; i < m.layers; ++i) {
    Collector layer{all, "layers." + std::to_string(i)};
    layer.linear("query", h, h, false);
    layer.linear("key", h, kv, false);
    layer.linear("value", h, kv, false);
    layer.linear("projection", h, h, false);
    layer.linear("gate", h, m.mlp_width(), false);
    layer.linear("up", h, m.mlp_width(), false);
    layer.linear("down", m.mlp_width(), h, false);
    layer.norm("norm1", h, false);
    layer.norm("norm2", h, false);
  }
  root.norm("norm", h, false);
  if (!m.tied) root.add("output.weight", {m.vocabulary, h});
}

// For a model of which only the number of parameters is known: the root gets what the layers of the shape leave. The
// first of a layer's two parameters is what tensor parallelism divides: all but norms and the biases after sums.
void counted_parameters(const PlanModel& m, std::vector<planning::Parameter>& all) {
  const auto layer = std::min(12 * m.hidden * m.hidden + 13 * m.hidden, m.count / (m.layers + 1));
  const auto undivided = std::min(6 * m.hidden, layer / 2);
  const auto root = m.count - m.layers * layer, positions = std::min(m.sequence * m.hidden, root / 2);
  Collector outside{all, ""};
  outside.table("token", {root - positions, 1});
  outside.table("position", {positions, 1});
  for (std::int64_t i = 0; i < m.layers; ++i) {
    Collector inside{all, "blocks." + std::to_string(i)};
    inside.add("weight", {layer - undivided, 1});
    inside.add("norm", {undivided});
  }
}

}  // namespace

namespace planning {

const char* name(config::OptimizerType type) {
  return config::name_of(type == config::OptimizerType::None ? config::OptimizerType::AdamW : type);
}

std::vector<Parameter> parameters_of(const PlanModel& model) {
  std::vector<Parameter> all;
  switch (model.kind) {
    case Kind::Gpt:
      gpt_parameters(model, all);
      break;
    case Kind::Bert:
      bert_parameters(model, all);
      break;
    case Kind::T5:
      t5_parameters(model, all);
      break;
    case Kind::Llama:
      llama_parameters(model, all);
      break;
    case Kind::Count:
      counted_parameters(model, all);
      break;
  }
  return all;
}

std::vector<std::string> check_patterns(const PlanModel& model, const config::Settings& settings) {
  std::vector<std::string> notices;
  if (settings.keep_fp32.empty()) return notices;
  std::string faults;
  for (const auto& fault : unmatched_patterns(parameters_of(model), settings)) {
    faults += "\n  " + fault;
    notices.push_back("[plan] " + fault +
                      ". These are the plan's own names: what the pattern names in a run is counted in 16 bits.");
  }
  if (model.kind == Kind::Gpt && !faults.empty())
    throw ConfigError("[plan] the configuration does not fit the model:" + faults);
  return notices;
}

bool has_experts(const PlanModel& model, std::int64_t layer) {
  return model.experts.count > 0 && (layer + 1) % model.experts.interval == 0;
}

std::int64_t expert_layers(const PlanModel& model) {
  return model.experts.count > 0 ? model.layers / model.experts.interval : 0;
}

std::int64_t kept_rows(const PlanExperts& experts, std::int64_t tokens) {
  const auto rows = tokens * experts.k;
  if (!experts.drop_tokens) return rows;
  const auto room = sharding::capacity(tokens, experts.count, experts.capacity_factor, experts.k, experts.min_capacity);
  return room >= rows ? rows : std::min(rows, experts.count * room);
}

PlanExperts experts_of(const config::ExpertSettings& settings) {
  return {.count = settings.num_experts,
          .interval = settings.expert_interval,
          .k = settings.k,
          .ep_size = settings.degree(),
          .capacity_factor = settings.capacity_factor,
          .min_capacity = settings.min_capacity,
          .drop_tokens = settings.drop_tokens,
          .residual = settings.use_residual};
}

PlanModel shape_for(double parameters) {
  PlanModel m;
  m.layers = std::max<std::int64_t>(1, std::llround(std::cbrt(parameters / (12 * 128.0 * 128.0))));
  // Layers and embeddings: 12*L*h^2 + (V + s)*h = P.
  const double a = 12.0 * static_cast<double>(m.layers), b = static_cast<double>(m.vocabulary + m.sequence);
  const double width = (std::sqrt(b * b + 4 * a * parameters) - b) / (2 * a);
  m.hidden = std::max<std::int64_t>(1, std::llround(width / 64)) * 64;
  m.heads = m.hidden / (m.hidden >= 4096 && m.hidden % 128 == 0 ? 128 : 64);
  return m;
}

}  // namespace planning

PlanModel PlanModel::named(std::string_view name) {
  for (const auto& model : catalog())
    if (model.name == plain(name)) return model;
  const auto all = names();
  std::string list;
  for (const auto& each : all) list += (list.empty() ? "" : ", ") + each;
  const auto near = nearest_name(plain(name), all);
  throw ConfigError(base::join("[PlanModel::named] got \"", std::string(name.substr(0, 80)), "\", expected one of ",
                               list, near.empty() ? "" : ". Hint: did you mean \"" + near + "\"?"));
}

std::vector<std::string> PlanModel::names() {
  std::vector<std::string> all;
  for (const auto& model : catalog()) all.push_back(model.name);
  return all;
}

PlanModel PlanModel::of_count(double parameters) {
  if (!(parameters >= 1e5 && parameters <= 1e15))
    throw ConfigError(base::join("[PlanModel::of_count] got ", parameters,
                                 " parameters, expected 1e5 to 1e15. Hint: 7.5e9 is 7.5 billion."));
  auto model = planning::shape_for(parameters);
  model.kind = Kind::Count;
  model.count = std::llround(parameters);
  return model;
}

PlanModel PlanModel::of_options(const Options& options) {
  const auto& given = options.settings().model;
  auto model = named(given.size);
  const auto published = model.num_parameters();
  const auto replace = [](std::int64_t& field, std::int64_t value) {
    if (value != 0) field = value;
  };
  replace(model.layers, given.layers);
  replace(model.hidden, given.hidden);
  replace(model.heads, given.heads);
  replace(model.sequence, given.seq_length);
  replace(model.vocabulary, given.vocabulary);
  model.tied = given.tied;
  model.experts = planning::experts_of(given.experts);
  model.validate();
  if (model.num_parameters() != published) model.name.clear();
  return model;
}

std::int64_t PlanModel::num_parameters() const {
  std::int64_t sum = 0;
  for (const auto& parameter : planning::parameters_of(*this)) sum += parameter.numel;
  return sum;
}

std::int64_t PlanModel::num_active_parameters() const {
  std::int64_t sum = 0;
  for (const auto& parameter : planning::parameters_of(*this))
    if (parameter.expert < experts.k) sum += parameter.numel;
  return sum;
}

void PlanModel::validate() const {
  const auto check = [](bool good, const char* what, std::int64_t got, const std::string& expected) {
    if (!good) throw ConfigError(base::join("[PlanModel] got ", what, " ", got, ", expected ", expected));
  };
  check(layers >= 1 && layers <= 100000, "layers", layers, "1 to 100000");
  check(hidden >= 1 && hidden <= 10000000, "hidden", hidden, "1 to 10000000");
  check(heads >= 1, "heads", heads, "at least 1");
  check(head_width > 0 || hidden % heads == 0, "heads", heads, base::join("a divisor of hidden = ", hidden));
  check(sequence >= 1, "sequence", sequence, "at least 1");
  check(vocabulary >= 2, "vocabulary", vocabulary, "at least 2");
  if (experts.count == 0) return;
  check(kind == Kind::Gpt, "experts", experts.count,
        "0 for a model that is no GPT. Hint: --model gpt2, or --layers with --hidden");
  check(experts.interval >= 1 && experts.interval <= layers, "expert_interval", experts.interval,
        base::join("1 to ", layers, ", the layers. Hint: 1 gives every layer experts"));
  check(experts.k >= 1 && experts.k <= experts.count, "k", experts.k,
        base::join("1 to ", experts.count, ", the experts"));
  check(experts.ep_size >= 1 && experts.count % experts.ep_size == 0, "ep_size", experts.ep_size,
        base::join("a divisor of ", experts.count, " experts"));
}

}  // namespace zero
