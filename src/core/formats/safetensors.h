// The safetensors container: 8 bytes of header length, a JSON header, the tensors' bytes without
// holes. The reader accepts what reliability rules 1 to 10 accept and nothing else; rule 12 (BOOL)
// is check_bool_bytes. No tensor library is known here: an element type is its name in the file.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "formats/files.h"

namespace zero::formats {

// Bits of one element ("F32": 32); 0 for a name that the format does not know.
int bits_of(std::string_view dtype);

struct TensorEntry {
  std::string key;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, counted from the first byte after the header
};

struct Header {
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;  // in the order of their bytes
  std::uint64_t data_begin = 0;      // offset in the file of the first tensor's first byte
};

// 1..4096 bytes, no control characters.
bool valid_key(std::string_view key);

// The bytes before the data: length and JSON, padded with spaces so that their number is a
// multiple of `alignment`. Entries must lie end to end from 0.
std::string header_bytes(const Header& header, std::size_t alignment);

// `json` is the header without its length; the file has data_bytes after it.
Header parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& path);
Header read_header(const File& file);

// Bytes other than 0 and 1 are no bool.
void check_bool_bytes(const void* data, std::size_t bytes, const std::string& path, const std::string& key);

}  // namespace zero::formats
