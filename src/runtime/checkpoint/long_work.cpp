// See long_work.h.
#include "checkpoint/long_work.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/executor.h"
#include "engine/rank_agreement.h"

namespace zero::checkpoint {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kMostTick{5000};

// What a rank sends in a round: 'd' (done) or 'b' (busy) and its count. Rank 0 also sends whom it gives up on.
struct Round {
  bool done;
  std::uint64_t moved;
  int given_up = -1;
};

std::string text_of(const Round& round) {
  return base::join(round.done ? "d " : "b ", round.moved, " ", round.given_up);
}

Round round_in(const std::string& text) {
  const auto second = text.find(' ', 2);
  ZERO_CHECK(text.size() > 4 && second != std::string::npos, "a rank's progress");
  return {text[0] == 'd', std::stoull(text.substr(2, second - 2)), std::stoi(text.substr(second + 1))};
}

// Rank 0 watches the counts: one clock decides.
class Watch {
 public:
  explicit Watch(int size) : ranks_(static_cast<std::size_t>(size)) {}
  // The first busy rank that has moved nothing for `limit`; -1: none.
  int stuck(const std::vector<Round>& rounds, milliseconds limit) {
    const auto now = std::chrono::steady_clock::now();
    int result = -1;
    for (std::size_t r = 0; r < rounds.size(); ++r) {
      auto& known = ranks_[r];
      if (rounds[r].done || rounds[r].moved != known.moved) known = {rounds[r].moved, now};
      if (result < 0 && now - known.since > limit) result = static_cast<int>(r);
    }
    return result;
  }

 private:
  struct Known {
    std::uint64_t moved = 0;
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  };
  std::vector<Known> ranks_;
};

}  // namespace

std::vector<std::string> agree_on_long_work(comm::Group& comm, const char* where,
                                            const std::function<std::string()>& part,
                                            const std::atomic<std::uint64_t>& moved) {
  std::string answer;
  base::Executor executor;  // ends before the answer
  const auto work = executor.add([&] {
    const at::NoGradGuard no_grad;
    answer = part();
  });
  Watch watch(comm.size());
  const auto tick = std::min(kMostTick, comm.timeout() / 4);
  for (int given_up = -1; comm.size() > 1;) {
    const bool done = work.wait_for(tick) == std::future_status::ready;
    std::vector<Round> rounds;
    for (const auto& text : comm.all_gather_bytes(text_of({done, moved.load(), given_up})))
      rounds.push_back(round_in(text));
    if (const int lost = rounds[0].given_up; lost >= 0) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(comm.timeout()).count();
      const auto error = base::join("[", where, "] rank ", lost, "/", comm.size(), " has moved no bytes for ", seconds,
                                    " s (libzero.timeout_s). Hint: look at its disk.");
      comm.abort(error);
      throw CommError(error, lost);
    }
    if (std::all_of(rounds.begin(), rounds.end(), [](const Round& round) { return round.done; })) break;
    if (comm.rank() == 0) given_up = watch.stuck(rounds, comm.timeout());
  }
  return engine::agree(comm, where, [&] {
    work.get();
    return std::move(answer);
  });
}

}  // namespace zero::checkpoint
