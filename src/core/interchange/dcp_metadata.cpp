// See dcp_metadata.h. The classes are those of torch/distributed/checkpoint/metadata.py and filesystem.py.
#include "interchange/dcp_metadata.h"

#include <algorithm>

#include "base/check.h"
#include "interchange/dcp_source.h"
#include "interchange/torch_archive.h"

namespace zero::interchange {
namespace {

using formats::Box;
using formats::numel_of;

constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;
constexpr const char* kModule = "torch.distributed.checkpoint.metadata.";

bool is_a(const PickleView& value, const char* name) { return value.is_object((std::string(kModule) + name).c_str()); }

std::vector<std::int64_t> sizes_of(const PickleView& view, std::size_t dims) {
  auto sizes = view.shape();
  if (sizes.size() != dims) view.fail(base::join(sizes.size(), " dimensions"), base::join(dims));
  return sizes;
}

using Key = std::pair<std::string, std::vector<std::int64_t>>;

// Where each item is. The offset of an object is empty, as that of a scalar.
std::map<Key, DcpItem> items_of(const PickleView& storage) {
  std::map<Key, DcpItem> items;
  if (!storage.is_dict()) storage.fail_type("a dictionary");
  storage.node().each([&](const pickle::Node& key_node, const pickle::Node& value_node) {
    const PickleView key(key_node, storage.path(), storage.place()), value(value_node, storage.path(), storage.place());
    if (!is_a(key, "MetadataIndex") || !value.is_object("torch.distributed.checkpoint.filesystem._StorageInfo"))
      value.fail_type("where an item is stored");
    Key name{key.attribute("fqn").text(), {}};
    if (key.has_attribute("offset")) name.second = key.attribute("offset").shape();
    DcpItem item;
    item.file = value.attribute("relative_path").text();
    item.begin = static_cast<std::uint64_t>(value.attribute("offset").count());
    item.bytes = static_cast<std::uint64_t>(value.attribute("length").count());
    if (!formats::valid_file_name(item.file)) value.fail("in the file \"" + item.file + "\"", "a plain name");
    if (value.has_attribute("transform_descriptors") && !value.attribute("transform_descriptors").node().items.empty())
      value.fail("compressed or encrypted", "an item as torch.save writes it. Hint: save without extensions");
    if (!items.emplace(name, item).second) key.fail("the item " + name.first + " again", "each once");
  });
  return items;
}

}  // namespace

std::optional<TilingFault> tiling_fault(const std::vector<std::int64_t>& shape, std::vector<Box> boxes) {
  std::int64_t covered = 0;
  for (const auto& box : boxes) {
    for (std::size_t d = 0; d < shape.size(); ++d)
      if (box.start[d] > shape[d] || box.size[d] > shape[d] - box.start[d])
        return TilingFault{"a box beyond the tensor", "boxes in it"};
    covered += numel_of(box.size);
    if (covered > numel_of(shape)) break;
  }
  if (covered != numel_of(shape))
    return TilingFault{base::join("boxes of ", covered, " elements"), base::join(numel_of(shape))};
  std::erase_if(boxes, [](const Box& box) { return numel_of(box.size) == 0; });
  if (shape.empty()) return std::nullopt;
  std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.start < b.start; });
  for (std::size_t i = 0; i < boxes.size(); ++i)
    for (std::size_t j = i + 1; j < boxes.size() && boxes[j].start[0] < boxes[i].start[0] + boxes[i].size[0]; ++j) {
      bool common = true;
      for (std::size_t d = 0; d < shape.size(); ++d)
        common = common && boxes[i].start[d] < boxes[j].start[d] + boxes[j].size[d] &&
                 boxes[j].start[d] < boxes[i].start[d] + boxes[i].size[d];
      if (common) return TilingFault{"boxes that overlap", "each element once"};
    }
  return std::nullopt;
}

DcpMetadata read_dcp_metadata(const formats::Folder& folder) {
  const auto path = folder.path_of(kDcpMetadata);
  const auto bytes = folder.read_file(kDcpMetadata, kMostBytes);
  const auto tree = parse_pickle(bytes, path);
  const PickleView root(tree.root(), path);
  if (!is_a(root, "Metadata")) root.fail_type("torch.distributed.checkpoint's Metadata");
  const auto items = items_of(root.attribute("storage_data"));
  DcpMetadata metadata;
  for (const auto& [name, entry] : root.attribute("state_dict_metadata").entries()) {
    const auto item_at = [&, &name = name, &entry = entry](const std::vector<std::int64_t>& offset) {
      const auto found = items.find({name, offset});
      if (found == items.end()) entry.fail("an item that storage_data does not have", "all of them");
      return found->second;
    };
    if (is_a(entry, "BytesStorageMetadata")) {
      metadata.objects[name] = item_at({});
      continue;
    }
    if (!is_a(entry, "TensorStorageMetadata")) entry.fail_type("the table of a tensor");
    DcpTensor tensor;
    const auto properties = entry.attribute("properties");
    if (!is_a(properties, "TensorProperties") || !properties.node().state)
      properties.fail_type("a tensor's properties");
    // (dtype, layout, requires_grad, memory format, pinned)
    const PickleView state(*properties.node().state, path, properties.place());
    const auto dtype = state.item(0);
    const char* const known = dtype_of_torch(dtype.node());
    if (!known) dtype.fail_type("a known element type");
    tensor.dtype = known;
    tensor.shape = entry.attribute("size").shape();
    std::vector<Box> boxes;
    for (const auto& chunk : entry.attribute("chunks").items()) {
      if (!is_a(chunk, "ChunkStorageMetadata")) chunk.fail_type("a box");
      Box box{sizes_of(chunk.attribute("offsets"), tensor.shape.size()),
              sizes_of(chunk.attribute("sizes"), tensor.shape.size())};
      boxes.push_back(box);
      if (numel_of(box.size) == 0) continue;
      auto item = item_at(box.start);
      tensor.boxes.emplace_back(std::move(box), std::move(item));
    }
    if (const auto fault = tiling_fault(tensor.shape, boxes)) entry.fail(fault->got, fault->expected);
    metadata.tensors.emplace(name, std::move(tensor));
  }
  if (root.has_attribute("planner_data") && root.attribute("planner_data").is_dict())
    for (const auto& [name, keys] : root.attribute("planner_data").entries()) {
      if (!keys.node().is(pickle::Kind::Tuple)) continue;
      auto& list = metadata.paths[name];
      for (const auto& key : keys.items()) list.push_back(key.node().is(pickle::Kind::Text) ? key.text() : key.line());
    }
  return metadata;
}

}  // namespace zero::interchange
