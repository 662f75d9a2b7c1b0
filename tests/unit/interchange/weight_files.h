// Reads safetensors without the library, by the format's definition, as the reference of its readers and writers; and
// the models that transformers wrote (script/make-hf-fixtures).
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "support/file_text.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test {

inline std::filesystem::path hf_model(const std::string& name) {
  return std::filesystem::path(ZERO_SOURCE_DIR) / "tests/golden/interchange" / name;
}

struct PlainTensor {
  std::string dtype, bytes;
  std::vector<std::int64_t> shape;
  bool operator==(const PlainTensor&) const = default;
  std::vector<float> floats() const {
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), values.size() * 4);
    return values;
  }
};
using PlainTensors = std::map<std::string, PlainTensor>;

inline nlohmann::json plain_header(const std::string& file, std::uint64_t* data = nullptr) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  if (data != nullptr) *data = 8 + length;
  return nlohmann::json::parse(file.substr(8, length));
}

inline PlainTensors plain_tensors(const std::filesystem::path& path) {
  const auto file = file_text(path);
  std::uint64_t data = 0;
  const auto header = plain_header(file, &data);
  PlainTensors tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const std::uint64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensors[name] = {entry["dtype"], file.substr(data + begin, end - begin), entry["shape"]};
  }
  return tensors;
}

// All tensors of the safetensors files of a directory, except expected.safetensors.
inline PlainTensors plain_folder(const std::filesystem::path& folder) {
  PlainTensors all;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors" && entry.path().stem() != "expected")
      all.merge(plain_tensors(entry.path()));
  return all;
}

// A safetensors file with these tensors, by the format's definition.
inline std::string plain_file(const PlainTensors& tensors, const nlohmann::json& metadata = nullptr) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  if (!metadata.is_null()) header["__metadata__"] = metadata;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  const auto json = header.dump();
  std::string file(8, '\0');
  const std::uint64_t length = json.size();
  std::memcpy(file.data(), &length, 8);
  return file + json + data;
}

template <class Element>
PlainTensor plain_tensor(const std::string& dtype, std::vector<std::int64_t> shape,
                         const std::vector<Element>& values) {
  return {dtype, std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Element)),
          std::move(shape)};
}

}  // namespace zero::test
