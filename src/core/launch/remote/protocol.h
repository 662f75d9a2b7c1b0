// What the launcher and its agent on another host say to each other, as bytes: frames of a kind and a
// payload, and the values in a payload. Knows no process and no socket; any bytes may come in.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "launch/supervise/host_plan.h"
#include "observe/status_page.h"

namespace zero::launch {

// Raised whenever a frame changes its meaning: both ends must be of one version.
inline constexpr std::uint32_t kProtocol = 1;
// The first line of an agent; what a login shell printed before it is not the agent's.
inline constexpr std::string_view kAgentMark = "\x01zero-agent\n";
inline constexpr std::size_t kLongestFrame = 16 << 20;

enum class FrameKind : std::uint8_t {
  // To the agent.
  Plan = 1,  // HostPlan, seconds of silence that mean "gone"
  Go,        // start the ranks
  Signal,    // int: to every rank's group
  Failed,    // rank of the world: keep the pages as they are now, and tell the ranks
  Listen,    // 0: leave the ranks' lines where they are, 1: send them on
  Finish,    // end what is left
  // From the agent.
  Hello = 32,  // protocol, version text
  Refused,     // exit code, text: a check failed, nothing was started
  Ready,       // host's own name
  Started,     // process ids
  Line,        // local rank, stream, text
  Died,        // local rank, by a signal, code
  Page,        // local rank, as it was at the failure, state letter, page
  Notice,      // level, text
  Finished,    // the kernel ended something for lack of memory
  // Both ways.
  Alive = 64,
};

struct Frame {
  FrameKind kind = FrameKind::Alive;
  std::string payload;
};

std::string frame_bytes(FrameKind kind, std::string_view payload = {});

// Bytes of a stream made into frames.
class FrameReader {
 public:
  void feed(std::string_view bytes) { bytes_.append(bytes); }
  // False: not yet whole. Throws IoError when a frame is longer than kLongestFrame.
  bool next(Frame& frame);
  std::size_t waiting() const { return bytes_.size() - at_; }

 private:
  std::string bytes_;
  std::size_t at_ = 0;
};

// Values behind each other, little-endian; texts and lists with their length before them.
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

// The same values in the same order. Throws IoError when the payload ends early.
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
