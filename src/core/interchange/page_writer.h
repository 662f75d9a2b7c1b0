// Ranges of files that several processes write, so that no page of 4096 bytes is written by two of them: two clients of
// a network file system would lose one of them. A page that one process has all of, it writes itself; parts of pages go
// to the page's process, in one exchange at the end.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "interchange/output_files.h"

namespace zero::interchange {

class PageWriter {
 public:
  // Of `size` processes. The writer must outlive it.
  PageWriter(OutputWriter& writer, int size) : writer_(writer), outgoing_(static_cast<std::size_t>(size)) {}

  // Ranges may come in any order; those that follow each other in a file are joined.
  void add(std::size_t file, std::uint64_t offset, const char* data, std::uint64_t bytes);
  // After the last add(): the parts of pages for each process, for its take().
  std::vector<std::string> finish();
  void take(std::string_view parts);

 private:
  void keep(std::size_t file, std::uint64_t offset, const char* data, std::uint64_t bytes);
  void end_tail();
  OutputWriter& writer_;
  std::vector<std::string> outgoing_;
  // The end of the last range, less than a page.
  std::size_t tail_file_ = 0;
  std::uint64_t tail_offset_ = 0;
  std::string tail_;
};

}  // namespace zero::interchange
