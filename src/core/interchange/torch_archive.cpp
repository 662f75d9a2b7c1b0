// See torch_archive.h. The calls are those of torch/_utils.py and torch/serialization.py of torch 2.11.
#include "interchange/torch_archive.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;
using pickle::Kind;
using pickle::Node;

constexpr std::uint64_t kMostPickle = std::uint64_t{256} << 20;
// Elements of an expanded tensor (stride 0) beyond those of its storage.
constexpr std::int64_t kMostExpanded = std::int64_t{1} << 20;

constexpr std::pair<std::string_view, const char*> kStorages[] = {
    {"torch.FloatStorage", "F32"},     {"torch.DoubleStorage", "F64"},      {"torch.HalfStorage", "F16"},
    {"torch.BFloat16Storage", "BF16"}, {"torch.LongStorage", "I64"},        {"torch.IntStorage", "I32"},
    {"torch.ShortStorage", "I16"},     {"torch.CharStorage", "I8"},         {"torch.ByteStorage", "U8"},
    {"torch.BoolStorage", "BOOL"},     {"torch.ComplexFloatStorage", "C64"}};
constexpr std::pair<std::string_view, const char*> kTypes[] = {{"torch.float32", "F32"},
                                                               {"torch.float64", "F64"},
                                                               {"torch.float16", "F16"},
                                                               {"torch.bfloat16", "BF16"},
                                                               {"torch.int64", "I64"},
                                                               {"torch.int32", "I32"},
                                                               {"torch.int16", "I16"},
                                                               {"torch.int8", "I8"},
                                                               {"torch.uint8", "U8"},
                                                               {"torch.uint16", "U16"},
                                                               {"torch.uint32", "U32"},
                                                               {"torch.uint64", "U64"},
                                                               {"torch.bool", "BOOL"},
                                                               {"torch.complex64", "C64"},
                                                               {"torch.float8_e4m3fn", "F8_E4M3"},
                                                               {"torch.float8_e5m2", "F8_E5M2"},
                                                               {"torch.float8_e4m3fnuz", "F8_E4M3FNUZ"},
                                                               {"torch.float8_e5m2fnuz", "F8_E5M2FNUZ"},
                                                               {"torch.float8_e8m0fnu", "F8_E8M0"}};

template <std::size_t N>
const char* look_up(const std::pair<std::string_view, const char*> (&table)[N], const Node& name) {
  for (const auto& [known, dtype] : table)
    if (name.is(Kind::Global, known)) return dtype;
  return nullptr;
}

std::vector<std::int64_t> contiguous_stride(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> stride(shape.size());
  std::int64_t step = 1;
  for (auto d = shape.size(); d-- > 0;) {
    stride[d] = step;
    step *= std::max<std::int64_t>(shape[d], 1);
  }
  return stride;
}

}  // namespace

bool StoredTensor::contiguous() const {
  const auto wanted = contiguous_stride(shape);
  for (std::size_t d = 0; d < shape.size(); ++d)
    if (shape[d] != 1 && stride[d] != wanted[d]) return formats::numel_of(shape) == 0;
  return true;
}

bool TiedNames::ByElements::operator()(const StoredTensor& a, const StoredTensor& b) const {
  return std::tie(a.record.begin, a.offset, a.shape, a.stride, a.dtype) <
         std::tie(b.record.begin, b.offset, b.shape, b.stride, b.dtype);
}

const std::string* TiedNames::put(const std::string& name, const StoredTensor& stored) {
  if (stored.record.bytes == 0) return nullptr;
  const auto [place, is_new] = names_.emplace(stored, name);
  return is_new ? nullptr : &place->second;
}

