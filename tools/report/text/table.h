// Aligned tables that fit a given width. Columns are two spaces apart, without borders, so that a
// table can be read by awk as well. Text columns are cut or wrapped; numbers are never
// cut. If the table still does not fit, it is written as one block of "name value" per row.
#pragma once
#include <string>
#include <vector>

#include "tools/report/text/text.h"

namespace zero::report {

struct Column {
  std::string name;  // of Wrap: '\n' ends a line of it
  Align align = Align::Left;
  // What happens when the table is too wide. Keep: never narrower than its widest cell.
  enum class Narrow { Keep, Cut, Wrap } narrow = Narrow::Keep;
  std::size_t least_width = 8;  // of Cut and Wrap
};

class Table {
 public:
  explicit Table(std::vector<Column> columns);

  // One cell per column; missing ones are empty. More cells than columns: InternalError.
  // A cell is one line of UTF-8.
  void row(std::vector<std::string> cells);
  // A line of dashes below the rows so far.
  void rule();
  std::size_t rows() const { return rows_.size(); }

  // Lines ending in '\n', none with trailing spaces, each at most `columns` wide (a single cell
  // wider than that excepted). `header` = false omits the names.
  std::string render(std::size_t columns = 80, bool utf8 = false, bool header = true) const;

 private:
  std::vector<std::size_t> widths(std::size_t columns, bool header, bool& fits) const;
  std::string records(bool header) const;
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;  // an empty one is a rule
};

// The text broken at new lines, and at spaces into lines of at most `width` columns (a longer word is broken).
std::vector<std::string> wrap(std::string_view text, std::size_t width);

}  // namespace zero::report
