// A save that is killed or fails at any of its calls: afterwards the newest committed checkpoint loads completely, and
// the next save works. A child is killed by SIGKILL at call k, for k = 1, 2, ... until a save completes.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <zero/log.h>

#include <algorithm>
#include <map>
#include <set>

#include "support/descriptors.h"
#include "support/file_text.h"
#include "support/nightly.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test::checkpoint_crash_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::formats;
using Fault = FaultyFiles::Fault;

// The state before the interrupted save, and the tag that it saves.
struct Scene {
  const char* name;
  std::vector<std::pair<std::string, int>> before;
  std::string tag;
};
// Of the calls of a save, each is struck at night, and one in three by each fault else, another one by the next fault.
const int kStride = nightly() ? 1 : 3;

const std::vector<Scene> kScenes{{"first save of all", {}, "new"},
                                 {"a new tag", {{"old", 1}}, "new"},
                                 {"a tag replaced", {{"older", 1}, {"same", 2}}, "same"}};
constexpr int kNewValue = 9;

void set_up(const Scene& scene, const TempFolder& folder) {
  for (const auto& [tag, value] : scene.before)
    save_sample(system_files(), (folder.path() / "root").string(), tag, value);
}

std::set<std::string> names_in(const fs::path& path) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) names.insert(entry.path().filename());
  return names;
}

// The oracle. Returns whether the new checkpoint is there.
bool check_after(const Scene& scene, const TempFolder& folder, const std::string& label) {
  const auto root = (folder.path() / "root").string();
  bool arrived = false;
  if (scene.before.empty()) {
    arrived = code_of([&] { EXPECT_EQ(load_sample(root).value, kNewValue) << label; }) == 0;
  } else {
    Loaded loaded;
    std::string text;
    EXPECT_EQ(code_of([&] { loaded = load_sample(root); }, &text), 0) << label << ": " << text;
    arrived = loaded.value == kNewValue;
    EXPECT_TRUE(arrived || loaded.value == scene.before.back().second) << label << " loaded " << loaded.value;
    // The other checkpoints are unchanged.
    for (const auto& [tag, value] : scene.before) {
      if (tag == scene.tag) continue;
      EXPECT_EQ(load_sample(root, tag).value, value) << label;
    }
  }
  // The next save works and leaves nothing behind.
  save_sample(system_files(), root, "after", 11);
  EXPECT_EQ(load_sample(root).value, 11) << label;
  std::set<std::string> wanted{".lock", "latest", "after"};
  for (const auto& [tag, value] : scene.before) wanted.insert(tag);
  if (arrived) wanted.insert(scene.tag);
  EXPECT_EQ(names_in(root), wanted) << label;
  return arrived;
}

TEST(CheckpointCrash, KilledAtEveryCall) {
  for (const auto& scene : kScenes) {
    for (const auto fault : {Fault::DieBefore, Fault::DieAfter}) {
      int died = 0;
      bool was_there = false;
      for (int k = fault == Fault::DieBefore ? 1 : 2;; k += kStride) {
        TempFolder folder(TempFolder::On::Memory);
        set_up(scene, folder);
        const auto child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
          int code = 1;
          try {
            FaultyFiles files(fault, k);
            save_sample(files, (folder.path() / "root").string(), scene.tag, kNewValue);
            code = files.struck() ? 2 : 0;
          } catch (...) {
          }
          ::_exit(code);
        }
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        const auto label = std::string(scene.name) + ", killed at call " + std::to_string(k);
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        ASSERT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << label << " status " << status;
        const bool arrived = check_after(scene, folder, label);
        // Once committed at call k, then at every later one too.
        EXPECT_TRUE(arrived || !was_there) << label;
        was_there = arrived;
        if (!killed) {
          EXPECT_TRUE(arrived);
          break;
        }
        ++died;
      }
      EXPECT_GT(died, 30 / kStride) << scene.name;
    }
  }
}

