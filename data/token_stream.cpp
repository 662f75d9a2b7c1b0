// See token_stream.h.
#include "data/token_stream.h"

#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace data {
namespace {

static_assert(std::endian::native == std::endian::little);
constexpr std::size_t kDocumentBytes = std::size_t{64} << 20;  // its pieces take about 15 times as much memory
constexpr std::array<char, 8> kMagic{'Z', 'T', 'O', 'K', 'E', 'N', 'S', '1'};

struct Header {
  std::array<char, 8> magic;
  std::uint64_t key, width, count;
};
static_assert(sizeof(Header) == 32);

void write_tokens(const std::string& path, const Records& records, const Tokenizer& tokenizer, std::int32_t separator,
                  std::uint64_t key, std::uint64_t width) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  Header header{kMagic, key, width, 0};
  out.write(reinterpret_cast<const char*>(&header), sizeof header);
  std::vector<std::uint16_t> narrow;
  for (std::int64_t i = 0; i < records.size() && out; ++i) {
    const auto record = records.at(i);
    const auto& text = *record.find("text");
    if (text.size() > kDocumentBytes)
      fail_file("records", record.where, "a document of " + std::to_string(text.size()) + " bytes",
                "at most 67108864. Hint: several files, or a line a document");
    auto ids = tokenizer.encode(text, false);
    ids.push_back(separator);
    header.count += ids.size();
    if (width == 2) {
      narrow.assign(ids.begin(), ids.end());
      out.write(reinterpret_cast<const char*>(narrow.data()), static_cast<std::streamsize>(2 * narrow.size()));
    } else {
      out.write(reinterpret_cast<const char*>(ids.data()), static_cast<std::streamsize>(4 * ids.size()));
    }
  }
  out.seekp(0);
  out.write(reinterpret_cast<const char*>(&header), sizeof header);
  out.close();
  if (!out) {
    const int error = errno;
    ::unlink(path.c_str());
    fail_file("tokens", path, std::strerror(error), "a file that can be written. Hint: more room, or another cache");
  }
}

}  // namespace

TokenStream::TokenStream(const Records& records, const Tokenizer& tokenizer, std::int32_t separator,
                         const std::string& cache) {
  const std::array<std::uint64_t, 3> facts{records.digest(), tokenizer.digest(), static_cast<std::uint64_t>(separator)};
  const std::uint64_t key = XXH3_64bits(facts.data(), sizeof facts);
  const auto vocabulary = tokenizer.vocabulary();
  const std::uint64_t width = vocabulary <= 65536 ? 2 : 4;
  if (cache.empty()) {
    std::error_code ignored;
    auto folder = std::filesystem::temp_directory_path(ignored);
    if (ignored) folder = "/tmp";
    std::string path = (folder / "zero-tokens-XXXXXX").string();
    const int fd = ::mkstemp(path.data());
    if (fd < 0) fail_file("tokens", path, std::strerror(errno), "a temporary file. Hint: set TMPDIR, or give a cache");
    ::close(fd);
    write_tokens(path, records, tokenizer, separator, key, width);
    const bool opened = open(path, key, vocabulary);
    ::unlink(path.c_str());
    if (!opened) fail_file("tokens", path, "other bytes than were written", "them");
    return;
  }
  char name[40];
  std::snprintf(name, sizeof name, "tokens-%016llx.bin", static_cast<unsigned long long>(key));
  const auto path = (std::filesystem::path(cache) / name).string();
  if (open(path, key, vocabulary)) return;
  // Ranks may do this at once: each writes a file of its own, and the last one to rename stays.
  const auto part = path + "." + std::to_string(::getpid()) + ".part";
  write_tokens(part, records, tokenizer, separator, key, width);
  if (std::rename(part.c_str(), path.c_str()) != 0) fail_file("tokens", path, std::strerror(errno), "a new name");
  if (!open(path, key, vocabulary)) fail_file("tokens", path, "other bytes than were written", "them");
}

bool TokenStream::open(const std::string& path, std::uint64_t key, std::int64_t vocabulary) {
  if (!std::filesystem::is_regular_file(path)) return false;
  file_ = std::make_unique<MappedFile>(path, "tokens");
  Header header{};
  if (file_->size() < static_cast<std::int64_t>(sizeof header)) return false;
  std::memcpy(&header, file_->data(), sizeof header);
  const auto bytes = static_cast<std::uint64_t>(file_->size()) - sizeof header;
  if (header.magic != kMagic || header.key != key || (header.width != 2 && header.width != 4) ||
      bytes % header.width != 0 || header.count != bytes / header.width)
    return false;
  width_ = static_cast<std::int64_t>(header.width);
  size_ = static_cast<std::int64_t>(header.count);
  constexpr std::int64_t kStep = 1 << 16;
  for (std::int64_t at = 0; at < size_; at += kStep)
    for (const auto id : tokens(at, std::min(kStep, size_ - at)))
      if (id < 0 || id >= vocabulary) return false;
  return true;
}

std::vector<std::int32_t> TokenStream::tokens(std::int64_t begin, std::int64_t count) const {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  const auto* from = file_->data() + sizeof(Header) + begin * width_;
  if (width_ == 4) {
    std::memcpy(ids.data(), from, ids.size() * 4);
    return ids;
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::uint16_t id = 0;
    std::memcpy(&id, from + 2 * i, 2);
    ids[i] = id;
  }
  return ids;
}

}  // namespace data
