// SentencePiece's compiled table of replacements: a double array (Darts) of byte strings, and what replaces each.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace data {

class Charsmap {
 public:
  // Throws std::invalid_argument for a table that is damaged.
  explicit Charsmap(std::string_view bytes);

  struct Found {
    std::size_t bytes = 0;  // 0: no replacement
    std::string_view replacement = {};
  };
  Found shortest(std::string_view text) const { return find(text, false); }
  Found longest(std::string_view text) const { return find(text, true); }

 private:
  Found find(std::string_view text, bool longest) const;

  std::vector<std::uint32_t> units_;
  std::string texts_;  // each ends with a byte of 0
};

// Throws std::invalid_argument for what is not base64.
std::string base64_decoded(std::string_view text);

}  // namespace data
