#include "formats/safetensors.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/plain_name.h"
#include "formats/json.h"

namespace zero::formats {
namespace {

constexpr std::uint64_t kMostHeaderBytes = 100000000;
constexpr const char* kMetadata = "__metadata__";

constexpr std::pair<std::string_view, int> kDtypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};

// Overflow is an error for any order of the factors, even if one of them is 0.
std::uint64_t bits_in(const TensorEntry& entry, const JsonView& view) {
  std::uint64_t product = 1;
  bool zero = false;
  for (const auto size : entry.shape) {
    if (size == 0)
      zero = true;
    else if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(size), &product))
      view.fail("has a shape whose product overflows");
  }
  if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(bits_of(entry.dtype)), &product))
    view.fail("has a shape whose size in bits overflows");
  return zero ? 0 : product;
}

}  // namespace

int bits_of(std::string_view dtype) {
  for (const auto& [name, bits] : kDtypes)
    if (name == dtype) return bits;
  return 0;
}

bool valid_key(std::string_view key) { return base::is_plain_name(key); }

std::string header_bytes(const Header& header, std::size_t alignment) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[kMetadata] = header.metadata;
  for (const auto& entry : header.tensors) {
    ZERO_CHECK(valid_key(entry.key) && entry.key != kMetadata && !json.contains(entry.key), "key ", entry.key);
    json[entry.key] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json.dump();
  text.resize((text.size() + 8 + alignment - 1) / alignment * alignment - 8, ' ');
  ZERO_CHECK(text.size() <= kMostHeaderBytes, "header of ", text.size(), " bytes");
  std::string result(8, '\0');
  for (std::size_t i = 0; i < 8; ++i)
    result[i] = static_cast<char>(static_cast<std::uint64_t>(text.size()) >> (8 * i) & 255);
  return result + text;
}

Header parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& path) {
  const auto parsed = parse_json(json, path, 3);
  const JsonView top(parsed, path);
  Header header;
  header.data_begin = 8 + json.size();
  for (const auto& [key, view] : top.fields()) {
    if (key == kMetadata) {
      for (const auto& [name, value] : view.fields()) header.metadata[name] = value.text();
      continue;
    }
    if (!valid_key(key)) view.fail("is not a tensor name of 1 to 4096 bytes without control characters");
    view.has_only({"dtype", "shape", "data_offsets"});
    TensorEntry entry;
    entry.key = key;
    entry.dtype = view.at("dtype").text();
    if (bits_of(entry.dtype) == 0) view.fail("has the unknown dtype \"" + entry.dtype + "\"");
    const auto sizes = view.at("shape").items();
    if (sizes.size() > 64) view.fail(base::join("has ", sizes.size(), " dimensions, expected at most 64"));
    for (const auto& size : sizes) entry.shape.push_back(size.count());
    const auto offsets = view.at("data_offsets").items();
    if (offsets.size() != 2) view.fail("has data_offsets that are not two numbers");
    entry.begin = static_cast<std::uint64_t>(offsets[0].count());
    entry.end = static_cast<std::uint64_t>(offsets[1].count());
    const auto bits = bits_in(entry, view);
    if (bits % 8 != 0) view.fail("does not end at a whole byte");
    if (entry.begin > entry.end || entry.end - entry.begin != bits / 8)
      view.fail(base::join("has data_offsets [", entry.begin, ", ", entry.end, "], expected ", bits / 8,
                           " bytes between them"));
    header.tensors.push_back(std::move(entry));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.key) < std::tie(b.begin, b.end, b.key);
  });
  std::uint64_t end = 0;
  for (const auto& entry : header.tensors) {
    if (entry.begin != end)
      fail_damaged(path, base::join("tensor ", entry.key, " begins at byte ", entry.begin, " of the data, expected ",
                                    end, ": a hole or an overlap"));
    end = entry.end;
  }
  if (end != data_bytes)
    fail_damaged(path, base::join("has ", data_bytes, " bytes of data, its header describes ", end));
  return header;
}

Header read_header(const File& file) {
  const auto total = file.info().bytes;
  if (total < 8) fail_damaged(file.path(), base::join("has ", total, " bytes, expected 8 or more"));
  unsigned char length[8];
  file.read(length, sizeof length, 0);
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < 8; ++i) size |= static_cast<std::uint64_t>(length[i]) << (8 * i);
  if (size > kMostHeaderBytes || size > total - 8)
    fail_damaged(file.path(), base::join("says that its header has ", size, " bytes, in a file of ", total));
  std::string json(static_cast<std::size_t>(size), '\0');
  file.read(json.data(), json.size(), 8);
  return parse_header(json, total - 8 - size, file.path());
}

void check_bool_bytes(const void* data, std::size_t bytes, std::int64_t first, const std::string& path,
                      const std::string& key) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i)
    if (at[i] > 1)
      fail_damaged(path, base::join("tensor ", key, ": element ", static_cast<std::uint64_t>(first) + i, " is ",
                                    int{at[i]}, ", expected 0 or 1 (BOOL)"));
}

}  // namespace zero::formats
