// Metrics as CSV, one file a tag in one folder: Train/Samples/lr -> Train_Samples_lr.csv with the header "step,lr".
// A file that is there is gone on with, as a resumed run wants it.
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
  // Makes the folder. Throws IoError.
  explicit CsvFiles(std::filesystem::path folder);

  // One row, in the file when it returns; nine significant digits, "nan" and "inf" as they are. Throws IoError.
  void write(const std::string& tag, std::int64_t step, double value);

  static std::string file_name(std::string_view tag);

 private:
  std::ofstream& file_of(const std::string& tag);
  std::filesystem::path folder_;
  std::map<std::string, std::ofstream> files_;  // by tag
};

}  // namespace zero::observe
