// Metrics as CSV, one file per tag: Train/Samples/lr -> Train_Samples_lr.csv with the header "step,lr". Appends to an
// existing file, so that resumed runs continue it.
#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>

namespace zero::observe {

class CsvFiles {
 public:
  // Creates the folder. Throws IoError.
  explicit CsvFiles(std::filesystem::path folder);

  // Writes one row, which is in the file on return; nine significant digits, "nan" and "inf". Throws IoError.
  void write(const std::string& tag, std::int64_t step, double value);

  static std::string file_name(std::string_view tag);

 private:
  std::ofstream& file_of(const std::string& tag);
  std::filesystem::path folder_;
  std::map<std::string, std::ofstream> files_;  // by tag
};

}  // namespace zero::observe
