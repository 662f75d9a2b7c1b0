// See named_source.h.
#include "interchange/named_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "formats/manifest.h"
#include "interchange/element_types.h"

namespace zero::interchange {
namespace {

constexpr std::int64_t kPanelBytes = std::int64_t{16} << 20;

class NamedSource : public TensorSource {
 public:
  NamedSource(TensorSource& source, Mapping mapping) : source_(source), mapping_(std::move(mapping)) {
    for (std::size_t t = 0; t < mapping_.tensors.size(); ++t) {
      const auto& tensor = mapping_.tensors[t];
      tensors_.push_back({tensor.kind, tensor.name, tensor.dtype, tensor.shape});
      places_[{tensor.kind, tensor.name}] = t;
    }
  }

  const std::string& format() const override { return source_.format(); }
  const std::vector<SourceTensor>& tensors() const override { return tensors_; }
  const std::map<std::string, std::string>& aliases() const override { return mapping_.aliases; }
  const std::optional<SourceProgress>& progress() const override { return source_.progress(); }
  const std::vector<std::string>& remarks() const override { return source_.remarks(); }

  void read(const SourceTensor& wanted, std::int64_t begin, std::int64_t numel, void* out) override {
    const auto found = places_.find({wanted.kind, wanted.name});
    ZERO_CHECK(found != places_.end(), "no tensor ", wanted.kind, " of ", wanted.name);
    const auto& tensor = mapping_.tensors[found->second];
    const auto width = width_of(tensor.dtype), end = begin + numel;
    if (!tensor.moves_elements()) {
      for_each_run(tensor, begin, end, [&](const ElementRun& run) {
        source_.read(source_.tensors()[run.source], run.from, run.numel,
                     static_cast<char*>(out) + (run.to - begin) * width);
      });
      return;
    }
    // Whole panels, kept for the next range: elements of one row of the target are far apart in the source.
    while (begin < end) {
      if (panel_of_ != found->second || begin < panel_begin_ || begin >= panel_end_) fill(found->second, begin);
      const auto count = std::min(end, panel_end_) - begin;
      std::memcpy(out, panel_.data() + (begin - panel_begin_) * width, static_cast<std::size_t>(count * width));
      out = static_cast<char*>(out) + count * width;
      begin += count;
    }
  }

 private:
  // The panel with the element `at`: whole rows of one segment.
  void fill(std::size_t index, std::int64_t at) {
    panel_of_ = kNone;
    const auto& tensor = mapping_.tensors[index];
    const auto width = width_of(tensor.dtype);
    std::int64_t begin = 0;
    const Segment* segment = nullptr;
    for (const auto& one : tensor.segments) {
      segment = &one;
      if (at < begin + one.numel()) break;
      begin += one.numel();
    }
    const auto rows = std::max<std::int64_t>(1, kPanelBytes / (segment->cols * width));
    const auto first = (at - begin) / segment->cols / rows * rows;
    panel_begin_ = begin + first * segment->cols;
    panel_end_ = begin + std::min(first + rows, segment->rows) * segment->cols;
    panel_.resize(static_cast<std::size_t>((panel_end_ - panel_begin_) * width));
    const auto place = [&](const ElementRun& run, const char* from) {
      scatter(from, run.numel, static_cast<int>(width), panel_.data() + (run.to - panel_begin_) * width, run.stride);
    };
    if (segment->rows <= rows) {  // one read instead of many
      staging_.resize(panel_.size());
      source_.read(source_.tensors()[segment->source], segment->begin, segment->numel(), staging_.data());
      for_each_run(tensor, panel_begin_, panel_end_,
                   [&](const ElementRun& run) { place(run, staging_.data() + (run.from - segment->begin) * width); });
    } else {
      for_each_run(tensor, panel_begin_, panel_end_, [&](const ElementRun& run) {
        staging_.resize(static_cast<std::size_t>(run.numel * width));
        source_.read(source_.tensors()[run.source], run.from, run.numel, staging_.data());
        place(run, staging_.data());
      });
    }
    panel_of_ = index;
  }

  static constexpr std::size_t kNone = SIZE_MAX;
  TensorSource& source_;
  Mapping mapping_;
  std::vector<SourceTensor> tensors_;
  std::map<std::pair<std::string, std::string>, std::size_t> places_;
  std::size_t panel_of_ = kNone;
  std::int64_t panel_begin_ = 0, panel_end_ = 0;
  std::vector<char> panel_, staging_;
};

}  // namespace

std::unique_ptr<TensorSource> named_source(TensorSource& source, Mapping mapping) {
  return std::make_unique<NamedSource>(source, std::move(mapping));
}

}  // namespace zero::interchange
