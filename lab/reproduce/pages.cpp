// See pages.h.
#include "lab/reproduce/pages.h"

#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "tools/report/page/html_parts.h"
#include "tools/report/text/table.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

using report::html_text;

std::size_t longest_word(const std::string& text) {
  std::size_t longest = 0;
  std::istringstream words(text);
  for (std::string word; words >> word;) longest = std::max(longest, report::display_width(word));
  return longest;
}

std::string paragraph(const std::string& text, std::size_t columns) {
  std::string out;
  for (const auto& line : report::wrap(text, columns)) out += line + "\n";
  return out;
}

std::string machine_text(const Record& record) {
  const auto value = [&](const char* key) {
    const auto found = record.machine.find(key);
    return found == record.machine.end() ? std::string("?")
           : found->is_string()          ? found->get<std::string>()
                                         : found->dump();
  };
  return base::join(value("processor"), ", ", value("cores"), " cores, ", value("system"), ", libzero ",
                    value("libzero"));
}

std::string time_text(const Record& record) {
  return base::join(report::human_duration(record.seconds), ", of which the programs used ",
                    report::human_duration(record.cpu_seconds), " of processor time");
}

// A cell of a Markdown table.
std::string cell_text(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

std::string markdown_table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows,
                           bool figures) {
  std::string out = "|", marks = "|";
  for (std::size_t i = 0; i < header.size(); ++i) {
    out += " " + cell_text(header[i]) + " |";
    marks += figures && i > 0 ? "---:|" : "---|";
  }
  out += "\n" + marks + "\n";
  for (const auto& row : rows) {
    out += "|";
    for (const auto& cell : row) out += " " + cell_text(cell) + " |";
    out += "\n";
  }
  return out;
}

std::vector<std::vector<std::string>> rows_of(const std::vector<Comparison>& all) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& one : all) rows.push_back({one.what, one.theirs, one.ours, one.why});
  return rows;
}

const std::vector<std::string> kComparisonHeader = {"figure", "paper or document", "here",
                                                    "why they differ, or do not"};

std::string html_table(const RecordTable& table) {
  report::HtmlTable out(table.caption, table.caption, table.header);
  for (const auto& row : table.rows) {
    std::vector<report::Cell> cells;
    for (std::size_t i = 1; i < row.size(); ++i) cells.push_back({row[i], ""});
    out.row(row.at(0), cells);
  }
  return out.done();
}

std::string html_comparisons(const Record& record) {
  report::HtmlTable out("comparisons", "The paper's or document's figures compared with these", kComparisonHeader);
  for (const auto& row : rows_of(record.comparisons))
    out.row(row[0], {report::words(row[1]), report::words(row[2]), report::words(row[3])});
  return out.done();
}

// Charts bring their own colours, for light paper; the page's style would recolour their text.
constexpr const char* kChartStyle =
    "figure{margin:12px 0}figure svg{max-width:100%;height:auto;border-radius:6px}"
    "figure svg text{fill:#333;font-family:sans-serif}";

}  // namespace

std::string text_of(const Record& record, std::size_t columns) {
  std::string out = "== " + record.name + ": " + record.title + "\n" + paragraph(record.question, columns) +
                    paragraph(record.setup, columns);
  if (record.quick) out += "--quick: sizes for a check of the program, not for conclusions\n";
  for (const auto& table : record.tables) {
    std::vector<report::Column> header;
    for (std::size_t i = 0; i < table.header.size(); ++i) {
      // Names may take several lines, figures not.
      std::size_t least = longest_word(table.header[i]);
      for (const auto& row : table.rows) least = std::max(least, report::display_width(row[i]));
      header.push_back(
          {table.header[i], i == 0 ? report::Align::Left : report::Align::Right, report::Column::Narrow::Wrap, least});
    }
    report::Table shown(header);
    for (const auto& row : table.rows) shown.row(row);
    out += "\n" + paragraph(table.caption, columns) + shown.render(columns);
  }
  if (!record.comparisons.empty()) out += "\nCompared with the paper or document\n";
  for (const auto& one : record.comparisons) {
    out += paragraph("- " + one.what, columns) + paragraph("  theirs: " + one.theirs, columns) +
           paragraph("  here:   " + one.ours, columns) + paragraph("  " + one.why, columns);
  }
  for (const auto& note : record.notes) out += paragraph(note, columns);
  return out + "took " + time_text(record) + "\n\n";
}

