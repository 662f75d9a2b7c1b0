// The folder of a run's logs, DIR/<run-id>. DIR may belong to others and be writable by all, and the run id can be
// guessed where launchers are started by hand: nothing that somebody else has put there is followed or written.
#pragma once
#include <string>

#include "base/fd.h"

namespace zero::launch {

class LogFolder {
 public:
  // Makes the folder, readable by all and writable by this user, or takes an existing one of this user. Throws IoError
  // if it is a link or belongs to somebody else.
  explicit LogFolder(std::string path);
  // A file in it to write at the end of, which is made if it is missing. Throws IoError if the name is a link, no
  // regular file, or a file that somebody else has put there.
  base::Descriptor append(const std::string& name) const;
  // The same, emptied.
  base::Descriptor rewrite(const std::string& name) const;

 private:
  base::Descriptor open_own(const std::string& name, int flags) const;
  [[noreturn]] void fail(const std::string& what, const std::string& why) const;
  std::string path_;
  base::Descriptor folder_;
  unsigned owner_ = 0;  // of the folder and of what this process makes in it
};

}  // namespace zero::launch
