// One archive of torch.save (since torch 1.6): a zip file of a pickle and the bytes of the storages that it refers to.
// The pickle is read, never executed. What torch.load would build of it is given by a fixed table for tensors; all else
// stays a tree.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/files.h"
#include "interchange/pickle_view.h"
#include "interchange/zip.h"

namespace zero::interchange {

// A tensor as a view of a record. All of it lies within the record: proved when it was made.
struct StoredTensor {
  std::string dtype;                        // "F32"
  std::vector<std::int64_t> shape, stride;  // in elements
  std::int64_t offset = 0;                  // of the first element, in elements from the record's first
  std::string record_name;
  StoredRecord record;

  bool contiguous() const;
};

// Names of tensors by their elements, to find those that are tied. A file may have a million.
class TiedNames {
 public:
  // The name under which the same elements, in the same shape, were put before; null if this is the first. The elements
  // of empty tensors are never the same.
  const std::string* put(const std::string& name, const StoredTensor& stored);

 private:
  struct ByElements {
    bool operator()(const StoredTensor& a, const StoredTensor& b) const;
  };
  std::map<StoredTensor, std::string, ByElements> names_;
};

class TorchArchive {
 public:
  // The archive in [begin, begin + bytes) of the file. Reads the directory and the pickle, no tensor. Throws IoError
  // (kCheckpoint).
  TorchArchive(const formats::File& file, std::uint64_t begin, std::uint64_t bytes, bool ignore_crc);

  PickleView root() const { return {tree_->root(), path_}; }
  // The tensor of a value; nothing if the value is none. Throws for tensors of other kinds: sparse, quantised, with
  // another class, conjugated.
  std::optional<StoredTensor> tensor(const PickleView& value) const;
  // Whether a value is built like a tensor of any kind, readable or not.
  static bool is_tensor(const pickle::Node& value);
  // Throws if the value is no tensor.
  StoredTensor require_tensor(const PickleView& value) const;

 private:
  StoredTensor view_of(const PickleView& value, const std::vector<const pickle::Node*>& given, const char* dtype) const;

  std::string path_;
  ZipDirectory directory_;
  std::string bytes_;
  std::unique_ptr<pickle::Tree> tree_;
};

// The name of torch.float32 and others in safetensors ("F32"); null for other values.
const char* dtype_of_torch(const pickle::Node& value);

// Whether a file begins as torch.save wrote it before torch 1.6, or as a tar file of even older ones.
bool is_old_torch_file(std::string_view first_bytes);
// The error about such a file, with the line that converts it.
[[noreturn]] void fail_old_torch_file(const std::string& path);

}  // namespace zero::interchange
