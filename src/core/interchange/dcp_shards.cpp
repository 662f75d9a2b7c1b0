// See dcp_shards.h. The format is that of torch/distributed/checkpoint/hf_storage.py and _hf_utils.py.
#include "interchange/dcp_shards.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "base/check.h"
#include "formats/json.h"
#include "formats/safetensors.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;

constexpr const char* kShardBoxes = "DCP_SHARDING_INFO";
constexpr const char* kShardVersion = "DCP_VERSION";
constexpr const char* kKnownShardVersion = "1.0";

// Numbers of shards and of files of a shard, as the names have them.
void require_all_shards(const formats::Folder& folder, const std::vector<std::string>& names) {
  if (names.empty()) fail_damaged(folder.path(), "has no files of shards, expected one or more");
  std::set<std::string> shards;
  for (const auto& name : names) shards.insert(name.substr(6, 5));
  const auto last = std::stoll(*shards.rbegin());
  if (last != static_cast<std::int64_t>(shards.size()))
    fail_damaged(folder.path(),
                 base::join("has files of ", shards.size(), " shards, expected all up to number ", last));
}

// Where each of a file's tensors begins in the whole one.
std::map<std::string, std::vector<std::int64_t>> offsets_in(const formats::Header& header, const std::string& path) {
  const auto found = header.metadata.find(kShardBoxes);
  if (found == header.metadata.end())
    fail_damaged(path, base::join("has no ", kShardBoxes, " in __metadata__, expected the places of its tensors"));
  if (const auto version = header.metadata.find(kShardVersion);
      version != header.metadata.end() && version->second != kKnownShardVersion)
    fail_damaged(path, base::join("has ", kShardVersion, " ", version->second, ", expected ", kKnownShardVersion));
  const auto label = path + ": " + kShardBoxes;
  const auto json = formats::parse_json(found->second, label, 4);
  std::map<std::string, std::vector<std::int64_t>> offsets;
  for (const auto& [name, entry] : formats::JsonView(json, label).fields()) {
    auto& list = offsets[name];
    for (const auto& offset : entry.has_only({"saved_offsets"}).at("saved_offsets").items())
      list.push_back(offset.count(formats::kMostCount));
  }
  return offsets;
}

}  // namespace

bool is_dcp_shard(const std::string& name) {
  constexpr std::string_view kLike = "shard-00000-model-00000-of-00000.safetensors";
  return name.size() == kLike.size() && std::equal(name.begin(), name.end(), kLike.begin(), [](char got, char like) {
           return like == '0' ? got >= '0' && got <= '9' : got == like;
         });
}

bool has_dcp_shards(const formats::Folder& folder) {
  const auto names = folder.names();
  return std::any_of(names.begin(), names.end(), is_dcp_shard);
}

DcpMetadata read_dcp_shards(const formats::Folder& folder) {
  auto names = folder.names();
  std::erase_if(names, [](const std::string& name) { return !is_dcp_shard(name); });
  require_all_shards(folder, names);
  DcpMetadata metadata;
  metadata.archives = false;
  for (const auto& name : names) {
    const auto file = folder.open_file(name);
    const auto header = formats::read_header(file);
    auto offsets = offsets_in(header, file.path());
    for (const auto& entry : header.tensors) {
      const auto found = offsets.find(entry.key);
      if (found == offsets.end() || found->second.size() != entry.shape.size())
        fail_damaged(file.path(), "does not say where the tensor " + entry.key +
                                      " begins, expected an offset of each " + "dimension");
      if (formats::bits_of(entry.dtype) % 8 != 0)
        fail_damaged(file.path(), "tensor " + entry.key + " has the dtype " + entry.dtype +
                                      ", whose elements are not whole bytes and cannot be read. Hint: dequantise it "
                                      "first");
      auto [known, first] = metadata.tensors.try_emplace(entry.key);
      auto& tensor = known->second;
      if (first) {
        tensor.dtype = entry.dtype;
        tensor.shape.assign(entry.shape.size(), 0);
      }
      if (tensor.dtype != entry.dtype || tensor.shape.size() != entry.shape.size())
        fail_damaged(file.path(),
                     "has the tensor " + entry.key + " in another type or number of dimensions than " + "another file");
      formats::Box box{std::move(found->second), entry.shape};
      for (std::size_t d = 0; d < box.size.size(); ++d)
        tensor.shape[d] = std::max(tensor.shape[d], box.start[d] + box.size[d]);
      tensor.boxes.emplace_back(std::move(box),
                                DcpItem{name, header.data_begin + entry.begin, entry.end - entry.begin});
      offsets.erase(found);
    }
    if (!offsets.empty())
      fail_damaged(file.path(), "says where the tensor " + offsets.begin()->first + " begins, and does not hold it");
  }
  for (auto& [name, tensor] : metadata.tensors) {
    std::vector<formats::Box> boxes;
    for (const auto& [box, item] : tensor.boxes) boxes.push_back(box);
    if (const auto fault = tiling_fault(tensor.shape, boxes))
      fail_damaged(folder.path(), "tensor " + name + " has " + fault->got + ", expected " + fault->expected);
    std::erase_if(tensor.boxes, [](const auto& one) { return formats::numel_of(one.first.size) == 0; });
  }
  return metadata;
}

}  // namespace zero::interchange
