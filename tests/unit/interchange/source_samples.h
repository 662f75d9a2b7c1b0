// Compares a source of tensors with tensors in a safetensors file that another program wrote.
#pragma once
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "interchange/source.h"
#include "support/file_text.h"

namespace zero::test {

inline std::string golden(const std::string& name) {
  return std::string(ZERO_SOURCE_DIR) + "/tests/golden/interchange/" + name;
}

inline std::string bytes_of_file(const std::string& path) {
  EXPECT_TRUE(std::filesystem::is_regular_file(path)) << path;
  return file_text(path);
}

inline std::string key_of(const interchange::SourceTensor& tensor) { return tensor.kind + "/" + tensor.name; }

inline std::string bytes_of(interchange::TensorSource& source, const interchange::SourceTensor& tensor) {
  const auto numel = formats::numel_of(tensor.shape);
  std::string bytes(static_cast<std::size_t>(numel * formats::bits_of(tensor.dtype) / 8), '\0');
  source.read(tensor, 0, numel, bytes.data());
  return bytes;
}

// All that a source says and holds, in one text.
inline std::string contents_of(interchange::TensorSource& source) {
  std::string text = source.format();
  for (const auto& tensor : source.tensors()) {
    text += "\n" + key_of(tensor) + " " + tensor.dtype;
    for (const auto size : tensor.shape) text += " " + std::to_string(size);
    text += "\n" + bytes_of(source, tensor);
  }
  for (const auto& [name, stored] : source.aliases()) text += "\n" + name + " = " + stored;
  if (const auto& p = source.progress())
    text += "\n" + std::to_string(p->global_steps) + " " + std::to_string(p->applied_steps) + " " +
            std::to_string(p->skipped_steps) + " " + std::to_string(p->global_samples) + " " + p->optimizer;
  return text;
}

// `prefix`: of the keys in the file, "weight/" for files that have names alone.
inline void expect_tensors(interchange::TensorSource& source, const std::string& path, const std::string& prefix = "") {
  SCOPED_TRACE(path);
  const auto file = bytes_of_file(path);
  std::uint64_t length = 0;
  ASSERT_GE(file.size(), sizeof length);
  file.copy(reinterpret_cast<char*>(&length), sizeof length);
  const auto header = formats::parse_header(std::string_view(file).substr(8, length), file.size() - 8 - length, path);
  std::map<std::string, const formats::TensorEntry*> wanted;
  for (const auto& entry : header.tensors) wanted[prefix + entry.key] = &entry;
  for (const auto& tensor : source.tensors()) {
    const auto key = key_of(tensor);
    const auto found = wanted.find(key);
    if (found == wanted.end()) {
      ADD_FAILURE() << key << " is not expected";
      continue;
    }
    const auto& entry = *found->second;
    EXPECT_EQ(tensor.dtype, entry.dtype) << key;
    EXPECT_EQ(tensor.shape, entry.shape) << key;
    const auto bytes = file.substr(8 + length + entry.begin, entry.end - entry.begin);
    EXPECT_TRUE(bytes_of(source, tensor) == bytes) << key;
    // Any range is the same as a part of all.
    const auto numel = formats::numel_of(tensor.shape), width = formats::bits_of(tensor.dtype) / 8L;
    for (const std::int64_t begin : {std::int64_t{0}, numel / 3, numel / 2}) {
      const auto some = std::min<std::int64_t>(numel - begin, numel / 2 + 1);
      std::string part(static_cast<std::size_t>(some * width), '\0');
      source.read(tensor, begin, some, part.data());
      EXPECT_TRUE(bytes.compare(static_cast<std::size_t>(begin * width), part.size(), part) == 0) << key << begin;
    }
    wanted.erase(found);
  }
  for (const auto& [key, entry] : wanted) ADD_FAILURE() << key << " is missing";
  const auto of = [&](const char* key) {
    return header.metadata.contains(key) ? nlohmann::json::parse(header.metadata.at(key)) : nlohmann::json::object();
  };
  EXPECT_EQ(nlohmann::json(source.aliases()), of("aliases"));
  const auto progress = of("progress");
  for (const auto& [key, value] : progress.items()) {
    ASSERT_TRUE(source.progress()) << key;
    const auto& p = *source.progress();
    EXPECT_EQ(key == "global_steps"    ? p.global_steps
              : key == "applied_steps" ? p.applied_steps
              : key == "skipped_steps" ? p.skipped_steps
                                       : p.global_samples,
              value.get<std::int64_t>())
        << key;
  }
}

}  // namespace zero::test
