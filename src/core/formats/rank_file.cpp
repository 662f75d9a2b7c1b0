// See rank_file.h.
#include "formats/rank_file.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/check.h"
#include "formats/blocks.h"
#include "formats/safetensors.h"
#include "formats/stream_writer.h"

namespace zero::formats {
namespace {

// Bytes that are copied and hashed while they are in the cache.
constexpr std::size_t kSlice = std::size_t{256} << 10;

// Index of the first fp32 with an exponent of all ones, or -1.
std::int64_t first_non_finite(const char* data, std::size_t bytes) {
  constexpr std::uint32_t kExponent = 0x7f800000;
  constexpr std::size_t kLanes = 32;  // a fixed number, so that compilers use vector instructions
  const auto count = bytes / sizeof(std::uint32_t);
  const auto found_at = [&](std::size_t begin, std::size_t end) -> std::int64_t {
    for (auto i = begin; i < end; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, data + sizeof bits * i, sizeof bits);
      if ((bits & kExponent) == kExponent) return static_cast<std::int64_t>(i);
    }
    return -1;
  };
  const auto whole = count / kLanes * kLanes;
  std::uint32_t found[kLanes] = {}, bits[kLanes];
  for (std::size_t i = 0; i < whole; i += kLanes) {
    std::memcpy(bits, data + sizeof bits[0] * i, sizeof bits);
    for (std::size_t lane = 0; lane < kLanes; ++lane) found[lane] |= (bits[lane] & kExponent) == kExponent;
  }
  const bool any = std::any_of(found, found + kLanes, [](std::uint32_t lane) { return lane != 0; });
  return found_at(any ? 0 : whole, count);
}

// What the file will be, before a byte of data is read.
struct Plan {
  struct Item {
    std::size_t source, part;
    TensorEntry entry;
  };
  std::string name;
  std::vector<Item> items;  // in the order of the file
  std::string head;
  std::uint64_t bytes = 0;  // of the file
  std::vector<Tensor> tensors;
};

Plan plan_of(const std::string& name, const std::vector<Source>& sources) {
  Plan plan;
  plan.name = name;
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
      plan.items.push_back({s, tensor.parts.size(), {key, source.dtype, {numel}, 0, 0}});
      tensor.parts.push_back({0, static_cast<std::int32_t>(numel), 0, start});
      done += numel;
    }
    plan.tensors.push_back(std::move(tensor));
  }
  // By decreasing element size, so that all tensors are aligned; otherwise in the order of the sources.
  std::stable_sort(plan.items.begin(), plan.items.end(), [](const Plan::Item& a, const Plan::Item& b) {
    return bits_of(a.entry.dtype) > bits_of(b.entry.dtype);
  });
  Header header;
  header.metadata["format"] = "zero.checkpoint/2";
  std::uint64_t end = 0;
  for (auto& item : plan.items) {
    item.entry.begin = end;
    end += static_cast<std::uint64_t>(item.entry.shape[0]) * static_cast<std::uint64_t>(bits_of(item.entry.dtype) / 8);
    item.entry.end = end;
    header.tensors.push_back(item.entry);
  }
  plan.head = header_bytes(header, kDirectAlignment);
  plan.bytes = plan.head.size() + end;
  for (const auto& item : plan.items)
    plan.tensors[item.source].parts[item.part].offset = plan.head.size() + item.entry.begin;
  return plan;
}

// Calls take(data, bytes) for all of the file's bytes, in order.
template <class Take>
void for_each_slice(const Plan& plan, const std::vector<Source>& sources, const Take& take) {
  take(plan.head.data(), plan.head.size());
  for (const auto& item : plan.items) {
    const auto& source = sources[item.source];
    const auto& part = plan.tensors[item.source].parts[item.part];
    const auto width = static_cast<std::uint64_t>(bits_of(source.dtype) / 8);
    const auto bytes = item.entry.end - item.entry.begin;
    for (std::uint64_t at = 0; at < bytes;) {
      const auto some = std::min(bytes - at, std::uint64_t{kReadBytes});
      const auto memory = source.read(part.start - source.start + static_cast<std::int64_t>(at / width),
                                      static_cast<std::int64_t>(some / width));
      const auto* const data = static_cast<const char*>(memory.get());
      for (std::uint64_t done = 0; done < some;) {
        const auto slice = std::min<std::uint64_t>(kSlice, some - done);
        if (source.must_be_finite)
          if (const auto bad = first_non_finite(data + done, slice); bad >= 0)
            throw InternalError(
                base::join("[save_checkpoint] ", source.kind, " of ", source.name, ": element ",
                           part.start + static_cast<std::int64_t>((at + done) / 4) + bad,
                           " is not finite; nothing was saved and the last checkpoint stands. Hint: resume from it "
                           "with a lower learning rate."),
                ExitCode::kNumerical);
        take(data + done, slice);
        done += slice;
      }
      at += some;
    }
  }
}

RankFile result_of(Plan&& plan, BlockHasher& hasher) {
  auto rows = hasher.rows();
  return {
      {plan.name, static_cast<std::int64_t>(plan.bytes), hasher.file_hash()}, std::move(plan.tensors), std::move(rows)};
}

// A file that has rotted is not passed on to later checkpoints.
bool is_whole(const Previous& previous) {
  try {
    (void)require_hash(*previous.folder, previous.file);
    return true;
  } catch (const IoError&) {
    return false;
  }
}

RankFile write(const Folder& folder, Plan&& plan, const std::vector<Source>& sources) {
  auto file = folder.create(plan.name);
  file.reserve(plan.bytes);
  BlockHasher hasher;
  StreamWriter writer(file, plan.head.size());
  bool is_head = true;
  for_each_slice(plan, sources, [&](const char* data, std::size_t bytes) {
    if (std::exchange(is_head, false)) {
      hasher.add(data, bytes);
      return;
    }
    while (bytes > 0) {
      auto some = bytes;
      auto* const to = writer.room(some);
      // The copy is hashed, which is what is written.
      std::memcpy(to, data, some);
      hasher.add(to, some);
      writer.advance(some);
      data += some;
      bytes -= some;
    }
  });
  writer.finish();
  // Written last: an incomplete file has no header.
  file.write(plan.head.data(), plan.head.size(), 0);
  file.sync();
  file.close();
  return result_of(std::move(plan), hasher);
}

}  // namespace

RankFile write_rank_file(const Folder& folder, const std::string& name, const std::vector<Source>& sources) {
  return write(folder, plan_of(name, sources), sources);
}

RankFile link_or_write_rank_file(const Folder& folder, const std::string& name, const std::vector<Source>& sources,
                                 const Previous* previous) {
  auto plan = plan_of(name, sources);
  if (previous != nullptr && previous->file.name == name &&
      previous->file.bytes == static_cast<std::int64_t>(plan.bytes)) {
    BlockHasher hasher;
    for_each_slice(plan, sources, [&](const char* data, std::size_t bytes) { hasher.add(data, bytes); });
    if (hasher.file_hash() == previous->file.hash && is_whole(*previous) && folder.link(*previous->folder, name))
      return result_of(std::move(plan), hasher);
  }
  return write(folder, std::move(plan), sources);
}

}  // namespace zero::formats