TEST(CheckpointCrash, EveryCallFailing) {
  // The calls that remove the replaced checkpoint.
  const std::set<std::string> after_commit{"rename_at", "open_folder_at", "list"};
  for (const auto& scene : kScenes) {
    int first = 0;
    for (const int error : {EIO, ENOSPC, EINTR, EAGAIN}) {
      int failed = 0;
      for (int k = 1 + first++ % kStride;; k += kStride) {
        TempFolder folder(TempFolder::On::Memory);
        set_up(scene, folder);
        const auto before = open_descriptors();
        FaultyFiles files(Fault::Error, k, error);
        std::string text;
        const int code =
            code_of([&] { save_sample(files, (folder.path() / "root").string(), scene.tag, kNewValue); }, &text);
        const auto label =
            std::string(scene.name) + ", call " + std::to_string(k) + " (" + files.struck_call() + ") fails: " + text;
        EXPECT_EQ(open_descriptors(), before) << label;
        if (!files.struck()) {
          EXPECT_EQ(code, 0) << label;
          break;
        }
        // The lock of another process is told by this error.
        const bool locked = error == EAGAIN && files.struck_call() == "try_lock";
        EXPECT_TRUE(code == 0 || code == static_cast<int>(locked ? ExitCode::kConfig : ExitCode::kIo) ||
                    code == kDamaged)
            << label << " code " << code;
        if (code != 0) {
          EXPECT_TRUE(text.find(folder.text()) != std::string::npos) << label << ": no path";
          ++failed;
        }
        if (fs::exists(folder.path() / "root")) {
          const bool arrived = check_after(scene, folder, label);
          // Success is never reported without a checkpoint.
          EXPECT_TRUE(code != 0 || arrived) << label;
          // These may fail without an error: removing obsolete files, closing files that were only read, creating a
          // parent directory (opening the target reports it).
          const auto call = files.struck_call();
          const bool asked_again = error == EINTR && (call == "pwrite" || call == "pread" || call == "fallocate");
          const bool replacing = scene.tag == "same";
          EXPECT_TRUE(code != 0 || asked_again || call == "close" || call == "make_folder" ||
                      call.starts_with("remove") || (replacing && after_commit.contains(call)))
              << label << ": continued";
        }
      }
      EXPECT_GT(failed, 20 / kStride) << scene.name;
    }
  }
}

TEST(CheckpointCrash, ShortReadsAndWritesAreGoneOnWith) {
  for (const auto& scene : kScenes) {
    for (int k = 1;; ++k) {
      TempFolder folder(TempFolder::On::Memory);
      set_up(scene, folder);
      FaultyFiles files(Fault::Short, k);
      save_sample(files, (folder.path() / "root").string(), scene.tag, kNewValue);
      EXPECT_TRUE(check_after(scene, folder, "short at " + std::to_string(k)));
      if (!files.struck()) break;
    }
  }
}

TEST(CheckpointCrash, EveryReadFailingWhileLoading) {
  TempFolder folder(TempFolder::On::Memory);
  save_sample(system_files(), folder.text(), "a", 1);
  save_sample(system_files(), folder.text(), "b", 2);
  for (const bool short_reads : {false, true}) {
    for (int k = 1;; ++k) {
      const auto before = open_descriptors();
      FaultyFiles files(short_reads ? Fault::Short : Fault::Error, k, EIO);
      int value = 0;
      std::string text;
      const int code = code_of([&] { value = load_sample(folder.text(), "b", files).value; }, &text);
      EXPECT_TRUE(code == 0 ? value == 2 : code == static_cast<int>(ExitCode::kIo) || code == kDamaged)
          << k << ": " << text;
      EXPECT_TRUE(!short_reads || code == 0) << k << ": " << text;
      EXPECT_EQ(open_descriptors(), before);
      if (!files.struck()) break;
    }
  }
}

// On a file system that has room for n more pages, for n = 0, 1, ... until a save has enough. Returns what was wrong.
std::string save_on_a_full_disk(const std::string& where) {
  const auto root = where + "/root";
  save_sample(system_files(), root, "old", 1);
  int failed = 0;
  for (int pages = 0;; ++pages) {
    {
      std::ofstream filler(where + "/filler");
      while (filler << std::string(4096, 'x') << std::flush) {
      }
    }
    const auto filled = fs::file_size(where + "/filler");
    fs::resize_file(where + "/filler", filled - std::min<std::uintmax_t>(filled, 4096 * static_cast<unsigned>(pages)));
    std::string text;
    const int code = code_of([&] { save_sample(system_files(), root, "new", 2); }, &text);
    const auto label = std::to_string(pages) + " pages: " + text;
    if (code != 0 && code != static_cast<int>(ExitCode::kIo)) return label + " has the code " + std::to_string(code);
    if (code != 0 && (text.find("No space left") == std::string::npos || text.find(where) == std::string::npos))
      return label + " names no full disk or no path";
    std::string load_text;
    int value = 0;
    if (code_of([&] { value = load_sample(root).value; }, &load_text) != 0) return label + " leaves " + load_text;
    if (value != 1 && value != 2) return label + " leaves other values";
    if (code == 0 && value != 2) return label + " is no save";
    fs::remove(where + "/filler");
    if (code == 0) return failed < 4 ? "only " + std::to_string(failed) + " saves failed" : "";
    ++failed;
    if (value == 2) fs::remove_all(root + "/new");  // committed, and then the pointer had no room
    if (value == 2) write_all(root + "/latest", latest_text({"old", 1}));
  }
}