std::string html_of(const std::vector<Record>& records) {
  const std::string title = records.size() == 1 ? records[0].title : "Experiments of the ZeRO papers and documents";
  std::string out =
      report::html_head("zero reproduce: " + title, kChartStyle) + "<body><main>\n<h1>" + html_text(title) + "</h1>\n";
  for (const auto& record : records) {
    std::string body = "<p>" + html_text(record.setup) + "</p>\n";
    if (record.quick) body += "<p>--quick: sizes for a check of the program, not for conclusions.</p>\n";
    for (const auto& chart : record.charts) body += "<figure>" + report::svg_chart(chart) + "</figure>\n";
    for (const auto& table : record.tables) body += html_table(table);
    if (!record.comparisons.empty()) body += html_comparisons(record);
    for (const auto& note : record.notes) body += "<p class=\"note\">" + html_text(note) + "</p>\n";
    body += "<p class=\"note\">" +
            html_text(machine_text(record) + "; took " + time_text(record) + "; " + record.command) + "</p>\n";
    out += report::section(record.name + ": " + record.title, record.question, body);
  }
  return out +
         "<footer>Written by zero reproduce; exact figures are in reproduction.json next to this "
         "file.</footer>\n</main></body></html>\n";
}

DocsPage docs_of(const std::vector<Record>& records, const std::string& stem) {
  DocsPage page;
  auto& out = page.markdown;
  out =
      "# Experiments of the papers and documents\n"
      "<!-- written by zero reproduce --docs from " +
      stem +
      ".json: do not edit -->\n\n"
      "ZeRO's papers, and the lecture notes, homework and notebooks about them, have experiments with a table or a\n"
      "picture. Each is one command here, on sizes that a machine with two cores holds, with the figure of the paper "
      "or\n"
      "document next to the one that was measured:\n\n"
      "    zero reproduce                     # names and expected minutes\n"
      "    zero reproduce homework            # one of them; --quick: in seconds, on small sizes\n"
      "    zero reproduce all --docs " +
      (stem == "reproduction" ? "docs/reproduction.md" : stem + ".md") +
      "    # this page\n\n"
      "Each prints its tables, and writes `index.html` with charts, `reproduction.json` with exact figures, and the\n"
      "configurations and folders of its runs into `--out` (`runs/reproduce`). Bytes are those of the library's "
      "ledger, or\n"
      "of rank 0's `result.json`. Times are of the machine named below, which may have been used by others at the "
      "same\n"
      "time; processor time is that of all programs of an experiment. Ranks are processes of one host with one thread "
      "each.\n"
      "No speed of more ranks than cores is compared.\n\n";
  std::vector<std::vector<std::string>> rows;
  double seconds = 0, cpu = 0;
  for (const auto& record : records) {
    rows.push_back({"[" + record.name + "](#" + record.name + ")", record.title, report::human_duration(record.seconds),
                    report::human_duration(record.cpu_seconds)});
    seconds += record.seconds, cpu += record.cpu_seconds;
  }
  rows.push_back({"all", "", report::human_duration(seconds), report::human_duration(cpu)});
  out += markdown_table({"experiment", "what is compared", "time", "processor time"}, rows, false);
  if (!records.empty()) out += "\nMachine: " + machine_text(records[0]) + ".\n";
  for (const auto& record : records) {
    out += "\n## " + record.name + "\n**" + record.title + ".** " + record.question + "\n\n" + record.setup + ".\n";
    if (record.quick) out += "\n`--quick`: sizes for a check of the program, not for conclusions.\n";
    for (std::size_t i = 0; i < record.charts.size(); ++i) {
      const auto file =
          base::join(stem, "-", record.name, record.charts.size() > 1 ? base::join("-", i + 1) : "", ".svg");
      page.pictures.emplace_back(file, report::svg_chart(record.charts[i]));
      out += "\n![" + record.charts[i].title + "](" + file + ")\n";
    }
    for (const auto& table : record.tables)
      out += "\n" + table.caption + ":\n\n" + markdown_table(table.header, table.rows, true);
    if (!record.comparisons.empty())
      out += "\n" + markdown_table(kComparisonHeader, rows_of(record.comparisons), false);
    for (const auto& note : record.notes) out += "\n" + note + "\n";
    out += "\n`" + record.command + "`, " + time_text(record) + ".\n";
  }
  return page;
}

}  // namespace zero::cli
