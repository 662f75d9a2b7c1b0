#include "engine/rank_agreement.h"

#include <xxhash.h>
#include <zero/errors.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"

namespace zero::engine {
namespace {

std::string hash_of(const std::string& text) {
  const auto hash = XXH3_128bits(text.data(), text.size());
  return {reinterpret_cast<const char*>(&hash), sizeof hash};
}

// Describes the first line in which two texts differ.
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

enum class Kind : char { Good = '0', Config = '1', Io = '2', Internal = '3' };
constexpr char kBusy = '~';  // and the bytes moved so far
constexpr std::chrono::seconds kBusyPause{5};
constexpr char kCommon = '=';  // a common text and the end of its line come before the outcome

std::string message(Kind kind, ExitCode code, const std::string& text) {
  return std::string{static_cast<char>(kind), static_cast<char>(code)} + text;
}

std::string outcome_of(const std::function<std::string()>& part) {
  try {
    return message(Kind::Good, ExitCode::kOk, part());
  } catch (const CommError&) {
    throw;
  } catch (const ConfigError& e) {
    return message(Kind::Config, e.code(), e.what());
  } catch (const IoError& e) {
    return message(Kind::Io, e.code(), e.what());
  } catch (const Error& e) {
    return message(Kind::Internal, e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return message(Kind::Internal, ExitCode::kOutOfMemory, "out of memory");
  } catch (const std::exception& e) {
    return message(Kind::Internal, ExitCode::kFailed, e.what());
  }
}

// The answers of all ranks, or the error that they share.
std::vector<std::string> answers_in(std::vector<std::string> outcomes, const char* where) {
  const auto good = [](const std::string& text) {
    return text.size() >= 2 && text[0] == static_cast<char>(Kind::Good);
  };
  const auto first = std::find_if_not(outcomes.begin(), outcomes.end(), good);
  if (first == outcomes.end()) {
    for (auto& text : outcomes) text.erase(0, 2);
    return outcomes;
  }
  ZERO_CHECK(first->size() >= 2, "an outcome of ", first->size(), " bytes");
  std::string text;
  if (std::all_of(outcomes.begin(), outcomes.end(), [&](const std::string& other) { return other == *first; })) {
    text = first->substr(2);  // all ranks report the same error: it is one error
  } else {
    text = base::join("[", where, "]");
    for (std::size_t r = 0; r < outcomes.size(); ++r)
      if (!good(outcomes[r]))
        text +=
            base::join(text.back() == ']' ? " " : "; ", "rank ", r, "/", outcomes.size(), ": ", outcomes[r].substr(2));
  }
  const auto code = static_cast<ExitCode>((*first)[1]);
  switch (static_cast<Kind>((*first)[0])) {
    case Kind::Config:
      throw ConfigError(text, code);
    case Kind::Io:
      throw IoError(text, code);
    default:
      throw InternalError(text, code);
  }
}

// Exchanges what each rank has done until all have an outcome.
class Busy {
 public:
  void end(std::string outcome) {
    const std::lock_guard<std::mutex> lock(mutex_);
    outcome_ = std::move(outcome);
    wake_.notify_all();
  }

  std::vector<std::string> exchange(comm::Group& comm, const char* where, const std::atomic<std::uint64_t>& moved) {
    using Clock = std::chrono::steady_clock;
    const auto limit = comm.timeout();
    const auto pause = std::min<std::chrono::milliseconds>(kBusyPause, limit / 4);
    const std::string_view busy(&kBusy, 1);
    std::vector<std::pair<std::string, Clock::time_point>> last(static_cast<std::size_t>(comm.size()),
                                                                {"", Clock::now()});
    while (true) {
      auto all = comm.all_gather_bytes(outcome_after(pause, moved));
      bool any = false;
      const auto now = Clock::now();
      for (std::size_t r = 0; r < all.size(); ++r) {
        if (!all[r].starts_with(busy)) continue;
        any = true;
        if (last[r].first != all[r]) last[r] = {all[r], now};
        if (now - last[r].second <= limit) continue;
        throw CommError(base::join("[", where, "] rank ", r, "/", all.size(), " has moved no byte for ",
                                   static_cast<double>(limit.count()) / 1e3,
                                   " s. Hint: look at its disk, or raise libzero.timeout_s."),
                        static_cast<int>(r));
      }
      if (!any) return all;
    }
  }

 private:
  // The outcome, or after a while what has been moved so far.
  std::string outcome_after(std::chrono::milliseconds pause, const std::atomic<std::uint64_t>& moved) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wake_.wait_for(lock, pause, [&] { return outcome_.has_value(); })) return *outcome_;
    return kBusy + std::to_string(moved.load());
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::optional<std::string> outcome_;
};

}  // namespace

std::string disagreement(comm::Group& comm, const std::string& what, const std::string& mine) {
  const auto hashes = comm.all_gather_bytes(hash_of(mine));
  std::vector<int> different;
  for (std::size_t r = 1; r < hashes.size(); ++r)
    if (hashes[r] != hashes[0]) different.push_back(static_cast<int>(r));
  if (different.empty()) return "";
  const auto texts = comm.all_gather_bytes(mine);
  std::string ranks;
  for (const int r : different) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  return what + " on rank 0 and on rank" + (different.size() > 1 ? "s " : " ") + ranks +
         " differ: " + first_difference(texts[0], texts[static_cast<std::size_t>(different[0])]);
}

std::vector<std::string> agree(comm::Group& comm, const char* where, const std::function<std::string()>& part,
                               const Common* common) {
  const bool tells = common && !common->mine.empty();
  auto outcomes = comm.all_gather_bytes((tells ? kCommon + common->mine + '\n' : "") + outcome_of(part));
  if (common) {
    std::vector<std::string> texts;
    for (auto& outcome : outcomes) {
      auto& text = texts.emplace_back();
      if (!outcome.starts_with(kCommon)) continue;
      const auto end = outcome.find('\n');
      ZERO_CHECK(end != std::string::npos, "an outcome of ", outcome.size(), " bytes");
      text = outcome.substr(1, end - 1);
      outcome.erase(0, end + 1);
    }
    common->compare(texts);
  }
  return answers_in(std::move(outcomes), where);
}

std::vector<std::string> agree_while_moving(comm::Group& comm, const char* where,
                                            const std::atomic<std::uint64_t>& moved,
                                            const std::function<std::string()>& part) {
  if (comm.size() == 1) return agree(comm, where, part);
  Busy busy;
  std::vector<std::string> outcomes;
  std::exception_ptr lost, fault;
  // Only this thread uses the communicator until it has ended.
  std::thread exchange([&] {
    try {
      outcomes = busy.exchange(comm, where, moved);
    } catch (...) {
      lost = std::current_exception();
    }
  });
  std::string mine;
  try {
    mine = outcome_of(part);
  } catch (const CommError& e) {
    fault = std::current_exception();
    mine = message(Kind::Internal, e.code(), e.what());
  }
  busy.end(std::move(mine));
  exchange.join();
  if (fault || lost) std::rethrow_exception(fault ? fault : lost);
  return answers_in(std::move(outcomes), where);
}

void agree_on(ErrorRelay& relay, comm::Group& comm, const char* call, const std::string& what,
              const std::function<std::string()>& part) {
  std::string mine, fault;
  relay.reporting([&] {
    try {
      const auto all = agree(comm, call, [&] { return mine = part(); });
      if (std::any_of(all.begin(), all.end(), [&](const std::string& theirs) { return theirs != all[0]; }))
        fault = disagreement(comm, what, mine) + ". Hint: the call is collective; ask for the same on every rank.";
    } catch (const ConfigError& e) {
      fault = e.what();
    }
  });
  if (!fault.empty()) throw ConfigError(fault);
}

}  // namespace zero::engine
