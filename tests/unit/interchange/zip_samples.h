// Writes zip files for tests, right and wrong ones, with nothing of the code that reads them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::test {

inline std::string little(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += i < 8 ? static_cast<char>(value >> (8 * i)) : char{0};
  return text;
}

// Bit by bit.
inline std::uint32_t slow_crc32(const std::string& text) {
  std::uint32_t crc = 0xffffffff;
  for (const unsigned char byte : text) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc;
}

struct ZipSample {
  struct Record {
    std::string name, data;
    int flags = 0, method = 0;
    std::string local_name = name;
    std::int64_t offset_by = 0;  // added to the place of the local header in the directory
    std::int64_t size_by = 0;    // added to the sizes in the directory
    std::uint32_t crc_by = 0;    // added to the CRC
  };
  std::vector<Record> records;
  bool zip64 = false;        // end records of both kinds
  bool descriptors = false;  // sizes and CRC after the data, as torch writes
  bool crcs = true;          // false: 0, which takes no time

  std::string bytes() const {
    std::string out, directory;
    for (const auto& record : records) {
      const auto at = out.size();
      const auto crc = (crcs ? slow_crc32(record.data) : 0) + record.crc_by;
      const int flags = record.flags | (descriptors ? 0x0808 : 0);
      const auto size = record.data.size();
      const auto sizes = little(size, 4) + little(size, 4);
      out += "PK\x03\x04" + little(20, 2) + little(static_cast<std::uint64_t>(flags), 2) +
             little(static_cast<std::uint64_t>(record.method), 2) + little(0, 4) +
             (descriptors ? little(0, 12) : little(crc, 4) + sizes) + little(record.local_name.size(), 2) +
             little(0, 2) + record.local_name + record.data;
      if (descriptors) out += "PK\x07\x08" + little(crc, 4) + sizes;
      const auto listed = static_cast<std::uint64_t>(static_cast<std::int64_t>(size) + record.size_by);
      directory += "PK\x01\x02" + little(20, 2) + little(20, 2) + little(static_cast<std::uint64_t>(flags), 2) +
                   little(static_cast<std::uint64_t>(record.method), 2) + little(0, 4) + little(crc, 4) +
                   little(listed, 4) + little(listed, 4) + little(record.name.size(), 2) + little(0, 12) +
                   little(static_cast<std::uint64_t>(static_cast<std::int64_t>(at) + record.offset_by), 4) +
                   record.name;
    }
    const auto begin = out.size();
    out += directory;
    if (zip64) {
      const auto at = out.size();
      out += "PK\x06\x06" + little(44, 8) + little(45, 2) + little(45, 2) + little(0, 8) + little(records.size(), 8) +
             little(records.size(), 8) + little(directory.size(), 8) + little(begin, 8);
      out += "PK\x06\x07" + little(0, 4) + little(at, 8) + little(1, 4);
    }
    return out + "PK\x05\x06" + little(0, 4) + little(records.size(), 2) + little(records.size(), 2) +
           little(directory.size(), 4) + little(begin, 4) + little(0, 2);
  }
};

// A file of torch.save with this pickle, and storages.
inline std::string torch_sample(const std::string& pickle, const std::vector<std::string>& storages = {},
                                bool crcs = true) {
  ZipSample zip;
  zip.zip64 = zip.descriptors = true;
  zip.crcs = crcs;
  zip.records.push_back({"archive/data.pkl", pickle});
  zip.records.push_back({"archive/byteorder", "little"});
  for (std::size_t i = 0; i < storages.size(); ++i)
    zip.records.push_back({"archive/data/" + std::to_string(i), storages[i]});
  zip.records.push_back({"archive/version", "3\n"});
  return zip.bytes();
}

}  // namespace zero::test
