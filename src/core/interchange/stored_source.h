// Base of the readers of torch files: tensors that are made of pieces of stored tensors. A reader of a
// format says which pieces; this reads them, in any range, with every record's CRC compared before its first use.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "formats/files.h"
#include "formats/manifest.h"
#include "interchange/source.h"
#include "interchange/torch_archive.h"

namespace zero::interchange {

// The files of a directory, few of them open at once. A file that is opened again must be the same.
class StoredFiles {
 public:
  explicit StoredFiles(formats::Folder root) : root_(std::move(root)) {}
  const formats::Folder& root() const { return root_; }
  // `name`: of a file below the directory, folders with '/' before it. Opens it.
  std::size_t add(const std::string& name);
  // Valid until the next call.
  const formats::File& open(std::size_t file);
  std::uint64_t bytes(std::size_t file) const { return files_[file].info->bytes; }
  // Throws unless the open file is what it was when it was added.
  void check_unchanged(std::size_t file);

 private:
  struct Known {
    std::string name;
    std::optional<formats::FileInfo> info;
    std::optional<formats::File> file;
  };
  formats::Folder root_;
  std::vector<Known> files_;
  std::size_t open_ = 0;
};

// Elements [begin, begin + numel) of a tensor are elements [at, at + numel) of a stored one.
struct Piece {
  std::int64_t begin = 0, numel = 0;
  std::size_t file = 0;
  StoredTensor stored;
  std::int64_t at = 0;
  // Of a file that holds many archives: the range of the one that holds the stored tensor and nothing else. `stored` is
  // then its dtype and shape, and the rest is read when it is needed.
  std::uint64_t archive_begin = 0, archive_bytes = 0;
};

class StoredSource : public TensorSource {
 public:
  StoredSource(std::string format, formats::Folder root, SourceOptions options)
      : files_(std::move(root)), options_(std::move(options)), format_(std::move(format)) {}

  const std::string& format() const override { return format_; }
  const std::vector<SourceTensor>& tensors() const override { return tensors_; }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }
  const std::optional<SourceProgress>& progress() const override { return progress_; }
  const std::vector<std::string>& remarks() const override { return remarks_; }
  void read(const SourceTensor& tensor, std::int64_t begin, std::int64_t numel, void* out) override;

 protected:
  TorchArchive archive(std::size_t file) {
    return TorchArchive(files_.open(file), 0, files_.bytes(file), options_.ignore_crc);
  }
  // The name without options.prefix. Throws ConfigError if it does not begin with it, IoError if it is not a name.
  std::string own_name(const std::string& name) const;
  // Pieces are in order and have every element once: else damage. Slices: how the pieces number the elements, as in a
  // manifest; empty: row-major.
  void add(const std::string& kind, const std::string& name, const std::string& dtype,
           const std::vector<std::int64_t>& shape, std::vector<Piece> pieces,
           std::vector<std::vector<formats::Box>> slices = {});
  // One stored tensor as it is.
  void add(const std::string& kind, const std::string& name, std::size_t file, StoredTensor stored);
  void alias(const std::string& name, const std::string& stored) { aliases_[own_name(name)] = own_name(stored); }
  void remark(std::string text) { remarks_.push_back(std::move(text)); }
  // The value of a stored scalar, which must be a non-negative integer.
  std::int64_t count_of(std::size_t file, const StoredTensor& stored);
  void read_stored(std::size_t file, const StoredTensor& stored, std::int64_t at, std::int64_t numel, void* out);
  void sort();  // by kind and name

  StoredFiles files_;
  SourceOptions options_;
  std::optional<SourceProgress> progress_;

 private:
  struct Made {
    std::vector<Piece> pieces;
    std::vector<std::vector<formats::Box>> slices;
  };
  void resolve(Piece& piece);
  void read_strided(const formats::File& file, const StoredTensor& stored, std::int64_t at, std::int64_t numel,
                    char* out);

  std::string format_;
  std::vector<SourceTensor> tensors_;
  std::map<std::pair<std::string, std::string>, Made> made_;
  std::map<std::string, std::string> aliases_;
  std::vector<std::string> remarks_;
  std::set<std::pair<std::size_t, std::uint64_t>> checked_;  // records, by file and first byte
  std::pair<std::size_t, std::uint64_t> kept_{};             // the record in kept_bytes_
  std::vector<char> kept_bytes_;
};

}  // namespace zero::interchange
