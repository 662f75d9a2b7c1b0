// See line_splitter.h. Memory is bounded by kLongestLine for any output.
#include "tools/launch/local/line_splitter.h"

namespace zero::launch {
namespace {
// The length of `line` without an incomplete UTF-8 character at its end.
std::size_t whole_characters(std::string_view line) {
  for (std::size_t back = 1; back <= 4 && back <= line.size(); ++back) {
    const unsigned c = static_cast<unsigned char>(line[line.size() - back]);
    if ((c & 0xc0) == 0x80) continue;
    const std::size_t needs = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
    return needs > back ? line.size() - back : line.size();
  }
  return line.size();
}
}  // namespace

void LineSplitter::put(std::string_view bytes) {
  if (bytes.empty()) return;
  if (carriage_return_) {  // the progress bar is redrawn
    carriage_return_ = false;
    line_.clear();
    cut_ = 0;
  }
  const std::size_t room = kLongestLine - line_.size();
  if (cut_ == 0 && bytes.size() > room) {
    line_ += bytes.substr(0, room);
    cut_ = bytes.size() - room;
  } else if (cut_ > 0) {
    cut_ += bytes.size();
  } else {
    line_ += bytes;
  }
}

void LineSplitter::end_line(const Emit& emit) {
  if (cut_ > 0) {
    const std::size_t whole = whole_characters(line_);
    cut_ += line_.size() - whole;
    line_.resize(whole);
    line_ += " [cut: " + std::to_string(cut_) + " more bytes]";
  }
  emit(line_);
  line_.clear();
  cut_ = 0;
  carriage_return_ = something_ = false;
}

void LineSplitter::feed(std::string_view bytes, const Emit& emit) {
  while (!bytes.empty()) {
    something_ = true;
    const std::size_t end = bytes.find_first_of("\r\n");
    put(bytes.substr(0, end));
    if (end == std::string_view::npos) return;
    if (bytes[end] == '\n') {
      end_line(emit);
    } else {
      carriage_return_ = true;
    }
    bytes.remove_prefix(end + 1);
  }
}

void LineSplitter::finish(const Emit& emit) {
  if (something_) end_line(emit);
}

}  // namespace zero::launch
