// Parses numbers of bytes with units.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace zero::config {

// "1048576", "512MiB", "2GB", "1.5 TB", "40G": units of 1000 (kB, MB, GB, TB, PB; the B is optional) and of 1024 (KiB
// ... PiB), case-insensitive. Rounds down to whole bytes. nullopt for all other text, negative numbers, fractions
// without a unit, and numbers of 2^63 or more.
std::optional<std::int64_t> byte_count(std::string_view text);

}  // namespace zero::config
