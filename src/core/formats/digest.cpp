// See digest.h.
#include "formats/digest.h"

#include <zero/checkpoint_tools.h>

#include <bit>
#include <cstdio>
#include <cstring>

#include "base/mix.h"
#include "formats/hash.h"
#include "formats/range_reader.h"
#include "formats/root_folder.h"
#include "formats/safetensors.h"

namespace zero {

namespace formats {

static_assert(std::endian::native == std::endian::little, "files have little-endian elements");

void Digest::add(std::string_view name, std::int64_t index, const char* data, std::int64_t numel, int width) {
  const auto hash = hash_of(name);
  const auto a = std::stoull(hash.substr(0, 16), nullptr, 16), b = std::stoull(hash.substr(16), nullptr, 16);
  for (std::int64_t i = 0; i < numel; ++i) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, data + i * width, static_cast<std::size_t>(width));
    const auto place = static_cast<std::uint64_t>(index + i);
    const auto low = base::mixed(base::mixed(a + place) ^ bits);
    low_ += low;
    high_ += base::mixed(base::mixed(b + place) ^ bits) + (low_ < low ? 1 : 0);
  }
}

void Digest::add(std::string_view hex) {
  const auto low = std::stoull(std::string(hex.substr(16)), nullptr, 16);
  low_ += low;
  high_ += std::stoull(std::string(hex.substr(0, 16)), nullptr, 16) + (low_ < low ? 1 : 0);
}

std::string Digest::hex() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(high_),
                static_cast<unsigned long long>(low_));
  return text;
}

std::string digest_of(const Folder& checkpoint, const Manifest& manifest) {
  Digest digest;
  RangeReader reader(checkpoint, manifest);
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const auto& tensor = manifest.tensors[i];
    reader.add(i, tensor, runs_between(tensor.shape, {}, tensor.slices, 0, numel_of(tensor.shape)));
  }
  reader.read([&](std::size_t i, const Run& run, const char* bytes) {
    const auto& tensor = manifest.tensors[i];
    digest.add(tensor.kind + "/" + tensor.name, run.wanted, bytes, run.numel, bits_of(tensor.dtype) / 8);
  });
  reader.finish();
  return digest.hex();
}

}  // namespace formats

std::string checkpoint_digest(const std::filesystem::path& dir, const std::string& tag) {
  auto& fs = formats::system_files();
  const auto choice = formats::choose(fs, dir.string(), tag, formats::Needs::TrainingIfAny);
  const auto folder = formats::Folder::open(fs, dir.string()).folder(choice.tag);
  return formats::digest_of(folder, formats::read_manifest(folder, choice.manifest_hash));
}

}  // namespace zero
