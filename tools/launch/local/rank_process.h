// Starts one rank as a process: fork, setup before exec, and pipes. The child has its own process group and dies with
// the launcher.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace zero::launch {

struct SpawnSettings {
  std::string path;                      // the program, resolved
  std::vector<std::string> arguments;    // including [0]
  std::vector<std::string> environment;  // "NAME=value"
  std::vector<int> cores;                // empty: inherited
  std::vector<int> keep_fds;             // remain open across exec
  int in = -1;                           // stdin; -1: /dev/null
};

struct SpawnedProcess {
  pid_t pid = -1;
  int out = -1, err = -1;  // read ends, non-blocking, close-on-exec; owned by the caller
};

// Returns when the program runs. Throws ConfigError if exec fails for the program, IoError if the system lacks
// resources. Call from the launcher's main thread: the parent-death signal is tied to the thread that forks.
SpawnedProcess spawn(const SpawnSettings& settings);

// The absolute path of a program, as execvp would find it; "zero" is also found next to the running program. Throws
// ConfigError if there is none or it is not an executable file.
std::string find_program(const std::string& name);

}  // namespace zero::launch
