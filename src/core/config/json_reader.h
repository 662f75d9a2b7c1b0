// A strict JSON reader (RFC 8259) with three extensions for DeepSpeed's files: comments, one trailing comma, and a
// byte-order mark. Everything else is a fault with a location. Independent of the key table.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "config/fault.h"
#include "config/json_value.h"

namespace zero::config {

// Limits of a file.
constexpr std::size_t kMaxFileBytes = 1 << 20, kMaxStringBytes = 4096, kMaxListItems = 4096;
constexpr int kMaxDepth = 32;

// Returns nullopt after a fault that ends reading, for example a syntax error, which is then the only one reported.
// Duplicate keys, NaN and numbers out of range are added to `faults`, and reading continues.
std::optional<Value> read_json(const std::shared_ptr<const Source>& source, Faults& faults);

}  // namespace zero::config
