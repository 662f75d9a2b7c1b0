// The ranks of a measurement: those of the launcher that started this program, or else processes that it starts.
#pragma once
#include <zero/communicator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tools/support/options.h"
#include "tools/support/rank_processes.h"

namespace zero::cli {

// Collective. This program's Communicator; of one rank without a launcher. world: of --world, becomes the number of
// ranks that measure, without a launcher and the option `alone`. transport, if given: of --transport, becomes the
// launcher's. ConfigError if an option asks for what the launcher does not have.
std::shared_ptr<Communicator> join_ranks(const Command& command, std::int64_t& world, std::int64_t alone,
                                         std::string* transport = nullptr);

// The result of `measure` on the launcher's ranks, complete on rank 0; without a launcher that of `task` by new ranks.
RankOutcome measure_on(const std::shared_ptr<Communicator>& own, const RankProcesses& ranks, const Json& task,
                       const Global& global, const std::function<Json()>& measure);

// Which of `count` configurations is the i-th of a round: every second round is in reverse order, so that none always
// follows the same one.
std::size_t in_turn(std::int64_t round, std::size_t i, std::size_t count);

}  // namespace zero::cli
