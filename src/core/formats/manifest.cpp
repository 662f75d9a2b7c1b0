// Names, SUMS and latest, and the proof that a manifest is complete. See manifest.h.
#include "formats/manifest.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <tuple>

#include "base/check.h"
#include "formats/files.h"
#include "formats/hash.h"
#include "formats/safetensors.h"

namespace zero::formats {
namespace {

bool is_word(char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

bool is_name(std::string_view text, std::size_t longest, bool underscore_first) {
  return !text.empty() && text.size() <= longest && (is_word(text[0]) || (underscore_first && text[0] == '_')) &&
         std::all_of(text.begin(), text.end(), [](char c) { return is_word(c) || c == '.' || c == '_' || c == '-'; });
}

// The lines of a text that ends with a newline.
std::vector<std::string_view> lines_of(std::string_view text, const std::string& path) {
  if (text.empty() || text.back() != '\n') fail_damaged(path, "does not end with a newline");
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const auto end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return lines;
}

}  // namespace

bool valid_tag(std::string_view tag) { return is_name(tag, 128, false) && tag != kLatestName; }

bool valid_file_name(std::string_view name) {
  return is_name(name, 255, true) && name.find("..") == std::string_view::npos;
}

namespace {

std::string numbered(const char* prefix, int rank) {
  const auto digits = std::to_string(rank);
  return prefix + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ".safetensors";
}

}  // namespace

bool is_exported_file(std::string_view name) {
  return name.starts_with("model") && (name.ends_with(".safetensors") || name == kExportedIndexName);
}

std::string rank_file_name(int rank) { return numbered("rank-", rank); }
std::string frozen_file_name(int rank) { return numbered("frozen-", rank); }

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  bool zero = false;
  for (const auto size : shape) {
    if (size < 0) return -1;
    if (size == 0)
      zero = true;
    else if (__builtin_mul_overflow(product, size, &product))
      return -1;
  }
  return zero ? 0 : product;
}

std::string key_of(const std::string& kind, const std::string& name, std::int64_t start) {
  return base::join(kind, "/", name, "@", start);
}

namespace {

// Whether two boxes have a common element.
bool overlap(const Box& a, const Box& b) {
  for (std::size_t d = 0; d < a.start.size(); ++d)
    if (a.start[d] + a.size[d] <= b.start[d] || b.start[d] + b.size[d] <= a.start[d]) return false;
  return true;
}

// Every box is compared with all others.
constexpr std::size_t kMostBoxes = 16384;

// Every element of the tensor is in exactly one box.
void prove_slices(const Tensor& tensor, const std::string& label, const std::string& path) {
  std::vector<const Box*> boxes;
  std::int64_t covered = 0;
  for (const auto& slice : tensor.slices)
    for (const auto& box : slice) {
      for (std::size_t d = 0; d < tensor.shape.size(); ++d)
        if (box.start[d] > tensor.shape[d] || box.size[d] > tensor.shape[d] - box.start[d])
          fail_damaged(path, label + " has a slice outside of its shape");
      const auto numel = numel_of(box.size);
      if (numel == 0) continue;
      if (boxes.size() == kMostBoxes) fail_damaged(path, base::join(label, " has more than ", kMostBoxes, " slices"));
      for (const auto* other : boxes)
        if (overlap(box, *other)) fail_damaged(path, label + " has slices that overlap");
      boxes.push_back(&box);
      covered += numel;
    }
  if (covered != numel_of(tensor.shape))
    fail_damaged(path, base::join(label, " has slices of ", covered, " of ", numel_of(tensor.shape), " elements"));
}

// Bytes of a file that a part has.
struct Range {
  std::uint64_t begin, end;
  const Tensor* tensor;
};

// An empty list for each file, which needs no more memory when its ranges are added. Format 1: nothing is added,
// because the readers of files' headers check them.
std::vector<std::vector<Range>> room_for_ranges(const Manifest& m) {
  std::vector<std::size_t> number(m.files.size());
  const auto count = [&](const std::vector<Tensor>& tensors) {
    for (const auto& tensor : tensors)
      for (const auto& part : tensor.parts)
        if (part.file < number.size()) ++number[part.file];
  };
  if (m.format != 1) count(m.tensors);
  if (m.format != 1) std::for_each(m.ranks.begin(), m.ranks.end(), count);
  std::vector<std::vector<Range>> ranges(m.files.size());
  for (std::size_t file = 0; file < number.size(); ++file) ranges[file].reserve(number[file]);
  return ranges;
}

}  // namespace

void prove_coverage(const Manifest& m, const std::string& path, Extent extent) {
  const bool whole = extent == Extent::Checkpoint;
  std::set<std::string> files;
  for (const auto& file : m.files)
    if (!files.insert(file.name).second || file.name == kManifestName || file.name == kSumsName)
      fail_damaged(path, "lists the file " + file.name + " twice, or it is one of the format's own");
  if (m.format == 2 && files.count(m.blocks) == 0) fail_damaged(path, "lists no file of blocks \"" + m.blocks + "\"");
  if (m.world < 1 || static_cast<std::int64_t>(m.ranks.size()) != m.world)
    fail_damaged(path, base::join("has the private state of ", m.ranks.size(), " ranks, expected ", m.world));
  auto ranges = room_for_ranges(m);
  const auto check = [&](const Tensor& tensor) {
    const auto label = tensor.kind + " " + tensor.name;
    const auto numel = numel_of(tensor.shape);
    const auto bytes = bits_of(tensor.dtype) / 8;
    if (m.weights_only && tensor.kind != "master" && tensor.kind != "param" && tensor.kind != "buffer")
      fail_damaged(path, label + " is in a checkpoint that says it has weights only");
    if (numel < 0 || bytes == 0) fail_damaged(path, label + " has a shape or dtype that cannot be");
    if (!tensor.slices.empty()) prove_slices(tensor, label, path);
    std::int64_t next = 0;
    for (const auto& part : tensor.parts) {
      if (part.start < next || (whole && part.start > next))
        fail_damaged(path, base::join(label, ": a part begins at element ", part.start, ", expected ", next,
                                      ": elements are missing or stored twice"));
      const auto left = std::max<std::int64_t>(numel - part.start, 0);
      if (part.numel < 1 || part.numel > left || part.numel > kMostPartBytes / bytes)
        fail_damaged(path, base::join(label, ": the part at ", part.start, " has ", part.numel, " of ", numel,
                                      " elements, expected 1 to ", std::min(left, kMostPartBytes / bytes)));
      if (part.file >= m.files.size() || m.files[part.file].name == m.blocks)
        fail_damaged(path, base::join(label, ": its file ", part.file, " is not listed"));
      if (is_exported_file(m.files[part.file].name))
        fail_damaged(path, base::join(label, ": lies in ", m.files[part.file].name, ", which is for other libraries"));
      next = part.start + part.numel;
      if (m.format == 1) continue;
      const auto length = static_cast<std::uint64_t>(part.numel) * static_cast<std::uint64_t>(bytes);
      const auto size = static_cast<std::uint64_t>(m.files[part.file].bytes);
      if (part.offset > size || length > size - part.offset || part.offset % static_cast<std::uint64_t>(bytes) != 0)
        fail_damaged(path, base::join(label, ": the part at ", part.start, " has the offset ", part.offset, " in ",
                                      m.files[part.file].name, " of ", size, " bytes"));
      ranges[part.file].push_back({part.offset, part.offset + length, &tensor});
    }
    if (whole && next != numel)
      fail_damaged(path, base::join(label, ": ", next, " of ", numel, " elements are stored"));
  };
  const auto unique = [&](const std::vector<Tensor>& tensors) {
    std::set<std::pair<std::string_view, std::string_view>> names;
    for (const auto& tensor : tensors) {
      if (!names.insert({tensor.kind, tensor.name}).second)
        fail_damaged(path, "has " + tensor.kind + " " + tensor.name + " twice");
      check(tensor);
    }
  };
  unique(m.tensors);
  for (const auto& own : m.ranks) unique(own);
  for (std::size_t file = 0; file < ranges.size(); ++file) {
    auto& own = ranges[file];
    std::sort(own.begin(), own.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < own.size(); ++i)
      if (own[i].begin < own[i - 1].end)
        fail_damaged(path, base::join(m.files[file].name, ": bytes at offset ", own[i].begin, " belong to ",
                                      own[i - 1].tensor->name, " and to ", own[i].tensor->name));
  }
}

std::string sums_text(const Manifest& manifest, const std::string& manifest_hash) {
  std::string text;
  for (const auto& file : manifest.files) text += file.hash + "  " + file.name + "\n";
  return text + manifest_hash + "  " + kManifestName + "\n";
}

std::map<std::string, std::string> parse_sums(std::string_view text, const std::string& path) {
  std::map<std::string, std::string> result;
  std::string last;
  for (const auto line : lines_of(text, path)) {
    if (line.size() < 35 || !is_hash(line.substr(0, 32)) || line.substr(32, 2) != "  ")
      fail_damaged(path, "has a line that is not \"<hash>  <name>\"");
    last = line.substr(34);
    if (!valid_file_name(last)) fail_damaged(path, "has a line whose name is not a plain file name");
    if (!result.emplace(last, line.substr(0, 32)).second) fail_damaged(path, "lists " + last + " twice");
  }
  if (last != kManifestName) fail_damaged(path, std::string("does not end with ") + kManifestName);
  return result;
}

std::string latest_text(const Latest& latest) {
  const auto head = base::join(latest.tag, "\nseq ", latest.seq, "\n");
  return head + "xxh128 " + hash_of(head) + "\n";
}

Latest parse_latest(std::string_view text, const std::string& path) {
  const auto lines = lines_of(text, path);
  Latest latest;
  if (lines.size() == 3 && lines[1].starts_with("seq ")) {
    const auto digits = lines[1].substr(4);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), latest.seq);
    latest.tag = lines[0];
    // Serializes again and compares: only one spelling is valid, including the hash.
    if (error == std::errc() && end == digits.data() + digits.size() && latest.seq >= 0 && valid_tag(latest.tag) &&
        latest_text(latest) == text)
      return latest;
  }
  fail_damaged(path, "is not the three lines of tag, seq and hash");
}

}  // namespace zero::formats
