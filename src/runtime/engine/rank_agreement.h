// How ranks come to one outcome: what all must have set alike, and parts that all must get through. Every rank goes on,
// or every rank throws the same error.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "comm/group.h"

namespace zero::engine {

// Compares a text over the ranks. Empty when all have the same; else a sentence that begins with `what`, names the
// ranks that differ from rank 0 and the first line that does. The same on every rank. Collective.
std::string disagreement(comm::Group& comm, const std::string& what, const std::string& mine);

// Runs `part` on this rank; its text is sent to all. Collective. When any rank threw, all throw the
// class and code of the first such rank, with every failed rank's message. A CommError goes on as
// it is: then there is nobody to agree with.
std::vector<std::string> agree(comm::Group& comm, const char* where, const std::function<std::string()>& part);

}  // namespace zero::engine
