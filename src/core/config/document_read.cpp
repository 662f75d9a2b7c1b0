// Converts JSON text and overrides to checked entries: names, old names, types, ranges, "auto".
#include <algorithm>
#include <cctype>

#include "base/json_write.h"
#include "config/byte_count.h"
#include "config/document.h"
#include "config/json_reader.h"

namespace zero::config {
namespace {

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  });
}

std::string list_of(const std::vector<std::string>& names) {
  std::string out;
  for (const auto& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

// Names from other configurations, which get a more specific error than "unknown".
bool known_elsewhere(std::string_view optimizer) {
  for (const char* name : {"Lamb", "OneBitLamb", "OneBitAdam", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD", "ASGD",
                           "Rprop", "LBFGS", "SparseAdam", "Adafactor"})
    if (same_word(optimizer, name)) return true;
  return false;
}

// Sources of a command's flags for degrees of parallelism and for experts. They and other sources have to agree: how
// many ranks work on a sample, and what the model is, is no preference.
bool is_degree_flag(const std::string& source) {
  for (const char* flag :
       {"--tensor-parallel", "--sequence-parallel", "--num-experts", "--ep-world-size", "--top-k", "--aux-loss"})
    if (source.ends_with(flag)) return true;
  return false;
}

class Walker {
 public:
  Walker(Document& document, Faults& faults) : document_(document), faults_(faults) {}

  // `level` is 0 for the file and increases with every override. A higher level wins; two names of one key on the same
  // level conflict.
  void walk(const Value& object, const std::string& block, const std::string& spelled_block, const std::string& source,
            int level) {
    for (const Member& member : object.members) {
      const std::string spelled = spelled_block.empty() ? member.key : spelled_block + "." + member.key;
      if (block.empty() && member.key == "$schema") {
        if (!member.value.is(Value::Kind::String)) wrong_type(member.value, spelled, "a string");
        continue;
      }
      std::string path = block.empty() ? member.key : block + "." + member.key;
      const OldName* old = nullptr;
      for (const OldName& o : old_names())
        if (o.old_path == path) old = &o;
      if (old && old->deprecated)
        faults_.notice("deprecated", member.key_place, pointer_of(spelled), "old name of " + std::string(old->path),
                       "write " + std::string(old->path));
      if (old) path = old->path;
      member_at(member, path, spelled, old, source, level);
    }
  }

  void override_with(const Setting& setting, int level) {
    const char* const kCall = "Options::";  // source of an OptionsBuilder's settings; faults name the call
    const auto text = std::make_shared<Source>(
        Source{setting.source.starts_with(kCall) ? setting.source : "--set", setting.key + "=" + setting.value});
    Faults ignored;
    const auto json_text = std::make_shared<Source>(Source{"--set", setting.value});
    auto parsed = read_json(json_text, ignored);
    const bool json = parsed && !ignored.has_errors();
    // Text that is not JSON is a plain word; JSON beyond the reader's limits is a fault.
    for (const ConfigFault& fault : ignored.sorted())
      if (fault.id == "too-deep" || fault.id == "too-large") {
        const Place place{text, setting.key.size() + 1, std::max<std::size_t>(1, setting.value.size())};
        return faults_.error(fault.id, place, pointer_of(setting.key), fault.message, fault.hint);
      }
    Value value;
    if (json) {
      value = std::move(*parsed);
    } else {
      value.kind = Value::Kind::String;
      value.text = setting.value;
    }
    relocate(value, text, setting.key.size() + 1);
    if (!json) value.place.length = std::max<std::size_t>(1, setting.value.size());
    if (setting.only_auto) {
      const auto found = document_.entries.find(setting.key);
      const bool absent_batch = found == document_.entries.end() &&
                                (setting.key == "train_batch_size" || setting.key == "train_micro_batch_size_per_gpu" ||
                                 setting.key == "gradient_accumulation_steps");
      if (!absent_batch && (found == document_.entries.end() || !found->second.automatic)) return;
    }
    // Wrap the value in the objects of its path, so that the file and overrides share one function.
    Value wrapped = std::move(value);
    std::string rest = setting.key;
    std::size_t end = rest.size();
    const Place whole{text, 0, setting.key.size()};
    while (true) {
      const std::size_t dot = end == 0 ? std::string::npos : rest.rfind('.', end - 1);
      Value outer;
      outer.kind = Value::Kind::Object;
      outer.place = wrapped.place;
      const std::size_t begin = dot == std::string::npos ? 0 : dot + 1;
      outer.members.push_back({rest.substr(begin, end - begin),
                               Place{text, begin, std::max<std::size_t>(1, end - begin)}, std::move(wrapped)});
      wrapped = std::move(outer);
      if (dot == std::string::npos) break;
      end = dot;
    }
    walk(wrapped, "", "", setting.source, level);
  }

 private:
  static void relocate(Value& value, const std::shared_ptr<const Source>& source, std::size_t by) {
    value.place.source = source;
    value.place.offset += by;
    for (Value& item : value.items) relocate(item, source, by);
    for (Member& member : value.members) {
      member.key_place.source = source;
      member.key_place.offset += by;
      relocate(member.value, source, by);
    }
  }

  void member_at(const Member& member, const std::string& path, const std::string& spelled, const OldName* old,
                 const std::string& source, int level) {
    const Value& value = member.value;
    if (path == "zero_optimization" && value.is(Value::Kind::Bool)) {
      faults_.notice("deprecated", member.key_place, pointer_of(spelled), "a boolean stands for the stage",
                     std::string("write {\"stage\": ") + (value.boolean ? "1}" : "0}"));
      put("zero_optimization.stage", number(value, value.boolean ? "1" : "0"), member, spelled, source, level);
    } else if (old && (old->old_path == "zero_optimization.cpu_offload" ||
                       old->old_path == "zero_optimization.cpu_offload_param")) {
      if (!value.is(Value::Kind::Bool)) return wrong_type(value, spelled, "true or false");
      if (value.boolean) put(path, word(value, "cpu"), member, spelled, source, level);
    } else if (old && old->old_path == "zero_optimization.cpu_offload_use_pin_memory") {
      if (!value.is(Value::Kind::Bool)) return wrong_type(value, spelled, "true or false");
      faults_.notice("no-effect", member.key_place, pointer_of(spelled),
                     "no effect: offload is not available in this version");
    } else if (old && old->old_path == "fp32_allreduce") {
      if (!value.is(Value::Kind::Bool)) return wrong_type(value, spelled, "true or false");
      if (value.boolean) put(path, word(value, "fp32"), member, spelled, source, level);
    } else if (find_key(path)) {
      put(path, value, member, spelled, source, level);
    } else if (is_block(path)) {
      if (value.is(Value::Kind::Null) &&
          (path == "zero_optimization.offload_param" || path == "zero_optimization.offload_optimizer")) {
        std::erase_if(document_.entries, [&](const auto& entry) { return entry.first.starts_with(path + "."); });
        return;
      }
      if (!value.is(Value::Kind::Object)) return wrong_type(value, spelled, "an object");
      walk(value, path, spelled, source, level);
    } else {
      unknown(member, path, spelled);
    }
  }

  static Value number(const Value& at, const char* text) {
    Value value;
    value.kind = Value::Kind::Number;
    value.text = text;
    value.place = at.place;
    return value;
  }
  static Value word(const Value& at, const char* text) {
    Value value = number(at, text);
    value.kind = Value::Kind::String;
    return value;
  }

  void unknown(const Member& member, const std::string& path, const std::string& spelled) {
    const std::size_t dot = path.rfind('.');
    const std::string block = dot == std::string::npos ? "" : path.substr(0, dot);
    const auto valid = names_below(block);
    std::string hint;
    if (path == "optimizer.params.max_grad_norm") {
      hint = "use gradient_clipping at the top level";
    } else if (const auto near = nearest_name(member.key, valid); !near.empty()) {
      hint = "did you mean \"" + near + "\"?";
    } else if (const auto elsewhere = paths_named(member.key); !elsewhere.empty()) {
      const auto other = elsewhere[0].rfind('.');
      hint = other == std::string::npos ? "it belongs at the top level"
                                        : "it belongs under " + elsewhere[0].substr(0, other);
    } else {
      hint = "known here: " + list_of(valid);
    }
    faults_.error("unknown-key", member.key_place, pointer_of(spelled), "unknown key", hint);
  }

  void wrong_type(const Value& value, const std::string& spelled, const std::string& expected) {
    std::string hint;
    if (value.is(Value::Kind::String)) {
      const std::string& t = value.text;
      if (t == "NaN" || t == "nan" || t == "Infinity" || t == "-Infinity" || t == "inf" || t == "-inf") {
        faults_.error("not-a-number", value.place, pointer_of(spelled), "got \"" + t + "\", expected " + expected);
        return;
      }
      Faults ignored;
      const auto inside = read_json(std::make_shared<Source>(Source{"", t}), ignored);
      if (inside && !ignored.has_errors() && (inside->is(Value::Kind::Number) || inside->is(Value::Kind::Bool)))
        hint = "remove the quotes";
    }
    faults_.error("wrong-type", value.place, pointer_of(spelled),
                  "got " + value.kind_name() + " (" + value.json().substr(0, 60) + "), expected " + expected, hint);
  }

  void put(const std::string& path, const Value& value, const Member& member, const std::string& spelled,
           const std::string& source, int level) {
    const Key& key = key_at(path);
    Entry entry;
    entry.key = &key;
    entry.place = value.place;
    entry.key_place = member.key_place;
    entry.spelled = spelled;
    entry.source = level == 0 ? value.place.text() : source;
    const bool literal = (key.type == Type::Text || key.type == Type::Enum) && key.auto_rule.empty();
    if (value.is(Value::Kind::String) && value.text == "auto" && !literal) {
      entry.automatic = true;
    } else if (!checked(key, value, spelled, entry.value)) {
      return;
    }
    if (entry.automatic && key.auto_rule.empty()) {
      faults_.error("auto-no-rule", value.place, pointer_of(spelled), "got \"auto\", but there is no rule for it here",
                    "give a value");
      return;
    }
    const auto found = document_.entries.find(path);
    if (found != document_.entries.end() && levels_[path] == level) {
      faults_.error("conflict", member.key_place, pointer_of(spelled),
                    "got " + spelled + " together with " + found->second.spelled + ", which is the same key",
                    "keep one of the two", {found->second.key_place});
      return;
    }
    if (found != document_.entries.end()) {
      const auto& other = found->second;
      entry.overrides = other.source;
      const bool agree = other.automatic || entry.automatic || other.value.json() == entry.value.json();
      if (!agree && (is_degree_flag(source) || is_degree_flag(other.source)))
        return faults_.error("conflict", value.place, pointer_of(spelled),
                             "got " + entry.value.json() + " by " + source + " and " + other.value.json() + " by " +
                                 other.source + ", expected the same",
                             "give one of the two", {other.key_place});
    }
    levels_[path] = level;
    document_.entries.insert_or_assign(path, std::move(entry));
  }

  bool out_of_range(const Value& value, const std::string& spelled, const Key& key) {
    const auto text = [](double limit) { return number_text(limit); };
    constexpr double kInf = std::numeric_limits<double>::infinity();
    std::string range;
    if (key.low > -kInf) range = (key.above_low ? "above " : "at least ") + text(key.low);
    if (key.high < kInf)
      range += std::string(range.empty() ? "" : " and ") + (key.below_high ? "below " : "at most ") + text(key.high);
    if (key.multiple > 1) range += " and a multiple of " + std::to_string(key.multiple);
    faults_.error(
        "out-of-range", value.place, pointer_of(spelled),
        "got " + value.json() + ", expected " + range + (key.unit.empty() ? "" : " (" + std::string(key.unit) + ")"));
    return false;
  }

  bool in_range(const Value& value, const std::string& spelled, const Key& key) {
    const double v = finite_number(value.text).value_or(0);
    const bool low = key.above_low ? v > key.low : v >= key.low, high = key.below_high ? v < key.high : v <= key.high;
    const bool fits = key.multiple == 1 || whole_number(value.text).value_or(0) % key.multiple == 0;
    return (low && high && fits) || out_of_range(value, spelled, key);
  }

  bool is_number(const Value& value, const std::string& spelled, const std::string& expected) {
    if (!value.is(Value::Kind::Number)) {
      wrong_type(value, spelled, expected);
      return false;
    }
    return !value.text.empty();  // otherwise the reader has reported it
  }

  // Checks type and range, and writes the canonical form to `out`.
  bool checked(const Key& key, const Value& value, const std::string& spelled, Value& out) {
    out = value;
    if (value.is(Value::Kind::Null)) {
      if (!key.nullable()) wrong_type(value, spelled, expected_type(key));
      return key.nullable();
    }
    const auto is = [&](Value::Kind kind) {
      if (!value.is(kind)) wrong_type(value, spelled, expected_type(key));
      return value.is(kind);
    };
    switch (key.type) {
      case Type::Bool:
        return is(Value::Kind::Bool);
      case Type::Int: {
        if (!is_number(value, spelled, expected_type(key))) return false;
        bool too_large = false;
        if (!whole_number(value.text, &too_large)) {
          if (too_large)
            faults_.error("number-too-large", value.place, pointer_of(spelled),
                          "got " + value.text.substr(0, 60) + ", expected a 64-bit integer");
          else
            faults_.error("wrong-type", value.place, pointer_of(spelled),
                          "got " + value.text + ", expected a whole number");
          return false;
        }
        return in_range(value, spelled, key);
      }
      case Type::Bytes:
        return checked_bytes(key, value, spelled, out);
      case Type::Num:
        return is_number(value, spelled, expected_type(key)) && in_range(value, spelled, key);
      case Type::Enum:
        return is(Value::Kind::String) && checked_word(key, value, spelled, out);
      case Type::Text:
        return is(Value::Kind::String);
      case Type::TextList:
        if (value.is(Value::Kind::String)) {
          out = Value{};
          out.kind = Value::Kind::Array;
          out.place = value.place;
          out.items.push_back(value);
          return true;
        }
        if (!is(Value::Kind::Array)) return false;
        for (const Value& item : value.items)
          if (!item.is(Value::Kind::String)) return wrong_type(item, spelled, "a string"), false;
        return true;
      case Type::NumPair:
        if (!value.is(Value::Kind::Array) || value.items.size() != 2)
          return wrong_type(value, spelled, expected_type(key)), false;
        return checked_numbers(key, value, spelled);
      case Type::NumOrList:
        if (value.is(Value::Kind::Array)) {
          if (value.items.empty()) return wrong_type(value, spelled, "a number, or one per parameter group"), false;
          return checked_numbers(key, value, spelled);
        }
        return is_number(value, spelled, expected_type(key)) && in_range(value, spelled, key);
      case Type::Groups:
        return is(Value::Kind::Array) && checked_groups(value, spelled);
      case Type::Block:
        return is(Value::Kind::Object);
      case Type::Any:
        return true;
    }
    return false;
  }

  static std::string expected_type(const Key& key) {
    switch (key.type) {
      case Type::Bool:
        return "true or false";
      case Type::Int:
        return "a whole number";
      case Type::Bytes:
        return "a number of bytes, or a string such as \"2GB\" or \"512MiB\"";
      case Type::Num:
        return "a number";
      case Type::Enum:
        return "one of " + list_of(key.choices);
      case Type::Text:
        return "a string";
      case Type::TextList:
        return "a string or a list of strings";
      case Type::NumPair:
        return "a list of two numbers";
      case Type::NumOrList:
        return "a number, or a list of numbers";
      case Type::Groups:
        return "a list of objects";
      default:
        return "an object";
    }
  }

  bool checked_bytes(const Key& key, const Value& value, const std::string& spelled, Value& out) {
    const auto bytes =
        value.is(Value::Kind::String) || value.is(Value::Kind::Number) ? byte_count(value.text) : std::nullopt;
    if (!bytes) {
      wrong_type(value, spelled, expected_type(key));
      return false;
    }
    out = Value{};
    out.kind = Value::Kind::Number;
    out.place = value.place;
    out.text = std::to_string(*bytes);
    return in_range(out, spelled, key);
  }

  bool checked_numbers(const Key& key, const Value& value, const std::string& spelled) {
    bool good = true;
    for (const Value& item : value.items) good &= is_number(item, spelled, "a number") && in_range(item, spelled, key);
    return good;
  }

  bool checked_word(const Key& key, const Value& value, const std::string& spelled, Value& out) {
    for (const auto& choice : key.choices)
      if (same_word(value.text, choice)) {
        out.text = choice;
        return true;
      }
    const std::string expected = "got " + base::json_quote(value.text) + ", expected " + expected_type(key);
    const auto near = nearest_name(value.text, key.choices);
    if (key.path == "optimizer.type" && known_elsewhere(value.text))
      faults_.error("refused", value.place, pointer_of(spelled), expected,
                    "it is not built in; pick one of the list, or give the Engine an optimizer of the program");
    else
      faults_.error("bad-value", value.place, pointer_of(spelled), expected,
                    near.empty() ? "" : "did you mean \"" + near + "\"?");
    return false;
  }

  bool checked_groups(const Value& value, const std::string& spelled) {
    bool good = true;
    for (std::size_t i = 0; i < value.items.size(); ++i) {
      const Value& item = value.items[i];
      const std::string at = spelled + "." + std::to_string(i);
      if (!item.is(Value::Kind::Object)) {
        wrong_type(item, at, "an object");
        good = false;
        continue;
      }
      const Value* pattern = item.find("pattern");
      if (!pattern) {
        faults_.error("missing", item.place, pointer_of(at), "got no \"pattern\"",
                      "name the parameters, as in {\"pattern\": \"*.bias\", \"weight_decay\": 0}");
        good = false;
      }
      for (const Member& member : item.members) {
        const std::string path = at + "." + member.key;
        if (member.key == "pattern") {
          if (!member.value.is(Value::Kind::String)) wrong_type(member.value, path, "a string"), good = false;
        } else if (member.key == "lr" || member.key == "weight_decay") {
          Key key{Rules{.low = 0}};
          good &= is_number(member.value, path, "a number") && in_range(member.value, path, key);
        } else {
          const auto near = nearest_name(member.key, {"pattern", "lr", "weight_decay"});
          faults_.error("unknown-key", member.key_place, pointer_of(path), "unknown key",
                        near.empty() ? "known here: pattern, lr, weight_decay" : "did you mean \"" + near + "\"?");
          good = false;
        }
      }
    }
    return good;
  }

  Document& document_;
  Faults& faults_;
  std::map<std::string, int> levels_;
};

}  // namespace

void read_entries(Document& document, Faults& faults) {
  const auto root = read_json(document.source, faults);
  if (!root) return;
  if (!root->is(Value::Kind::Object)) {
    faults.error("wrong-type", root->place, "", "got " + root->kind_name() + ", expected an object at the top level");
    return;
  }
  Walker walker(document, faults);
  walker.walk(*root, "", "", "", 0);
  int level = 0;
  for (const Setting& setting : document.overrides) walker.override_with(setting, ++level);
}

}  // namespace zero::config
