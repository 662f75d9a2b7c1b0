// Writes rows of CSV files.
#include "observe/csv_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <zero/errors.h>

#include "base/check.h"
#include "base/standard_streams.h"

namespace zero::observe {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, int error) {
  throw IoError(base::join("[csv_monitor] got \"", std::strerror(error), "\" for ", path.string(),
                           ", expected to write it. Hint: csv_monitor.output_path names the folder."));
}

// Names with a comma, a quote or a newline need quotes (RFC 4180).
std::string cell(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

}  // namespace

CsvFiles::CsvFiles(std::filesystem::path folder) : folder_(std::move(folder)) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) refuse(folder_, error.value());
}

std::string CsvFiles::file_name(std::string_view tag) {
  std::string name(tag);
  std::replace(name.begin(), name.end(), '/', '_');
  return name + ".csv";
}

std::ofstream& CsvFiles::file_of(const std::string& tag) {
  const auto [place, is_new] = files_.try_emplace(tag);
  std::ofstream& file = place->second;
  if (is_new) {
    const auto path = folder_ / file_name(tag);
    base::fill_standard_streams();
    file.open(path, std::ios::app);
    if (!file) refuse(path, errno);
    file.seekp(0, std::ios::end);
    if (file.tellp() == 0) file << "step," << cell(std::string_view(tag).substr(tag.rfind('/') + 1)) << "\n";
  }
  return file;
}

void CsvFiles::write(const std::string& tag, std::int64_t step, double value) {
  char row[64];
  const int size = std::snprintf(row, sizeof row, "%lld,%.9g\n", static_cast<long long>(step), value);
  std::ofstream& file = file_of(tag);
  file.write(row, size).flush();
  if (!file) refuse(folder_ / file_name(tag), errno);
}

}  // namespace zero::observe
