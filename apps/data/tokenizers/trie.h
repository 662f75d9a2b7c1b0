// Byte strings with numbers, to be found as the beginnings of a text.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace data {

class Trie {
 public:
  Trie() = default;
  // Of equal texts the last one counts. Empty texts are left out.
  explicit Trie(std::vector<std::pair<std::string, std::int32_t>> texts);

  static constexpr std::uint32_t kRoot = 0, kNone = UINT32_MAX;
  std::uint32_t child(std::uint32_t node, unsigned char byte) const {
    if (node == kRoot) return roots_.empty() ? kNone : roots_[byte];
    const auto& at = nodes_[node];
    for (std::uint32_t i = at.first; i < at.first + at.count; ++i)
      if (labels_[i] == byte) return i;
    return kNone;
  }
  // Of the text that ends in this node; -1: none does.
  std::int32_t value(std::uint32_t node) const { return nodes_[node].value; }

  struct Found {
    std::size_t bytes = 0;  // 0: nothing
    std::int32_t value = -1;
  };
  Found longest(std::string_view text) const;

 private:
  // Children follow each other, sorted by their byte.
  struct Node {
    std::uint32_t first = 0, count = 0;
    std::int32_t value = -1;
  };
  std::vector<Node> nodes_;
  std::vector<unsigned char> labels_;  // the byte that leads to a node
  std::vector<std::uint32_t> roots_;   // children of the root by byte
};

}  // namespace data
