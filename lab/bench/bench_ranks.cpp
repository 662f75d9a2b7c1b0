#include "lab/bench/bench_ranks.h"

#include <zero/errors.h>

namespace zero::cli {

std::shared_ptr<Communicator> join_ranks(const Command& command, std::int64_t& world, std::int64_t alone,
                                         std::string* transport) {
  auto own = Communicator::from_env();
  const bool launched = own->size() > 1;
  if (launched && command.given("--world") && world != own->size())
    throw ConfigError("[--world] got " + std::to_string(world) + ", expected " + std::to_string(own->size()) +
                      ", the ranks the launcher started. Hint: leave --world out.");
  if (launched && transport != nullptr && command.given("--transport") && *transport != own->transport())
    throw ConfigError("[--transport] got " + *transport + ", expected " + own->transport() +
                      ", which joins the launcher's ranks. Hint: leave --transport out, and set ZERO_TRANSPORT.");
  if (!command.given("--world")) world = launched ? own->size() : alone;
  if (launched && transport != nullptr) *transport = own->transport();
  return own;
}

RankOutcome measure_on(const std::shared_ptr<Communicator>& own, const RankProcesses& ranks, const Json& task,
                       const Global& global, const std::function<Json()>& measure) {
  return own->size() > 1 ? RankOutcome{0, measure()} : run_rank_processes(ranks, task, global);
}

std::size_t in_turn(std::int64_t round, std::size_t i, std::size_t count) { return round % 2 == 0 ? i : count - 1 - i; }

}  // namespace zero::cli
