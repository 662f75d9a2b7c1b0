// See trie.h.
#include "apps/data/tokenizers/trie.h"

#include <algorithm>

namespace data {

Trie::Trie(std::vector<std::pair<std::string, std::int32_t>> texts) {
  std::stable_sort(texts.begin(), texts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  struct Range {
    std::uint32_t node;
    std::size_t begin, end, depth;
  };
  nodes_.emplace_back();
  labels_.push_back(0);
  std::vector<Range> queue{{kRoot, 0, texts.size(), 0}};
  for (std::size_t next = 0; next < queue.size(); ++next) {
    auto [node, begin, end, depth] = queue[next];
    for (; begin < end && texts[begin].first.size() == depth; ++begin)
      if (depth > 0) nodes_[node].value = texts[begin].second;
    nodes_[node].first = static_cast<std::uint32_t>(nodes_.size());
    while (begin < end) {
      const char byte = texts[begin].first[depth];
      auto last = begin;
      while (last < end && texts[last].first[depth] == byte) ++last;
      queue.push_back({static_cast<std::uint32_t>(nodes_.size()), begin, last, depth + 1});
      nodes_.emplace_back();
      labels_.push_back(static_cast<unsigned char>(byte));
      ++nodes_[node].count;
      begin = last;
    }
  }
  roots_.assign(256, kNone);
  for (std::uint32_t i = nodes_[kRoot].first; i < nodes_[kRoot].first + nodes_[kRoot].count; ++i)
    roots_[labels_[i]] = i;
}

Trie::Found Trie::longest(std::string_view text) const {
  Found found;
  std::uint32_t node = kRoot;
  for (std::size_t i = 0; i < text.size(); ++i) {
    node = child(node, static_cast<unsigned char>(text[i]));
    if (node == kNone) break;
    if (value(node) >= 0) found = {i + 1, value(node)};
  }
  return found;
}

}  // namespace data
