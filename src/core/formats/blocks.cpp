// See blocks.h.
#include "formats/blocks.h"

#include <algorithm>

#include "base/check.h"
#include "formats/safetensors.h"

namespace zero::formats {

void BlockHasher::add(const char* data, std::size_t bytes) {
  whole_.add(data, bytes);
  while (bytes > 0) {
    const auto now = std::min<std::uint64_t>(bytes, kBlockBytes - filled_);
    block_.add(data, now);
    filled_ += now;
    data += now;
    bytes -= now;
    if (filled_ < kBlockBytes) continue;
    rows_ += block_.digest();
    block_.reset();
    filled_ = 0;
  }
}

std::string BlockHasher::rows() {
  if (filled_ > 0) rows_ += block_.digest();
  filled_ = 0;
  return std::move(rows_);
}

Manifest::FileEntry write_blocks(const Folder& folder, const std::vector<std::pair<std::string, std::string>>& rows) {
  Header header;
  header.metadata["format"] = "zero.checkpoint/2";
  std::uint64_t end = 0;
  for (const auto& [name, own] : rows) {
    header.tensors.push_back({name, "U8", {static_cast<std::int64_t>(own.size() / kRowBytes), kRowBytes}, end, 0});
    end += own.size();
    header.tensors.back().end = end;
  }
  const auto head = header_bytes(header, 8);
  auto file = folder.create(kBlocksName);
  file.reserve(head.size() + end);
  Hasher hasher;
  std::uint64_t at = 0;
  const auto write = [&](const std::string& bytes) {
    hasher.add(bytes.data(), bytes.size());
    file.write(bytes.data(), bytes.size(), at);
    at += bytes.size();
  };
  write(head);
  for (const auto& [name, own] : rows) write(own);
  file.sync();
  file.close();
  return {kBlocksName, static_cast<std::int64_t>(at), hasher.hex()};
}

void BlockRows::open() {
  const auto listed = std::find_if(manifest_.files.begin(), manifest_.files.end(),
                                   [&](const auto& entry) { return entry.name == manifest_.blocks; });
  ZERO_CHECK(listed != manifest_.files.end(), "file ", manifest_.blocks);
  auto file = folder_.open_file(listed->name, static_cast<std::uint64_t>(listed->bytes));
  const auto header = read_header(file);
  begins_.assign(manifest_.files.size(), 0);
  for (std::size_t i = 0; i < manifest_.files.size(); ++i) {
    const auto& entry = manifest_.files[i];
    if (entry.name == manifest_.blocks) continue;
    const auto found = std::find_if(header.tensors.begin(), header.tensors.end(),
                                    [&](const TensorEntry& tensor) { return tensor.key == entry.name; });
    const auto bytes = num_blocks(static_cast<std::uint64_t>(entry.bytes)) * kRowBytes;
    if (found == header.tensors.end() || found->dtype != "U8" || found->end - found->begin != bytes)
      fail_damaged(file.path(), base::join("has no ", bytes, " bytes of hashes of ", entry.name));
    begins_[i] = header.data_begin + found->begin;
  }
  file_.emplace(std::move(file));
}

std::string BlockRows::read(std::uint32_t file, std::uint64_t first, std::uint64_t count) {
  if (!file_) open();
  std::string rows(count * kRowBytes, '\0');
  file_->read(rows.data(), rows.size(), begins_[file] + first * kRowBytes);
  return rows;
}

void BlockRows::check(std::uint32_t file, std::uint64_t first, std::string_view rows, const char* data,
                      std::uint64_t bytes) const {
  for (std::uint64_t at = 0; at < bytes; at += kBlockBytes) {
    const auto block = at / kBlockBytes;
    const auto row = rows.substr(block * kRowBytes, kRowBytes);
    const auto got = raw_hash_of(data + at, std::min(kBlockBytes, bytes - at));
    if (got != row) fail(file, first + block, row, got);
  }
}

void BlockRows::fail(std::uint32_t file, std::uint64_t block, std::string_view row, std::string_view got) const {
  for (const auto& entry : manifest_.files)
    if (entry.name == manifest_.blocks) (void)require_hash(folder_, entry);
  fail_damaged(folder_.path_of(manifest_.files[file].name),
               base::join("the block at offset ", block * kBlockBytes, " has the hash ", hex_of(got), ", expected ",
                          hex_of(row), ": the file was damaged after it was written"));
}

HashedFile hash_file(const Folder& folder, const std::string& name, std::optional<std::uint64_t> bytes) {
  const auto file = folder.open_file(name, bytes);
  const auto before = file.info();
  BlockHasher hasher;
  std::vector<char> slice(std::size_t{4} << 20);
  for (std::uint64_t done = 0; done < before.bytes;) {
    const auto bytes = std::min<std::uint64_t>(slice.size(), before.bytes - done);
    file.read(slice.data(), bytes, done);
    hasher.add(slice.data(), bytes);
    done += bytes;
  }
  check_not_replaced(folder, name, file, before);
  auto rows = hasher.rows();
  return {{name, static_cast<std::int64_t>(before.bytes), hasher.file_hash()}, std::move(rows)};
}

std::string require_hash(const Folder& folder, const Manifest::FileEntry& entry) {
  auto got = hash_file(folder, entry.name, static_cast<std::uint64_t>(entry.bytes));
  if (got.entry.hash != entry.hash)
    fail_damaged(folder.path_of(entry.name), "has the hash " + got.entry.hash + ", expected " + entry.hash +
                                                 ": it was damaged after it was written");
  return std::move(got.rows);
}

namespace {

// Blocks that are read at once.
constexpr std::uint64_t kBlocksAtOnce = 16;

// Compares blocks [first, last) of a file with their rows.
void verify_blocks(const Folder& folder, const Manifest& manifest, BlockRows& listed, std::uint32_t number,
                   std::uint64_t first, std::uint64_t last) {
  const auto& entry = manifest.files[number];
  const auto size = static_cast<std::uint64_t>(entry.bytes);
  const auto file = folder.open_file(entry.name, size);
  const auto before = file.info();
  std::vector<char> bytes(kBlocksAtOnce * kBlockBytes);
  for (auto block = first; block < last; block += kBlocksAtOnce) {
    const auto count = std::min(kBlocksAtOnce, last - block);
    const auto end = std::min(size, (block + count) * kBlockBytes);
    const auto rows = listed.read(number, block, count);
    const auto begin = block * kBlockBytes;
    file.read(bytes.data(), end - begin, begin);
    listed.check(number, block, rows, bytes.data(), end - begin);
  }
  check_not_replaced(folder, entry.name, file, before);
}

}  // namespace

void verify_share(const Folder& folder, const Manifest& manifest, int reader, int of) {
  const auto mine = static_cast<std::uint64_t>(reader), all = static_cast<std::uint64_t>(of);
  if (manifest.format == 1) {
    for (std::size_t i = mine; i < manifest.files.size(); i += all) (void)require_hash(folder, manifest.files[i]);
    return;
  }
  // All readers use the rows, so each checks them.
  std::uint64_t total = 0;
  for (const auto& entry : manifest.files)
    if (entry.name == manifest.blocks)
      (void)require_hash(folder, entry);
    else
      total += num_blocks(static_cast<std::uint64_t>(entry.bytes));
  const auto first = total * mine / all, last = total * (mine + 1) / all;
  BlockRows listed(folder, manifest);
  std::uint64_t begin = 0;  // of the file, in blocks of all files
  for (std::uint32_t i = 0; i < manifest.files.size(); ++i) {
    if (manifest.files[i].name == manifest.blocks) continue;
    const auto count = num_blocks(static_cast<std::uint64_t>(manifest.files[i].bytes));
    const auto from = std::max(first, begin), to = std::min(last, begin + count);
    if (from < to) verify_blocks(folder, manifest, listed, i, from - begin, to - begin);
    begin += count;
  }
}

}  // namespace zero::formats
