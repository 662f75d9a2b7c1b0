// See range_reader.h.
#include "formats/range_reader.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

#include "base/check.h"
#include "base/executor.h"
#include "formats/hash.h"
#include "observe/status_page.h"

namespace zero::formats {
namespace {

// Limit of open files of a checkpoint: `ulimit -n` is often 1024, and there may be more ranks.
constexpr int kMostOpen = 32;

std::uint64_t width_of(const Tensor& tensor) { return static_cast<std::uint64_t>(bits_of(tensor.dtype) / 8); }
std::uint64_t bytes_of(const Tensor& tensor, std::int64_t numel) {
  return static_cast<std::uint64_t>(numel) * width_of(tensor);
}

void require_entry(const TensorEntry& entry, const Tensor& tensor, const Part& part, const std::string& path) {
  if (entry.dtype != tensor.dtype || entry.shape != std::vector<std::int64_t>{part.numel})
    fail_damaged(path,
                 base::join("key ", entry.key, " is ", entry.dtype, " of ", entry.shape.empty() ? 1 : entry.shape[0],
                            " elements, expected ", tensor.dtype, " of ", part.numel));
}

}  // namespace

RangeReader::Known& RangeReader::open(std::uint32_t file) {
  auto& known = known_[file];
  if (known.file) return known;
  const auto& entry = manifest_.files[file];
  known.file.emplace(folder_.open_file(entry.name, static_cast<std::uint64_t>(entry.bytes)));
  ++open_;
  if (std::exchange(known.seen, true)) {
    check_not_replaced(folder_, entry.name, *known.file, known.info);
    return known;
  }
  known.info = known.file->info();
  if (manifest_.format > 1) return known;
  const auto header = read_header(*known.file);
  for (const auto& tensor : header.tensors) known.keys[tensor.key] = tensor;
  known.data_begin = header.data_begin;
  return known;
}

// A load reads all files repeatedly, so the first ones stay open and the others are closed after use.
void RangeReader::close_some(std::uint32_t file) {
  if (open_ <= kMostOpen) return;
  auto& known = known_[file];
  check_not_replaced(folder_, manifest_.files[file].name, *known.file, known.info);
  known.file.reset();
  --open_;
}

std::uint64_t RangeReader::offset_of(const Tensor& tensor, const Part& part) {
  if (manifest_.format > 1) return part.offset;
  auto& known = open(part.file);
  const auto path = folder_.path_of(manifest_.files[part.file].name);
  const auto key = key_of(tensor.kind, tensor.name, part.start);
  const auto found = known.keys.find(key);
  if (found == known.keys.end()) fail_damaged(path, "has no key " + key);
  require_entry(found->second, tensor, part, path);
  close_some(part.file);
  return known.data_begin + found->second.begin;
}

void RangeReader::add(std::size_t id, const Tensor& tensor, const std::vector<Run>& runs) {
  std::int64_t missing = 0;
  for (const auto& wanted : runs) missing += wanted.numel;
  auto run = runs.begin();  // the first that a later part may have
  for (const auto& part : tensor.parts) {
    const auto end = part.start + part.numel;
    while (run != runs.end() && run->stored + run->numel <= part.start) ++run;
    if (run == runs.end()) break;
    std::optional<std::uint64_t> offset;
    for (auto next = run; next != runs.end() && next->stored < end; ++next) {
      const auto first = std::max(next->stored, part.start), last = std::min(next->stored + next->numel, end);
      if (!offset) offset = offset_of(tensor, part);
      entries_.push_back({part.file, static_cast<std::uint32_t>(id), *offset + bytes_of(tensor, first - part.start),
                          next->wanted + (first - next->stored), first, last - first, &tensor, &part});
      missing -= last - first;
    }
  }
  // Of the parts of one rank, another might want others.
  if (missing != 0)
    fail_damaged(folder_.path_of(kManifestName), base::join("lacks ", missing, " elements of ", tensor.kind, " of ",
                                                            tensor.name, " that are needed here"));
}

std::vector<RangeReader::Window> RangeReader::windows() {
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return std::tie(a.file, a.offset) < std::tie(b.file, b.offset); });
  std::vector<Window> result;
  std::size_t first = 0;
  const auto add = [&](std::uint32_t file, std::uint64_t begin, std::uint64_t end) {
    Window window{file, begin, end, first, first};
    while (window.last < entries_.size() && entries_[window.last].file == file && entries_[window.last].offset < end)
      ++window.last;
    result.push_back(window);
    while (first < window.last &&
           entries_[first].offset + bytes_of(*entries_[first].tensor, entries_[first].numel) <= end)
      ++first;
  };
  for (std::size_t i = 0; i < entries_.size();) {
    const auto& entry = entries_[i];
    if (manifest_.format == 1) {
      const auto begin = entry.offset - bytes_of(*entry.tensor, entry.stored - entry.part->start);
      add(entry.file, begin, begin + bytes_of(*entry.tensor, entry.part->numel));
      while (i < entries_.size() && entries_[i].part == entry.part) ++i;
      continue;
    }
    // Blocks that follow each other.
    std::uint64_t block = entry.offset / kBlockBytes, end = block;
    for (; i < entries_.size() && entries_[i].file == entry.file && entries_[i].offset / kBlockBytes <= end; ++i)
      end = std::max(end, num_blocks(entries_[i].offset + bytes_of(*entries_[i].tensor, entries_[i].numel)));
    const auto bytes = static_cast<std::uint64_t>(manifest_.files[entry.file].bytes);
    for (; block < end; block += kMostWindowBytes / kBlockBytes)
      add(entry.file, block * kBlockBytes,
          std::min({block * kBlockBytes + kMostWindowBytes, end * kBlockBytes, bytes}));
  }
  return result;
}

