// Temporary folders for tests: new, empty, and removed again by the process that made them.
#pragma once
#include <filesystem>
#include <string>

namespace zero::test {

class TempFolder {
 public:
  // The system's temporary folder; a folder next to the build, which is on a disk; or memory if there is space, for
  // tests that need many writes and no disk.
  enum class On { System, Disk, Memory };
  explicit TempFolder(On on = On::System);
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string text() const { return path_.string(); }
  // The path of something in it.
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
  int owner_;  // a forked child removes nothing
};

// One that lasts until the process ends.
std::string temporary_folder();

}  // namespace zero::test
