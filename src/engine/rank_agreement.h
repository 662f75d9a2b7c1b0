// What all ranks must have set alike: how to find out, and what to say when they have not.
#pragma once
#include <string>

#include <zero/communicator.h>

namespace zero::engine {

// Compares a text over the ranks. Empty when all have the same; else a sentence that begins with `what`, names the
// ranks that differ from rank 0 and the first line that does. The same on every rank. Collective.
std::string disagreement(Communicator& comm, const std::string& what, const std::string& mine);

}  // namespace zero::engine
