// Both sides are this program on similar hosts. Every length is checked nevertheless, because a login script or a
// broken connection may send anything.
#include "tools/launch/remote/protocol.h"

#include <cstring>

#include "base/check.h"

namespace zero::launch {
namespace {

constexpr std::size_t kHeader = 5;

std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}
void append(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

}  // namespace

std::string frame_bytes(FrameKind kind, std::string_view payload) {
  ZERO_CHECK(payload.size() <= kLongestFrame, "a frame of ", payload.size(), " bytes");
  std::string bytes;
  bytes.reserve(kHeader + payload.size());
  append(bytes, payload.size(), 4);
  bytes += static_cast<char>(kind);
  return bytes.append(payload);
}

bool FrameReader::next(Frame& frame) {
  const std::string_view rest = std::string_view(bytes_).substr(at_);
  if (rest.size() < kHeader) return false;
  const std::uint64_t length = little_endian(rest.substr(0, 4));
  if (length > kLongestFrame)
    throw IoError(base::join("[launch::wire] got a frame of ", length, " bytes, expected at most ", kLongestFrame,
                             ". Hint: something else than zero writes to the connection."));
  if (rest.size() < kHeader + length) return false;
  frame.kind = static_cast<FrameKind>(static_cast<unsigned char>(rest[4]));
  frame.payload = rest.substr(kHeader, length);
  at_ += kHeader + length;
  if (at_ > (1 << 16) || at_ == bytes_.size()) {
    bytes_.erase(0, at_);
    at_ = 0;
  }
  return true;
}

Packer& Packer::number(std::int64_t value) {
  append(bytes_, static_cast<std::uint64_t>(value), 8);
  return *this;
}
Packer& Packer::real(double value) {
  std::int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return number(bits);
}
Packer& Packer::text(std::string_view value) {
  append(bytes_, value.size(), 4);
  bytes_ += value;
  return *this;
}
Packer& Packer::texts(const std::vector<std::string>& values) {
  number(static_cast<std::int64_t>(values.size()));
  for (const std::string& value : values) text(value);
  return *this;
}
Packer& Packer::numbers(const std::vector<int>& values) {
  number(static_cast<std::int64_t>(values.size()));
  for (const int value : values) number(value);
  return *this;
}

std::string_view Unpacker::take(std::size_t count) {
  if (count > bytes_.size())
    throw IoError(base::join("[launch::wire] got ", bytes_.size(), " bytes left in a frame, expected ", count,
                             ". Hint: both hosts need the same version of zero."));
  const std::string_view taken = bytes_.substr(0, count);
  bytes_.remove_prefix(count);
  return taken;
}
std::int64_t Unpacker::number() { return static_cast<std::int64_t>(little_endian(take(8))); }
double Unpacker::real() {
  const std::int64_t bits = number();
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
std::string Unpacker::text() {
  const auto length = static_cast<std::size_t>(little_endian(take(4)));
  return std::string(take(length));
}
std::vector<std::string> Unpacker::texts() {
  std::vector<std::string> values;
  for (std::int64_t count = number(); count > 0; --count) values.push_back(text());
  return values;
}
std::vector<int> Unpacker::numbers() {
  std::vector<int> values;
  for (std::int64_t count = number(); count > 0; --count) values.push_back(small());
  return values;
}

std::string pack_plan(const HostPlan& p) {
  Packer out;
  out.text(p.name)
      .text(p.run_id)
      .number(p.attempt)
      .number(p.previous_world)
      .number(p.first_rank)
      .number(p.ranks)
      .number(p.world);
  out.number(p.group).number(p.groups).texts(p.program).text(p.folder).numbers(p.slots).number(p.bind_cores);
  out.text(p.core_list).text(p.master_address).number(p.master_port).text(p.log_folder).text(p.token);
  out.number(p.pass_local_rank).number(static_cast<std::int64_t>(p.environment.size()));
  for (const auto& [name, value] : p.environment) out.text(name).text(value);
  return out.bytes();
}

HostPlan unpack_plan(Unpacker& in) {
  HostPlan p;
  p.name = in.text();
  p.run_id = in.text();
  p.attempt = in.small();
  p.previous_world = in.small();
  p.first_rank = in.small();
  p.ranks = in.small();
  p.world = in.small();
  p.group = in.small();
  p.groups = in.small();
  p.program = in.texts();
  p.folder = in.text();
  p.slots = in.numbers();
  p.bind_cores = in.number() != 0;
  p.core_list = in.text();
  p.master_address = in.text();
  p.master_port = in.small();
  p.log_folder = in.text();
  p.token = in.text();
  p.pass_local_rank = in.number() != 0;
  for (std::int64_t count = in.number(); count > 0; --count) {
    std::string name = in.text();
    p.environment[std::move(name)] = in.text();
  }
  return p;
}

void pack_page(Packer& out, const observe::StatusSnapshot& page) {
  out.number(page.pid).number(static_cast<std::int64_t>(page.changes)).number(page.step);
  out.number(static_cast<std::int64_t>(page.commits)).number(page.micro_batch).number(static_cast<int>(page.phase));
  out.text(page.unit).text(page.error).number(page.error_code).number(page.world_rule.has_value());
  const base::WorldRule rule = page.world_rule.value_or(base::WorldRule());
  out.text(page.save).number(static_cast<std::int64_t>(page.save_written));
  out.number(static_cast<std::int64_t>(page.save_bytes));
  out.number(rule.batch_parts).number(rule.data_parallel).number(rule.copy).number(rule.tensor).number(rule.experts);
  out.number(static_cast<std::int64_t>(page.collectives.size()));
  for (const observe::CollectiveSnapshot& c : page.collectives) {
    out.number(static_cast<std::int64_t>(c.sequence)).number(c.numel).number(static_cast<int>(c.state));
    out.text(c.op).text(c.dtype).text(c.group).text(c.site);
  }
}

observe::StatusSnapshot unpack_page(Unpacker& in) {
  observe::StatusSnapshot page;  // its times are in another host's clock and remain 0
  page.pid = in.small();
  page.changes = static_cast<std::uint64_t>(in.number());
  page.step = in.number();
  page.commits = static_cast<std::uint64_t>(in.number());
  page.micro_batch = in.small();
  page.phase = static_cast<observe::StatusPhase>(in.number());
  page.unit = in.text();
  page.error = in.text();
  page.error_code = in.small();
  const bool has_rule = in.number() != 0;
  page.save = in.text();
  page.save_written = static_cast<std::uint64_t>(in.number());
  page.save_bytes = static_cast<std::uint64_t>(in.number());
  base::WorldRule rule;
  for (std::int64_t* member : {&rule.batch_parts, &rule.data_parallel, &rule.copy, &rule.tensor, &rule.experts})
    *member = in.number();
  if (has_rule && rule.copy > 0 && rule.tensor > 0 && rule.experts > 0) page.world_rule = rule;
  for (std::int64_t count = in.number(); count > 0; --count) {
    observe::CollectiveSnapshot c;
    c.sequence = static_cast<std::uint64_t>(in.number());
    c.numel = in.number();
    c.state = static_cast<observe::CollectiveState>(in.number());
    c.op = in.text();
    c.dtype = in.text();
    c.group = in.text();
    c.site = in.text();
    page.collectives.push_back(std::move(c));
  }
  return page;
}

}  // namespace zero::launch
