// See zip_layout.h. Field names are those of PKWARE's APPNOTE.TXT.
#include "interchange/zip_layout.h"

#include <algorithm>

#include "base/check.h"

namespace zero::interchange {
namespace {

constexpr std::uint64_t kAlignment = 64, kMost32 = 0xffffffffu, kMost16 = 0xffffu;
constexpr std::uint64_t kLocalBytes = 30, kPaddingHead = 4, kZip64Local = 20;

void put(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 255);
}

bool is_large(const ZipRecord& record) { return record.bytes >= kMost32; }

std::uint64_t local_bytes(const ZipRecord& record) {
  return kLocalBytes + record.name.size() + (is_large(record) ? kZip64Local : 0) + kPaddingHead;
}

// What local and central headers have in common: from "version needed" to the lengths.
void put_common(std::string& out, const ZipRecord& record, std::uint32_t crc, bool zip64) {
  put(out, zip64 ? 45 : 20, 2);
  put(out, 0, 2);  // flags
  put(out, 0, 2);  // stored
  put(out, 0, 2);  // time
  put(out, 0x21, 2);  // 1 January 1980
  put(out, crc, 4);
  put(out, is_large(record) ? kMost32 : record.bytes, 4);
  put(out, is_large(record) ? kMost32 : record.bytes, 4);
  put(out, record.name.size(), 2);
}

std::string local_header(const ZipRecord& record, std::uint32_t crc) {
  std::string out = "PK\3\4";
  put_common(out, record, crc, is_large(record));
  const auto padding = record.data - record.header - local_bytes(record);
  put(out, (is_large(record) ? kZip64Local : 0) + kPaddingHead + padding, 2);
  out += record.name;
  if (is_large(record)) {
    put(out, 1, 2);
    put(out, 16, 2);
    put(out, record.bytes, 8);
    put(out, record.bytes, 8);
  }
  out += "FB";
  put(out, padding, 2);
  out.append(padding, 'Z');
  return out;
}

std::string directory_entry(const ZipRecord& record, std::uint32_t crc) {
  std::string extra;
  if (is_large(record)) {
    put(extra, record.bytes, 8);
    put(extra, record.bytes, 8);
  }
  if (record.header >= kMost32) put(extra, record.header, 8);
  const bool zip64 = !extra.empty();
  if (zip64) {
    std::string head;
    put(head, 1, 2);
    put(head, extra.size(), 2);
    extra = head + extra;
  }
  std::string out = "PK\1\2";
  put(out, zip64 ? 45 : 20, 2);  // made by
  put_common(out, record, crc, zip64);
  put(out, extra.size(), 2);
  put(out, 0, 2);  // comment
  put(out, 0, 2);  // disk
  put(out, 0, 2);  // internal attributes
  put(out, 0, 4);  // external attributes
  put(out, record.header >= kMost32 ? kMost32 : record.header, 4);
  return out + record.name + extra;
}

std::string end_of(const ZipLayout& layout, std::uint64_t directory_bytes) {
  const auto count = layout.records.size();
  std::string out;
  if (count >= kMost16 || layout.directory >= kMost32 || directory_bytes >= kMost32) {
    out = "PK\6\6";
    put(out, 44, 8);
    put(out, 45, 2);
    put(out, 45, 2);
    put(out, 0, 4);
    put(out, 0, 4);
    put(out, count, 8);
    put(out, count, 8);
    put(out, directory_bytes, 8);
    put(out, layout.directory, 8);
    out += "PK\6\7";
    put(out, 0, 4);
    put(out, layout.directory + directory_bytes, 8);
    put(out, 1, 4);
  }
  out += "PK\5\6";
  put(out, 0, 2);
  put(out, 0, 2);
  put(out, std::min<std::uint64_t>(count, kMost16), 2);
  put(out, std::min<std::uint64_t>(count, kMost16), 2);
  put(out, std::min(directory_bytes, kMost32), 4);
  put(out, std::min(layout.directory, kMost32), 4);
  put(out, 0, 2);
  return out;
}

std::string directory_of(const ZipLayout& layout, const std::vector<std::uint32_t>& crcs) {
  std::string out;
  for (std::size_t i = 0; i < layout.records.size(); ++i) out += directory_entry(layout.records[i], crcs[i]);
  return out + end_of(layout, out.size());
}

}  // namespace

ZipLayout zip_layout(const std::vector<std::pair<std::string, std::uint64_t>>& records) {
  ZipLayout layout;
  std::uint64_t end = 0;
  for (const auto& [name, bytes] : records) {
    ZERO_CHECK(!name.empty() && name.size() < kMost16, "a record's name of ", name.size(), " bytes");
    ZipRecord record{name, bytes, end, 0};
    record.data = (end + local_bytes(record) + kAlignment - 1) / kAlignment * kAlignment;
    end = record.data + bytes;
    layout.records.push_back(record);
  }
  layout.directory = end;
  layout.bytes = end + directory_of(layout, std::vector<std::uint32_t>(records.size(), 0)).size();
  return layout;
}

std::vector<std::pair<std::uint64_t, std::string>> zip_headers(const ZipLayout& layout,
                                                               const std::vector<std::uint32_t>& crcs) {
  ZERO_CHECK(crcs.size() == layout.records.size(), "CRCs of ", crcs.size(), " records");
  std::vector<std::pair<std::uint64_t, std::string>> result;
  for (std::size_t i = 0; i < crcs.size(); ++i)
    result.emplace_back(layout.records[i].header, local_header(layout.records[i], crcs[i]));
  result.emplace_back(layout.directory, directory_of(layout, crcs));
  return result;
}

}  // namespace zero::interchange
