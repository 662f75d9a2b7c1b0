// See rank_report.h.
#include "formats/rank_report.h"

#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "formats/blocks.h"
#include "formats/hash.h"

namespace zero::formats {
namespace {

std::string name_of(int rank) { return ".report-" + std::to_string(rank); }

}  // namespace

void RankReport::add(RankFile&& file, std::size_t num_shared) {
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    auto& tensor = file.tensors[i];
    for (auto& part : tensor.parts) part.file = static_cast<std::uint32_t>(files.size());
    (i < num_shared ? shared : own).push_back(std::move(tensor));
  }
  files.push_back(std::move(file.file));
  rows.push_back(std::move(file.rows));
}

void RankReport::add(HashedFile&& file) {
  files.push_back(std::move(file.entry));
  rows.push_back(std::move(file.rows));
}

// Lines with the files, a line with the numbers of tensors, the tensors, and all rows.
std::string write_report(const Folder& folder, int rank, const RankReport& report) {
  auto text = base::join(report.files.size(), "\n");
  for (const auto& file : report.files) text += base::join(file.name, " ", file.bytes, " ", file.hash, "\n");
  const auto shared = tensors_text(report.shared), own = tensors_text(report.own);
  text += base::join(shared.size(), " ", own.size(), "\n") + shared + own;
  for (const auto& rows : report.rows) text += rows;
  // Not synced: it is gone before the checkpoint is complete.
  auto file = folder.create(name_of(rank));
  file.write(text.data(), text.size(), 0);
  file.close();
  return hash_of(text);
}

RankReport take_report(const Folder& folder, int rank, const std::string& hash) {
  const auto path = folder.path_of(name_of(rank));
  const auto text = folder.read_file(name_of(rank), kMostManifestBytes);
  if (hash_of(text) != hash) fail_damaged(path, "is not what rank " + std::to_string(rank) + " wrote");
  std::istringstream in(text);
  RankReport report;
  std::size_t files = 0, shared = 0, own = 0;
  in >> files;
  for (std::size_t i = 0; i < files; ++i) {
    report.files.emplace_back();
    in >> report.files.back().name >> report.files.back().bytes >> report.files.back().hash;
  }
  in >> shared >> own;
  in.get();
  auto at = static_cast<std::size_t>(in.tellg());
  report.shared = parse_tensors(std::string_view(text).substr(at, shared), path);
  report.own = parse_tensors(std::string_view(text).substr(at + shared, own), path);
  at += shared + own;
  for (const auto& file : report.files) {
    report.rows.push_back(text.substr(at, num_blocks(static_cast<std::uint64_t>(file.bytes)) * kRowBytes));
    at += report.rows.back().size();
  }
  ZERO_CHECK(in && at == text.size(), "the report ", path);
  folder.remove(name_of(rank));
  return report;
}

ManifestMerge::ManifestMerge(Manifest& manifest) : manifest_(manifest) {
  for (auto& tensor : manifest.tensors) by_name_[{tensor.kind, tensor.name}] = &tensor;
}

void ManifestMerge::add(RankReport&& report) {
  const auto base = static_cast<std::uint32_t>(manifest_.files.size());
  for (auto& tensor : report.shared) {
    const auto found = by_name_.find({tensor.kind, tensor.name});
    ZERO_CHECK(found != by_name_.end(), "no tensor ", tensor.kind, " of ", tensor.name);
    for (auto& part : tensor.parts) {
      part.file += base;
      found->second->parts.push_back(part);
    }
  }
  for (auto& tensor : report.own) {
    private_.emplace_back(tensor.kind, tensor.name);
    for (auto& part : tensor.parts) part.file += base;
  }
  manifest_.ranks.push_back(std::move(report.own));
  for (std::size_t i = 0; i < report.files.size(); ++i) {
    rows_.emplace_back(report.files[i].name, std::move(report.rows[i]));
    manifest_.files.push_back(std::move(report.files[i]));
  }
}

void ManifestMerge::finish(const Folder& folder) {
  std::sort(private_.begin(), private_.end());
  std::erase_if(manifest_.tensors, [&](const Tensor& tensor) {
    return std::binary_search(private_.begin(), private_.end(), std::make_pair(tensor.kind, tensor.name));
  });
  for (auto& tensor : manifest_.tensors)
    std::sort(tensor.parts.begin(), tensor.parts.end(), [](const Part& a, const Part& b) { return a.start < b.start; });
  manifest_.files.push_back(write_blocks(folder, rows_));
  manifest_.blocks = kBlocksName;
}

}  // namespace zero::formats
