// A save that loses power at any moment. The calls of a save are recorded, and images of the disk are made from them:
// what was synced is there; of the rest any part may be, writes torn at 512 bytes and names in any order. In each the
// newest committed checkpoint loads, or the one before if the commit was not reached.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

#include "unit/formats/checkpoint_samples.h"

namespace zero::test::checkpoint_images_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::formats;

// A file or a directory: its state at the last sync, and what was done to it since.
struct Inode {
  bool folder = false;
  struct Write {
    std::uint64_t offset;
    std::string bytes;
  };
  std::string data;           // durable
  std::vector<Write> writes;  // since
  std::uint64_t size = 0;     // with all writes

  using Entries = std::map<std::string, int>;
  struct Change {
    std::set<std::string> removed;
    Entries added;
  };
  Entries entries, now;         // durable, and with all changes
  std::vector<Change> changes;  // since
};

// One recorded call that changes the disk.
struct Disk {
  std::vector<Inode> inodes;

  int make(bool folder) {
    inodes.emplace_back().folder = folder;
    return static_cast<int>(inodes.size()) - 1;
  }
  Inode& at(int inode) { return inodes[static_cast<std::size_t>(inode)]; }
  void change(int folder, Inode::Change change) {
    auto& now = at(folder).now;
    for (const auto& name : change.removed) now.erase(name);
    for (const auto& [name, inode] : change.added) now[name] = inode;
    at(folder).changes.push_back(std::move(change));
  }
  void sync(int inode) {
    auto& node = at(inode);
    for (const auto& write : node.writes) put(node.data, write.offset, write.bytes, 0, write.bytes.size());
    node.writes.clear();
    node.data.resize(std::max<std::size_t>(node.data.size(), node.size));
    if (!node.folder) return;
    node.entries = node.now;
    node.changes.clear();
  }
  static void put(std::string& data, std::uint64_t offset, const std::string& bytes, std::size_t from, std::size_t to) {
    data.resize(std::max<std::size_t>(data.size(), offset + to));
    std::copy(bytes.begin() + static_cast<std::ptrdiff_t>(from), bytes.begin() + static_cast<std::ptrdiff_t>(to),
              data.begin() + static_cast<std::ptrdiff_t>(offset + from));
  }

  // Writes what a disk may hold after a loss of power now.
  template <class Random>
  void image(int folder, const fs::path& path, Random& random) const {
    const auto& node = inodes[static_cast<std::size_t>(folder)];
    auto entries = node.entries;
    auto changes = node.changes;
    std::shuffle(changes.begin(), changes.end(), random);
    for (const auto& change : changes) {
      if (random() % 2 == 0) continue;
      for (const auto& name : change.removed) entries.erase(name);
      for (const auto& [name, inode] : change.added) entries[name] = inode;
    }
    fs::create_directory(path);
    for (const auto& [name, inode] : entries) {
      const auto& child = inodes[static_cast<std::size_t>(inode)];
      if (child.folder) {
        image(inode, path / name, random);
        continue;
      }
      auto data = child.data;
      for (const auto& write : child.writes)
        for (std::size_t from = 0; from < write.bytes.size();) {
          const auto to = std::min(write.bytes.size(), from + 512 - (write.offset + from) % 512);
          if (random() % 2 == 0) put(data, write.offset, write.bytes, from, to);
          from = to;
        }
      // The size may be there before the bytes.
      if (random() % 2 == 0) data.resize(std::max<std::size_t>(data.size(), child.size));
      write_all(path / name, data);
    }
  }
};

// Performs the calls, and keeps the disk as it is after each call that changes it.
class RecordingFiles : public FsOps {
 public:
  explicit RecordingFiles(const fs::path& root) : root_(root.string()), top_(disk_.make(true)) {}
  const std::vector<Disk>& states() const { return states_; }
  int top() const { return top_; }

