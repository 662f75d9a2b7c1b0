// Layout of tables: natural widths first, then text columns shrink by one character at a time.
#include "tools/report/text/table.h"

#include <algorithm>

#include "base/check.h"

namespace zero::report {
namespace {
constexpr std::size_t kGap = 2;

std::size_t widest_line(std::string_view text) {
  std::size_t widest = 0;
  for (auto end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
    widest = std::max(widest, display_width(text.substr(0, end)));
    text.remove_prefix(end + 1);
  }
  return std::max(widest, display_width(text));
}

void trim_end(std::string& line) { line.erase(line.find_last_not_of(' ') + 1); }
}  // namespace

std::vector<std::string> wrap(std::string_view text, std::size_t width) {
  width = std::max<std::size_t>(width, 1);
  std::vector<std::string> lines;
  if (const auto end = text.find('\n'); end != std::string_view::npos) {
    lines = wrap(text.substr(0, end), width);
    for (auto& line : wrap(text.substr(end + 1), width)) lines.push_back(std::move(line));
    return lines;
  }
  std::string line;
  while (!text.empty()) {
    const std::size_t space = text.find(' ');
    std::string_view word = text.substr(0, space);
    text.remove_prefix(space == std::string_view::npos ? text.size() : space + 1);
    if (!line.empty() && display_width(line) + 1 + display_width(word) > width) {
      lines.push_back(std::move(line));
      line.clear();
    }
    if (!line.empty()) line += ' ';
    while (display_width(word) > width && line.empty()) {
      std::string_view part = prefix_of_width(word, width);
      if (part.empty()) part = word;  // one character wider than the column
      lines.emplace_back(part);
      word.remove_prefix(part.size());
    }
    line += word;
  }
  if (!line.empty() || lines.empty()) lines.push_back(std::move(line));
  return lines;
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  ZERO_CHECK(!columns_.empty(), "a table without columns");
}

void Table::row(std::vector<std::string> cells) {
  ZERO_CHECK(cells.size() <= columns_.size(), "table row with ", cells.size(), " cells, ", columns_.size(), " columns");
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::rule() { rows_.emplace_back(); }

std::vector<std::size_t> Table::widths(std::size_t columns, bool header, bool& fits) const {
  std::vector<std::size_t> width(columns_.size());
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    if (header) width[c] = widest_line(columns_[c].name);
    for (const auto& row : rows_)
      if (!row.empty()) width[c] = std::max(width[c], display_width(row[c]));
  }
  std::size_t total = kGap * (columns_.size() - 1);
  for (std::size_t w : width) total += w;
  // Shrink the widest shrinkable column by one character at a time.
  while (total > columns) {
    std::size_t widest = columns_.size();
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (columns_[c].narrow == Column::Narrow::Keep || width[c] <= columns_[c].least_width) continue;
      if (widest == columns_.size() || width[c] > width[widest]) widest = c;
    }
    if (widest == columns_.size()) break;
    --width[widest];
    --total;
  }
  fits = total <= columns;
  return width;
}

std::string Table::records(bool header) const {
  std::size_t name_width = 0;
  for (const Column& c : columns_) name_width = std::max(name_width, display_width(c.name));
  std::string out;
  for (const auto& row : rows_) {
    if (row.empty()) continue;
    if (!out.empty()) out += '\n';
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (row[c].empty()) continue;
      if (header) out += fit(columns_[c].name, name_width) + "  ";
      out += row[c] + '\n';
    }
  }
  return out;
}

std::string Table::render(std::size_t columns, bool utf8, bool header) const {
  bool fits = false;
  const std::vector<std::size_t> width = widths(columns, header, fits);
  if (!fits && columns_.size() > 1) return records(header);
  std::string out;
  const auto emit = [&](const std::vector<std::string>& cells) {
    std::vector<std::vector<std::string>> lines(cells.size());
    std::size_t height = 1;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      if (columns_[c].narrow == Column::Narrow::Wrap) {
        lines[c] = wrap(cells[c], width[c]);
      } else {
        lines[c] = {cells[c]};
      }
      height = std::max(height, lines[c].size());
    }
    for (std::size_t l = 0; l < height; ++l) {
      std::string line;
      for (std::size_t c = 0; c < cells.size(); ++c) {
        if (c) line.append(kGap, ' ');
        line += fit(l < lines[c].size() ? lines[c][l] : "", width[c], columns_[c].align, utf8);
      }
      trim_end(line);
      out += line + '\n';
    }
  };
  if (header) {
    std::vector<std::string> names;
    for (const Column& c : columns_) names.push_back(c.name);
    emit(names);
  }
  std::size_t total = kGap * (columns_.size() - 1);
  for (std::size_t w : width) total += w;
  for (const auto& row : rows_) {
    if (row.empty()) {
      out += std::string(total, '-') + '\n';
    } else {
      emit(row);
    }
  }
  return out;
}

}  // namespace zero::report
