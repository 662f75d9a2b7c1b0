// See csv.h.
#include "apps/data/csv.h"

namespace data {

std::optional<CsvFault> each_csv_record(
    std::string_view text, const std::function<void(std::int64_t line, std::size_t begin, std::size_t end)>& take) {
  std::size_t at = text.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  std::int64_t line = 1;
  while (at < text.size()) {
    const std::size_t begin = at;
    const std::int64_t first = line;
    bool field_begins = true;
    while (at < text.size() && text[at] != '\n') {
      if (text[at] == '"') {
        if (!field_begins) return CsvFault{line, "a quote inside a field without quotes", "quotes around the field"};
        const std::int64_t opened = line;
        for (++at;; ++at) {
          if (at == text.size()) return CsvFault{opened, "a quote that is never closed", "a second one"};
          if (text[at] == '\n') ++line;
          if (text[at] != '"') continue;
          if (at + 1 == text.size() || text[at + 1] != '"') break;
          ++at;
        }
        ++at;
        const bool line_end = at == text.size() || text[at] == '\n' || text.substr(at, 2) == "\r\n";
        if (!line_end && text[at] != ',') return CsvFault{line, "text behind the closing quote of a field", "a comma"};
        field_begins = false;
      } else {
        field_begins = text[at] == ',';
        ++at;
      }
    }
    std::size_t end = at;
    if (end > begin && text[end - 1] == '\r') --end;
    if (end > begin) take(first, begin, end);
    ++at;
    ++line;
  }
  return std::nullopt;
}

std::vector<std::string> csv_fields(std::string_view record) {
  std::vector<std::string> fields;
  std::size_t at = 0;
  do {
    std::string field;
    if (at < record.size() && record[at] == '"') {
      for (++at; at < record.size(); ++at) {
        if (record[at] == '"' && record.substr(at + 1, 1) != "\"") break;
        if (record[at] == '"') ++at;
        field += record[at];
      }
      ++at;
    } else {
      const auto end = std::min(record.find(',', at), record.size());
      field = record.substr(at, end - at);
      at = end;
    }
    fields.push_back(std::move(field));
  } while (at++ < record.size());
  return fields;
}

}  // namespace data
