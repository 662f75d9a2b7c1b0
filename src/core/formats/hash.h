// XXH3-128 as 32 digits of canonical (big-endian) hex, the format of xxh128sum. Detects corruption, not tampering.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace zero::formats {

class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;
  void add(const void* data, std::size_t bytes);
  std::string hex() const;
  std::string digest() const;  // 16 bytes, canonical
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string hash_of(const void* data, std::size_t bytes);
inline std::string hash_of(std::string_view text) { return hash_of(text.data(), text.size()); }
std::string raw_hash_of(const void* data, std::size_t bytes);  // 16 bytes, canonical
std::string hex_of(std::string_view digest);
// 32 lower-case hex digits.
bool is_hash(std::string_view text);
// 32 hex digits from the system's random number generator.
std::string random_id();

}  // namespace zero::formats
