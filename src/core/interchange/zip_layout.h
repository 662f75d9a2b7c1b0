// Zip files of stored records, as torch.save writes them: every offset follows from names and sizes, so records are
// written in any order; headers, which have the CRCs, come last. Zip64 where sizes need it. No file access.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zero::interchange {

struct ZipRecord {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t header = 0, data = 0;  // offsets in the file
};

struct ZipLayout {
  std::vector<ZipRecord> records;
  std::uint64_t directory = 0, bytes = 0;  // of the directory at the end; of the file
};

// Records in the given order; the data of each begin at a multiple of 64.
ZipLayout zip_layout(const std::vector<std::pair<std::string, std::uint64_t>>& records);

// All that is not data, by offset. crcs: CRC-32 of each record's data.
std::vector<std::pair<std::uint64_t, std::string>> zip_headers(const ZipLayout& layout,
                                                               const std::vector<std::uint32_t>& crcs);

}  // namespace zero::interchange
