// See stored_source.h.
#include "interchange/stored_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "base/check.h"
#include "base/printable.h"
#include "formats/safetensors.h"
#include "formats/slices.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;

constexpr std::size_t kMostOpen = 32;
// A record that is read through its strides is kept in memory up to this size.
constexpr std::uint64_t kMostKept = std::uint64_t{64} << 20;

// The number of elements, from each of those of `shape` in row-major order, that follow each other in the record too.
std::int64_t dense_run(const StoredTensor& stored) {
  std::int64_t run = 1;
  for (auto d = stored.shape.size(); d-- > 0;) {
    if (stored.shape[d] == 1) continue;
    if (stored.stride[d] != run) break;
    run *= stored.shape[d];
  }
  return run;
}

// `name`: with folders before it.
formats::File open_below(const formats::Folder& folder, const std::string& name) {
  const auto slash = name.find('/');
  if (slash == std::string::npos) return folder.open_file(name);
  return open_below(folder.folder(name.substr(0, slash)), name.substr(slash + 1));
}

}  // namespace

std::size_t StoredFiles::add(const std::string& name) {
  files_.push_back({name, {}, {}});
  (void)open(files_.size() - 1);
  return files_.size() - 1;
}

const formats::File& StoredFiles::open(std::size_t file) {
  auto& known = files_[file];
  if (known.file) return *known.file;
  if (open_ >= kMostOpen) {
    for (auto& other : files_) other.file.reset();
    open_ = 0;
  }
  known.file.emplace(open_below(root_, known.name));
  ++open_;
  if (!known.info) known.info = known.file->info();
  check_unchanged(file);
  return *known.file;
}

void StoredFiles::check_unchanged(std::size_t file) {
  auto& known = files_[file];
  const auto now = known.file->info();
  if (now.bytes != known.info->bytes || now.inode != known.info->inode || now.device != known.info->device ||
      now.modified_ns != known.info->modified_ns)
    fail_damaged(known.file->path(), "was replaced or changed while it was read");
}

std::string StoredSource::own_name(const std::string& name) const {
  if (!formats::valid_key(name) || base::printable(name, base::Lines::Escape) != name)
    fail_damaged(files_.root().path(), "names a tensor \"" + base::printable(name.substr(0, 80), base::Lines::Escape) +
                                           "\", expected 1 to 4096 bytes of printable UTF-8");
  if (!name.starts_with(options_.prefix) || name.size() == options_.prefix.size())
    throw ConfigError("[checkpoint] " + files_.root().path() + ": the tensor " + name +
                      " does not begin with the prefix \"" + options_.prefix + "\"");
  return name.substr(options_.prefix.size());
}

void StoredSource::add(const std::string& kind, const std::string& name, const std::string& dtype,
                       const std::vector<std::int64_t>& shape, std::vector<Piece> pieces,
                       std::vector<std::vector<formats::Box>> slices) {
  const auto own = own_name(name);
  std::int64_t end = 0;
  std::erase_if(pieces, [](const Piece& piece) { return piece.numel == 0; });
  for (const auto& piece : pieces) {
    if (piece.begin != end || piece.stored.dtype != dtype)
      fail_damaged(files_.root().path(), base::join(kind, " of ", name, " has a piece of ", piece.stored.dtype,
                                                    " at element ", piece.begin, ", expected ", dtype, " at ", end));
    ZERO_CHECK(piece.at >= 0 && piece.at + piece.numel <= formats::numel_of(piece.stored.shape), "a piece of ", name);
    end += piece.numel;
  }
  if (end != formats::numel_of(shape))
    fail_damaged(files_.root().path(),
                 base::join(kind, " of ", name, " has ", end, " elements, expected ", formats::numel_of(shape)));
  if (!made_.emplace(std::pair(kind, own), Made{std::move(pieces), std::move(slices)}).second)
    fail_damaged(files_.root().path(), base::join("has ", kind, " of ", name, " twice, expected it once"));
  tensors_.push_back({kind, own, dtype, shape});
}

void StoredSource::add(const std::string& kind, const std::string& name, std::size_t file, StoredTensor stored) {
  const auto shape = stored.shape;
  const auto dtype = stored.dtype;
  Piece piece;
  piece.numel = formats::numel_of(shape);
  piece.file = file;
  piece.stored = std::move(stored);
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  add(kind, name, dtype, shape, std::move(pieces));
}

void StoredSource::sort() {
  std::sort(tensors_.begin(), tensors_.end(), [](const SourceTensor& a, const SourceTensor& b) {
    return std::tie(a.kind, a.name) < std::tie(b.kind, b.name);
  });
}

