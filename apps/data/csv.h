// CSV of RFC 4180: fields between commas, quotes around fields that have commas, quotes ("" each) or line ends in them.
// Lines may end in LF or CR LF; empty lines between records are skipped. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace data {

struct CsvFault {
  std::int64_t line;
  std::string got, expected;
};

// Calls `take` with the first line and the bytes of every record, without its line end. A byte order mark is skipped.
// The first fault ends it: after a wrong quote nobody knows where records end.
std::optional<CsvFault> each_csv_record(
    std::string_view text, const std::function<void(std::int64_t line, std::size_t begin, std::size_t end)>& take);

// The fields of a record that each_csv_record has found.
std::vector<std::string> csv_fields(std::string_view record);

}  // namespace data
