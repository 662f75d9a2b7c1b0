// Implements what checkpoint_tools.h says of other libraries' files.
#include <zero/checkpoint_tools.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "interchange/checkpoint_import.h"
#include "interchange/element_types.h"
#include "interchange/native_source.h"
#include "interchange/weights_export.h"

namespace zero {
namespace {
using namespace interchange;

constexpr std::int64_t kDiffWindow = std::int64_t{1} << 20;  // elements

SourceOptions options_of(const SourceChoice& choice) {
  SourceOptions options;
  options.tag = choice.tag;
  options.key = choice.key;
  options.prefix = choice.prefix;
  options.ignore_crc = choice.ignore_crc;
  return options;
}

// Weights have different kinds in different files.
std::string diff_key(const SourceTensor& tensor) {
  return tensor.kind.starts_with("opt.") ? tensor.kind + "/" + tensor.name : tensor.name;
}

class Comparison {
 public:
  Comparison(TensorSource& a, TensorSource& b) : a_(a), b_(b) {}

  CheckpointDifference run() {
    std::map<std::string, const SourceTensor*> left, right;
    for (const auto& tensor : a_.tensors()) left[diff_key(tensor)] = &tensor;
    for (const auto& tensor : b_.tensors()) right[diff_key(tensor)] = &tensor;
    for (const auto& [name, tensor] : left) {
      const auto other = right.find(name);
      if (other == right.end())
        result_.tensors.push_back({name, "only in A", 0, -1, "", ""});
      else
        compare(name, *tensor, *other->second);
    }
    for (const auto& [name, tensor] : right)
      if (!left.contains(name)) result_.tensors.push_back({name, "only in B", 0, -1, "", ""});
    std::stable_sort(result_.tensors.begin(), result_.tensors.end(),
                     [](const auto& x, const auto& y) { return x.name < y.name; });
    return std::move(result_);
  }

 private:
  void compare(const std::string& name, const SourceTensor& a, const SourceTensor& b) {
    ++result_.compared;
    TensorDifference difference{name, "", 0, -1, "", ""};
    if (a.shape != b.shape) {
      difference.what = "shape " + shape_text(a.shape) + " against " + shape_text(b.shape);
      result_.tensors.push_back(std::move(difference));
      return;
    }
    if (a.dtype != b.dtype) difference.what = "dtype " + a.dtype + " against " + b.dtype;
    if (a.dtype == b.dtype || (is_floating(a.dtype) && is_floating(b.dtype))) {
      const auto numel = formats::numel_of(a.shape);
      for (std::int64_t begin = 0; begin < numel; begin += kDiffWindow)
        compare_range(a, b, begin, std::min(kDiffWindow, numel - begin), difference);
    }
    if (difference.count > 0 && difference.what.empty()) difference.what = "values";
    if (!difference.what.empty()) result_.tensors.push_back(std::move(difference));
  }

  const char* window(TensorSource& source, const SourceTensor& tensor, std::int64_t begin, std::int64_t count,
                     bool widen, std::vector<char>& raw, std::vector<char>& wide) {
    raw.resize(static_cast<std::size_t>(count * width_of(tensor.dtype)));
    source.read(tensor, begin, count, raw.data());
    result_.bytes += static_cast<std::int64_t>(raw.size());
    if (!widen) return raw.data();
    wide.resize(static_cast<std::size_t>(count) * 8);
    convert_elements(raw.data(), tensor.dtype, count, wide.data(), "F64");
    return wide.data();
  }

  void compare_range(const SourceTensor& a, const SourceTensor& b, std::int64_t begin, std::int64_t count,
                     TensorDifference& difference) {
    const bool widen = a.dtype != b.dtype;
    const auto* const left = window(a_, a, begin, count, widen, raw_a_, wide_a_);
    const auto* const right = window(b_, b, begin, count, widen, raw_b_, wide_b_);
    const auto width = static_cast<std::size_t>(widen ? 8 : width_of(a.dtype));
    if (std::memcmp(left, right, static_cast<std::size_t>(count) * width) == 0) return;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i) * width;
      if (std::memcmp(left + at, right + at, width) == 0) continue;
      ++difference.count;
      if (difference.first >= 0) continue;
      difference.first = begin + i;
      difference.a = element_text(raw_a_.data() + i * width_of(a.dtype), a.dtype);
      difference.b = element_text(raw_b_.data() + i * width_of(b.dtype), b.dtype);
    }
  }

  TensorSource &a_, &b_;
  CheckpointDifference result_;
  std::vector<char> raw_a_, raw_b_, wide_a_, wide_b_;
};

// Attention heads of the GPT that `zero train` made, which tensors do not tell. Other programs' configurations have
// these keys as well, with their defaults: all sizes must be those of the tensors. 0: not known.
std::int64_t heads_of_run(const TensorSource& source) {
  const auto config = native_config(source);
  const auto number = [&](const char* key) {
    const auto found = config.find(std::string("libzero.model.") + key);
    return found == config.end() ? 0 : std::atoll(found->second.c_str());
  };
  const auto shape = [&](const std::string& name) {
    for (const auto& tensor : source.tensors())
      if (tensor.name == name && tensor.kind != "buffer" && !tensor.kind.starts_with("opt.")) return tensor.shape;
    return std::vector<std::int64_t>();
  };
  const std::vector<std::int64_t> token{number("vocabulary"), number("hidden")},
      position{number("seq_length"), number("hidden")};
  return shape("token.weight") == token && shape("position.weight") == position ? number("heads") : 0;
}

}  // namespace

ExportReport export_checkpoint(const std::filesystem::path& source, const std::filesystem::path& out,
                               const ExportOptions& options, const std::string& tag) {
  auto& fs = formats::system_files();
  SourceOptions open;
  open.tag = tag;
  open.weights = options.format != "universal";
  const auto opened = open_source(fs, source.string(), open);
  auto own = options;
  if (own.heads == 0 && own.names == "gpt2") own.heads = heads_of_run(*opened);
  return export_weights(fs, *opened, source.string(), out.string(), own);
}

SourceInfo inspect_source(const std::filesystem::path& source, const SourceChoice& choice) {
  auto options = options_of(choice);
  options.describe = true;
  const auto opened = open_source(formats::system_files(), source.string(), options);
  SourceInfo info;
  info.format = opened->format();
  for (const auto& tensor : opened->tensors()) {
    const auto bytes = (formats::numel_of(tensor.shape) * formats::bits_of(tensor.dtype) + 7) / 8;
    info.tensors.push_back({tensor.kind, tensor.name, tensor.dtype, tensor.shape, bytes, 0, tensor.kind == "master"});
    info.bytes += bytes;
  }
  info.aliases.assign(opened->aliases().begin(), opened->aliases().end());
  if (const auto& progress = opened->progress()) {
    info.global_steps = progress->global_steps;
    info.applied_steps = progress->applied_steps;
    info.optimizer = progress->optimizer;
  }
  info.remarks = opened->remarks();
  return info;
}

CheckpointImported import_checkpoint(const std::filesystem::path& source, const std::filesystem::path& dir,
                                     const std::string& tag, const CheckpointImport& options) {
  auto& fs = formats::system_files();
  const auto opened = open_source(fs, source.string(), options_of(options.source));
  return interchange::import_checkpoint(fs, *opened, source.string(), dir.string(), tag, options);
}

CheckpointDifference diff_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b) {
  auto& fs = formats::system_files();
  const auto left = open_source(fs, a.string()), right = open_source(fs, b.string());
  return Comparison(*left, *right).run();
}

}  // namespace zero
