// See html_parts.h. A table cell shows a rounded value; its attribute data-value has the exact one.
#include "tools/report/page/html_parts.h"

#include <algorithm>
#include <set>

#include "tools/report/page/html_page.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {

// "31.2 MiB"
std::string size_text(std::uint64_t bytes) {
  std::string text = human_bytes(bytes);
  text.insert(text.find_first_not_of("0123456789."), " ");
  return text;
}

}  // namespace

std::string grouped(double value) {
  std::string text = printed("%.0f", value);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > (text[0] == '-' ? 1 : 0); at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

Cell count(double value) { return {grouped(value), printed("%.17g", value)}; }
Cell bytes(std::uint64_t value) { return {value == 0 ? "0" : size_text(value), std::to_string(value)}; }
Cell words(std::string text) { return {std::move(text), "", false}; }
Cell fixed(const char* format, const std::optional<double>& value) {
  if (!value) return {"\u2013", ""};
  return {printed(format, *value), printed("%.17g", *value)};
}
Cell grouped_or_none(const std::optional<double>& value) { return value ? count(*value) : Cell{"\u2013", ""}; }

void HtmlTable::row(const std::string& name, const std::vector<Cell>& cells, const std::string& color) {
  numeric_ = !cells.empty() && cells[0].numeric;
  rows_ += "<tr><th scope=\"row\">" + (color.empty() ? "" : "<i style=\"background:var(--" + color + ")\"></i>") +
           html_text(name) + "</th>";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const Cell& cell = cells[i];
    rows_ += cell.numeric ? "<td class=\"n\"" : "<td class=\"wide\"";
    if (!cell.value.empty())
      rows_ += " data-row=\"" + html_text(name) + "\" data-column=\"" +
               html_text(i + 1 < header_.size() ? header_[i + 1] : "") + "\" data-value=\"" + html_text(cell.value) +
               "\"";
    rows_ += ">" + html_text(cell.text) + "</td>";
  }
  rows_ += "</tr>\n";
}

std::string HtmlTable::done() const {
  std::string out = "<div class=\"scroll\"><table data-table=\"" + html_text(name_) + "\"><caption>" +
                    html_text(caption_) + "</caption>\n<thead><tr>";
  for (std::size_t i = 0; i < header_.size(); ++i)
    out += std::string("<th scope=\"col\"") + (i > 0 && numeric_ ? " class=\"n\"" : "") + ">" + html_text(header_[i]) +
           "</th>";
  return out + "</tr></thead>\n<tbody>\n" + rows_ + "</tbody></table></div>\n";
}

std::string html_head(const std::string& title, const std::string& more) {
  return "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
         "script-src 'unsafe-inline'\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
         html_text(title) + "</title>\n<style>\n" + page_style() + more + "</style></head>\n";
}

std::string color_of_run(std::size_t i) { return "r" + std::to_string(i % 8); }

std::string section(const std::string& title, const std::string& says, const std::string& body) {
  return "<section><h2>" + html_text(title) + "</h2>\n<p>" + html_text(says) + "</p>\n" + body + "</section>\n";
}

std::string chart(const std::string& id, const std::string& title) {
  return "<div class=\"chart\" id=\"" + id + "\" data-title=\"" + html_text(title) + "\"></div>\n";
}

std::string curve_card(const std::string& id, const std::string& title, const std::string& says,
                       const std::string& table) {
  return section(title, says, chart(id, title) + "<p class=\"note\" id=\"" + id + "-note\"></p>\n" + table);
}

std::string details(const std::string& summary, const std::string& body) {
  return "<details><summary>" + html_text(summary) + "</summary>\n" + body + "</details>\n";
}

std::string legend(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string out = "<ul class=\"legend\">";
  for (const auto& [color, name] : entries)
    out += "<li><i style=\"background:var(--" + color + ")\"></i>" + html_text(name) + "</li>";
  return out + "</ul>\n";
}

std::string legend_of_runs(const Runs& runs) {
  std::vector<std::pair<std::string, std::string>> entries;
  for (std::size_t i = 0; i < runs.size(); ++i) entries.emplace_back(color_of_run(i), runs[i].label);
  return legend(entries);
}

std::string curve_table(const Runs& runs, const std::string& id, const std::string& title,
                        std::optional<double> StepPoint::*value, const char* format) {
  std::vector<std::string> header{"step"};
  for (const RunRecord& run : runs) header.push_back(run.label);
  HtmlTable table(id, title, header);
  std::set<std::int64_t> steps;
  for (const RunRecord& run : runs) {
    std::vector<std::int64_t> known;
    for (const StepPoint& point : run.log)
      if (point.*value) known.push_back(point.step);
    for (std::size_t k = 0; k <= 10 && !known.empty(); ++k) steps.insert(known[k * (known.size() - 1) / 10]);
  }
  for (const std::int64_t step : steps) {
    std::vector<Cell> cells;
    for (const RunRecord& run : runs) {
      const auto found = std::lower_bound(run.log.begin(), run.log.end(), step,
                                          [](const StepPoint& point, std::int64_t s) { return point.step < s; });
      cells.push_back(found == run.log.end() || found->step != step ? Cell{"\u2013", ""}
                                                                    : fixed(format, (*found).*value));
    }
    table.row(std::to_string(step), cells);
  }
  return details("The same as a table", table.done());
}

}  // namespace zero::report