TorchArchive::TorchArchive(const formats::File& file, std::uint64_t begin, std::uint64_t bytes, bool ignore_crc)
    : path_(file.path()), directory_(read_zip(file, begin, bytes)) {
  if (directory_.records.contains("constants.pkl"))
    fail_damaged(path_, "is a TorchScript module, expected a file of torch.save. Hint: save its state_dict()");
  const auto& whole = directory_.at("data.pkl", path_);
  const auto small = [&](const char* name) {
    const auto found = directory_.records.find(name);
    return found == directory_.records.end() ? std::string() : read_record(file, name, found->second, 64, ignore_crc);
  };
  if (const auto order = small("byteorder"); !order.empty() && order != "little")
    fail_damaged(path_, "was written on a big-endian machine, expected little-endian numbers");
  auto version = small("version");
  if (version.ends_with('\n')) version.pop_back();
  if (version != "3") fail_damaged(path_, "has version \"" + version + "\" of torch's archives, expected 3");
  bytes_ = read_record(file, "data.pkl", whole, kMostPickle, ignore_crc);
  tree_ = std::make_unique<pickle::Tree>(parse_pickle(bytes_, path_ + ": data.pkl"));
  path_ += ": data.pkl";
}

std::optional<StoredTensor> TorchArchive::tensor(const PickleView& value) const {
  const Node* node = &value.node();
  // Wrappers: a parameter, and torch.Tensor's own attributes.
  for (int depth = 0; depth < 4 && node->kind == Kind::Call; ++depth) {
    const auto& given = node->arguments();
    if (node->is_call("torch._utils._rebuild_parameter") && given.size() == 3) {
      node = given[0];
    } else if (node->is_call("torch._utils._rebuild_parameter_with_state") && given.size() == 4) {
      node = given[0];
    } else if (node->is_call("torch._tensor._rebuild_from_type_v2") && given.size() == 4) {
      if (!given[1]->is(Kind::Global, "torch.Tensor") && !given[1]->is(Kind::Global, "torch.nn.parameter.Parameter"))
        value.fail("a tensor of the class " + pickle::Tree::text_of(*given[1], 80), "torch.Tensor");
      if (given[2]->kind != Kind::Tuple || given[0]->kind != Kind::Global)
        value.fail_type("what a tensor is rebuilt from");
      // The function and its arguments, as a call.
      if (!given[0]->is(Kind::Global, "torch._utils._rebuild_tensor_v2"))
        value.fail("a tensor of " + pickle::Tree::text_of(*given[0], 80), "a dense one");
      return view_of(value, given[2]->items, nullptr);
    } else {
      break;
    }
  }
  if (node->kind != Kind::Call) return std::nullopt;
  const auto& given = node->arguments();
  if (node->is_call("torch._utils._rebuild_tensor_v2")) return view_of(value, given, nullptr);
  if (node->is_call("torch._utils._rebuild_tensor_v3")) {
    if (given.size() < 7) value.fail_type("a tensor");
    const char* const dtype = look_up(kTypes, *given[6]);
    if (!dtype) value.fail("a tensor of " + pickle::Tree::text_of(*given[6], 60), "a known element type");
    return view_of(value, given, dtype);
  }
  if (is_tensor(*node))
    value.fail("a tensor of " + std::string(node->items[0]->text),
               "a dense one. Hint: convert sparse and quantised tensors with to_dense() or dequantize()");
  return std::nullopt;
}

bool TorchArchive::is_tensor(const Node& value) {
  if (value.kind != Kind::Call || value.items[0]->kind != Kind::Global) return false;
  const auto name = value.items[0]->text;
  return name.starts_with("torch._utils._rebuild_") || name.starts_with("torch._tensor._rebuild_");
}

StoredTensor TorchArchive::require_tensor(const PickleView& value) const {
  auto found = tensor(value);
  if (!found) value.fail_type("a tensor");
  return *std::move(found);
}

