// Building blocks of the page: cells, tables, sections, places of charts. All text is escaped here.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/report/page/run_record.h"

namespace zero::report {

using Runs = std::vector<RunRecord>;

struct Cell {
  std::string text;
  std::string value;  // exact; empty: the cell has only text
  bool numeric = true;
};

// 1,234,567
std::string grouped(double value);
Cell count(double value);
Cell bytes(std::uint64_t value);
Cell words(std::string text);
Cell fixed(const char* format, const std::optional<double>& value);
Cell grouped_or_none(const std::optional<double>& value);

class HtmlTable {
 public:
  HtmlTable(std::string name, std::string caption, std::vector<std::string> header)
      : name_(std::move(name)), caption_(std::move(caption)), header_(std::move(header)) {}
  // `color`: of the mark before the first cell, a variable of the style sheet; empty: none.
  void row(const std::string& name, const std::vector<Cell>& cells, const std::string& color = "");
  std::string done() const;

 private:
  std::string name_, caption_;
  std::vector<std::string> header_;
  std::string rows_;
  bool numeric_ = true;  // so are all rows of a table
};

// The document up to its body, with the pages' style and `more` of it. It loads nothing.
std::string html_head(const std::string& title, const std::string& more = "");
std::string color_of_run(std::size_t i);
std::string section(const std::string& title, const std::string& says, const std::string& body);
// The place where the page's script draws.
std::string chart(const std::string& id, const std::string& title);
std::string curve_card(const std::string& id, const std::string& title, const std::string& says,
                       const std::string& table);
std::string details(const std::string& summary, const std::string& body);
// Colours and names.
std::string legend(const std::vector<std::pair<std::string, std::string>>& entries);
std::string legend_of_runs(const Runs& runs);
// A table of a curve's values at about eleven steps of each run.
std::string curve_table(const Runs& runs, const std::string& id, const std::string& title,
                        std::optional<double> StepPoint::*value, const char* format);

}  // namespace zero::report
