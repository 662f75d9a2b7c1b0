// The two ends of a scope of gathered_parameters.
#include <algorithm>

#include "base/check.h"
#include "engine/rank_agreement.h"
#include "engine/state.h"

namespace zero::engine {

// Every rank tells what it asks for, or why it cannot, before anything is gathered: the ranks' errors are one error,
// and nothing has ended by it.
std::vector<int> State::agreed_groups(const ParameterChoice& choice, bool modify) {
  constexpr const char* kCall = "gathered_parameters";
  std::vector<int> groups;
  std::string fault;
  relay_.telling([&] {
    std::string mine = modify ? "to write\n" : "to read\n";
    try {
      const auto all = agree(*comm_, "Engine::gathered_parameters", [&] {
        groups = chosen_groups(groups_, choice, where(kCall));
        for (const int g : groups) mine += groups_[static_cast<std::size_t>(g)]->name() + "\n";
        return mine;
      });
      if (std::any_of(all.begin(), all.end(), [&](const std::string& theirs) { return theirs != all[0]; }))
        fault = disagreement(*comm_, where(kCall) + "the units asked for", mine) +
                ". Hint: the call is collective; ask for the same on every rank.";
    } catch (const ConfigError& e) {
      fault = e.what();
    }
  });
  if (!fault.empty()) throw ConfigError(fault);
  return groups;
}

std::vector<int> State::begin_gathered(const ParameterChoice& choice, bool modify) {
  relay_.keeping([&] {
    if (modify)
      require_boundary("gathered_parameters");
    else
      require_usable("gathered_parameters");
  });
  auto groups = agreed_groups(choice, modify);
  relay_.telling([&] {
    flush();
    {
      const step::Prefetcher::Alone alone(*prefetcher_, where("gathered_parameters"));
      prefetcher_->pin(groups);
    }
    scopes_.open(groups, modify);
  });
  return groups;
}

void State::end_gathered(const std::vector<int>& groups, bool modify) {
  relay_.telling([&] {
    scopes_.close(groups, modify);
    if (modify) {
      check_parameters("gathered_parameters");
      comm_->barrier();  // nobody reads a shard in place any more
      for (const int g : groups) groups_[static_cast<std::size_t>(g)]->write_back();
    }
    prefetcher_->unpin(groups);
  });
}

void State::require_no_scope(const char* what, bool reading_too) const {
  if (!scopes_.any_modifying() && (!scopes_.any() || !reading_too)) return;
  throw ConfigError(where(what) + "called inside a scope of gathered_parameters" +
                    (reading_too ? "" : "(true), whose writes count from its end on") +
                    ". Hint: close() the scope first.");
}

}  // namespace zero::engine
