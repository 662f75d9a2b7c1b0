// See zip.h. Field offsets are those of PKWARE's APPNOTE.TXT 6.3; numbers are little-endian.
#include "interchange/zip.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/printable.h"
#include "interchange/crc32.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;
using formats::File;

constexpr std::uint64_t kEnd = 22, kEnd64 = 56, kLocator = 20, kEntry = 46, kLocal = 30;
constexpr std::uint64_t kMostDirectory = std::uint64_t{256} << 20;
constexpr std::size_t kSlice = std::size_t{1} << 20;

// Fields of one structure.
struct Fields {
  const char* data;
  std::uint64_t offset;  // in the file, for messages

  template <class Number>
  Number get(std::size_t at) const {
    Number value;
    std::memcpy(&value, data + at, sizeof value);
    return value;
  }
  std::uint16_t u16(std::size_t at) const { return get<std::uint16_t>(at); }
  std::uint32_t u32(std::size_t at) const { return get<std::uint32_t>(at); }
  std::uint64_t u64(std::size_t at) const { return get<std::uint64_t>(at); }
};

[[noreturn]] void fail(const File& file, std::uint64_t offset, const std::string& got, const std::string& expected) {
  fail_damaged(file.path(), base::join("offset ", offset, " has ", got, ", expected ", expected));
}

std::string hex_of(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

// Where the directory is, as the end records say.
struct Place {
  std::uint64_t begin = 0, bytes = 0, entries = 0;  // from the archive's first byte
};

// `size`: bytes of the archive, which starts at `start`.
Place place_of(const File& file, std::uint64_t start, std::uint64_t size) {
  if (size < kEnd) fail(file, start, base::join(size, " bytes"), "a zip file");
  char bytes[kLocator + kEnd];
  const auto tail = std::min<std::uint64_t>(size, sizeof bytes);
  file.read(bytes, tail, start + size - tail);
  const Fields end{bytes + tail - kEnd, start + size - kEnd};
  if (end.u32(0) != 0x06054b50 || end.u16(20) != 0)
    fail(file, end.offset, "no end record", "a zip file that ends here");
  if (end.u16(4) != 0 || end.u16(6) != 0) fail(file, end.offset, "a part of a split archive", "one file");
  if (end.u16(8) != end.u16(10)) fail(file, end.offset, "two numbers of records", "one");
  Place place{end.u32(16), end.u32(12), end.u16(10)};
  const Fields locator{bytes, start + size - tail};
  std::uint64_t before_end = size - kEnd;
  if (tail == sizeof bytes && locator.u32(0) == 0x07064b50) {
    const auto at = locator.u64(8);
    if (locator.u32(4) != 0 || locator.u32(16) > 1) fail(file, locator.offset, "a part of a split archive", "one file");
    if (size < kEnd + kLocator + kEnd64 || at != size - kEnd - kLocator - kEnd64)
      fail(file, locator.offset, base::join("a zip64 end record at ", at), "one just before it");
    char more[kEnd64];
    file.read(more, sizeof more, start + at);
    const Fields wide{more, start + at};
    if (wide.u32(0) != 0x06064b50 || wide.u64(4) != kEnd64 - 12 || wide.u32(16) != 0 || wide.u32(20) != 0 ||
        wide.u64(24) != wide.u64(32))
      fail(file, wide.offset, "no zip64 end record", "one of 56 bytes for one file");
    // Where the short record has room for a number, both say the same.
    const auto same = [](std::uint64_t narrow, std::uint64_t all_ones, std::uint64_t number) {
      return narrow == number || narrow == all_ones;
    };
    if (!same(place.entries, 0xffff, wide.u64(32)) || !same(place.bytes, 0xffffffff, wide.u64(40)) ||
        !same(place.begin, 0xffffffff, wide.u64(48)))
      fail(file, wide.offset, "other numbers than the end record", "the same");
    place = {wide.u64(48), wide.u64(40), wide.u64(32)};
    before_end = at;
  }
  if (place.bytes > before_end || place.begin != before_end - place.bytes)
    fail(file, end.offset, base::join("a directory of ", place.bytes, " bytes at ", place.begin),
         base::join("one that ends at ", before_end));
  if (place.bytes > kMostDirectory || place.entries > place.bytes / kEntry)
    fail(file, end.offset, base::join(place.entries, " records in ", place.bytes, " bytes"),
         base::join("at most ", kMostDirectory, " bytes of directory"));
  return place;
}

// A folder and plain names, with one character between them: never a path that leaves a folder.
bool plain_name(std::string_view name) {
  if (name.empty() || name.size() > 512 || name.front() == '/' || name.back() == '/') return false;
  for (std::size_t at = 0; at <= name.size();) {
    const auto end = std::min(name.find('/', at), name.size());
    const auto part = name.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") return false;
    at = end + 1;
  }
  return std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return c >= 0x20 && c != 0x7f && c != '\\' && c != ':'; });
}

