// Divides the output of a rank into lines of at most 64 KiB. A progress bar's carriage returns are reduced to its last
// state.
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

  // Calls `emit` for each complete line. "\r\n" ends a line like "\n"; after a lone "\r" the line starts again. A
  // longer line is cut at a UTF-8 character boundary and marked " [cut: 123 more bytes]".
  void feed(std::string_view bytes, const Emit& emit);
  // Emits the last line if it had no newline.
  void finish(const Emit& emit);

 private:
  void put(std::string_view bytes);
  void end_line(const Emit& emit);
  std::string line_;
  std::size_t cut_ = 0;           // bytes that line_ omits
  bool carriage_return_ = false;  // the last byte was '\r'
  bool something_ = false;        // bytes arrived since the last newline
};

}  // namespace zero::launch
