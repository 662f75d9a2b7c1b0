// See kept_slot.h. The header is one page of text, then zeros; a slot that is being written has zeros only.
#include "formats/kept_slot.h"

#include <algorithm>
#include <cerrno>
#include <sstream>

#include "base/check.h"
#include "base/kept_memory.h"
#include "formats/hash.h"
#include "formats/manifest.h"

namespace zero::formats {
namespace {

constexpr std::uint64_t kPage = kDirectAlignment;
// Numbers that are no descriptors of the system.
constexpr int kFolder = 1 << 30;
constexpr int kFirstFile = kFolder + 1;

}  // namespace

KeptSlot::KeptSlot(FsOps& under, int memory, int slot)
    : under_(under),
      memory_(memory),
      base_(static_cast<std::uint64_t>(slot) * base::kKeptSlotBytes),
      path_(base::join("kept snapshot in slot ", slot)) {
  entries_.push_back({"header", 0, kPage});
}

Folder KeptSlot::folder() { return Folder::open(*this, path_); }

// --- the header -------------------------------------------------------------------------------

void KeptSlot::write_header(const std::string& text) {
  ZERO_CHECK(text.size() < kPage, "a header of ", text.size(), " bytes");
  std::string page(kPage, '\0');
  page.replace(0, text.size(), text);
  File(*this, kFirstFile, path_).write(page.data(), page.size(), 0);
}

void KeptSlot::begin() {
  write_header("");
  entries_.resize(1);
}

void KeptSlot::publish(const KeptHeader& header) {
  auto text = base::join("zero.kept/1\nattempt ", header.attempt, "\nstep ", header.step, "\nkey ", header.key,
                         "\nmanifest ", header.manifest_hash, "\nfiles ", entries_.size() - 1, "\n");
  for (std::size_t i = 1; i < entries_.size(); ++i)
    text += base::join(entries_[i].name, " ", entries_[i].begin, " ", entries_[i].bytes, "\n");
  write_header(text + hash_of(text) + "\n");
}

std::optional<KeptHeader> KeptSlot::read() {
  std::string page(kPage, '\0');
  try {
    File(*this, kFirstFile, path_).read(page.data(), page.size(), 0);
  } catch (const IoError&) {
    return std::nullopt;
  }
  const auto text = page.substr(0, page.find('\0'));
  constexpr std::size_t kHashLine = 33;
  if (text.size() < kHashLine ||
      text.substr(text.size() - kHashLine) != hash_of(text.substr(0, text.size() - kHashLine)) + "\n")
    return std::nullopt;
  std::istringstream in(text);
  std::string format, word[5];
  KeptHeader header;
  std::size_t files = 0;
  in >> format >> word[0] >> header.attempt >> word[1] >> header.step >> word[2] >> header.key >> word[3] >>
      header.manifest_hash >> word[4] >> files;
  if (!in || format != "zero.kept/1" || header.attempt < 0 || header.step < 0 || header.step > kMostCount ||
      !is_hash(header.key) || !is_hash(header.manifest_hash))
    return std::nullopt;
  std::deque<Entry> found{entries_.front()};
  for (; files > 0; --files) {
    Entry entry;
    in >> entry.name >> entry.begin >> entry.bytes;
    const auto end = found.back().begin + found.back().bytes;
    if (!in || !valid_file_name(entry.name) || entry.begin % kPage != 0 || entry.begin < end ||
        entry.begin > base::kKeptSlotBytes || entry.bytes > base::kKeptSlotBytes - entry.begin)
      return std::nullopt;
    found.push_back(std::move(entry));
  }
  entries_ = std::move(found);
  return header;
}

// --- files ------------------------------------------------------------------------------------

KeptSlot::Entry* KeptSlot::entry_of(int fd) {
  const auto number = static_cast<std::size_t>(fd - kFirstFile);
  return fd >= kFirstFile && number < entries_.size() ? &entries_[number] : nullptr;
}

int KeptSlot::number_of(const char* name) const {
  for (std::size_t i = 1; i < entries_.size(); ++i)
    if (entries_[i].name == name) return static_cast<int>(i);
  return -1;
}

int KeptSlot::open_folder(const char*) { return kFolder; }

int KeptSlot::open_read_at(int, const char* name) {
  const int number = number_of(name);
  return number < 0 ? -ENOENT : kFirstFile + number;
}

int KeptSlot::create_at(int, const char* name) {
  if (number_of(name) >= 0) return -EEXIST;
  const auto& last = entries_.back();
  entries_.push_back({name, aligned_up(last.begin + last.bytes), 0});
  return kFirstFile + static_cast<int>(entries_.size()) - 1;
}

ssize_t KeptSlot::pread(int fd, void* out, std::size_t bytes, std::uint64_t offset) {
  const auto* const entry = entry_of(fd);
  if (entry == nullptr) return -EBADF;
  if (offset >= entry->bytes) return 0;
  return under_.pread(memory_, out, std::min<std::uint64_t>(bytes, entry->bytes - offset),
                      base_ + entry->begin + offset);
}

// Several threads write parts of one file.
ssize_t KeptSlot::pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) {
  auto* const entry = entry_of(fd);
  if (entry == nullptr) return -EBADF;
  const auto room = base::kKeptSlotBytes - entry->begin;
  if (offset > room || bytes > room - offset) return -EFBIG;
  const auto n = under_.pwrite(memory_, data, bytes, base_ + entry->begin + offset);
  if (n <= 0) return n;
  const std::lock_guard lock(mutex_);
  entry->bytes = std::max(entry->bytes, offset + static_cast<std::uint64_t>(n));
  return n;
}

// It is memory: there is nothing to bypass, to sync or to close, and pages come when they are written.
int KeptSlot::set_direct(int, bool direct) { return direct ? -EINVAL : 0; }
int KeptSlot::fallocate(int, std::uint64_t) { return -EOPNOTSUPP; }
int KeptSlot::fdatasync(int) { return 0; }
int KeptSlot::fsync(int) { return 0; }
int KeptSlot::close(int) { return 0; }
int KeptSlot::free_bytes(int, std::uint64_t*) { return -ENOSYS; }

int KeptSlot::info(int fd, FileInfo* out) {
  const auto* const entry = entry_of(fd);
  if (entry == nullptr) return -EBADF;
  *out = {};
  out->regular = true;
  out->bytes = entry->bytes;
  return 0;
}

int KeptSlot::info_at(int, const char* name, FileInfo* out) {
  const int number = number_of(name);
  return number < 0 ? -ENOENT : info(kFirstFile + number, out);
}

}  // namespace zero::formats
