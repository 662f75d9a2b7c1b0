// The parts of both formats that scalars need.
#include "observe/event_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <zero/errors.h>

#include "base/check.h"
#include "base/standard_streams.h"
#include "base/system.h"

namespace zero::observe {
namespace {

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value & 1 ? (value >> 1) ^ 0x82f63b78u : value >> 1;
    table[i] = value;
  }
  return table;
}

std::uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

template <class T>
void append_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

enum Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_tag(std::string& out, std::uint64_t field, Wire wire) {
  append_varint(out, field << 3 | static_cast<std::uint64_t>(wire));
}

void append_bytes(std::string& out, std::uint64_t field, std::string_view bytes) {
  append_tag(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
std::string event_head(double wall_time, std::int64_t step) {
  std::string out;
  append_tag(out, 1, kFixed64);
  append_little_endian(out, std::bit_cast<std::uint64_t>(wall_time));
  if (step != 0) {
    append_tag(out, 2, kVarint);
    append_varint(out, static_cast<std::uint64_t>(step));
  }
  return out;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::atomic<int> next_number{0};

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = crc_table();
  std::uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  return ~crc;
}

std::string record_frame(std::string_view payload) {
  std::string out;
  append_little_endian(out, static_cast<std::uint64_t>(payload.size()));
  append_little_endian(out, masked_crc(out));
  out += payload;
  append_little_endian(out, masked_crc(payload));
  return out;
}

// Summary { repeated Value value = 1; }   Value { string tag = 1; float simple_value = 2; }
std::string scalar_event(double wall_time, std::int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, number] : scalars) {
    std::string value;
    append_bytes(value, 1, tag);
    append_tag(value, 2, kFixed32);
    append_little_endian(value, std::bit_cast<std::uint32_t>(static_cast<float>(number)));
    append_bytes(summary, 1, value);
  }
  std::string out = event_head(wall_time, step);
  append_bytes(out, 5, summary);
  return out;
}

EventFile::EventFile(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const double now = seconds_since_1970();
  path_ = folder / base::join("events.out.tfevents.", static_cast<std::int64_t>(now), ".", base::host_name("host"), ".",
                              ::getpid(), ".", next_number.fetch_add(1));
  fd_ = base::off_standard(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (fd_ < 0)
    throw IoError(base::join("[tensorboard] got \"", std::strerror(errno), "\" for ", path_.string(),
                             ", expected to write it. Hint: tensorboard.output_path names the folder."));
  std::string first = event_head(now, 0);
  append_bytes(first, 3, "brain.Event:2");
  append(record_frame(first));
}

EventFile::~EventFile() { ::close(fd_); }

void EventFile::write(std::int64_t step, const Scalars& scalars) {
  if (!scalars.empty()) append(record_frame(scalar_event(seconds_since_1970(), step, scalars)));
}

void EventFile::append(const std::string& bytes) {
  std::string_view left = bytes;
  while (!left.empty()) {
    const ssize_t written = ::write(fd_, left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0)
      throw IoError(base::join("[tensorboard] got \"", std::strerror(errno), "\" for ", path_.string(),
                               ", expected to write ", left.size(), " bytes"));
    left.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace zero::observe