void RangeReader::load(const Window& window, Loaded& to, bool once) {
  const auto bytes = window.end - window.begin;
  if (to.capacity < bytes) {
    to.bytes = aligned_memory(bytes);
    to.capacity = bytes;
  }
  if (verify_ && manifest_.format > 1) to.rows = rows_.read(window.file, window.begin / kBlockBytes, num_blocks(bytes));
  const auto& file = *open(window.file).file;
  if (once && window.begin % kDirectAlignment == 0)
    file.read_direct(to.bytes, bytes, window.begin);
  else
    file.read(to.bytes.get(), bytes, window.begin);
  close_some(window.file);
}

void RangeReader::check(const Window& window, const Loaded& loaded) {
  if (!verify_) return;
  const auto bytes = window.end - window.begin;
  if (manifest_.format == 1) {
    const auto& entry = entries_[window.first];
    const auto& hash = entry.tensor->hashes[static_cast<std::size_t>(entry.part - entry.tensor->parts.data())];
    if (const auto got = hash_of(loaded.bytes.get(), bytes); got != hash)
      fail_damaged(folder_.path_of(manifest_.files[window.file].name),
                   base::join("key ", key_of(entry.tensor->kind, entry.tensor->name, entry.part->start), " at offset ",
                              window.begin, ": the hash of its ", bytes, " bytes is ", got, ", expected ", hash,
                              ": the file was damaged after it was written"));
    return;
  }
  rows_.check(window.file, window.begin / kBlockBytes, loaded.rows, loaded.bytes.get(), bytes);
}

void RangeReader::use(const Window& window, const Loaded& loaded, const Take& take) {
  for (auto i = window.first; i < window.last; ++i) {
    const auto& entry = entries_[i];
    const auto width = width_of(*entry.tensor);
    const auto begin = std::max(entry.offset, window.begin);
    const auto end = std::min(entry.offset + bytes_of(*entry.tensor, entry.numel), window.end);
    if (begin >= end) continue;
    const auto skipped = static_cast<std::int64_t>((begin - entry.offset) / width);
    const char* const bytes = loaded.bytes.get() + (begin - window.begin);
    if (entry.tensor->dtype == "BOOL")
      check_bool_bytes(bytes, end - begin, entry.stored + skipped, folder_.path_of(manifest_.files[window.file].name),
                       key_of(entry.tensor->kind, entry.tensor->name, entry.part->start));
    take(entry.id, {entry.wanted + skipped, entry.stored + skipped, static_cast<std::int64_t>((end - begin) / width)},
         bytes);
  }
}

void RangeReader::read(const Take& take, bool once) {
  const auto all = windows();
  Loaded loaded[2];
  base::Executor executor;  // ends before the memory that it fills
  std::shared_future<void> next;
  const auto begin = [&](std::size_t i) {
    next = executor.add(
        [this, once, &window = all[i], &to = loaded[i % 2], &moved = bytes_moved()] {
          const MovesFor reader(moved);
          load(window, to, once);
        },
        1);
  };
  if (!all.empty()) begin(0);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& first = entries_[all[i].first];
    observe::status_page().set_unit(key_of(first.tensor->kind, first.tensor->name, first.part->start));
    next.get();
    if (i + 1 < all.size()) begin(i + 1);
    check(all[i], loaded[i % 2]);
    use(all[i], loaded[i % 2], take);
  }
  entries_.clear();
}

void RangeReader::finish() const {
  for (std::size_t i = 0; i < known_.size(); ++i) {
    const auto& known = known_[i];
    const auto& name = manifest_.files[i].name;
    if (known.file)
      check_not_replaced(folder_, name, *known.file, known.info);
    else if (known.seen)
      check_not_replaced(folder_, name, folder_.open_file(name, static_cast<std::uint64_t>(manifest_.files[i].bytes)),
                         known.info);
  }
}

void require_same_header(const Folder& folder, const Manifest& manifest, std::uint32_t number) {
  const auto& listed = manifest.files[number];
  const auto file = folder.open_file(listed.name, static_cast<std::uint64_t>(listed.bytes));
  const auto header = read_header(file);
  if (listed.name == manifest.blocks) return;  // readers of rows check them
  std::map<std::string, const TensorEntry*> rest;
  for (const auto& entry : header.tensors) rest[entry.key] = &entry;
  const auto check = [&](const std::vector<Tensor>& tensors) {
    for (const auto& tensor : tensors)
      for (const auto& part : tensor.parts) {
        if (part.file != number) continue;
        const auto found = rest.find(key_of(tensor.kind, tensor.name, part.start));
        if (found == rest.end())
          fail_damaged(file.path(), "has no key " + key_of(tensor.kind, tensor.name, part.start));
        require_entry(*found->second, tensor, part, file.path());
        if (manifest.format > 1 && header.data_begin + found->second->begin != part.offset)
          fail_damaged(file.path(), base::join("has ", found->first, " at offset ",
                                               header.data_begin + found->second->begin, ", expected ", part.offset));
        rest.erase(found);
      }
  };
  check(manifest.tensors);
  for (const auto& own : manifest.ranks) check(own);
  if (!rest.empty()) fail_damaged(file.path(), "has the key " + rest.begin()->first + ", which the manifest does not");
}

}  // namespace zero::formats
