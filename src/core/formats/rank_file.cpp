#include "formats/rank_file.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/check.h"
#include "formats/hash.h"
#include "observe/status_page.h"

namespace zero::formats {
namespace {

constexpr std::size_t kHeaderAlignment = 4096;
// Data is hashed twice (part and file) and written while it is in the cache.
constexpr std::size_t kSlice = std::size_t{1} << 20;
// Limit of open files of a checkpoint: `ulimit -n` is often 1024, and there may be more ranks.
constexpr int kMostOpen = 32;

// Index of the first fp32 with an exponent of all ones, or -1.
std::int64_t first_non_finite(const char* data, std::size_t bytes) {
  constexpr std::uint32_t kExponent = 0x7f800000;
  const auto bits_at = [&](std::size_t i) {
    std::uint32_t bits;
    std::memcpy(&bits, data + 4 * i, sizeof bits);
    return bits;
  };
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < bytes / 4; ++i) found |= (bits_at(i) & kExponent) == kExponent;
  if (found == 0) return -1;
  for (std::size_t i = 0; i < bytes / 4; ++i)
    if ((bits_at(i) & kExponent) == kExponent) return static_cast<std::int64_t>(i);
  return -1;
}

struct Planned {
  std::size_t source, part;
  TensorEntry entry;
};

}  // namespace

RankFile write_rank_file(const Folder& folder, const std::string& name, const std::vector<Source>& sources) {
  RankFile result;
  std::vector<Planned> plan;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    const auto& source = sources[s];
    const std::int64_t width = bits_of(source.dtype) / 8;
    ZERO_CHECK(width > 0, "dtype ", source.dtype);
    Tensor tensor{source.kind, source.name, source.dtype, source.shape, source.requires_grad, {}, {}};
    for (std::int64_t done = 0; done < source.numel;) {
      const auto numel = std::min(source.numel - done, kMostPartBytes / width);
      const auto start = source.start + done;
      const auto key = key_of(source.kind, source.name, start);
      if (!valid_key(key))
        throw ConfigError("[save_checkpoint] the name \"" + key +
                          "\" is too long or not printable. Hint: rename the module or parameter.");
      plan.push_back({s, tensor.parts.size(), {key, source.dtype, {numel}, 0, 0}});
      tensor.parts.push_back({name, key, start, numel, ""});
      done += numel;
    }
    result.tensors.push_back(std::move(tensor));
  }
  // By decreasing element size, so that all tensors are aligned; then by name.
  std::sort(plan.begin(), plan.end(), [](const Planned& a, const Planned& b) {
    return std::make_tuple(-bits_of(a.entry.dtype), std::cref(a.entry.key)) <
           std::make_tuple(-bits_of(b.entry.dtype), std::cref(b.entry.key));
  });
  Header header;
  header.metadata["format"] = "zero.checkpoint/1";
  std::uint64_t end = 0;
  for (auto& item : plan) {
    item.entry.begin = end;
    end += static_cast<std::uint64_t>(item.entry.shape[0]) * static_cast<std::uint64_t>(bits_of(item.entry.dtype) / 8);
    item.entry.end = end;
    header.tensors.push_back(item.entry);
  }
  const auto head = header_bytes(header, kHeaderAlignment);

  auto file = folder.create(name);
  file.reserve(head.size() + end);
  Hasher whole;
  whole.add(head.data(), head.size());
  for (const auto& item : plan) {
    const auto& source = sources[item.source];
    auto& part = result.tensors[item.source].parts[item.part];
    const auto width = static_cast<std::uint64_t>(bits_of(source.dtype) / 8);
    const auto bytes = item.entry.end - item.entry.begin;
    observe::status_page().set_unit(part.key);  // shows progress on the status page
    const auto memory = source.read(part.start - source.start, static_cast<std::int64_t>(bytes / width));
    const auto* const data = static_cast<const char*>(memory.get());
    Hasher own;
    for (std::uint64_t done = 0; done < bytes;) {
      const auto slice = std::min<std::uint64_t>(kSlice, bytes - done);
      if (source.must_be_finite)
        if (const auto bad = first_non_finite(data + done, slice); bad >= 0)
          throw InternalError(
              base::join("[save_checkpoint] ", source.kind, " of ", source.name, ": element ",
                         part.start + static_cast<std::int64_t>(done / 4) + bad,
                         " is not finite; nothing was saved and the last checkpoint stands. Hint: resume from it "
                         "with a lower learning rate."),
              ExitCode::kNumerical);
      own.add(data + done, slice);
      whole.add(data + done, slice);
      file.write(data + done, slice, head.size() + item.entry.begin + done);
      done += slice;
    }
    part.hash = own.hex();
  }
  // Written last: an incomplete file has no header.
  file.write(head.data(), head.size(), 0);
  file.sync();
  file.close();
  result.file = {name, static_cast<std::int64_t>(head.size() + end), whole.hex()};
  return result;
}

