// Agreement between ranks: equal settings, and steps in which either all ranks succeed or all throw the same error.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "engine/error_relay.h"

namespace zero::engine {

// Compares a text over the ranks. Returns "" if all are equal, else a sentence that begins with `what` and names the
// ranks that differ from rank 0 and the first differing line. The result is the same on every rank. Collective.
std::string disagreement(comm::Group& comm, const std::string& what, const std::string& mine);

// Runs `part` on every rank and gathers the returned texts. Collective. If any rank throws, all throw an error of the
// class and code of the first such rank, with the messages of all failed ranks. A CommError is rethrown unchanged,
// because ranks can no longer communicate.
// common: a line that must be equal on all ranks, compared before any error by `compare`, which gets the lines of all
// ranks and may throw. An empty one is not sent.
struct Common {
  std::string mine;
  std::function<void(const std::vector<std::string>&)> compare;
};
std::vector<std::string> agree(comm::Group& comm, const char* where, const std::function<std::string()>& part,
                               const Common* common = nullptr);

// agree() for a part that may take longer than the longest wait of a collective: reading and writing files. Ranks tell
// each other every few seconds that they are busy. `part` runs on this thread and must not use the communicator; it
// adds to `moved`. CommError that names the rank if one has moved nothing for the communicator's timeout.
std::vector<std::string> agree_while_moving(comm::Group& comm, const char* where,
                                            const std::atomic<std::uint64_t>& moved,
                                            const std::function<std::string()>& part);

// agree(), and all texts must be equal: ConfigError that begins with `what` otherwise. Thrown before anything else is
// sent, so that the Engine stays usable after a ConfigError. `part` returns lines.
void agree_on(ErrorRelay& relay, comm::Group& comm, const char* call, const std::string& what,
              const std::function<std::string()>& part);

}  // namespace zero::engine
