// Finds the processes of a job through /proc: children by parent, others by the run id in their environment. Identifies
// processes by id, never by name.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace zero::launch {

// Live and zombie children of this process whose parent is its main thread.
std::vector<pid_t> children_of_self();
// Whether the environment of `pid` at exec contained exactly these `entries` ("NAME=value"). False for a zombie.
bool has_environment(pid_t pid, const std::vector<std::string>& entries);
// Processes of this user whose environment at exec contained exactly these `entries` ("ZERO_RUN_ID=...").
std::vector<pid_t> processes_with_environment(const std::vector<std::string>& entries);
// The state letter of /proc/PID/stat ('R' 'S' 'D' 'T' 'Z'), or '?'.
char process_state(pid_t pid);

}  // namespace zero::launch