PartReader::Known& PartReader::open(const std::string& name) {
  auto found = files_.find(name);
  if (found == files_.end()) {
    const auto listed = std::find_if(manifest_.files.begin(), manifest_.files.end(),
                                     [&](const auto& entry) { return entry.name == name; });
    ZERO_CHECK(listed != manifest_.files.end(), "file ", name);
    const auto bytes = static_cast<std::uint64_t>(listed->bytes);
    auto file = folder_.open_file(name, bytes);
    const auto info = file.info();
    const auto header = read_header(file);
    std::map<std::string, TensorEntry> entries;
    for (const auto& entry : header.tensors) entries[entry.key] = entry;
    found = files_.emplace(name, Known{std::move(file), bytes, info, std::move(entries), header.data_begin}).first;
    ++open_;
  } else if (!found->second.file) {
    found->second.file.emplace(folder_.open_file(name, found->second.bytes));
    ++open_;
    check_not_replaced(folder_, name, *found->second.file, found->second.info);
  }
  return found->second;
}

const char* PartReader::read(const Tensor& tensor, const Part& part) {
  observe::status_page().set_unit(part.key);
  auto& open_file = open(part.file);
  const auto path = open_file.file->path();
  const auto found = open_file.entries.find(part.key);
  if (found == open_file.entries.end()) fail_damaged(path, "has no key " + part.key);
  const auto& entry = found->second;
  if (entry.dtype != tensor.dtype || entry.shape != std::vector<std::int64_t>{part.numel})
    fail_damaged(path,
                 base::join("key ", part.key, " is ", entry.dtype, " of ", entry.shape.empty() ? 1 : entry.shape[0],
                            " elements, expected ", tensor.dtype, " of ", part.numel));
  const auto bytes = static_cast<std::size_t>(entry.end - entry.begin);
  if (buffer_.size() < bytes) buffer_.resize(bytes);
  const auto offset = open_file.data_begin + entry.begin;
  open_file.file->read(buffer_.data(), bytes, offset);
  // A load reads all files repeatedly, so the first ones stay open and the others are closed after use.
  if (open_ > kMostOpen) {
    check_not_replaced(folder_, part.file, *open_file.file, open_file.info);
    open_file.file.reset();
    --open_;
  }
  if (const auto got = hash_of(buffer_.data(), bytes); got != part.hash)
    fail_damaged(path, base::join("key ", part.key, " at offset ", offset, ": the hash of its ", bytes, " bytes is ",
                                  got, ", expected ", part.hash, ": the file was damaged after it was written"));
  if (tensor.dtype == "BOOL") check_bool_bytes(buffer_.data(), bytes, path, part.key);
  return buffer_.data();
}

void PartReader::finish() const {
  for (const auto& [name, known] : files_) {
    if (known.file)
      check_not_replaced(folder_, name, *known.file, known.info);
    else
      check_not_replaced(folder_, name, folder_.open_file(name, known.bytes), known.info);
  }
}

}  // namespace zero::formats