struct Entry {
  std::string name;
  std::uint64_t local = 0;  // of its local header, from the archive's first byte
  StoredRecord record;
};

// Takes the 64-bit numbers that the entry's own fields have no room for. `extra`: its extra fields.
void widen(const File& file, const Fields& entry, std::string_view extra, std::uint64_t* stored, std::uint64_t* bytes,
           std::uint64_t* local) {
  std::vector<std::uint64_t*> missing;
  for (auto* number : {bytes, stored, local})
    if (*number == 0xffffffff) missing.push_back(number);
  while (extra.size() >= 4) {
    const Fields field{extra.data(), entry.offset};
    const std::size_t size = field.u16(2);
    if (size > extra.size() - 4) break;
    if (field.u16(0) == 1) {
      if (size != 8 * missing.size()) fail(file, entry.offset, "other 64-bit numbers", "those that have no room");
      for (std::size_t i = 0; i < missing.size(); ++i) *missing[i] = field.u64(4 + 8 * i);
      missing.clear();
    }
    extra.remove_prefix(4 + size);
  }
  if (!extra.empty() || !missing.empty()) fail(file, entry.offset, "incomplete extra fields", "whole ones");
}

std::vector<Entry> entries_of(const File& file, std::uint64_t start, const Place& place) {
  std::vector<char> directory(place.bytes);
  file.read(directory.data(), directory.size(), start + place.begin);
  std::vector<Entry> entries;
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < place.entries; ++i) {
    const Fields entry{directory.data() + at, start + place.begin + at};
    if (place.bytes - at < kEntry || entry.u32(0) != 0x02014b50) fail(file, entry.offset, "no record", "one");
    const std::uint64_t name_bytes = entry.u16(28), extra_bytes = entry.u16(30);
    if (place.bytes - at - kEntry < name_bytes + extra_bytes || entry.u16(32) != 0)
      fail(file, entry.offset, "a record that is too long, or a comment", "name and extra fields in the directory");
    if (entry.u16(8) & ~0x0808u) fail(file, entry.offset, "an encrypted or unusual record", "a plain one");
    if (entry.u16(10) != 0)
      fail(file, entry.offset, base::join("compression method ", entry.u16(10)),
           "stored records, as torch.save writes");
    if (entry.u16(34) != 0) fail(file, entry.offset, "a part of a split archive", "one file");
    Entry found;
    found.name.assign(entry.data + kEntry, name_bytes);
    if (!plain_name(found.name))
      fail(file, entry.offset, "the name \"" + base::printable(found.name, base::Lines::Escape) + "\"", "a plain name");
    std::uint64_t stored = entry.u32(20), local = entry.u32(42);
    found.record.bytes = entry.u32(24);
    found.record.crc = entry.u32(16);
    widen(file, entry, {entry.data + kEntry + name_bytes, extra_bytes}, &stored, &found.record.bytes, &local);
    if (stored != found.record.bytes)
      fail(file, entry.offset, base::join(stored, " stored bytes of ", found.record.bytes), "as many");
    if (local > place.begin || place.begin - local < kLocal)
      fail(file, entry.offset, base::join("a local header at ", local), "one before the directory");
    found.local = local;
    entries.push_back(std::move(found));
    at += kEntry + name_bytes + extra_bytes;
  }
  if (at != place.bytes) fail(file, start + place.begin + at, "bytes after the last record", "the end");
  return entries;
}

