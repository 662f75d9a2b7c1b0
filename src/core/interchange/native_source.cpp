// See native_source.h.
#include "interchange/native_source.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <tuple>

#include "base/check.h"
#include "formats/range_reader.h"
#include "formats/root_folder.h"
#include "formats/safetensors.h"
#include "formats/slices.h"

namespace zero::interchange {
namespace {

class NativeSource : public TensorSource {
 public:
  NativeSource(formats::Folder folder, const std::string& hash, const std::string& prefix)
      : folder_(std::move(folder)), manifest_(formats::read_manifest(folder_, hash)), reader_(folder_, manifest_) {
    for (const auto& tensor : manifest_.tensors) add(tensor, prefix);
    std::string own;
    for (const auto& tensor : manifest_.ranks.empty() ? std::vector<formats::Tensor>() : manifest_.ranks[0])
      if (tensor.kind == "buffer") {
        add(tensor, prefix);
        own += (own.empty() ? "" : ", ") + tensor.name;
      }
    if (!own.empty()) remarks_.push_back("buffers that differed between ranks are those of rank 0: " + own);
    std::sort(tensors_.begin(), tensors_.end(), [](const SourceTensor& a, const SourceTensor& b) {
      return std::tie(a.kind, a.name) < std::tie(b.kind, b.name);
    });
    for (const auto& [alias, stored] : manifest_.aliases) aliases_[without(alias, prefix)] = without(stored, prefix);
    if (!manifest_.weights_only) progress_ = progress_of(manifest_);
  }

  const std::map<std::string, std::string>& config() const { return manifest_.config; }
  const std::string& format() const override { return format_; }
  const std::vector<SourceTensor>& tensors() const override { return tensors_; }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }
  const std::optional<SourceProgress>& progress() const override { return progress_; }
  const std::vector<std::string>& remarks() const override { return remarks_; }

  void read(const SourceTensor& tensor, std::int64_t begin, std::int64_t numel, void* out) override {
    const auto found = stored_.find({tensor.kind, tensor.name});
    ZERO_CHECK(found != stored_.end(), "no tensor ", tensor.kind, " of ", tensor.name);
    const auto& stored = *found->second;
    ZERO_CHECK(begin >= 0 && numel >= 0 && begin + numel <= formats::numel_of(stored.shape), "elements ", begin, " + ",
               numel, " of ", tensor.name);
    const auto width = static_cast<std::size_t>(formats::bits_of(stored.dtype) / 8);
    const auto runs = formats::runs_between(stored.shape, {}, stored.slices, begin, begin + numel);
    auto* const to = static_cast<char*>(out);
    reader_.add(0, stored, runs);
    reader_.read([&](std::size_t, const formats::Run& run, const char* bytes) {
      std::memcpy(to + static_cast<std::size_t>(run.wanted - begin) * width, bytes,
                  static_cast<std::size_t>(run.numel) * width);
    });
    reader_.finish();
  }

 private:
  static std::string without(const std::string& name, const std::string& prefix) {
    if (!name.starts_with(prefix) || name.size() == prefix.size())
      throw ConfigError("[checkpoint] the tensor " + name + " does not begin with the prefix \"" + prefix + "\"");
    return name.substr(prefix.size());
  }

  void add(const formats::Tensor& tensor, const std::string& prefix) {
    const auto name = without(tensor.name, prefix);
    stored_[{tensor.kind, name}] = &tensor;
    tensors_.push_back({tensor.kind, name, tensor.dtype, tensor.shape});
  }

  formats::Folder folder_;
  formats::Manifest manifest_;
  formats::RangeReader reader_;
  std::string format_ = "libzero";
  std::vector<SourceTensor> tensors_;
  std::map<std::pair<std::string, std::string>, const formats::Tensor*> stored_;
  std::map<std::string, std::string> aliases_;
  std::optional<SourceProgress> progress_;
  std::vector<std::string> remarks_;
};

}  // namespace

SourceProgress progress_of(const formats::Manifest& manifest) {
  SourceProgress progress{manifest.global_steps, manifest.applied_steps, manifest.skipped_steps,
                          manifest.global_samples, manifest.optimizer};
  if (manifest.parameter_dtype != "F16") return progress;
  auto& scaler = progress.scaler.emplace();
  // An imported checkpoint has no configuration, or these keys alone.
  const auto option = [&](const std::string& key) {
    const auto found = manifest.config.find("fp16." + key);
    return found == manifest.config.end() ? nullptr : found->second.c_str();
  };
  const auto set = [&](const char* key, std::int64_t least, std::int64_t& value) {
    if (const char* const text = option(key)) value = std::max<std::int64_t>(least, std::atoll(text));
  };
  set("loss_scale_window", 1, scaler.window);
  set("hysteresis", 1, scaler.most_hysteresis);
  set("min_loss_scale", 1, scaler.smallest);
  const char* const consecutive = option("consecutive_hysteresis");
  scaler.consecutive = consecutive != nullptr && consecutive == std::string("true");
  const char* const fixed = option("loss_scale");
  scaler.dynamic = fixed == nullptr || std::atof(fixed) == 0;
  scaler.scale = manifest.loss_scale;
  scaler.hysteresis = manifest.hysteresis;
  scaler.good = manifest.good;
  return progress;
}

std::map<std::string, std::string> native_config(const TensorSource& source) {
  const auto* const native = dynamic_cast<const NativeSource*>(&source);
  return native == nullptr ? std::map<std::string, std::string>() : native->config();
}

std::unique_ptr<TensorSource> open_native(formats::FsOps& fs, const std::string& path, const SourceOptions& options) {
  auto folder = formats::Folder::open(fs, path);
  if (options.tag.empty() && folder.exists(formats::kManifestName)) {
    const auto hash = formats::require_whole(folder);
    return std::make_unique<NativeSource>(std::move(folder), hash, options.prefix);
  }
  const auto choice =
      formats::choose(fs, path, options.tag, options.weights ? formats::Needs::Weights : formats::Needs::TrainingIfAny);
  return std::make_unique<NativeSource>(folder.folder(choice.tag), choice.manifest_hash, options.prefix);
}

}  // namespace zero::interchange
