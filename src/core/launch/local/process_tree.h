// Finding the processes a job has left, through /proc: children by parent, strays by the run id in
// their environment. Processes are known by id only, never by name.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace zero::launch {

// Live and zombie children of this process, as far as its main thread is their parent.
std::vector<pid_t> children_of_self();
// Processes of this user whose environment, as it was at their exec, has exactly these `entries`
// ("ZERO_RUN_ID=...").
std::vector<pid_t> processes_with_environment(const std::vector<std::string>& entries);
// The state letter of /proc/PID/stat ('R' 'S' 'D' 'T' 'Z'), or '?'.
char process_state(pid_t pid);

}  // namespace zero::launch
