#include "parallel/mesh_degrees.h"

#include <zero/errors.h>

#include <algorithm>

#include "base/check.h"
#include "config/settings.h"

namespace zero::parallel {
namespace {

// "rank 3", "ranks 0-2, 5".
std::string ranks_with(const std::string& degrees, const std::vector<std::string>& by_rank) {
  std::string text;
  int count = 0;
  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    if (by_rank[r] != degrees) continue;
    auto last = r;
    while (last + 1 < by_rank.size() && by_rank[last + 1] == degrees) ++last;
    text += base::join(count == 0 ? "" : ", ", r, last == r ? "" : base::join("-", last));
    count += static_cast<int>(last - r) + 1;
    r = last;
  }
  return (count == 1 ? "rank " : "ranks ") + text;
}

std::string text_of(int tensor, int sequence) {
  return base::join("tensor_parallel.autotp_size ", tensor, " x sequence_parallel_size ", sequence);
}

}  // namespace

ExpertGrid ExpertGrid::of(int rank, int ranks, int ep_size, bool data_before_experts) {
  const int copies = ranks / ep_size;
  if (data_before_experts) return {rank / copies, rank % copies, copies};
  return {rank % ep_size, rank / ep_size, copies};
}

std::string degrees_of(const Options& options) {
  const auto& mesh = options.settings().mesh;
  return mesh.tensor == 1 && mesh.sequence == 1 ? "" : text_of(mesh.tensor, mesh.sequence);
}

void require_equal_degrees(const std::string& where, const std::vector<std::string>& by_rank) {
  std::vector<std::string> different;
  for (const auto& degrees : by_rank)
    if (std::find(different.begin(), different.end(), degrees) == different.end()) different.push_back(degrees);
  if (different.size() < 2) return;
  std::string text;
  for (const auto& degrees : different)
    text += base::join(text.empty() ? "" : "; ", degrees.empty() ? text_of(1, 1) : degrees, " on ",
                       ranks_with(degrees, by_rank));
  throw ConfigError(where + "the ranks have different degrees of parallelism: " + text +
                    ". Hint: every rank has to run the same program with the same configuration.");
}

}  // namespace zero::parallel
