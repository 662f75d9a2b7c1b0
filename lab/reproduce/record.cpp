// Records as JSON and back (record.h).
#include "lab/reproduce/record.h"

#include <zero/errors.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

namespace zero::cli {
namespace {

constexpr const char* kSchema = "zero.reproduce/1";
constexpr std::size_t kMostBytes = 64 << 20;
constexpr const char* kKinds[] = {"bars", "stacked", "lines"};

Json numbers_of(const std::vector<double>& values) {
  Json out = Json::array();
  for (const double value : values) out.push_back(std::isfinite(value) ? Json(value) : Json(nullptr));
  return out;
}

std::vector<double> numbers_from(const Json& json) {
  std::vector<double> out;
  for (const auto& value : json)
    out.push_back(value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>());
  return out;
}

Json chart_of(const report::Chart& chart) {
  Json series = Json::array();
  for (const auto& one : chart.series)
    series.push_back({{"name", one.name}, {"x", numbers_of(one.x)}, {"y", numbers_of(one.y)}, {"dashed", one.dashed}});
  return {{"kind", kKinds[static_cast<int>(chart.kind)]},
          {"title", chart.title},
          {"x_name", chart.x_name},
          {"y_name", chart.y_name},
          {"categories", chart.categories},
          {"series", series},
          {"absent", chart.absent},
          {"log_x", chart.log_x},
          {"log_y", chart.log_y}};
}

report::Chart chart_from(const Json& json) {
  report::Chart chart;
  const auto kind = json.at("kind").get<std::string>();
  for (int i = 0; i < 3; ++i)
    if (kind == kKinds[i]) chart.kind = static_cast<report::Chart::Kind>(i);
  json.at("title").get_to(chart.title);
  json.at("x_name").get_to(chart.x_name);
  json.at("y_name").get_to(chart.y_name);
  json.at("categories").get_to(chart.categories);
  json.at("absent").get_to(chart.absent);
  json.at("log_x").get_to(chart.log_x);
  json.at("log_y").get_to(chart.log_y);
  for (const auto& one : json.at("series"))
    chart.series.push_back({one.at("name").get<std::string>(), numbers_from(one.at("x")), numbers_from(one.at("y")),
                            one.at("dashed").get<bool>()});
  return chart;
}

}  // namespace

Json json_of(const Record& record) {
  Json tables = Json::array(), charts = Json::array(), comparisons = Json::array();
  for (const auto& table : record.tables)
    tables.push_back({{"caption", table.caption}, {"header", table.header}, {"rows", table.rows}});
  for (const auto& chart : record.charts) charts.push_back(chart_of(chart));
  for (const auto& one : record.comparisons)
    comparisons.push_back({{"what", one.what}, {"theirs", one.theirs}, {"ours", one.ours}, {"why", one.why}});
  return {{"name", record.name},
          {"title", record.title},
          {"question", record.question},
          {"setup", record.setup},
          {"quick", record.quick},
          {"seconds", record.seconds},
          {"cpu_seconds", record.cpu_seconds},
          {"command", record.command},
          {"machine", record.machine},
          {"tables", tables},
          {"charts", charts},
          {"comparisons", comparisons},
          {"notes", record.notes},
          {"data", record.data}};
}

Record record_of(const Json& json, const std::string& source) {
  Record record;
  try {
    json.at("name").get_to(record.name);
    json.at("title").get_to(record.title);
    json.at("question").get_to(record.question);
    json.at("setup").get_to(record.setup);
    json.at("quick").get_to(record.quick);
    json.at("seconds").get_to(record.seconds);
    json.at("cpu_seconds").get_to(record.cpu_seconds);
    json.at("command").get_to(record.command);
    record.machine = json.at("machine");
    for (const auto& table : json.at("tables")) {
      record.tables.push_back({table.at("caption").get<std::string>(),
                               table.at("header").get<std::vector<std::string>>(),
                               table.at("rows").get<std::vector<std::vector<std::string>>>()});
      for (const auto& row : record.tables.back().rows)
        if (row.size() != record.tables.back().header.size())
          throw ConfigError("[" + source + "] got a row of " + std::to_string(row.size()) + " cells in a table of " +
                            record.name + ", expected " + std::to_string(record.tables.back().header.size()));
    }
    for (const auto& chart : json.at("charts")) record.charts.push_back(chart_from(chart));
    for (const auto& one : json.at("comparisons"))
      record.comparisons.push_back({one.at("what").get<std::string>(), one.at("theirs").get<std::string>(),
                                    one.at("ours").get<std::string>(), one.at("why").get<std::string>()});
    json.at("notes").get_to(record.notes);
    record.data = json.at("data");
  } catch (const Json::exception& error) {
    throw ConfigError("[" + source + "] got an experiment of another form (" + error.what() +
                      "), expected what zero reproduce writes");
  }
  if (record.name.empty() ||
      record.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") != std::string::npos)
    throw ConfigError("[" + source + "] got an experiment without a name that can be a file's");
  return record;
}

Json document_of(const std::vector<Record>& records) {
  Json experiments = Json::array();
  for (const auto& record : records) experiments.push_back(json_of(record));
  return {{"schema", kSchema}, {"experiments", experiments}};
}

std::vector<Record> read_records(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text;
  char part[65536];
  while (in.read(part, sizeof part) || in.gcount() > 0) {
    text.append(part, static_cast<std::size_t>(in.gcount()));
    if (text.size() > kMostBytes)
      throw ConfigError("[--from] got more than " + std::to_string(kMostBytes) + " bytes in " + path +
                        ", expected a file of zero reproduce");
  }
  if (text.empty()) throw IoError("[--from] got no file " + path + ", expected one that zero reproduce wrote");
  // The parser is called with a limit of nesting: it descends once a level.
  int deepest = 0;
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    deepest = std::max(deepest, depth);
    return depth <= 32;
  };
  const auto json = Json::parse(text, shallow, /*allow_exceptions=*/false);
  if (deepest > 32 || !json.is_object() || json.value("schema", "") != kSchema || !json.contains("experiments") ||
      !json.at("experiments").is_array())
    throw ConfigError("[--from] got " + path + ", expected a JSON document with the schema " + kSchema);
  std::vector<Record> records;
  for (const auto& one : json.at("experiments")) records.push_back(record_of(one, path));
  return records;
}

}  // namespace zero::cli