// (storage, offset, shape, stride, requires_grad, hooks, [dtype,] metadata)
StoredTensor TorchArchive::view_of(const PickleView& value, const std::vector<const Node*>& given,
                                   const char* dtype) const {
  const std::size_t metadata = dtype ? 7 : 6;
  if (given.size() < 6 || given.size() > metadata + 1 || given[0]->kind != Kind::Persistent)
    value.fail_type("a tensor of a storage");
  if (given.size() > metadata && !given[metadata]->is(Kind::None) &&
      !(given[metadata]->is(Kind::Dict) && given[metadata]->items.empty()))
    value.fail("a tensor with " + pickle::Tree::text_of(*given[metadata], 60),
               "a plain one. Hint: save it after resolve_conj() and resolve_neg()");
  // ("storage", class, name of the record, device, elements)
  const PickleView id(*given[0]->items[0], value.path(), value.place() + "/storage");
  if (id.items().size() != 5 || id.item(0).text() != "storage") id.fail_type("a storage");
  const auto& type = id.item(1).node();
  const char* const storage = look_up(kStorages, type);
  const bool untyped = type.is(Kind::Global, "torch.storage.UntypedStorage");
  if (dtype ? !storage && !untyped : !storage)
    id.fail("a storage of " + pickle::Tree::text_of(type, 60), "a known element type");
  StoredTensor tensor;
  tensor.dtype = dtype ? dtype : storage;
  tensor.record_name = "data/" + id.item(2).text();
  tensor.record = directory_.at(tensor.record_name, value.path());
  const std::int64_t width = formats::bits_of(tensor.dtype) / 8;
  const auto numel = id.item(4).count(INT64_MAX / 16);
  const auto unit = dtype && !storage ? 1 : dtype ? formats::bits_of(storage) / 8 : width;
  if (static_cast<std::uint64_t>(numel * unit) != tensor.record.bytes)
    id.fail(base::join(numel, " elements in ", tensor.record.bytes, " bytes"), "a record of that size");
  const std::int64_t stored = numel * unit / width;

  tensor.offset = PickleView(*given[1], value.path(), value.place() + "/offset").count();
  tensor.shape = PickleView(*given[2], value.path(), value.place() + "/shape").shape();
  for (const auto& step : PickleView(*given[3], value.path(), value.place() + "/stride").items())
    tensor.stride.push_back(step.count());
  if (tensor.stride.size() != tensor.shape.size())
    value.fail("a tensor with another number of strides", "one a dimension");
  const auto all = formats::numel_of(tensor.shape);
  if (all == 0) {
    tensor.offset = 0;
    return tensor;
  }
  // The last element lies in the record, by checked arithmetic.
  std::int64_t last = tensor.offset;
  bool inside = all > 0;
  for (std::size_t d = 0; d < tensor.shape.size() && inside; ++d) {
    std::int64_t span = 0;
    inside = !__builtin_mul_overflow(tensor.shape[d] - 1, tensor.stride[d], &span) &&
             !__builtin_add_overflow(last, span, &last);
  }
  if (!inside || last >= stored)
    value.fail(base::join("a tensor that reaches beyond the ", stored, " elements of its record"), "all of it inside");
  if (all > stored && all - stored > kMostExpanded)
    value.fail(base::join("an expanded tensor of ", all, " elements in a storage of ", stored),
               "its elements. Hint: save it after contiguous()");
  return tensor;
}

const char* dtype_of_torch(const Node& value) { return look_up(kTypes, value); }

bool is_old_torch_file(std::string_view first) {
  // A pickled long integer of 10 bytes: torch's magic number; or "ustar" of a tar file.
  constexpr std::string_view kMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 14);
  return first.starts_with(kMagic) || (first.size() >= 262 && first.substr(257, 5) == "ustar");
}

void fail_old_torch_file(const std::string& path) {
  fail_damaged(
      path,
      "was written by torch before 1.6 or with _use_new_zipfile_serialization=False, expected a zip file. Hint: "
      "where you trust it, python -c \"import torch; torch.save(torch.load('old.pt', map_location='cpu'), "
      "'new.pt')\"");
}

}  // namespace zero::interchange
