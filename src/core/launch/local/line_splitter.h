// Bytes of a rank's pipe made into whole lines: at most 64 KiB each, with a progress bar's
// carriage returns folded into its last state. Pure; knows no file and no prefix.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace zero::launch {

inline constexpr std::size_t kLongestLine = 64 * 1024;

class LineSplitter {
 public:
  using Emit = std::function<void(std::string_view line)>;  // without its newline

  // Calls `emit` for each line that the bytes complete. "\r\n" ends a line as "\n" does; after a
  // lone "\r" the line starts again. A longer line is cut at a whole UTF-8 character and marked
  // " [cut: 123 more bytes]".
  void feed(std::string_view bytes, const Emit& emit);
  // The last line, if it had no newline.
  void finish(const Emit& emit);

 private:
  void put(std::string_view bytes);
  void end_line(const Emit& emit);
  std::string line_;
  std::size_t cut_ = 0;           // bytes left out of line_
  bool carriage_return_ = false;  // the last byte was '\r'
  bool something_ = false;        // bytes came since the last newline
};

}  // namespace zero::launch
