// One outcome for all ranks: each runs its part, then all learn of all. Either every rank goes on
// with everybody's answer, or every rank throws the same error. Knows nothing of files.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include <zero/communicator.h>

namespace zero::checkpoint {

// Runs `part` on this rank; its text is sent to all. Collective. When any rank threw, all throw the
// class and code of the first such rank, with every failed rank's message. A CommError goes on as
// it is: then there is nobody to agree with.
std::vector<std::string> agree(Communicator& comm, const char* where, const std::function<std::string()>& part);

}  // namespace zero::checkpoint
