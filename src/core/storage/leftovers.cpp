// Removes only folders with our name and file name that belong to a process that has ended. Everything is opened
// relative to its folder, without following links.
#include "storage/leftovers.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "base/check.h"
#include "base/process_start.h"
#include "base/system.h"

namespace zero::storage {
namespace {

using base::join;

constexpr const char* kPrefix = "zero-swap@";

// Only characters that do not end a part of the name or leave the folder.
std::string plain(const std::string& text, std::size_t most) {
  std::string out;
  for (const char c : text.substr(0, most))
    out += std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_' ? c : '_';
  return out.empty() ? "_" : out;
}

struct Owner {
  std::string host;
  pid_t pid = 0;
  std::uint64_t start = 0;
};

std::optional<std::uint64_t> number(const std::string& text) {
  if (text.empty() || text.size() > 19 || text.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  return std::strtoull(text.c_str(), nullptr, 10);
}

std::optional<Owner> owner_of(const std::string& name) {
  if (name.rfind(kPrefix, 0) != 0) return std::nullopt;
  std::vector<std::string> parts;
  for (std::size_t at = 0, end; at <= name.size(); at = end + 1) {
    end = std::min(name.find('@', at), name.size());
    parts.push_back(name.substr(at, end - at));
  }
  if (parts.size() != 6) return std::nullopt;
  const auto pid = number(parts[2]), start = number(parts[3]);
  if (!pid || !start || !number(parts[5]) || *pid == 0 || *pid > 0x7fffffff) return std::nullopt;
  return Owner{parts[1], static_cast<pid_t>(*pid), *start};
}

struct Folder {
  explicit Folder(int fd) : fd(fd) {}
  ~Folder() {
    if (fd >= 0) close(fd);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  int fd;
};

int open_folder_at(int parent, const char* name) {
  return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

// Why the folder must be kept, or empty. `inner` then holds the lock.
std::string alive(const Owner& owner, int inner) {
  if (owner.host != plain(base::host_name("_"), 64)) return "it is of host " + owner.host;
  if (const auto start = base::process_start(owner.pid); start != 0 && start == owner.start)
    return join("its run lives (process ", owner.pid, ")");
  // Where a file system has no locks, the process alone tells.
  if (flock(inner, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return "its run lives (the folder is locked)";
  return "";
}

Leftover look_at(int folder, const std::string& path, const std::string& name, const Owner& owner, bool remove) {
  Leftover found{path + "/" + name, 0, false, ""};
  const Folder inner(open_folder_at(folder, name.c_str()));
  if (inner.fd < 0) {
    found.kept_because = std::strerror(errno);
    return found;
  }
  struct stat facts {};
  const bool has_file = fstatat(inner.fd, kPrivateFileName, &facts, AT_SYMLINK_NOFOLLOW) == 0;
  if (has_file) found.bytes = static_cast<std::int64_t>(facts.st_blocks) * 512;
  found.kept_because = alive(owner, inner.fd);
  if (!found.kept_because.empty() || !remove) return found;
  if (has_file && !S_ISREG(facts.st_mode)) {
    found.kept_because = join(kPrivateFileName, " in it is no file");
  } else if (has_file && unlinkat(inner.fd, kPrivateFileName, 0) != 0) {
    found.kept_because = std::strerror(errno);
  } else if (unlinkat(folder, name.c_str(), AT_REMOVEDIR) != 0) {
    found.kept_because = std::strerror(errno);  // it contains other files
  } else {
    found.removed = true;
  }
  return found;
}

}  // namespace

std::string private_folder_name() {
  static std::atomic<std::uint64_t> next{0};
  const char* run = std::getenv("ZERO_RUN_ID");
  return join(kPrefix, plain(base::host_name("_"), 64), "@", getpid(), "@", base::process_start(getpid()), "@",
              plain(run ? run : "", 64), "@", next++);
}

std::vector<Leftover> find_leftovers(const std::string& folder, bool remove) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(fd < 0 ? nullptr : fdopendir(fd), closedir);
  if (!listing) {
    const int error = errno;
    if (fd >= 0) close(fd);
    throw IoError(join("[find_leftovers] cannot list ", folder, ": ", std::strerror(error),
                       ". Hint: name the folder of offloaded files."));
  }
  std::vector<std::string> names;
  while (const dirent* entry = readdir(listing.get()))
    if (owner_of(entry->d_name)) names.emplace_back(entry->d_name);
  std::sort(names.begin(), names.end());
  std::vector<Leftover> all;
  for (const auto& name : names) all.push_back(look_at(dirfd(listing.get()), folder, name, *owner_of(name), remove));
  return all;
}

}  // namespace zero::storage
