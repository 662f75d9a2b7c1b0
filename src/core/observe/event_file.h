// Writes TensorBoard's event files: TFRecord frames (length, payload, masked CRC-32C of both) with protocol buffer
// Event messages that contain scalars.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zero::observe {

// CRC-32C (Castagnoli polynomial, RFC 3720) of the bytes.
std::uint32_t crc32c(std::string_view bytes);

// One frame of a TFRecord file: length (8 bytes), its checksum (4), payload, its checksum (4), little endian. Checksums
// are masked: rotated right by 15 bits plus 0xa282ead8 (tensorflow/core/lib/io/record_writer.cc, lib/hash/crc32c.h).
std::string record_frame(std::string_view payload);

using Scalars = std::vector<std::pair<std::string, double>>;  // tag, value

// An Event message (tensorflow/core/util/event.proto) with one Summary.Value.simple_value (float) per tag. `wall_time`:
// seconds since 1970.
std::string scalar_event(double wall_time, std::int64_t step, const Scalars& scalars);

class EventFile {
 public:
  // Creates `folder` and in it events.out.tfevents.SECONDS.HOST.PID.NUMBER. Throws IoError.
  explicit EventFile(const std::filesystem::path& folder);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // Writes one event, which is in the file on return. No effect without scalars. Throws IoError.
  void write(std::int64_t step, const Scalars& scalars);
  const std::filesystem::path& path() const { return path_; }

 private:
  void append(const std::string& bytes);
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace zero::observe
