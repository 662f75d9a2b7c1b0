#include "config/tp_plan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <regex>
#include <utility>

#include <zero/config_tools.h>

#include "base/check.h"
#include "config/fault.h"

namespace zero::config {
namespace {

constexpr std::size_t kLongestPattern = 256;
constexpr const char* kWhere = "/tensor_parallel/partition_config";

// Reads one object of the plan: every field has a reader, and other fields are faults.
class Reader {
 public:
  Reader(const Value& object, std::string pointer, Faults& faults)
      : object_(object), pointer_(std::move(pointer)), faults_(faults) {
    if (!object_.is(Value::Kind::Object)) wrong(object_, pointer_, "an object");
  }
  ~Reader() {
    for (const auto& member : object_.members) {
      if (std::find(known_.begin(), known_.end(), member.key) != known_.end()) continue;
      const auto near = nearest_name(member.key, known_);
      faults_.error("unknown-key", member.key_place, at(member.key), "got an unknown field " + member.key,
                    near.empty() ? "fields: " + joined(known_) : "did you mean " + near + "?");
    }
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  std::string at(const std::string& key) const { return pointer_ + "/" + key; }
  const Value* find(const char* key) {
    known_.emplace_back(key);
    const auto* const value = object_.find(key);
    return value == nullptr || value->is(Value::Kind::Null) ? nullptr : value;
  }
  std::optional<bool> flag(const char* key) {
    const auto* const value = find(key);
    if (value == nullptr) return {};
    if (!value->is(Value::Kind::Bool)) wrong(*value, at(key), "true or false");
    return value->boolean;
  }
  std::optional<std::int64_t> whole(const char* key, std::int64_t least) {
    const auto* const value = find(key);
    return value == nullptr ? std::nullopt : whole_at_least(*value, at(key), least);
  }
  std::optional<std::int64_t> whole_at_least(const Value& value, const std::string& pointer, std::int64_t least) {
    const auto number = value.is(Value::Kind::Number) ? whole_number(value.text) : std::nullopt;
    if (number && *number >= least) return number;
    wrong(value, pointer, base::join("a whole number of at least ", least));
    return {};
  }
  std::vector<std::string> texts(const char* key) {
    const auto* const value = find(key);
    std::vector<std::string> result;
    if (value == nullptr) return result;
    if (value->is(Value::Kind::String)) return {value->text};
    if (!value->is(Value::Kind::Array)) wrong(*value, at(key), "a string or a list of strings");
    for (const auto& item : value->items) {
      if (!item.is(Value::Kind::String)) wrong(item, at(key), "a string");
      result.push_back(item.text);
    }
    return result;
  }
  void wrong(const Value& value, const std::string& pointer, const std::string& expected) {
    faults_.error("wrong-type", value.place, pointer, "got " + value.json().substr(0, 80) + ", expected " + expected);
  }
  void fail(const Value& value, const char* key, const std::string& message, const std::string& hint = {}) {
    faults_.error("out-of-range", value.place, at(key), message, hint);
  }

 private:
  static std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
    return text;
  }
  const Value& object_;
  const std::string pointer_;
  Faults& faults_;
  std::vector<std::string> known_;
};

void read_patterns(Reader& reader, const Value& object, LayerSpec& spec) {
  spec.patterns = reader.texts("patterns");
  if (spec.patterns.empty()) reader.fail(object, "patterns", "got no pattern, expected at least one");
  for (const auto& pattern : spec.patterns) {
    if (pattern.size() > kLongestPattern)
      reader.fail(object, "patterns",
                  base::join("got a pattern of ", pattern.size(), " characters, expected at most ", kLongestPattern));
    if (std::regex_search(pattern, std::regex(R"((^|[^\\])(\\\\)*\\[1-9])")))
      reader.fail(object, "patterns", "got the pattern " + pattern + " with a backreference, which is not supported");
    try {
      (void)std::regex(pattern, std::regex::ECMAScript);
    } catch (const std::regex_error& e) {
      reader.fail(object, "patterns", "got the pattern " + pattern + ", expected a regular expression", e.what());
    }
  }
}

// [3, -1]: 3 equal pieces; [[q, k, v], -1]: pieces of these lengths.
void read_shape(Reader& reader, LayerSpec& spec) {
  const auto* const shape = reader.find("shape");
  if (shape == nullptr) return;
  if (!shape->is(Value::Kind::Array) || shape->items.size() != 2 || shape->items[1].text != "-1")
    return reader.wrong(*shape, reader.at("shape"), "[number of pieces, -1] or [[lengths], -1]");
  const auto& first = shape->items[0];
  for (const auto& item : first.is(Value::Kind::Array) ? first.items : std::vector<Value>{first})
    if (const auto length = reader.whole_at_least(item, reader.at("shape"), 1)) spec.pieces.push_back(*length);
  spec.equal_pieces = !first.is(Value::Kind::Array);
  if (spec.type != PartitionType::Column)
    reader.fail(*shape, "shape", "got pieces of a weight that is not cut by columns",
                "pieces along the inputs of a row layer are not supported");
}

LayerSpec read_spec(const Value& object, const std::string& pointer, Faults& faults) {
  LayerSpec spec;
  spec.place = object.place.text();
  if (const auto& source = object.place.source; !source || source->name.empty()) spec.place = pointer;
  Reader reader(object, pointer, faults);
  read_patterns(reader, object, spec);
  const auto* const type = reader.find("partition_type");
  static const std::map<std::string, PartitionType> types{
      {"column", PartitionType::Column}, {"row", PartitionType::Row}, {"skip", PartitionType::Skip}};
  spec.type = PartitionType::Column;  // DeepSpeed's default
  if (type != nullptr) {
    const auto found = types.find(type->text);
    if (found == types.end())
      reader.fail(*type, "partition_type", "got " + type->json() + ", expected column, row or skip");
    else
      spec.type = found->second;
  }
  read_shape(reader, spec);
  if (const auto dim = reader.whole("partition_dim", 0); dim && *dim != (spec.type == PartitionType::Row ? 1 : 0))
    reader.fail(object, "partition_dim", base::join("got ", *dim, ", expected 0 for column and 1 for row"));
  spec.gather_output = reader.flag("gather_output");
  spec.grad_allreduce = reader.flag("grad_allreduce").value_or(false);
  spec.scatter_input = reader.flag("scatter_input").value_or(false);
  spec.multiple = reader.whole("multiple", 1).value_or(1);
  reader.texts("model_types");  // C++ models have none
  return spec;
}

LayerSpec column(std::string pattern, std::vector<std::int64_t> pieces = {}) {
  LayerSpec spec;
  spec.patterns = {std::move(pattern)};
  spec.type = PartitionType::Column;
  spec.equal_pieces = !pieces.empty();
  spec.pieces = std::move(pieces);
  return spec;
}

LayerSpec row(std::string pattern) {
  LayerSpec spec;
  spec.patterns = {std::move(pattern)};
  spec.type = PartitionType::Row;
  return spec;
}

// Layers by the names that the models give them: models/gpt.cpp, and Hugging Face's.
std::vector<LayerSpec> preset_specs(const std::string& name) {
  std::vector<LayerSpec> specs;
  if (name == "gpt") {
    specs = {column(R"(.*blocks\.\d+\.qkv\.weight)", {3}), row(R"(.*blocks\.\d+\.projection\.weight)"),
             column(R"(.*blocks\.\d+\.up\.weight)"), row(R"(.*blocks\.\d+\.down\.weight)"),
             column(R"((.*\.)?(token|output)\.weight)")};
    specs.back().head = true;
  } else if (name == "llama" || name == "qwen2") {
    specs = {column(R"(.*\.[qkv]_proj\.weight)"), row(R"(.*\.o_proj\.weight)"), column(R"(.*\.(gate|up)_proj\.weight)"),
             row(R"(.*\.down_proj\.weight)")};
  } else if (name == "phi3") {
    specs = {column(R"(.*\.qkv_proj\.weight)", {3}), row(R"(.*\.o_proj\.weight)"),
             column(R"(.*\.gate_up_proj\.weight)", {2}), row(R"(.*\.down_proj\.weight)")};
  } else if (name == "bloom") {
    specs = {column(R"(.*\.query_key_value\.weight)"), row(R"(.*\.self_attention\.dense\.weight)"),
             column(R"(.*\.dense_h_to_4h\.weight)"), row(R"(.*\.dense_4h_to_h\.weight)")};
  } else if (name == "chatglm") {
    specs = {column(R"(.*\.query_key_value\.weight)", {3}), row(R"(.*\.self_attention\.dense\.weight)"),
             column(R"(.*\.dense_h_to_4h\.weight)", {2}), row(R"(.*\.dense_4h_to_h\.weight)")};
  }
  for (auto& spec : specs) {
    spec.place = "preset " + name;
    spec.preset = true;
  }
  return specs;
}

}  // namespace

TpPlan read_tp_plan(const Value& partition_config, const std::string& preset, int degree, Faults& faults) {
  TpPlan plan;
  bool defaults = true;
  if (!partition_config.is(Value::Kind::Null)) {
    Reader reader(partition_config, kWhere, faults);
    defaults = reader.flag("use_default_specs").value_or(true);
    plan.strict = reader.flag("strict_mode").value_or(false);
    if (reader.find("lm_head_patterns") != nullptr) plan.lm_head_patterns = reader.texts("lm_head_patterns");
    reader.whole("embedding_partition_dim", 0);  // rows are cut in any case
    if (const auto size = reader.whole("tp_size", 1); size && *size > 1 && *size != degree)
      reader.fail(*partition_config.find("tp_size"), "tp_size",
                  base::join("got ", *size, ", expected ", degree, ", as tensor_parallel.autotp_size"));
    if (const auto* const specs = reader.find("layer_specs")) {
      if (!specs->is(Value::Kind::Array)) reader.wrong(*specs, std::string(kWhere) + "/layer_specs", "a list");
      for (std::size_t i = 0; i < specs->items.size(); ++i)
        plan.specs.push_back(read_spec(specs->items[i], base::join(kWhere, "/layer_specs/", i), faults));
    }
  }
  // The first match decides, so entries of the configuration come before the preset's.
  if (defaults || partition_config.is(Value::Kind::Null))
    for (auto& spec : preset_specs(preset)) plan.specs.push_back(std::move(spec));
  return plan;
}

}  // namespace zero::config
