// Reads JSON strictly (RFC 8259), with the three liberties that DeepSpeed's files take: comments,
// one trailing comma, a byte-order mark. Everything else is a fault with its place. No keys here.
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

// Empty after a fault that ends reading (a syntax error, say); it is then the only one added.
// Duplicate keys, NaN and numbers out of range are added to `faults`, and reading goes on.
std::optional<Value> read_json(const std::shared_ptr<const Source>& source, Faults& faults);

}  // namespace zero::config
