// Look-ups in the key table.
#include "config/key_table.h"

#include <algorithm>
#include <map>

namespace zero::config {
namespace {

struct Index {
  std::vector<Key> all;
  std::map<std::string_view, const Key*> by_path;
  Index() {
    for (const auto part : {training_keys(), zero_keys(), parallel_keys(), other_keys()})
      all.insert(all.end(), part.begin(), part.end());
    for (const Key& key : all) by_path.emplace(key.path, &key);
  }
};

const Index& index() {
  static const Index kIndex;
  return kIndex;
}

bool below(std::string_view path, std::string_view block) {
  return block.empty() || (path.size() > block.size() && path.starts_with(block) && path[block.size()] == '.');
}

}  // namespace

std::span<const Key> keys() { return index().all; }

const Key* find_key(std::string_view path) {
  const auto found = index().by_path.find(path);
  return found == index().by_path.end() ? nullptr : found->second;
}

bool is_block(std::string_view path) {
  return std::any_of(keys().begin(), keys().end(),
                     [&](const Key& key) { return below(key.path, path) && !path.empty(); });
}

std::vector<std::string> names_below(std::string_view block) {
  std::vector<std::string> names;
  const auto add = [&](std::string_view path) {
    if (!below(path, block)) return;
    path.remove_prefix(block.empty() ? 0 : block.size() + 1);
    std::string name(path.substr(0, path.find('.')));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  };
  for (const Key& key : keys()) add(key.path);
  for (const OldName& old : old_names()) add(old.old_path);
  return names;
}

std::vector<std::string> paths_named(std::string_view name) {
  std::vector<std::string> paths;
  for (const Key& key : keys())
    if (key.path.substr(key.path.rfind('.') + 1) == name) paths.emplace_back(key.path);
  return paths;
}

}  // namespace zero::config
