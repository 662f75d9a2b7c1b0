// A small checkpoint built without an engine, a file system that fails on request, and helpers for the checkpoint
// tests.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "formats/blocks.h"
#include "formats/hash.h"
#include "formats/range_reader.h"
#include "formats/rank_file.h"
#include "formats/root_folder.h"
#include "support/folder.h"

namespace zero::test {

inline void write_all(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// The state that sample checkpoint `value` holds: floats, bools and a private tensor.
struct Sample {
  std::vector<float> weights;
  std::vector<unsigned char> mask, own;
  explicit Sample(int value) : weights(300), mask(70), own(33) {
    for (std::size_t i = 0; i < weights.size(); ++i)
      weights[i] = static_cast<float>(value) + 0.25f * static_cast<float>(i);
    for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = (i * 7 + static_cast<std::size_t>(value)) % 3 == 0;
    for (std::size_t i = 0; i < own.size(); ++i) own[i] = static_cast<unsigned char>(value * 31 + static_cast<int>(i));
  }
  bool operator==(const Sample&) const = default;
};

inline formats::Manifest sample_manifest(int value, const formats::RankFile& file,
                                         const formats::Manifest::FileEntry& blocks) {
  formats::Manifest m;
  m.libzero_version = m.libtorch_version = "1";
  m.created = "2000-01-01T00:00:00Z";
  m.global_steps = value;
  m.optimizer = "AdamW";
  m.slots = {"exp_avg"};
  m.parameter_dtype = m.gradient_dtype = m.wire_dtype = "F32";
  m.config = {{"seed", "1"}};
  m.config_hash = "x";
  m.user_state = "{\"n\": " + std::to_string(value) + "}";
  m.files = {file.file, blocks};
  m.blocks = blocks.name;
  m.tensors = {file.tensors[0], file.tensors[1], {"master", "empty", "F32", {0, 3}, true, {}}};
  m.ranks.emplace_back(file.tensors.begin() + 2, file.tensors.end());
  return m;
}

// Of a checkpoint with this file alone, whose rows are written, too.
inline formats::Manifest manifest_of(const formats::Folder& folder, const formats::RankFile& file) {
  formats::Manifest manifest;
  manifest.files = {file.file, formats::write_blocks(folder, {{file.file.name, file.rows}})};
  manifest.blocks = manifest.files[1].name;
  return manifest;
}

// The bytes of all parts of a tensor.
inline std::string bytes_in(const formats::Folder& folder, const formats::Manifest& manifest,
                            const formats::Tensor& tensor) {
  const auto begin = tensor.parts.front().start, end = tensor.parts.back().start + tensor.parts.back().numel;
  const auto width = formats::bits_of(tensor.dtype) / 8;
  std::string result(static_cast<std::size_t>((end - begin) * width), '\0');
  formats::RangeReader reader(folder, manifest);
  reader.add(0, tensor, {{0, begin, end - begin}});
  reader.read([&](std::size_t, const formats::Run& run, const char* bytes) {
    std::memcpy(result.data() + run.wanted * width, bytes, static_cast<std::size_t>(run.numel * width));
  });
  reader.finish();
  return result;
}

// Reads a vector that outlives the source.
template <class Values>
auto from(const Values& values) {
  return [data = values.data()](std::int64_t at, std::int64_t) {
    return std::shared_ptr<const void>(std::shared_ptr<const void>(), data + at);
  };
}

inline std::vector<formats::Source> sources_of(const Sample& sample) {
  return {{"master", "layer.weight", "F32", {30, 10}, true, 0, 300, from(sample.weights), true},
          {"buffer", "mask", "BOOL", {70}, false, 0, 70, from(sample.mask), false},
          {"rank", "own", "U8", {33}, false, 0, 33, from(sample.own), false}};
}

// What one rank alone does to save.
inline void save_sample(formats::FsOps& fs, const std::string& root, const std::string& tag, int value,
                        bool weights_only = false) {
  const Sample sample(value);
  auto sources = sources_of(sample);
  if (weights_only) sources.pop_back();  // the private tensor
  formats::Commit commit(fs, root, tag, weights_only);
  formats::RankFile file;
  formats::Manifest::FileEntry blocks;
  {
    const auto folder = formats::Folder::open(fs, root).folder(commit.folder_name());
    file = formats::write_rank_file(folder, formats::rank_file_name(0), sources);
    blocks = formats::write_blocks(folder, {{file.file.name, file.rows}});
  }
  auto manifest = sample_manifest(value, file, blocks);
  if (weights_only) manifest.slots.clear();
  commit.publish(std::move(manifest));
}
inline void save_sample_weights(formats::FsOps& fs, const std::string& root, const std::string& tag, int value) {
  save_sample(fs, root, tag, value, /*weights_only=*/true);
}

struct Loaded {
  std::string tag;
  int value = -1;
};

// Reads and verifies all of the checkpoint; the value must be consistent.
inline Loaded load_sample(const std::string& root, const std::string& tag = "",
                          formats::FsOps& fs = formats::system_files()) {
  const auto choice = formats::choose(fs, root, tag);
  const auto folder = formats::Folder::open(fs, root).folder(choice.tag);
  const auto manifest = formats::read_manifest(folder, choice.manifest_hash);
  const int value = static_cast<int>(manifest.global_steps);
  Sample got(value + 1);
  formats::RangeReader reader(folder, manifest);
  std::vector<std::pair<char*, std::int64_t>> targets;  // memory and bytes of an element
  const auto want = [&](const formats::Tensor& tensor, auto& values) {
    reader.add(targets.size(), tensor, {{0, 0, static_cast<std::int64_t>(values.size())}});
    targets.emplace_back(reinterpret_cast<char*>(values.data()), sizeof values[0]);
  };
  for (const auto& tensor : manifest.tensors) {
    if (tensor.name == "layer.weight") want(tensor, got.weights);
    if (tensor.name == "mask") want(tensor, got.mask);
  }
  want(manifest.ranks.at(0).at(0), got.own);
  reader.read([&](std::size_t id, const formats::Run& run, const char* bytes) {
    const auto [to, width] = targets[id];
    std::memcpy(to + run.wanted * width, bytes, static_cast<std::size_t>(run.numel * width));
  });
  reader.finish();
  if (!(got == Sample(value)))
    throw std::runtime_error("the checkpoint of " + std::to_string(value) + " holds other values");
  return {choice.tag, value};
}

// The code of the IoError or ConfigError that fn throws, -1 for anything else, 0 for none.
inline int code_of(const std::function<void()>& fn, std::string* text = nullptr) {
  try {
    fn();
  } catch (const Error& e) {
    if (text != nullptr) *text = e.what();
    return static_cast<int>(e.code());
  } catch (const std::exception& e) {
    if (text != nullptr) *text = e.what();
    return -1;
  }
  return 0;
}

inline constexpr int kDamaged = static_cast<int>(ExitCode::kCheckpoint);

}  // namespace zero::test