void StoredSource::read(const SourceTensor& tensor, std::int64_t begin, std::int64_t numel, void* out) {
  const auto found = made_.find({tensor.kind, tensor.name});
  ZERO_CHECK(found != made_.end() && begin >= 0 && numel >= 0 && begin <= formats::numel_of(tensor.shape) - numel,
             "elements ", begin, " + ", numel, " of ", tensor.kind, " ", tensor.name);
  if (numel == 0) return;
  auto& [pieces, slices] = found->second;
  const auto width = static_cast<std::int64_t>(formats::bits_of(tensor.dtype) / 8);
  auto runs = slices.empty() ? std::vector<formats::Run>{{begin, begin, numel}}
                             : formats::runs_between(tensor.shape, {}, slices, begin, begin + numel);
  for (const auto& run : runs) {
    auto piece = std::upper_bound(pieces.begin(), pieces.end(), run.stored,
                                  [](std::int64_t at, const Piece& one) { return at < one.begin; }) -
                 1;
    for (std::int64_t done = 0; done < run.numel; ++piece) {
      const auto at = run.stored + done - piece->begin;
      const auto some = std::min(run.numel - done, piece->numel - at);
      resolve(*piece);
      read_stored(piece->file, piece->stored, piece->at + at, some,
                  static_cast<char*>(out) + (run.wanted + done - begin) * width);
      done += some;
    }
  }
  if (tensor.dtype == "BOOL")
    formats::check_bool_bytes(out, static_cast<std::size_t>(numel), begin, files_.root().path(), tensor.name);
}

void StoredSource::resolve(Piece& piece) {
  if (piece.archive_bytes == 0) return;
  const TorchArchive one(files_.open(piece.file), piece.archive_begin, piece.archive_bytes, options_.ignore_crc);
  auto stored = one.require_tensor(one.root());
  if (stored.dtype != piece.stored.dtype || stored.shape != piece.stored.shape)
    one.root().fail("a tensor of another type or shape", "that of the table of tensors");
  piece.stored = std::move(stored);
  piece.archive_bytes = 0;
}

void StoredSource::read_stored(std::size_t file, const StoredTensor& stored, std::int64_t at, std::int64_t numel,
                               void* out) {
  const auto& opened = files_.open(file);
  const auto width = static_cast<std::uint64_t>(formats::bits_of(stored.dtype) / 8);
  const auto bytes = static_cast<std::uint64_t>(numel) * width;
  const bool dense = stored.contiguous();
  const bool unchecked =
      stored.record.has_crc && !options_.ignore_crc && !checked_.contains({file, stored.record.begin});
  if (unchecked && dense && stored.offset == 0 && at == 0 && bytes == stored.record.bytes) {
    check_record(opened, stored.record_name, stored.record, out);
  } else {
    if (unchecked) check_record(opened, stored.record_name, stored.record);
    if (dense)
      opened.read(out, bytes, stored.record.begin + static_cast<std::uint64_t>(stored.offset + at) * width);
    else
      read_strided(opened, stored, at, numel, static_cast<char*>(out));
  }
  files_.check_unchanged(file);
  checked_.emplace(file, stored.record.begin);
}

void StoredSource::read_strided(const formats::File& file, const StoredTensor& stored, std::int64_t at,
                                std::int64_t numel, char* out) {
  const auto width = static_cast<std::int64_t>(formats::bits_of(stored.dtype) / 8);
  const bool keep = stored.record.bytes <= kMostKept;
  if (const std::pair<std::size_t, std::uint64_t> wanted(static_cast<std::size_t>(file.info().inode),
                                                         stored.record.begin);
      keep && (kept_ != wanted || kept_bytes_.size() != stored.record.bytes)) {
    kept_bytes_.resize(stored.record.bytes);
    file.read(kept_bytes_.data(), kept_bytes_.size(), stored.record.begin);
    kept_ = wanted;
  }
  const auto run = dense_run(stored);
  for (std::int64_t done = 0; done < numel;) {
    const auto some = std::min(numel - done, run - (at + done) % run);
    // Its place in the record, from the last dimension to the first.
    std::int64_t index = at + done, place = stored.offset;
    for (auto d = stored.shape.size(); d-- > 0;) {
      place += index % stored.shape[d] * stored.stride[d];
      index /= stored.shape[d];
    }
    if (keep)
      std::memcpy(out + done * width, kept_bytes_.data() + place * width, static_cast<std::size_t>(some * width));
    else
      file.read(out + done * width, static_cast<std::size_t>(some * width),
                stored.record.begin + static_cast<std::uint64_t>(place * width));
    done += some;
  }
}

std::int64_t StoredSource::count_of(std::size_t file, const StoredTensor& stored) {
  double value = -1;
  if (formats::numel_of(stored.shape) == 1 && stored.dtype == "F32") {
    float number = 0;
    read_stored(file, stored, 0, 1, &number);
    value = number;
  } else if (formats::numel_of(stored.shape) == 1 && stored.dtype == "I64") {
    std::int64_t number = 0;
    read_stored(file, stored, 0, 1, &number);
    value = static_cast<double>(number);
  } else if (formats::numel_of(stored.shape) == 1 && stored.dtype == "F64") {
    read_stored(file, stored, 0, 1, &value);
  }
  if (!(value >= 0) || value != std::floor(value) || value > static_cast<double>(formats::kMostCount))
    fail_damaged(files_.open(file).path(), base::join("has the step count ", value, " in a tensor of ", stored.dtype,
                                                      ", expected one non-negative integer"));
  return static_cast<std::int64_t>(value);
}

}  // namespace zero::interchange
