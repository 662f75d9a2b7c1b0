// The protocol between the launcher and its agent on another host: frames with a kind and a payload, and the values in
// payloads. Accepts arbitrary bytes as input.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "observe/status_page.h"
#include "tools/launch/supervise/host_plan.h"

namespace zero::launch {

// Incremented whenever a frame changes. Both sides must have the same version.
inline constexpr std::uint32_t kProtocol = 3;
// The agent's first line. Anything before it was printed by the login shell.
inline constexpr std::string_view kAgentMark = "\x01zero-agent\n";
inline constexpr std::size_t kLongestFrame = 16 << 20;

enum class FrameKind : std::uint8_t {
  // To the agent.
  Plan = 1,  // HostPlan; seconds of silence after which the launcher counts as lost
  Go,        // start the ranks
  Signal,    // int: to every rank's process group
  Failed,    // rank of the world: keep the pages as they are now and tell the ranks
  Listen,    // 0: stop forwarding the ranks' lines; 1: forward them
  Finish,    // end all remaining processes
  // From the agent.
  Hello = 32,  // protocol, version text
  Refused,     // exit code, text: a check failed; nothing was started
  Ready,       // host's own name
  Started,     // process ids
  Line,        // local rank, stream, text
  Died,        // local rank, by a signal, code
  Page,        // local rank, as it was at the failure, state letter, page
  Notice,      // level, text
  Finished,    // whether the kernel killed a process for lack of memory
  // Both ways.
  Alive = 64,
};

struct Frame {
  FrameKind kind = FrameKind::Alive;
  std::string payload;
};

std::string frame_bytes(FrameKind kind, std::string_view payload = {});

// Divides a stream of bytes into frames.
class FrameReader {
 public:
  void feed(std::string_view bytes) { bytes_.append(bytes); }
  // False: no complete frame. Throws IoError if a frame is longer than kLongestFrame.
  bool next(Frame& frame);
  std::size_t waiting() const { return bytes_.size() - at_; }

 private:
  std::string bytes_;
  std::size_t at_ = 0;
};

// Serializes values, little-endian; texts and lists are prefixed with their length.
class Packer {
 public:
  Packer& number(std::int64_t value);
  Packer& real(double value);
  Packer& text(std::string_view value);
  Packer& texts(const std::vector<std::string>& values);
  Packer& numbers(const std::vector<int>& values);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads the same values in the same order. Throws IoError if the payload ends early.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
  std::int64_t number();
  int small() { return static_cast<int>(number()); }
  double real();
  std::string text();
  std::vector<std::string> texts();
  std::vector<int> numbers();

 private:
  std::string_view take(std::size_t count);
  std::string_view bytes_;
};

std::string pack_plan(const HostPlan& plan);
HostPlan unpack_plan(Unpacker& in);
void pack_page(Packer& out, const observe::StatusSnapshot& page);
observe::StatusSnapshot unpack_page(Unpacker& in);

}  // namespace zero::launch
