// Numbers of bytes as people write them.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace zero::config {

// "1048576", "512MiB", "2GB", "1.5 TB", "40G": units of 1000 (kB, MB, GB, TB, PB; the B may be left out) and of 1024
// (KiB ... PiB), case-insensitive. Rounded down to whole bytes. Nothing for anything else, negative or above 2^63.
std::optional<std::int64_t> byte_count(std::string_view text);

}  // namespace zero::config
