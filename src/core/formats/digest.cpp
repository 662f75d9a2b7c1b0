// See digest.h.
#include "formats/digest.h"

#include <zero/checkpoint_tools.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "formats/hash.h"
#include "formats/rank_file.h"
#include "formats/root_folder.h"
#include "formats/safetensors.h"
#include "formats/slices.h"

namespace zero {

namespace formats {
namespace {

static_assert(std::endian::native == std::endian::little, "files have little-endian elements");

// The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace

void Digest::add(std::string_view name, std::int64_t index, const char* data, std::int64_t numel, int width) {
  const auto hash = hash_of(name);
  const auto a = std::stoull(hash.substr(0, 16), nullptr, 16), b = std::stoull(hash.substr(16), nullptr, 16);
  for (std::int64_t i = 0; i < numel; ++i) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, data + i * width, static_cast<std::size_t>(width));
    const auto place = static_cast<std::uint64_t>(index + i);
    const auto low = mixed(mixed(a + place) ^ bits);
    low_ += low;
    high_ += mixed(mixed(b + place) ^ bits) + (low_ < low ? 1 : 0);
  }
}

std::string Digest::hex() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(high_),
                static_cast<unsigned long long>(low_));
  return text;
}

std::string digest_of(const Folder& checkpoint, const Manifest& manifest) {
  Digest digest;
  PartReader reader(checkpoint, manifest);
  for (const auto& tensor : manifest.tensors) {
    const auto name = tensor.kind + "/" + tensor.name;
    const int width = bits_of(tensor.dtype) / 8;
    const auto runs = runs_between(tensor.shape, {}, tensor.slices, 0, numel_of(tensor.shape));
    auto run = runs.begin();
    for (const auto& part : tensor.parts) {
      const auto end = part.start + part.numel;
      const char* const bytes = reader.read(tensor, part);
      while (run != runs.end() && run->stored + run->numel <= part.start) ++run;
      for (auto next = run; next != runs.end() && next->stored < end; ++next) {
        const auto first = std::max(next->stored, part.start), last = std::min(next->stored + next->numel, end);
        digest.add(name, next->wanted + (first - next->stored), bytes + (first - part.start) * width, last - first,
                   width);
      }
    }
  }
  reader.finish();
  return digest.hex();
}

}  // namespace formats

std::string checkpoint_digest(const std::filesystem::path& dir, const std::string& tag) {
  auto& fs = formats::system_files();
  const auto choice = formats::choose(fs, dir.string(), tag);
  const auto folder = formats::Folder::open(fs, dir.string()).folder(choice.tag);
  return formats::digest_of(folder, formats::read_manifest(folder, choice.manifest_hash));
}

}  // namespace zero
