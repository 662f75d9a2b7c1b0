// The private folders of runs on file systems without unnamed files: how they are called, and how to
// tell those of dead runs. A name is zero-swap@HOST@PID@START@RUN@NUMBER; START is the process's start
// in clock ticks since boot, so that another process of the same number is not taken for it; the
// owner holds a lock on the folder besides.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::storage {

// A new name for this process, another one at each call.
std::string private_folder_name();
// The file in such a folder.
inline constexpr const char* kPrivateFileName = "state";

struct Leftover {
  std::string path;
  std::int64_t bytes = 0;  // on the disk
  bool removed = false;
  std::string kept_because;  // why it stays: its run lives, is of another host, an error
};

// The private folders in `folder`; those of dead runs of this host are removed if `remove`, and nothing else is
// touched. Throws IoError if the folder cannot be read.
std::vector<Leftover> find_leftovers(const std::string& folder, bool remove);

}  // namespace zero::storage
