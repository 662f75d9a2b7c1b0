#include "tools/launch/supervise/log_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/check.h"
#include "base/standard_streams.h"
#include "tools/launch/machine/host.h"

namespace zero::launch {
namespace {

// Whom a file belongs to that this process makes in the folder: another user than the own one where a server replaces
// root (root_squash). The own one if it cannot make any.
uid_t owner_of_new_files(int folder) {
  const std::string name = ".owner-" + random_hex(8);
  const base::Descriptor file(openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  struct stat facts {};
  const bool known = file && fstat(file.get(), &facts) == 0;
  if (file) unlinkat(folder, name.c_str(), 0);
  return known ? facts.st_uid : geteuid();
}

}  // namespace

void LogFolder::fail(const std::string& what, const std::string& why) const {
  throw IoError(base::join("[--log-dir] cannot write to ", what, ": ", why));
}

LogFolder::LogFolder(std::string path) : path_(std::move(path)), owner_(geteuid()) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), error);
  if (error) fail(path_, error.message());
  if (mkdir(path_.c_str(), 0755) != 0 && errno != EEXIST) fail(path_, std::strerror(errno));
  folder_ = base::Descriptor(base::off_standard(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)));
  struct stat facts {};
  if (!folder_ || fstat(folder_.get(), &facts) != 0)
    fail(path_,
         errno == ELOOP || errno == ENOTDIR ? "it is a link or a file, expected a folder" : std::strerror(errno));
  if (facts.st_uid != owner_) owner_ = owner_of_new_files(folder_.get());
  if (facts.st_uid != owner_)
    fail(path_, base::join("the folder belongs to user ", facts.st_uid, ", expected one of user ", owner_,
                           ". Hint: name a --log-dir that others cannot write to, or remove the folder."));
}

base::Descriptor LogFolder::open_own(const std::string& name, int flags) const {
  // O_NONBLOCK: a FIFO is refused, not waited for.
  base::Descriptor file(base::off_standard(
      openat(folder_.get(), name.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | flags, 0666)));
  const std::string path = path_ + "/" + name;
  struct stat facts {};
  if (!file || fstat(file.get(), &facts) != 0)
    fail(path, errno == ELOOP ? "it is a link, expected a regular file" : std::strerror(errno));
  if (!S_ISREG(facts.st_mode) || facts.st_nlink != 1 || facts.st_uid != owner_)
    fail(path, "it is no regular file of this user alone. Hint: remove it.");
  return file;
}

base::Descriptor LogFolder::append(const std::string& name) const { return open_own(name, O_APPEND); }

base::Descriptor LogFolder::rewrite(const std::string& name) const {
  base::Descriptor file = open_own(name, 0);
  if (ftruncate(file.get(), 0) != 0) fail(path_ + "/" + name, std::strerror(errno));
  return file;
}

}  // namespace zero::launch
