#include "support/folder.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <list>
#include <mutex>
#include <stdexcept>

namespace zero::test {
namespace {

namespace fs = std::filesystem;

fs::path parent_for(TempFolder::On on) {
  struct statvfs room {};
  constexpr unsigned long long kEnough = 32 << 20;
  if (on == TempFolder::On::Memory && ::access("/dev/shm", W_OK) == 0 && ::statvfs("/dev/shm", &room) == 0 &&
      room.f_bavail * room.f_frsize > kEnough)
    return "/dev/shm";
  return on == TempFolder::On::Disk ? fs::path(ZERO_BINARY_DIR) : fs::temp_directory_path();
}

}  // namespace

TempFolder::TempFolder(On on) : owner_(::getpid()) {
  std::string name = (parent_for(on) / "zero-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
  path_ = name;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  if (owner_ == ::getpid()) fs::remove_all(path_, ignored);
}

std::string temporary_folder() {
  static std::mutex mutex;
  static std::list<TempFolder> folders;
  std::lock_guard lock(mutex);
  return folders.emplace_back().text();
}

}  // namespace zero::test
