// The safetensors container: 8 bytes with the header's length, a JSON header, and the tensors' bytes without gaps. The
// reader accepts only what reliability rules 1 to 10 allow; rule 12 (BOOL) is check_bool_bytes. Element types are
// identified by their name in the file.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "formats/files.h"

namespace zero::formats {

// Bits of one element ("F32": 32); 0 for an unknown name.
int bits_of(std::string_view dtype);

struct TensorEntry {
  std::string key;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the end of the header
};

struct Header {
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;  // in order of their bytes
  std::uint64_t data_begin = 0;      // file offset of the first tensor's data
};

// 1..4096 bytes, no control characters.
bool valid_key(std::string_view key);

// The bytes before the data: length and JSON, padded with spaces to a multiple of `alignment`. Entries must be
// contiguous from 0.
std::string header_bytes(const Header& header, std::size_t alignment);

// `json`: the header without its length. data_bytes: size of the data after it.
Header parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& path);
Header read_header(const File& file);

// Throws if a byte is neither 0 nor 1. first: the place of the first byte in its tensor.
void check_bool_bytes(const void* data, std::size_t bytes, std::int64_t first, const std::string& path,
                      const std::string& key);

}  // namespace zero::formats
