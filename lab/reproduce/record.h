// What an experiment of `zero reproduce` found: text, tables, charts, and the figures behind them. Written as JSON,
// read back, and shown by pages.h, so that a page can be made again from its JSON. Independent of what was measured.
#pragma once
#include <string>
#include <vector>

#include "tools/report/page/svg_chart.h"
#include "tools/support/measurement.h"

namespace zero::cli {

struct RecordTable {
  std::string caption;
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;  // as shown; the first column is text, others are to the right
};

// A figure of the paper or document compared with ours, and why they differ.
struct Comparison {
  std::string what, theirs, ours, why;
};

struct Record {
  std::string name, title;
  std::string question;  // what is asked, and where in the documents or papers
  std::string setup;     // model, ranks, budget
  bool quick = false;
  std::vector<RecordTable> tables;
  std::vector<report::Chart> charts;
  std::vector<Comparison> comparisons;
  std::vector<std::string> notes;
  Json data = Json::object();  // exact: bytes, seconds, elements
  Json machine = Json::object();
  double seconds = 0, cpu_seconds = 0;  // of the experiment; of all processes that it started
  std::string command;                  // what was written to start it
};

Json json_of(const Record& record);
// Throws ConfigError, naming `source`, for a document of another form.
Record record_of(const Json& json, const std::string& source);

// All records of a file: {"schema": "zero.reproduce/1", "experiments": [...]}.
Json document_of(const std::vector<Record>& records);
// Throws IoError, or ConfigError for another document.
std::vector<Record> read_records(const std::string& path);

}  // namespace zero::cli
