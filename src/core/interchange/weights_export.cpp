// See weights_export.h.
#include "interchange/weights_export.h"

#include <algorithm>
#include <numeric>

#include "formats/manifest.h"
#include "interchange/crc32.h"
#include "interchange/element_types.h"
#include "interchange/named_source.h"
#include "interchange/output_files.h"
#include "interchange/weights_plan.h"

namespace zero::interchange {
namespace {

constexpr std::int64_t kExportWindow = std::int64_t{1} << 20;  // elements
constexpr const char* kExport = "[export]";

// Order of the files, so that they are written from front to back.
std::vector<std::size_t> file_order(const WeightsLayout& layout) {
  std::vector<std::size_t> order(layout.places.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::make_pair(layout.places[a].file, layout.places[a].offset) <
           std::make_pair(layout.places[b].file, layout.places[b].offset);
  });
  return order;
}

}  // namespace

ExportReport export_weights(formats::FsOps& fs, TensorSource& source, const std::string& label, const std::string& path,
                            const ExportOptions& options) {
  if (!options.change.empty())
    throw ConfigError("[export] got ExportOptions::change for " + options.change.begin()->first +
                      ", expected none for files. Hint: Engine::export_weights takes it.");
  std::optional<NameMap> map;
  if (!options.names.empty()) map = NameMap::find(fs, options.names);
  const auto* const names = map ? &*map : nullptr;
  const bool universal = options.format == "universal";
  if (universal && !source.progress())
    throw ConfigError("[export] " + label +
                      " is no checkpoint of a run, expected one with the optimizer's states. Hint: --to hf or pt");
  const auto plan = universal
                        ? plan_universal(source.tensors(), source.aliases(), *source.progress(), names, options, label)
                        : plan_weights(source.tensors(), source.aliases(), names, options, label);
  const auto view = named_source(source, plan.mapping);
  OutputFiles files(fs, path, plan.one_file ? OutputFiles::Kind::File : OutputFiles::Kind::Folder, kExport);
  files.create(plan.layout.files);
  OutputWriter writer(fs, files.folder(), files.names());
  std::vector<char> in, out;
  std::vector<std::uint32_t> crcs(plan.tensors.size(), 0);
  std::map<std::string, std::int64_t> overflows;
  ExportReport report;
  for (const auto t : file_order(plan.layout)) {
    const auto& tensor = plan.tensors[t];
    const auto& from = view->tensors()[plan.from[t]];
    const auto width = width_of(tensor.dtype), numel = formats::numel_of(tensor.shape);
    for (std::int64_t begin = 0; begin < numel; begin += kExportWindow) {
      const auto count = std::min(kExportWindow, numel - begin);
      const auto bytes = static_cast<std::size_t>(count * width);
      in.resize(static_cast<std::size_t>(count * width_of(from.dtype)));
      out.resize(bytes);
      view->read(from, begin, count, in.data());
      const auto conversion = convert_elements(in.data(), from.dtype, count, out.data(), tensor.dtype);
      if (conversion.overflows > 0) overflows[tensor.name] += conversion.overflows;
      if (!plan.torch.empty()) crcs[t] = crc32(crcs[t], out.data(), bytes);
      const auto& place = plan.layout.places[t];
      writer.write(place.file, place.offset + static_cast<std::uint64_t>(begin * width), out.data(), bytes);
    }
    report.bytes += static_cast<std::int64_t>(tensor.bytes());
  }
  check_overflows(overflows, options);
  for (std::size_t file = 0; file < plan.torch.size(); ++file)
    for (const auto& [offset, text] : closing_bytes(plan, file, crcs))
      writer.write(file, offset, text.data(), text.size());
  writer.close();
  files.commit();
  for (const auto& file : plan.layout.files) report.files.push_back(plan.one_file ? path : file.name);
  report.tensors = static_cast<std::int64_t>(plan.tensors.size());
  report.remarks = plan.remarks;
  for (const auto& remark : source.remarks()) report.remarks.push_back(remark);
  return report;
}

}  // namespace zero::interchange
