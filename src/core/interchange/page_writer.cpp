// See page_writer.h.
#include "interchange/page_writer.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace zero::interchange {
namespace {

constexpr std::uint64_t kPage = 4096;

struct PartHead {
  std::uint64_t file, offset, bytes;
};

}  // namespace

void PageWriter::keep(std::size_t file, std::uint64_t offset, const char* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const auto count = std::min(bytes, kPage - offset % kPage);
    auto& out = outgoing_[(offset / kPage + file) % outgoing_.size()];
    const PartHead head{file, offset, count};
    out.append(reinterpret_cast<const char*>(&head), sizeof head);
    out.append(data, count);
    offset += count;
    data += count;
    bytes -= count;
  }
}

void PageWriter::end_tail() {
  keep(tail_file_, tail_offset_, tail_.data(), tail_.size());
  tail_.clear();
}

void PageWriter::add(std::size_t file, std::uint64_t offset, const char* data, std::uint64_t bytes) {
  if (bytes == 0) return;
  if (!tail_.empty() && (file != tail_file_ || offset != tail_offset_ + tail_.size())) end_tail();
  if (!tail_.empty()) {
    const auto count = std::min(bytes, kPage - offset % kPage);
    tail_.append(data, count);
    offset += count;
    data += count;
    bytes -= count;
    if (offset % kPage != 0) return;
    if (tail_.size() == kPage) {
      writer_.write(tail_file_, tail_offset_, tail_.data(), kPage);
      tail_.clear();
    } else {
      end_tail();
    }
  }
  // The front of a page whose beginning another range has.
  if (offset % kPage != 0) {
    const auto count = std::min(bytes, kPage - offset % kPage);
    tail_file_ = file;
    tail_offset_ = offset;
    tail_.assign(data, count);
    offset += count;
    data += count;
    bytes -= count;
    if (offset % kPage != 0) return;
    end_tail();
  }
  const auto whole = bytes / kPage * kPage;
  if (whole > 0) writer_.write(file, offset, data, whole);
  tail_file_ = file;
  tail_offset_ = offset + whole;
  tail_.assign(data + whole, bytes - whole);
}

std::vector<std::string> PageWriter::finish() {
  end_tail();
  return std::move(outgoing_);
}

void PageWriter::take(std::string_view parts) {
  for (std::size_t at = 0; at < parts.size();) {
    PartHead head{};
    ZERO_CHECK(parts.size() - at >= sizeof head, "a part of a page");
    std::memcpy(&head, parts.data() + at, sizeof head);
    at += sizeof head;
    ZERO_CHECK(parts.size() - at >= head.bytes, "a part of a page of ", head.bytes, " bytes");
    writer_.write(head.file, head.offset, parts.data() + at, head.bytes);
    at += head.bytes;
  }
}

}  // namespace zero::interchange
