// See dcp_source.h.
#include "interchange/dcp_source.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "base/printable.h"
#include "interchange/dcp_metadata.h"
#include "interchange/dcp_shards.h"
#include "interchange/stored_source.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;
using formats::numel_of;

// Objects that are opened: hyper-parameters, counters.
constexpr std::size_t kMostObjects = 1000;
constexpr std::uint64_t kMostObjectBytes = std::uint64_t{16} << 20;

// optim.state.NAME.SLOT, after the dictionary of the optimizer.
struct Slot {
  std::string parameter, slot;
};

class DcpSource : public StoredSource {
 public:
  DcpSource(formats::Folder folder, const SourceOptions& options)
      : StoredSource("dcp", std::move(folder), options),
        metadata_(files_.root().exists(kDcpMetadata) ? read_dcp_metadata(files_.root())
                                                     : read_dcp_shards(files_.root())) {
    // Without a table of nested dictionaries, "model." is a part of names unless states are stored next to it.
    if (metadata_.archives || has_states()) find_containers();
    read_objects();
    std::map<std::string, const DcpTensor*> model;
    std::map<std::string, std::pair<Slot, const DcpTensor*>> slots;
    for (const auto& [name, tensor] : metadata_.tensors) {
      if (Slot slot; slot_in(name, slot))
        slots.emplace(name, std::pair(slot, &tensor));
      else if (options_.prefix.empty() ? name.starts_with(model_) : name.starts_with(options_.prefix))
        model.emplace(options_.prefix.empty() ? name.substr(model_.size()) : name, &tensor);
      else
        remark(base::printable(name + ": a tensor outside of the model", base::Lines::Escape));
    }
    for (const auto& [name, found] : slots) trained_.insert(found.first.parameter);
    std::set<std::int64_t> steps;
    for (const auto& [name, found] : slots) {
      const auto& [slot, tensor] = found;
      const auto own = options_.prefix + slot.parameter;  // of a prefix, the model's names have it
      if (!model.contains(own)) {
        remark(base::printable(name + ": a state of a parameter that the model does not have", base::Lines::Escape));
      } else if (slot.slot == "step" && tensor->boxes.size() == 1) {
        steps.insert(step_of(*tensor));
      } else {
        if (tensor->shape != model.at(own)->shape)
          fail_damaged(files_.root().path(), name + " has another shape than its parameter");
        add_boxes("opt." + slot.slot, own, *tensor);
      }
    }
    for (const auto& [name, tensor] : model)
      add_boxes(trained_.contains(name.substr(options_.prefix.size())) ? "master" : "weight", name, *tensor);
    if (!steps.empty()) {
      progress_.emplace();
      progress_->global_steps = progress_->applied_steps = *steps.rbegin();
      if (has_slot("opt.exp_avg_sq")) progress_->optimizer = "AdamW";
      if (steps.size() > 1)
        remark(base::join("parameters were updated between ", *steps.begin(), " and ", *steps.rbegin(), " times"));
    }
    sort();
  }

 private:
  // The dictionaries of model and optimizer. Without a table of the nested keys, by the usual names.
  void find_containers() {
    const auto nested = [&](const std::string& container) {
      for (const auto& [name, tensor] : metadata_.tensors) {
        if (!name.starts_with(container + ".")) continue;
        const auto path = metadata_.paths.find(name);
        if (path == metadata_.paths.end() || (path->second.size() > 1 && path->second[0] == container)) return true;
      }
      return false;
    };
    for (const char* const one : {"model", "module"})
      if (model_.empty() && nested(one)) model_ = std::string(one) + ".";
    for (const char* const one : {"optim", "optimizer"})
      if (optimizer_.empty() && nested(one)) optimizer_ = std::string(one) + ".";
  }

  bool has_states() const {
    return std::any_of(metadata_.tensors.begin(), metadata_.tensors.end(), [](const auto& one) {
      return one.first.starts_with("optim.state.") || one.first.starts_with("optimizer.state.");
    });
  }

  bool slot_in(const std::string& name, Slot& out) const {
    const auto prefix = optimizer_ + "state.";
    if (optimizer_.empty() || !name.starts_with(prefix)) return false;
    const auto dot = name.rfind('.');
    if (dot <= prefix.size()) return false;
    out = {name.substr(prefix.size(), dot - prefix.size()), name.substr(dot + 1)};
    return true;
  }

