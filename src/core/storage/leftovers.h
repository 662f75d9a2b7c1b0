// Private folders of runs on file systems without unnamed files: their names, and detection of folders of dead runs. A
// name is zero-swap@HOST@PID@START@RUN@NUMBER. START is the process's start time in clock ticks since boot, which
// distinguishes processes that reuse a pid. The owner also holds a lock on the folder.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::storage {

// A new name for this process, different at each call.
std::string private_folder_name();
// The file in such a folder.
inline constexpr const char* kPrivateFileName = "state";

struct Leftover {
  std::string path;
  std::int64_t bytes = 0;  // on the disk
  bool removed = false;
  std::string kept_because;  // why it was kept: its run is alive, it belongs to another host, or an error
};

// Lists the private folders in `folder`. remove: deletes those of dead runs of this host, and nothing else. Throws
// IoError if the folder cannot be read.
std::vector<Leftover> find_leftovers(const std::string& folder, bool remove);

}  // namespace zero::storage