  int open_folder(const char* path) override {
    const int fd = FsOps::open_folder(path);
    if (fd < 0) return fd;
    const std::string text = path;
    return known(fd, text == root_ ? top_ : text.starts_with(root_ + "/") ? find(text.substr(root_.size() + 1)) : -1);
  }
  int open_folder_at(int folder, const char* name) override {
    return known(FsOps::open_folder_at(folder, name), child(folder, name));
  }
  int make_folder(const char* path) override {
    const int r = FsOps::make_folder(path);
    const std::string text = path;
    if (r >= 0 && text.starts_with(root_ + "/")) added(top_, text.substr(root_.size() + 1), true);
    return r;
  }
  int make_folder_at(int folder, const char* name) override {
    const int r = FsOps::make_folder_at(folder, name);
    if (r >= 0) added(inode(folder), name, true);
    return r;
  }
  int create_at(int folder, const char* name) override {
    const int fd = FsOps::create_at(folder, name);
    return fd < 0 ? fd : known(fd, added(inode(folder), name, false));
  }
  int open_lock_at(int folder, const char* name) override {
    const int fd = FsOps::open_lock_at(folder, name);
    const int there = child(folder, name);
    return fd < 0 ? fd : known(fd, there >= 0 ? there : added(inode(folder), name, false));
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    const auto n = FsOps::pwrite(fd, data, bytes, offset);
    const std::lock_guard lock(mutex_);
    if (n <= 0 || inode(fd) < 0) return n;
    auto& node = disk_.at(inode(fd));
    node.writes.push_back({offset, {static_cast<const char*>(data), static_cast<std::size_t>(n)}});
    node.size = std::max(node.size, offset + static_cast<std::uint64_t>(n));
    return keep(n);
  }
  int fallocate(int fd, std::uint64_t bytes) override {
    const int r = FsOps::fallocate(fd, bytes);
    if (r >= 0) disk_.at(inode(fd)).size = std::max(disk_.at(inode(fd)).size, bytes);
    return keep(r);
  }
  int fdatasync(int fd) override { return synced(fd, FsOps::fdatasync(fd)); }
  int fsync(int fd) override { return synced(fd, FsOps::fsync(fd)); }
  int rename_at(int folder, const char* from, const char* to) override {
    const int r = FsOps::rename_at(folder, from, to);
    if (r >= 0) disk_.change(inode(folder), {{from}, {{to, child(folder, from)}}});
    return keep(r);
  }
  int exchange_at(int folder, const char* a, const char* b) override {
    const int r = FsOps::exchange_at(folder, a, b);
    if (r >= 0) disk_.change(inode(folder), {{}, {{a, child(folder, b)}, {b, child(folder, a)}}});
    return keep(r);
  }
  int remove_at(int folder, const char* name) override { return removed(folder, name, FsOps::remove_at(folder, name)); }
  int remove_folder_at(int folder, const char* name) override {
    return removed(folder, name, FsOps::remove_folder_at(folder, name));
  }

 private:
  template <class Result>
  Result keep(Result r) {
    states_.push_back(disk_);
    return r;
  }
  int known(int fd, int inode) {
    if (fd >= 0) inodes_[fd] = inode;
    return fd;
  }
  int inode(int fd) const {
    const auto found = inodes_.find(fd);
    return found == inodes_.end() ? -1 : found->second;
  }
  int find(const std::string& name) {
    const auto& now = disk_.at(top_).now;
    const auto found = now.find(name);
    return found == now.end() ? -1 : found->second;
  }
  int child(int folder, const std::string& name) {
    if (inode(folder) < 0) return -1;
    const auto& now = disk_.at(inode(folder)).now;
    const auto found = now.find(name);
    return found == now.end() ? -1 : found->second;
  }
  int added(int folder, const std::string& name, bool is_folder) {
    if (folder < 0) return -1;
    const int made = disk_.make(is_folder);
    disk_.change(folder, {{}, {{name, made}}});
    keep(0);
    return made;
  }
  int removed(int folder, const char* name, int r) {
    if (r >= 0) disk_.change(inode(folder), {{name}, {}});
    return keep(r);
  }
  int synced(int fd, int r) {
    if (r >= 0 && inode(fd) >= 0) disk_.sync(inode(fd));
    return keep(r);
  }

  const std::string root_;
  Disk disk_;
  const int top_;
  std::mutex mutex_;
  std::map<int, int> inodes_;  // by descriptor
  std::vector<Disk> states_;
};

TEST(CheckpointImages, LoadAfterALossOfPower) {
  const auto seed = std::random_device{}();
  std::mt19937 random(seed);
  const char* more = std::getenv("ZERO_IMAGES");
  const int per_state = more != nullptr ? std::stoi(more) : 8;
  int images = 0, older = 0, newer = 0;
  for (const bool replaced : {false, true}) {
    const TempFolder folder(TempFolder::On::Memory);
    RecordingFiles files(folder.path());
    const auto root = (folder.path() / "root").string();
    save_sample(files, root, "older", 1);
    save_sample(files, root, "old", 2);
    const auto committed = files.states().size();
    save_sample(files, root, replaced ? "old" : "new", 3);
    bool arrived = false;
    for (auto k = committed - 1; k < files.states().size(); ++k) {
      const bool last = k + 1 == files.states().size();
      for (int i = 0; i < per_state; ++i) {
        const TempFolder copy(TempFolder::On::Memory);
        files.states()[k].image(files.top(), copy.path() / "disk", random);
        const auto label = "seed " + std::to_string(seed) + ", call " + std::to_string(k) + ", image " +
                           std::to_string(i) + (replaced ? ", replaced" : "");
        Loaded loaded;
        std::string text;
        ASSERT_EQ(code_of([&] { loaded = load_sample((copy.path() / "disk/root").string()); }, &text), 0)
            << label << ": " << text;
        EXPECT_TRUE(loaded.value == 2 || loaded.value == 3) << label << ": " << loaded.value;
        (loaded.value == 2 ? older : newer) += 1;
        arrived = arrived || loaded.value == 3;
        if (last) EXPECT_EQ(loaded.value, 3) << label;
        // The next save works, whatever is left.
        if (i == 0) {
          save_sample(system_files(), (copy.path() / "disk/root").string(), "after", 4);
          EXPECT_EQ(load_sample((copy.path() / "disk/root").string()).value, 4) << label;
        }
        ++images;
      }
    }
    EXPECT_TRUE(arrived);
  }
  EXPECT_GE(images, 500);
  EXPECT_GT(older, 100);
  EXPECT_GT(newer, 20);
  RecordProperty("images", images);
}

}  // namespace
}  // namespace zero::test::checkpoint_images_test
