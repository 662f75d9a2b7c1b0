// Work of unknown length that all ranks do at once, such as files of a checkpoint. It runs in a thread; meanwhile the
// ranks tell each other how far they are, so that no collective waits longer than a few seconds for a slow disk.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/group.h"

namespace zero::checkpoint {

// As engine::agree(), for a part that runs in another thread (without grad mode) and counts the bytes that it has moved.
// A rank whose count stands still for the group's timeout is given up on: CommError that names it, on the other ranks.
std::vector<std::string> agree_on_long_work(comm::Group& comm, const char* where,
                                            const std::function<std::string()>& part,
                                            const std::atomic<std::uint64_t>& moved);

}  // namespace zero::checkpoint
