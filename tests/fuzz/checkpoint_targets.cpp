// Targets that read several files, or memory: tables of hashes, DeepSpeed's meaning of its files, kept snapshots. See
// targets.h.
#include <cstring>
#include <string>

#include "base/kept_memory.h"
#include "formats/blocks.h"
#include "formats/kept_slot.h"
#include "formats/safetensors.h"
#include "fuzz/accepts.h"
#include "fuzz/memory_files.h"
#include "fuzz/targets.h"
#include "interchange/deepspeed_source.h"
#include "unit/interchange/zip_samples.h"

namespace zero::test {
namespace {

// Takes a little-endian number, or what there is of it.
std::uint64_t take_number(std::string_view& bytes, std::size_t size) {
  std::uint64_t value = 0;
  size = std::min(size, bytes.size());
  for (std::size_t i = 0; i < size; ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  bytes.remove_prefix(size);
  return value;
}
std::string_view take_bytes(std::string_view& bytes, std::size_t size) {
  const auto taken = bytes.substr(0, size);
  bytes.remove_prefix(taken.size());
  return taken;
}

// 4 bytes each: the sizes of two files of zeros. Then the table of their hashes.
void blocks(std::string_view bytes) {
  MemoryFiles files;
  formats::Manifest manifest;
  for (int rank = 0; rank < 2; ++rank) {
    const auto size = take_number(bytes, 4) % (1 << 20);
    manifest.files.push_back({formats::rank_file_name(rank), static_cast<std::int64_t>(size), std::string(32, '0')});
    files.files[manifest.files.back().name] = std::string(size, '\0');
  }
  manifest.blocks = formats::kBlocksName;
  manifest.files.push_back({manifest.blocks, static_cast<std::int64_t>(bytes.size()), formats::hash_of(bytes)});
  files.files[manifest.blocks] = bytes;
  (void)accepts([&] {
    const auto folder = formats::Folder::open(files, "d");
    formats::BlockRows table(folder, manifest);
    for (std::uint32_t i = 0; i < 2; ++i) {
      const auto& data = files.files.at(manifest.files[i].name);
      const auto rows = table.read(i, 0, formats::num_blocks(data.size()));
      require(bytes.find(rows) != std::string_view::npos, "rows are not in the table");
      for (std::uint64_t row = 0; row < formats::num_blocks(data.size()); ++row)
        require(table.read(i, row, 1) == rows.substr(row * formats::kRowBytes, formats::kRowBytes),
                "a row by itself is another one");
      formats::BlockHasher hasher;
      hasher.add(data.data(), data.size());
      require(accepts([&] { table.check(i, 0, rows, data.data(), data.size()); }) == (rows == hasher.rows()),
              "blocks are not compared with their rows");
    }
  });
}

// Files of a checkpoint: of each a line with its name, the length of its pickle (2 bytes), the pickle, the number of
// its storages (1) and the size of each (2).
void deepspeed(std::string_view bytes) {
  MemoryFiles files;
  while (!bytes.empty() && files.files.size() < 64) {
    const std::string name(take_bytes(bytes, std::min(bytes.find('\n'), std::size_t{200})));
    (void)take_bytes(bytes, 1);
    const std::string pickle(take_bytes(bytes, take_number(bytes, 2)));
    std::vector<std::string> storages(take_number(bytes, 1));
    for (auto& storage : storages) {
      storage.resize(take_number(bytes, 2) % 4096);
      // Scalars are counts of steps.
      for (std::size_t i = 0; i < storage.size() && storage.size() > 8; ++i) storage[i] = i % 2 != 0;
    }
    if (!name.empty() && name.find('\0') == std::string::npos)
      files.files[name] = torch_sample(pickle, storages, false);
  }
  (void)accepts([&] {
    interchange::SourceOptions options;
    options.ignore_crc = true;
    const auto source = interchange::open_deepspeed(files, "d", options);
    for (const auto& tensor : source->tensors()) {
      const auto numel = formats::numel_of(tensor.shape);
      const auto width = formats::bits_of(tensor.dtype) / 8;
      require(numel >= 0 && width > 0, "a tensor has no size");
      if (numel == 0 || numel > (1 << 16)) continue;
      std::string whole(static_cast<std::size_t>(numel * width), '\0'), halves = whole;
      if (!accepts([&] { source->read(tensor, 0, numel, whole.data()); })) continue;
      const auto half = numel / 2;
      source->read(tensor, half, numel - half, halves.data() + half * width);
      source->read(tensor, 0, half, halves.data());
      require(whole == halves, "a tensor in two reads is another one");
    }
  });
}

// The memory that a launcher keeps, of which there are three pages.
class Pages : public formats::FsOps {
 public:
  std::string bytes = std::string(std::size_t{3} * 4096, '\0');
  ssize_t pread(int, void* out, std::size_t count, std::uint64_t offset) override {
    if (offset >= bytes.size()) return 0;
    const auto some = std::min<std::size_t>(count, bytes.size() - offset);
    std::memcpy(out, bytes.data() + offset, some);
    return static_cast<ssize_t>(some);
  }
  ssize_t pwrite(int, const void* data, std::size_t count, std::uint64_t offset) override {
    require(offset + count <= 4096, "a header is longer than its page");
    std::memcpy(bytes.data() + offset, data, count);
    return static_cast<ssize_t>(count);
  }
};

// A header as it is, and with the hash that it should end with.
void kept(std::string_view bytes) {
  for (const bool hashed : {false, true}) {
    const auto page =
        std::string(bytes.substr(0, 4000)) + (hashed ? formats::hash_of(bytes.substr(0, 4000)) + "\n" : "");
    Pages memory;
    std::memcpy(memory.bytes.data(), page.data(), page.size());
    formats::KeptSlot slot(memory, 0, 0);
    const auto header = slot.read();
    if (!header) continue;
    const auto folder = slot.folder();
    for (const auto& name :
         {formats::rank_file_name(0), std::string(formats::kBlocksName), std::string(formats::kManifestName)})
      (void)accepts([&] { (void)folder.read_file(name, std::uint64_t{1} << 20); });
    if (!accepts([&] { slot.publish(*header); })) continue;  // longer, because numbers and words were short
    formats::KeptSlot again(memory, 0, 0);
    const auto same = again.read();
    require(same && *same == *header, "a header does not come back");
  }
}

constexpr FuzzTarget kTargets[] = {{"blocks", blocks}, {"deepspeed", deepspeed}, {"kept", kept}};

}  // namespace

std::span<const FuzzTarget> checkpoint_fuzz_targets() { return kTargets; }

}  // namespace zero::test
