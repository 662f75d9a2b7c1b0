// A link between two network namespaces whose packets a process carries, so that they can be lost or late on request:
// two TUN devices named link0, without the kernel's netem, which few kernels have. Requires root and /dev/net/tun.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <string>

namespace zero::test {

class PacketLink {
 public:
  // Makes the devices in both namespaces (names as in `ip netns`), without addresses; made() says whether it could.
  PacketLink(const std::string& first, const std::string& second);
  ~PacketLink();
  PacketLink(const PacketLink&) = delete;
  PacketLink& operator=(const PacketLink&) = delete;

  bool made() const { return made_; }
  // From now on; each packet has its own chance.
  void lose(int percent) { settings_->percent = percent; }
  void delay(int milliseconds) { settings_->milliseconds = milliseconds; }
  int lost() const { return settings_->lost; }

 private:
  struct Settings {
    std::atomic<int> percent{0}, milliseconds{0}, lost{0};
  };
  [[noreturn]] static void carry(const int (&devices)[2], int parent, Settings& settings);

  Settings* settings_;  // in memory that the carrier shares
  int pipe_ = -1;       // its end tells the carrier to end
  pid_t carrier_ = -1;
  bool made_ = false;
};

}  // namespace zero::test
