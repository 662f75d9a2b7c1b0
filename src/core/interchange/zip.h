// The directory of a zip file, as torch.save writes it: every record stored as it is, so that a tensor is a range of
// the file. The rules are strict; what they do not allow is damage. Reads by pread.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "formats/files.h"

namespace zero::interchange {

struct StoredRecord {
  std::uint64_t begin = 0;  // offset of its first byte in the file
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;
  bool has_crc = true;
};

struct ZipDirectory {
  std::string root;                             // the folder that all records are in, "archive"
  std::map<std::string, StoredRecord> records;  // by name without the root: "data.pkl", "data/0"

  // Throws if there is none.
  const StoredRecord& at(const std::string& name, const std::string& path) const;
};

// Reads the directory of the zip file in the range [begin, begin + bytes) of `file`. Throws IoError (kCheckpoint) with
// path, offset and what was expected: for a method other than stored, an encrypted or split archive, a local header
// that differs from the directory, records that overlap or leave the range, names that are not plain or occur twice,
// anything after the end record.
ZipDirectory read_zip(const formats::File& file, std::uint64_t begin, std::uint64_t bytes);

// Throws unless the CRC-32 of the record's bytes is the directory's. Reads by pieces of 1 MiB. With `out`, which has
// room for all of it, also returns its bytes.
void check_record(const formats::File& file, const std::string& name, const StoredRecord& record, void* out = nullptr);

// The whole record, at most `limit` bytes, checked unless ignore_crc.
std::string read_record(const formats::File& file, const std::string& name, const StoredRecord& record,
                        std::uint64_t limit, bool ignore_crc);

}  // namespace zero::interchange