// Finds the record's first byte behind its local header, which must agree with the directory.
void locate(const File& file, std::uint64_t start, std::uint64_t end, Entry& entry) {
  char bytes[kLocal];
  file.read(bytes, sizeof bytes, start + entry.local);
  const Fields local{bytes, start + entry.local};
  const std::uint64_t name_bytes = local.u16(26), extra_bytes = local.u16(28);
  if (local.u32(0) != 0x04034b50 || (local.u16(6) & ~0x0808u) || local.u16(8) != 0)
    fail(file, local.offset, "no local header of a stored record", "one");
  if (name_bytes != entry.name.size() || end - entry.local - kLocal < name_bytes + extra_bytes)
    fail(file, local.offset, "a local header of other lengths", "those of the directory");
  std::string name(name_bytes, '\0');
  file.read(name.data(), name.size(), local.offset + kLocal);
  if (name != entry.name) fail(file, local.offset, "another name", "\"" + entry.name + "\"");
  // With a data descriptor (bit 3) the numbers follow the data, and are 0 here or the same.
  const bool later = local.u16(6) & 8;
  const auto agrees = [&](std::uint32_t number, std::uint64_t wanted) {
    return number == wanted || number == 0xffffffff || (later && number == 0);
  };
  if (!(local.u32(14) == entry.record.crc || (later && local.u32(14) == 0)) ||
      !agrees(local.u32(18), entry.record.bytes) || !agrees(local.u32(22), entry.record.bytes))
    fail(file, local.offset, "a local header of other sizes", "those of the directory");
  entry.record.begin = entry.local + kLocal + name_bytes + extra_bytes;
  if (entry.record.bytes > end - entry.record.begin)
    fail(file, local.offset, base::join(entry.record.bytes, " bytes of ", entry.name),
         base::join("at most ", end - entry.record.begin));
}

}  // namespace

const StoredRecord& ZipDirectory::at(const std::string& name, const std::string& path) const {
  const auto found = records.find(name);
  if (found == records.end())
    fail_damaged(path,
                 "has no record " + base::printable(name, base::Lines::Escape) + ", expected a file of torch.save");
  return found->second;
}

ZipDirectory read_zip(const File& file, std::uint64_t begin, std::uint64_t bytes) {
  const auto place = place_of(file, begin, bytes);
  auto entries = entries_of(file, begin, place);
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.local < b.local; });
  ZipDirectory directory;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    auto& entry = entries[i];
    locate(file, begin, i + 1 < entries.size() ? entries[i + 1].local : place.begin, entry);
    const auto slash = entry.name.find('/');
    const auto root = entry.name.substr(0, slash == std::string::npos ? 0 : slash);
    if (i == 0) directory.root = root;
    if (root.empty() || root != directory.root)
      fail_damaged(file.path(), "has the record \"" + entry.name + "\", expected all records in one folder");
    entry.record.begin += begin;
    if (!directory.records.emplace(entry.name.substr(slash + 1), entry.record).second)
      fail_damaged(file.path(), "has two records \"" + entry.name + "\", expected each once");
  }
  return directory;
}

void check_record(const File& file, const std::string& name, const StoredRecord& record, void* out) {
  std::vector<char> own(out ? 0 : std::min<std::uint64_t>(kSlice, record.bytes));
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < record.bytes;) {
    const auto some = std::min<std::uint64_t>(kSlice, record.bytes - done);
    char* const to = out ? static_cast<char*>(out) + done : own.data();
    file.read(to, some, record.begin + done);
    crc = crc32(crc, to, some);
    done += some;
  }
  if (crc != record.crc)
    fail_damaged(file.path(),
                 base::join("the CRC-32 of ", base::printable(name, base::Lines::Escape), " (", record.bytes,
                            " bytes at offset ", record.begin, ") is ", hex_of(crc), ", expected ", hex_of(record.crc),
                            ": the file was damaged, or written without CRCs. Hint: --ignore-crc reads the "
                            "latter."));
}

std::string read_record(const File& file, const std::string& name, const StoredRecord& record, std::uint64_t limit,
                        bool ignore_crc) {
  if (record.bytes > limit)
    fail_damaged(file.path(), base::join(name, " has ", record.bytes, " bytes, expected at most ", limit));
  std::string text(record.bytes, '\0');
  if (ignore_crc)
    file.read(text.data(), text.size(), record.begin);
  else
    check_record(file, name, record, text.data());
  return text;
}

}  // namespace zero::interchange
