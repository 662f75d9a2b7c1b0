// Targets that read files of other libraries. See targets.h.
#include <algorithm>
#include <cstring>
#include <string>

#include "formats/safetensors.h"
#include "fuzz/accepts.h"
#include "fuzz/targets.h"
#include "interchange/dcp_metadata.h"
#include "interchange/dcp_shards.h"
#include "interchange/names.h"
#include "interchange/torch_archive.h"
#include "interchange/weight_index.h"
#include "interchange/zip.h"
#include "pickle/pickle.h"

namespace zero::test {
namespace {

// A folder in which every name is the same file.
class OneFile : public formats::FsOps {
 public:
  explicit OneFile(std::string_view bytes) : bytes_(bytes) {}
  int open_folder(const char*) override { return 1000; }
  int open_folder_at(int, const char*) override { return 1000; }
  int open_read_at(int, const char*) override { return 1001; }
  int close(int) override { return 0; }
  ssize_t pread(int, void* out, std::size_t count, std::uint64_t offset) override {
    if (offset >= bytes_.size()) return 0;
    const auto some = std::min<std::size_t>(count, bytes_.size() - offset);
    std::memcpy(out, bytes_.data() + offset, some);
    return static_cast<ssize_t>(some);
  }
  int info(int fd, formats::FileInfo* out) override {
    *out = {};
    out->regular = fd == 1001;
    out->directory = fd == 1000;
    out->bytes = bytes_.size();
    return 0;
  }
  int info_at(int, const char*, formats::FileInfo* out) override { return info(1001, out); }
  int list(int, std::vector<std::string>* names) override {
    *names = {"shard-00001-model-00001-of-00001.safetensors"};
    return 0;
  }

 private:
  std::string_view bytes_;
};

void pickles(std::string_view bytes) {
  try {
    const ::pickle::Tree tree(bytes);
    (void)::pickle::Tree::text_of(tree.root());
  } catch (const ::pickle::Fault&) {
  }
}

void zips(std::string_view bytes) {
  OneFile files(bytes);
  (void)accepts([&] {
    const formats::File file(files, 1001, "f");
    const auto directory = interchange::read_zip(file, 0, bytes.size());
    for (const auto& [name, record] : directory.records) {
      require(record.begin <= bytes.size() && record.bytes <= bytes.size() - record.begin,
              "a record lies outside of its file");
      (void)accepts(
          [&, &name = name, &record = record] { (void)interchange::read_record(file, name, record, 1 << 20, false); });
    }
  });
}

// Every value of the tree that may be a tensor.
void visit(const interchange::TorchArchive& archive, const interchange::PickleView& value, int depth) {
  (void)accepts([&] {
    if (const auto tensor = archive.tensor(value)) {
      std::int64_t last = tensor->offset;
      for (std::size_t d = 0; d < tensor->shape.size(); ++d) {
        if (tensor->shape[d] == 0) return;
        last += (tensor->shape[d] - 1) * tensor->stride[d];
      }
      const auto width = static_cast<std::uint64_t>(std::max(1, formats::bits_of(tensor->dtype) / 8));
      require(tensor->offset >= 0 && last >= 0 && static_cast<std::uint64_t>(last + 1) * width <= tensor->record.bytes,
              "a tensor lies outside of its record");
    }
  });
  if (depth > 8) return;
  for (const auto* item : value.node().items) visit(archive, {*item, "f"}, depth + 1);
}

void torch_archives(std::string_view bytes) {
  OneFile files(bytes);
  (void)accepts([&] {
    const formats::File file(files, 1001, "f");
    const interchange::TorchArchive archive(file, 0, bytes.size(), true);
    visit(archive, archive.root(), 0);
  });
}

void dcp_metadata(std::string_view bytes) {
  OneFile files(bytes);
  (void)accepts([&] { (void)interchange::read_dcp_metadata(formats::Folder::open(files, "d")); });
}

void dcp_shards(std::string_view bytes) {
  OneFile files(bytes);
  (void)accepts([&] {
    const auto table = interchange::read_dcp_shards(formats::Folder::open(files, "d"));
    for (const auto& [name, tensor] : table.tensors)
      for (const auto& [box, item] : tensor.boxes)
        if (item.begin > bytes.size() || item.bytes > bytes.size() - item.begin) {
          std::fprintf(stderr, "fuzz: a box lies outside of its file\n");
          std::abort();
        }
  });
}

void weight_indices(std::string_view bytes) {
  OneFile files(bytes);
  (void)accepts([&] { (void)interchange::read_weight_index(formats::Folder::open(files, "d"), "f"); });
}

void name_maps(std::string_view bytes) {
  (void)accepts([&] {
    const auto map = interchange::NameMap::parse(bytes, "f");
    const std::vector<interchange::SourceTensor> tensors{{"weight", "h.0.attn.weight", "F32", {4, 6}},
                                                         {"weight", "wte.weight", "F32", {8, 4}}};
    for (const auto direction : {interchange::Direction::ToOurs, interchange::Direction::ToTheirs})
      (void)accepts([&] { (void)interchange::map_names(map, direction, tensors, {}, "f"); });
  });
}

constexpr FuzzTarget kTargets[] = {{"pickle", pickles},   {"zip", zips},          {"torch", torch_archives},
                                   {"dcp", dcp_metadata}, {"shards", dcp_shards}, {"index", weight_indices},
                                   {"names", name_maps}};

}  // namespace

std::span<const FuzzTarget> interchange_fuzz_targets() { return kTargets; }

}  // namespace zero::test
