// Numbers and small structs of all ranks: the one way in which they become the bytes of all_gather_bytes().
#pragma once
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/check.h"

namespace zero::base {

// [collective] The lists of all ranks, which may differ in length, by rank. Ranks: a Communicator, or what has its
// all_gather_bytes(). A rank of another build, whose values have another size, is an InternalError.
template <class Value, class Ranks>
std::vector<std::vector<Value>> all_gather_lists(Ranks& ranks, const std::vector<Value>& mine) {
  static_assert(std::is_trivially_copyable_v<Value>);
  std::vector<std::vector<Value>> all;
  for (const std::string& bytes :
       ranks.all_gather_bytes({reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Value)})) {
    ZERO_CHECK(bytes.size() % sizeof(Value) == 0, "rank ", all.size(), " sent ", bytes.size(), " bytes");
    auto& theirs = all.emplace_back(bytes.size() / sizeof(Value));
    if (!theirs.empty()) std::memcpy(theirs.data(), bytes.data(), bytes.size());
  }
  return all;
}

// [collective] The values of all ranks, by rank.
template <class Value, class Ranks>
std::vector<Value> all_gather_values(Ranks& ranks, const Value& mine) {
  std::vector<Value> all;
  for (const auto& theirs : all_gather_lists(ranks, std::vector<Value>{mine})) {
    ZERO_CHECK(theirs.size() == 1, "rank ", all.size(), " sent ", theirs.size(), " values");
    all.push_back(theirs.front());
  }
  return all;
}

}  // namespace zero::base
