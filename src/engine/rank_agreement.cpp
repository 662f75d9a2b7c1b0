#include "engine/rank_agreement.h"

#include <xxhash.h>

#include <vector>

namespace zero::engine {
namespace {

std::string hash_of(const std::string& text) {
  const auto hash = XXH3_128bits(text.data(), text.size());
  return {reinterpret_cast<const char*>(&hash), sizeof hash};
}

// Where the first of two texts' lines differ.
std::string first_difference(const std::string& a, const std::string& b) {
  std::size_t begin = 0;
  while (true) {
    const auto end_a = a.find('\n', begin), end_b = b.find('\n', begin);
    const auto line_a = a.substr(begin, end_a - begin), line_b = b.substr(begin, end_b - begin);
    if (line_a != line_b) return "\"" + line_a + "\" against \"" + line_b + "\"";
    if (end_a == std::string::npos || end_b == std::string::npos) return "the number of lines";
    begin = end_a + 1;
  }
}

}  // namespace

std::string disagreement(Communicator& comm, const std::string& what, const std::string& mine) {
  const auto hashes = comm.exchange(hash_of(mine));
  std::vector<int> different;
  for (std::size_t r = 1; r < hashes.size(); ++r)
    if (hashes[r] != hashes[0]) different.push_back(static_cast<int>(r));
  if (different.empty()) return "";
  const auto texts = comm.exchange(mine);
  std::string ranks;
  for (const int r : different) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  return what + " on rank 0 and on rank" + (different.size() > 1 ? "s " : " ") + ranks +
         " differ: " + first_difference(texts[0], texts[static_cast<std::size_t>(different[0])]);
}

}  // namespace zero::engine
