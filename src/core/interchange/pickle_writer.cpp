// See pickle_writer.h. Opcodes: Lib/pickletools.py of CPython.
#include "interchange/pickle_writer.h"

#include <algorithm>
#include <bit>
#include <utility>

#include <zero/errors.h>

#include "formats/manifest.h"
#include "interchange/little_endian.h"

namespace zero::interchange {
namespace {

const char* storage_of(const std::string& dtype) {
  constexpr std::pair<const char*, const char*> kStorages[] = {
      {"F32", "FloatStorage"}, {"F64", "DoubleStorage"}, {"F16", "HalfStorage"},        {"BF16", "BFloat16Storage"},
      {"I64", "LongStorage"},  {"I32", "IntStorage"},    {"I16", "ShortStorage"},       {"I8", "CharStorage"},
      {"U8", "ByteStorage"},   {"BOOL", "BoolStorage"},  {"C64", "ComplexFloatStorage"}};
  for (const auto& [name, storage] : kStorages)
    if (dtype == name) return storage;
  throw ConfigError("[export] torch's files have no storage of the type " + dtype);
}

}  // namespace

PickleWriter::PickleWriter() : out_("\x80\x02") {}

void PickleWriter::mark() { out_ += '('; }
void PickleWriter::begin_dict() { out_ += "}("; }
void PickleWriter::begin_ordered_dict() {
  global("collections", "OrderedDict");
  out_ += ")R(";
}
void PickleWriter::end_dict() { out_ += 'u'; }
void PickleWriter::begin_list() { out_ += "]("; }
void PickleWriter::end_list() { out_ += 'e'; }

void PickleWriter::text(const std::string& value) {
  out_ += 'X';
  append_little(out_, value.size(), 4);
  out_ += value;
}

void PickleWriter::integer(std::int64_t value) {
  if (value == static_cast<std::int32_t>(value)) {
    out_ += 'J';
    append_little(out_, static_cast<std::uint64_t>(value), 4);
    return;
  }
  out_ += '\x8a';  // LONG1
  append_little(out_, 8, 1);
  append_little(out_, static_cast<std::uint64_t>(value), 8);
}

void PickleWriter::real(double value) {
  out_ += 'G';  // big endian
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i) & 255);
}

void PickleWriter::boolean(bool value) { out_ += value ? '\x88' : '\x89'; }
void PickleWriter::none() { out_ += 'N'; }
void PickleWriter::global(const std::string& module, const std::string& name) {
  out_ += 'c' + module + '\n' + name + '\n';
}

void PickleWriter::begin_object(const std::string& module, const std::string& name) {
  global(module, name);
  out_ += ")\x81}(";  // no arguments, NEWOBJ, the dictionary of its attributes
}
void PickleWriter::end_object() { out_ += "ub"; }

void PickleWriter::tuple(const std::vector<std::int64_t>& values) {
  mark();
  for (const auto value : values) integer(value);
  out_ += 't';
}

void PickleWriter::tensor(const std::string& dtype, const std::vector<std::int64_t>& shape, std::size_t record) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<std::int64_t>(shape[d], 1);
  global("torch._utils", "_rebuild_tensor_v2");
  mark();
  mark();
  text("storage");
  global("torch", storage_of(dtype));
  text(std::to_string(record));
  text("cpu");
  integer(formats::numel_of(shape));
  out_ += "tQ";  // the tuple is a persistent id
  integer(0);    // offset
  tuple(shape);
  tuple(strides);
  boolean(false);  // requires_grad
  global("collections", "OrderedDict");
  out_ += ")RtR";
}

std::string PickleWriter::finish() { return std::move(out_) + "."; }

}  // namespace zero::interchange
