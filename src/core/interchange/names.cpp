// The text of name maps, and names against patterns. map_names() is in name_mapping.cpp.
#include "interchange/names.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/check.h"
#include "base/printable.h"
#include "formats/json.h"
#include "interchange/name_pattern.h"

namespace zero::interchange {
namespace {

constexpr std::uint64_t kMostMapBytes = std::uint64_t{4} << 20;

[[noreturn]] void fail_map(const std::string& path, const std::string& what) {
  throw ConfigError(base::printable("[names] " + path + ": " + what));
}

Order order_of(const formats::JsonView& rule, std::int64_t* heads) {
  if (!rule.raw().contains("op")) return Order::Same;
  const auto op = rule.at("op");
  if (op.raw().is_object()) {
    op.has_only({"permute_heads"});
    *heads = op.at("permute_heads").count(1 << 20);
    if (*heads < 1) op.fail("has no heads, expected 1 or more");
    return Order::PairsToHalves;
  }
  const auto word = op.text();
  if (word == "transpose") return Order::Transposed;
  if (word != "concat") op.fail("is \"" + word + "\", expected transpose, concat or {\"permute_heads\": N}");
  return Order::Same;
}

std::vector<std::string> words_in(const formats::JsonView& object, const char* field) {
  std::vector<std::string> words;
  if (object.raw().contains(field))
    for (const auto& item : object.at(field).items()) words.push_back(item.text());
  return words;
}

void require_fields(const formats::JsonView& object, const std::set<std::string>& known) {
  for (const auto& [field, view] : object.fields())
    if (!known.contains(field)) view.fail("is not a field of a name map");
}

NameMap::Rule rule_in(const formats::JsonView& view) {
  require_fields(view, {"ours", "theirs", "also", "op", "shares"});
  NameMap::Rule rule;
  rule.ours = view.at("ours").text();
  if (view.at("theirs").raw().is_array())
    rule.theirs = words_in(view, "theirs");
  else
    rule.theirs = {view.at("theirs").text()};
  rule.also = words_in(view, "also");
  rule.order = order_of(view, &rule.heads);
  if (view.raw().contains("shares"))
    for (const auto& share : view.at("shares").items()) rule.shares.push_back(share.count(1 << 20));
  if (rule.theirs.empty()) view.fail("names no tensor of theirs");
  if (!rule.also.empty() && rule.theirs.size() > 1) view.fail("has other spellings of several tensors");
  if (rule.shares.empty()) rule.shares.assign(rule.theirs.size(), 1);
  if (rule.shares.size() != rule.theirs.size() ||
      std::any_of(rule.shares.begin(), rule.shares.end(), [](std::int64_t share) { return share < 1; }))
    view.fail(base::join("has shares that are not ", rule.theirs.size(), " numbers of 1 or more"));
  // What one side captures fills the other side, in both directions.
  const auto captures = captures_of(rule.ours);
  if (std::count(rule.ours.begin(), rule.ours.end(), '*') > 1) view.fail("has more than one \"*\"");
  for (const auto* const names : {&rule.theirs, &rule.also})
    for (const auto& name : *names)
      if (std::count(name.begin(), name.end(), '*') > 1 || captures_of(name) != captures)
        view.fail("has other numbers or \"*\" in " + name + " than in " + rule.ours);
  if (std::set<std::string>(rule.theirs.begin(), rule.theirs.end()).size() != rule.theirs.size())
    view.fail("names a tensor twice");
  return rule;
}

}  // namespace

NameMap NameMap::parse(std::string_view text, const std::string& path) {
  NameMap map;
  map.name_ = path;
  try {
    const auto json = formats::parse_json(text, path, 6);
    const formats::JsonView top(json, path);
    require_fields(top, {"format", "prefix", "rules", "ties", "ignore"});
    if (top.at("format").text() != "zero.names/1")
      top.at("format").fail("is \"" + top.at("format").text() + "\", expected \"zero.names/1\"");
    if (top.raw().contains("prefix")) map.prefix_ = top.at("prefix").text();
    for (const auto& rule : top.at("rules").items()) map.rules_.push_back(rule_in(rule));
    if (map.rules_.empty()) top.at("rules").fail("is empty");
    if (top.raw().contains("ties"))
      for (const auto& tie : top.at("ties").items()) {
        require_fields(tie, {"alias", "stored", "if"});
        map.ties_.push_back(
            {tie.at("alias").text(), tie.at("stored").text(), tie.raw().contains("if") ? tie.at("if").text() : ""});
      }
    map.ignore_ = words_in(top, "ignore");
  } catch (const IoError& e) {
    throw ConfigError(e.what());
  }
  return map;
}

NameMap NameMap::find(formats::FsOps& fs, const std::string& name) {
  if (const auto* const text = builtin_text(name)) return parse(text, name);
  std::string known;
  for (const auto& one : builtin_names()) known += (known.empty() ? "" : ", ") + one;
  const std::filesystem::path path(name);
  const auto parent = path.parent_path().string();
  std::string text;
  try {
    text = formats::Folder::open(fs, parent.empty() ? "." : parent).read_file(path.filename().string(), kMostMapBytes);
  } catch (const IoError& e) {
    if (e.code() != ExitCode::kCheckpoint) throw;
    fail_map(name, "got neither a built-in map nor a file, expected one of " + known + ", or a file of zero.names/1");
  }
  return parse(text, name);
}

}  // namespace zero::interchange
