// Text of others (keys of a configuration, names in a manifest, files) on its way into a message: nothing in it may
// command the terminal that shows it, or make it look like another text. The one home of that rule; no messages here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zero::base {

enum class Lines {
  Keep,    // newlines and tabs stay: for a whole message
  Escape,  // "\n", "\t": for a name inside a line
};

// Control characters (C0, DEL, C1), line separators and marks of writing direction.
bool commands_terminal(std::int32_t code);

// `text` with what commands a terminal as \u001b, and bytes that are not UTF-8 as \x9b. Everything else stays as it is,
// so that doing it twice changes nothing.
std::string printable(std::string_view text, Lines lines = Lines::Keep);

// Code points of UTF-8: what a caret is placed by.
std::size_t width_of(std::string_view text);

}  // namespace zero::base
