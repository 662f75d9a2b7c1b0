// A configuration that was read: entries with their locations and sources, notices, and typed values. Built once from
// text and overrides, then immutable.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <zero/options.h>

#include "config/fault.h"
#include "config/key_table.h"
#include "config/settings.h"

namespace zero::config {

struct Entry {
  const Key* key = nullptr;
  Value value;             // checked, in canonical form; unused when automatic
  Place place, key_place;  // locations of the value and the key
  std::string source;      // "ds.json:3:5", "CLI", ...
  std::string spelled;     // the path as written; may be an old name
  bool automatic = false;  // "auto"
  std::string overrides;   // the source that this one replaced
};

struct Document {
  std::shared_ptr<const Source> source;
  std::vector<Setting> overrides;
  std::map<std::string, Entry, std::less<>> entries;  // by path; only keys that were set
  std::vector<ConfigFault> notices;
  std::vector<ConfigFault> not_built;  // settings that this version does not support
  Settings settings;

  const Entry* find(std::string_view path) const;
  bool is_set(std::string_view path) const;  // to a value other than "auto"
  // The effective value as JSON: the set value, else the default; "" if there is none.
  std::string effective(const Key& key) const;
  std::string effective(std::string_view path) const { return effective(key_at(path)); }
  Place place(std::string_view path) const;
  OptimizerType optimizer_type() const;  // some have defaults of their own
};

// Reads `source`, then applies `overrides`. Adds errors to `faults`; the document is then unusable.
std::shared_ptr<const Document> read_document(std::shared_ptr<const Source> source, std::vector<Setting> overrides,
                                              Faults& faults);

// The stages of read_document, in order.
void read_entries(Document& document, Faults& faults);         // text and overrides -> entries
void check_entries(const Document& document, Faults& faults);  // conflicts, refused values, missing keys
Settings typed_settings(const Document& document);             // entries and defaults -> Settings
void list_not_built(const Document& document, Faults& not_built);

// The values of keys that are not set.
Settings default_settings(OptimizerType optimizer);

// The word of a condition in the schema, and why keys that need it have no effect; empty if they have one.
struct Condition {
  std::string_view word;
  std::string unmet;
};
Condition condition_of(const Document& document, When when);

}  // namespace zero::config