TEST(CheckpointCrash, AFullFileSystem) {
  const TempFolder folder;
  const auto child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder.text().c_str(), "tmpfs", 0, "size=256k") != 0)
      ::_exit(77);
    std::string fault = "an exception";
    try {
      fault = save_on_a_full_disk(folder.text());
    } catch (const std::exception& e) {
      fault = e.what();
    }
    if (!fault.empty()) std::fprintf(stderr, "full disk: %s\n", fault.c_str());  // the child's only way to say why
    ::_exit(fault.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "no mounts here";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(CheckpointCrash, AFileSizeLimitIsAFullDisk) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = (folder.path() / "root").string();
  save_sample(system_files(), root, "old", 1);
  int refused = 0;
  for (const rlim_t limit : {0, 100, 4096, 5000, 5400, 8000}) {
    const auto child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const rlimit bytes{limit, limit};
      ::setrlimit(RLIMIT_FSIZE, &bytes);
      std::string text;
      const int code = code_of([&] { save_sample(system_files(), root, "new", kNewValue); }, &text);
      ::_exit(code == 0 ? 0 : code == static_cast<int>(ExitCode::kIo) && text.find(root) != std::string::npos ? 5 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    const int code = WEXITSTATUS(status);
    EXPECT_TRUE(code == 0 || code == 5) << limit << ": " << code;
    refused += code == 5;
    EXPECT_EQ(load_sample(root).value, code == 0 ? kNewValue : 1) << limit;
  }
  EXPECT_GE(refused, 3);
}

// What a power loss may take: a rename must never show what is not on disk.
TEST(CheckpointCrash, EverythingIsSyncedBeforeItIsShown) {
  for (const auto& scene : kScenes) {
    TempFolder folder(TempFolder::On::Memory);
    set_up(scene, folder);
    OrderWatchingFiles files;
    save_sample(files, (folder.path() / "root").string(), scene.tag, kNewValue);
    for (const auto& fault : files.faults) ADD_FAILURE() << scene.name << ": " << fault;
    const bool replaces = scene.before.size() == 2;
    EXPECT_EQ(files.renames, replaces ? 3 : 2) << scene.name;
    EXPECT_EQ(files.removals > 0, replaces);
    // Only the removal of the replaced checkpoint need not be.
    for (const auto& path : files.unsynced())
      EXPECT_TRUE(replaces && path == (folder.path() / "root").string()) << scene.name << ": " << path;
  }
}

TEST(CheckpointCrash, TwoWritersInOneDirectory) {
  TempFolder folder(TempFolder::On::Memory);
  const Commit first(system_files(), folder.text(), "a");
  std::string text;
  EXPECT_EQ(code_of([&] { Commit second(system_files(), folder.text(), "b"); }, &text),
            static_cast<int>(ExitCode::kConfig));
  EXPECT_TRUE(text.find("pid " + std::to_string(::getpid())) != std::string::npos) << text;
  EXPECT_TRUE(fs::exists(folder.path() / first.folder_name())) << "the second removed the first's work";
}

// A file system without flock, or without fsync of directories, or both (Lustre without `-o flock`, NFSv3, SMB, FUSE).
class PoorFiles final : public FsOps {
 public:
  PoorFiles(int lock_error, int sync_error) : lock_error_(lock_error), sync_error_(sync_error) {}
  int try_lock(int fd) override { return lock_error_ != 0 ? -lock_error_ : FsOps::try_lock(fd); }
  int fsync(int fd) override {
    FileInfo what;
    const bool folder = info(fd, &what) == 0 && what.directory;
    return folder && sync_error_ != 0 ? -sync_error_ : FsOps::fsync(fd);
  }
  // Another file system each time, so that each is told.
  int info(int fd, FileInfo* out) override {
    const int result = FsOps::info(fd, out);
    out->device += device_;
    return result;
  }
  int info_at(int folder, const char* name, FileInfo* out) override {
    const int result = FsOps::info_at(folder, name, out);
    out->device += device_;
    return result;
  }

 private:
  static inline std::uint64_t next_ = 1 << 20;
  const int lock_error_, sync_error_;
  const std::uint64_t device_ = next_++;
};

TEST(CheckpointCrash, FileSystemsWithoutLocksOrSyncsOfFolders) {
  static std::vector<std::string> said;
  said.clear();
  set_log_sink([](LogLevel, std::string_view text) { said.emplace_back(text); });
  const auto times_said = [](const std::string& part) {
    return std::count_if(said.begin(), said.end(), [&](const auto& line) { return line.find(part) != line.npos; });
  };
  for (const int lock_error : {0, ENOSYS, ENOLCK, EOPNOTSUPP}) {
    for (const int sync_error : {0, EINVAL, ENOSYS, EOPNOTSUPP}) {
      const std::string label = std::to_string(lock_error) + " " + std::to_string(sync_error);
      PoorFiles files(lock_error, sync_error);
      TempFolder folder(TempFolder::On::Memory);
      said.clear();
      probe_root(files, folder.text());
      EXPECT_EQ(times_said("this file system has no locks"), lock_error != 0) << label;
      EXPECT_EQ(times_said("cannot sync a directory"), sync_error != 0) << label;
      for (const char* tag : {"a", "b", "a"}) save_sample(files, folder.text(), tag, 7);
      EXPECT_EQ(load_sample(folder.text(), "a").value, 7) << label;
      EXPECT_EQ(times_said("this file system has no locks"), lock_error != 0) << label << ": once";
      EXPECT_EQ(times_said("cannot sync a directory"), sync_error != 0) << label << ": once";
      EXPECT_EQ(names_in(folder.text()), (std::set<std::string>{".lock", "latest", "a", "b"})) << label;
      // Two writers at once.
      const Commit first(files, folder.text(), "c");
      std::string text;
      EXPECT_EQ(code_of([&] { Commit second(files, folder.text(), "d"); }, &text), static_cast<int>(ExitCode::kConfig));
      EXPECT_NE(text.find("pid " + std::to_string(::getpid())), std::string::npos) << text;
      EXPECT_NO_THROW(probe_root(files, folder.text())) << "a held lock is no fault of the folder";
    }
  }
  set_log_sink({});
  // Any other error still ends a save.
  TempFolder folder(TempFolder::On::Memory);
  PoorFiles no_disk(0, EIO), no_lock(EIO, 0);
  for (FsOps* files : {static_cast<FsOps*>(&no_disk), static_cast<FsOps*>(&no_lock)})
    EXPECT_EQ(code_of([&] { save_sample(*files, folder.text(), "a", 1); }), static_cast<int>(ExitCode::kIo));
}

TEST(CheckpointCrash, AFileInPlaceOfALockEndsWithItsProcess) {
  PoorFiles files(ENOSYS, 0);
  TempFolder folder(TempFolder::On::Memory);
  const pid_t killed = fork();
  if (killed == 0) {
    const auto root = Folder::make(files, folder.text());
    const RootLock lock(root, "");
    raise(SIGKILL);
  }
  waitpid(killed, nullptr, 0);
  const std::string owner = file_text(folder.path() / kOwnerName);
  EXPECT_NE(owner.find(", pid " + std::to_string(killed) + ", started "), std::string::npos) << owner;
  EXPECT_NO_THROW(save_sample(files, folder.text(), "a", 1));
  EXPECT_EQ(names_in(folder.text()), (std::set<std::string>{".lock", "latest", "a"}));
  // One of another host, or one that cannot be read, may be of a process that lives.
  for (std::string other : {"host elsewhere, pid:[1], pid " + std::to_string(killed) + ", started 5", std::string()}) {
    write_all(folder.path() / kOwnerName, other);
    std::string text;
    EXPECT_EQ(code_of([&] { save_sample(files, folder.text(), "a", 1); }, &text), static_cast<int>(ExitCode::kConfig));
    EXPECT_NE(text.find("If that process has ended, remove the file"), std::string::npos) << text;
    EXPECT_EQ(file_text(folder.path() / kOwnerName), other);
  }
  // The process id is in use again, by a process that began at another time.
  const auto at = owner.find("pid " + std::to_string(killed));
  write_all(folder.path() / kOwnerName, owner.substr(0, at) + "pid " + std::to_string(::getpid()) + ", started 5");
  EXPECT_NO_THROW(save_sample(files, folder.text(), "a", 1));
}

TEST(CheckpointCrash, WhatIsNoCheckpointIsNotReplaced) {
  TempFolder folder(TempFolder::On::Memory);
  fs::create_directory(folder.path() / "photos");
  write_all(folder.path() / "photos" / "one.jpg", "dear");
  write_all(folder.path() / "file", "dear");
  for (const char* tag : {"photos", "file"})
    EXPECT_EQ(code_of([&] { save_sample(system_files(), folder.text(), tag, 1); }), static_cast<int>(ExitCode::kIo));
  EXPECT_EQ(file_text(folder.path() / "photos" / "one.jpg"), "dear");
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{".lock", "file", "photos"}));
}

}  // namespace
}  // namespace zero::test::checkpoint_crash_test
