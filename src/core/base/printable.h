// Escapes external text (keys of a configuration, names in a manifest, file names) for messages, so that it cannot
// control the terminal or imitate other text.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zero::base {

enum class Lines {
  Keep,    // keep newlines and tabs: for a whole message
  Escape,  // "\n", "\t": for a name within a line
};

// Control characters (C0, DEL, C1), line separators and bidirectional marks.
bool commands_terminal(std::int32_t code);

// Returns `text` with what commands a terminal as \u001b, and bytes that are not UTF-8 as \x9b. Everything else is
// unchanged, so the function is idempotent.
std::string printable(std::string_view text, Lines lines = Lines::Keep);

// The number of UTF-8 code points, for placing carets.
std::size_t width_of(std::string_view text);

}  // namespace zero::base
