// A configuration that was read: what was set, where, and by whom; its notices; its typed values.
// Built once from text and overrides, then immutable.
#pragma once
#include <map>
#include <memory>
#include <set>
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
  Place place, key_place;  // of the value as it was written
  std::string source;      // "ds.json:3:5", "CLI", ...
  std::string spelled;     // the path as it was written, old names included
  bool automatic = false;  // "auto"
  std::string overrides;   // the source that this one replaced
};

struct Document {
  std::shared_ptr<const Source> source;
  std::vector<Setting> overrides;
  std::map<std::string, Entry, std::less<>> entries;  // by path; only what was set
  std::vector<ConfigFault> notices;
  std::vector<ConfigFault> not_built;  // what asks for more than this version can do
  Settings settings;

  const Entry* find(std::string_view path) const;
  bool is_set(std::string_view path) const;  // with a value, not "auto"
  // The effective value as JSON: set, else the default; "" when there is none.
  std::string effective(const Key& key) const;
  Place place(std::string_view path) const;
};

// Reads `source` with `overrides` on top. Errors go to `faults`; the document is then not usable.
std::shared_ptr<const Document> read_document(std::shared_ptr<const Source> source, std::vector<Setting> overrides,
                                              Faults& faults);

// The parts of read_document, in their order.
void read_entries(Document& document, Faults& faults);         // text and overrides -> entries
void check_entries(const Document& document, Faults& faults);  // conflicts, refusals, what is missing
Settings typed_settings(const Document& document);             // entries and defaults -> Settings
void list_not_built(const Document& document, Faults& not_built);

// Paths that typed_settings() reads: the keys that work are these and no others (a test compares).
std::set<std::string> keys_read_by_settings();

// Why a key whose need is not met has no effect; empty when it is met.
std::string unmet_need(const Document& document, std::string_view need);

}  // namespace zero::config
