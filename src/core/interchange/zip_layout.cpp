// See zip_layout.h. Field names are those of PKWARE's APPNOTE.TXT.
#include "interchange/zip_layout.h"

#include <algorithm>

#include "base/check.h"
#include "interchange/little_endian.h"

namespace zero::interchange {
namespace {

constexpr std::uint64_t kAlignment = 64, kMost32 = 0xffffffffu, kMost16 = 0xffffu;
constexpr std::uint64_t kLocalBytes = 30, kPaddingHead = 4, kZip64Local = 20;

bool is_large(const ZipRecord& record) { return record.bytes >= kMost32; }

std::uint64_t local_bytes(const ZipRecord& record) {
  return kLocalBytes + record.name.size() + (is_large(record) ? kZip64Local : 0) + kPaddingHead;
}

// What local and central headers have in common: from "version needed" to the lengths.
void put_common(std::string& out, const ZipRecord& record, std::uint32_t crc, bool zip64) {
  append_little(out, zip64 ? 45 : 20, 2);
  append_little(out, 0, 2);     // flags
  append_little(out, 0, 2);     // stored
  append_little(out, 0, 2);     // time
  append_little(out, 0x21, 2);  // 1 January 1980
  append_little(out, crc, 4);
  append_little(out, is_large(record) ? kMost32 : record.bytes, 4);
  append_little(out, is_large(record) ? kMost32 : record.bytes, 4);
  append_little(out, record.name.size(), 2);
}

std::string local_header(const ZipRecord& record, std::uint32_t crc) {
  std::string out = "PK\3\4";
  put_common(out, record, crc, is_large(record));
  const auto padding = record.data - record.header - local_bytes(record);
  append_little(out, (is_large(record) ? kZip64Local : 0) + kPaddingHead + padding, 2);
  out += record.name;
  if (is_large(record)) {
    append_little(out, 1, 2);
    append_little(out, 16, 2);
    append_little(out, record.bytes, 8);
    append_little(out, record.bytes, 8);
  }
  out += "FB";
  append_little(out, padding, 2);
  out.append(padding, 'Z');
  return out;
}

std::string directory_entry(const ZipRecord& record, std::uint32_t crc) {
  std::string extra;
  if (is_large(record)) {
    append_little(extra, record.bytes, 8);
    append_little(extra, record.bytes, 8);
  }
  if (record.header >= kMost32) append_little(extra, record.header, 8);
  const bool zip64 = !extra.empty();
  if (zip64) {
    std::string head;
    append_little(head, 1, 2);
    append_little(head, extra.size(), 2);
    extra = head + extra;
  }
  std::string out = "PK\1\2";
  append_little(out, zip64 ? 45 : 20, 2);  // made by
  put_common(out, record, crc, zip64);
  append_little(out, extra.size(), 2);
  append_little(out, 0, 2);  // comment
  append_little(out, 0, 2);  // disk
  append_little(out, 0, 2);  // internal attributes
  append_little(out, 0, 4);  // external attributes
  append_little(out, record.header >= kMost32 ? kMost32 : record.header, 4);
  return out + record.name + extra;
}

std::string end_of(const ZipLayout& layout, std::uint64_t directory_bytes) {
  const auto count = layout.records.size();
  std::string out;
  if (count >= kMost16 || layout.directory >= kMost32 || directory_bytes >= kMost32) {
    out = "PK\6\6";
    append_little(out, 44, 8);
    append_little(out, 45, 2);
    append_little(out, 45, 2);
    append_little(out, 0, 4);
    append_little(out, 0, 4);
    append_little(out, count, 8);
    append_little(out, count, 8);
    append_little(out, directory_bytes, 8);
    append_little(out, layout.directory, 8);
    out += "PK\6\7";
    append_little(out, 0, 4);
    append_little(out, layout.directory + directory_bytes, 8);
    append_little(out, 1, 4);
  }
  out += "PK\5\6";
  append_little(out, 0, 2);
  append_little(out, 0, 2);
  append_little(out, std::min<std::uint64_t>(count, kMost16), 2);
  append_little(out, std::min<std::uint64_t>(count, kMost16), 2);
  append_little(out, std::min(directory_bytes, kMost32), 4);
  append_little(out, std::min(layout.directory, kMost32), 4);
  append_little(out, 0, 2);
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