  bool has_slot(const std::string& kind) const {
    return std::any_of(tensors().begin(), tensors().end(), [&](const auto& tensor) { return tensor.kind == kind; });
  }

  std::size_t file_of(const DcpItem& item) {
    auto found = by_name_.find(item.file);
    if (found == by_name_.end()) found = by_name_.emplace(item.file, files_.add(item.file)).first;
    const auto size = files_.bytes(found->second);
    if (item.begin > size || item.bytes > size - item.begin)
      fail_damaged(files_.root().path_of(item.file),
                   base::join("has ", size, " bytes, expected an item of ", item.bytes, " at ", item.begin));
    return found->second;
  }

  void read_objects() {
    for (const auto& [name, item] : metadata_.objects) {
      const bool named =
          !optimizer_.empty() && name.starts_with(optimizer_ + "param_groups.") && name.ends_with(".params");
      if (!named && (remarks().size() >= kMostObjects || item.bytes > kMostObjectBytes)) {
        if (remarks().size() < kMostObjects) remark(base::printable(name + ": an object", base::Lines::Escape));
        continue;
      }
      const auto file = file_of(item);
      const TorchArchive one(files_.open(file), item.begin, item.bytes, options_.ignore_crc);
      const auto root = one.root();
      if (named && root.node().is(pickle::Kind::List))
        for (const auto& parameter : root.items())
          if (parameter.node().is(pickle::Kind::Text)) trained_.insert(parameter.text());
      if (remarks().size() < kMostObjects) remark(base::printable(name + ": " + root.line(), base::Lines::Escape));
    }
  }

  std::int64_t step_of(const DcpTensor& tensor) {
    const auto& item = tensor.boxes[0].second;
    const auto file = file_of(item);
    if (!metadata_.archives) return count_of(file, bytes_of(item, tensor.dtype, tensor.shape));
    const TorchArchive one(files_.open(file), item.begin, item.bytes, options_.ignore_crc);
    return count_of(file, one.require_tensor(one.root()));
  }

  // A tensor whose bytes are an item.
  static StoredTensor bytes_of(const DcpItem& item, const std::string& dtype, const std::vector<std::int64_t>& shape) {
    StoredTensor stored;
    stored.dtype = dtype;
    stored.shape = shape;
    stored.stride.assign(shape.size(), 1);
    for (std::size_t d = shape.size(); d-- > 1;) stored.stride[d - 1] = stored.stride[d] * shape[d];
    stored.record_name = item.file;
    stored.record = {item.begin, item.bytes, 0, /*has_crc=*/false};
    return stored;
  }

  void add_boxes(const std::string& kind, const std::string& name, const DcpTensor& tensor) {
    std::vector<Piece> pieces;
    std::vector<std::vector<formats::Box>> slices;
    std::int64_t begin = 0;
    for (const auto& [box, item] : tensor.boxes) {
      Piece piece;
      piece.begin = begin;
      piece.numel = numel_of(box.size);
      piece.file = file_of(item);
      if (metadata_.archives) {
        piece.stored.dtype = tensor.dtype;
        piece.stored.shape = box.size;
        piece.archive_begin = item.begin;
        piece.archive_bytes = item.bytes;
      } else {
        piece.stored = bytes_of(item, tensor.dtype, box.size);
      }
      begin += piece.numel;
      pieces.push_back(std::move(piece));
      slices.push_back({box});
    }
    if (slices.size() == 1 && slices[0][0].size == tensor.shape) slices.clear();
    add(kind, name, tensor.dtype, tensor.shape, std::move(pieces), std::move(slices));
  }

  DcpMetadata metadata_;
  std::string model_, optimizer_;  // with the dot
  std::set<std::string> trained_;
  std::map<std::string, std::size_t> by_name_;
};

}  // namespace

std::unique_ptr<TensorSource> open_dcp(formats::FsOps& fs, const std::string& path, const SourceOptions& options) {
  return std::make_unique<DcpSource>(formats::Folder::open(fs, path), options);
}

}  // namespace zero::interchange
