// See descriptors.h.
#include "net/descriptors.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <vector>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::net {
namespace {

// For the library's own files and those that the program opens meanwhile.
constexpr int kSpare = 32;
// Enough that strangers' connections do not use up the limit, while programs that close all possible numbers still end.
// Only these are looked at: the lowest free number is always taken next.
constexpr rlim_t kMostLookedAt = 1 << 16;

}  // namespace

int open_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  std::vector<pollfd> all(static_cast<std::size_t>(std::min(limit.rlim_cur, kMostLookedAt)));
  for (std::size_t fd = 0; fd < all.size(); ++fd) all[fd] = {static_cast<int>(fd), 0, 0};
  if (poll(all.data(), all.size(), 0) < 0) return 0;
  return static_cast<int>(
      std::count_if(all.begin(), all.end(), [](const pollfd& entry) { return (entry.revents & POLLNVAL) == 0; }));
}

void reserve_descriptors(int needed, const std::string& purpose, const std::string& place) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const int used = open_descriptors();
  const auto total = static_cast<rlim_t>(used + needed + kSpare);
  const rlimit raised{std::min(limit.rlim_max, std::max(total, kMostLookedAt)), limit.rlim_max};
  if (limit.rlim_max >= total && limit.rlim_cur < raised.rlim_cur && setrlimit(RLIMIT_NOFILE, &raised) == 0)
    limit = raised;
  if (limit.rlim_cur >= total) return;
  throw CommError(base::join("[comm::descriptors] got a limit of ", limit.rlim_cur, " file descriptors, of which ",
                             used, " are in use, expected at least ", total, " for ", purpose, " (", place,
                             "). Hint: raise the hard limit, ulimit -Hn, or LimitNOFILE of the service."));
}

}  // namespace zero::net
