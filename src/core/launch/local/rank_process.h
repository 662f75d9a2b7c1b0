// One rank as a process: fork, what happens between fork and exec, and its pipes. The child is a
// process group of its own and dies with the launcher.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace zero::launch {

struct SpawnSettings {
  std::string path;                      // the program, resolved
  std::vector<std::string> arguments;    // [0] included
  std::vector<std::string> environment;  // "NAME=value"
  std::vector<int> cores;                // empty: inherited
  int keep_fd = -1;                      // stays open across exec
  int in = -1;                           // its stdin; /dev/null when -1
};

struct SpawnedProcess {
  pid_t pid = -1;
  int out = -1, err = -1;  // read ends, non-blocking, close-on-exec; the caller's
};

// Returns when the program runs. Throws ConfigError when exec refuses it, IoError when the system
// has no room for it. Call from the launcher's main thread: the parent-death signal is tied to
// the thread that forks.
SpawnedProcess spawn(const SpawnSettings& settings);

// The absolute path of a program, as execvp would find it. Throws ConfigError when there is none
// or it is not an executable file. "zero" is found beside the running program, too.
std::string find_program(const std::string& name);

}  // namespace zero::launch
