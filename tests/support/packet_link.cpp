#include "support/packet_link.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <new>
#include <random>
#include <vector>

namespace zero::test {
namespace {

// A TUN device of the namespace; -1 if it cannot be made. The process stays where it was.
int tun_in(const std::string& name) {
  const int here = ::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  const int space = ::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (here < 0 || space < 0 || ::setns(space, CLONE_NEWNET) != 0) return -1;
  const int fd = ::open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  ifreq request{};
  std::snprintf(request.ifr_name, sizeof request.ifr_name, "link0");
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  const bool made = fd >= 0 && ::ioctl(fd, TUNSETIFF, &request) == 0;
  const bool back = ::setns(here, CLONE_NEWNET) == 0;
  ::close(space);
  ::close(here);
  return made && back ? fd : -1;
}

}  // namespace

PacketLink::PacketLink(const std::string& first, const std::string& second) {
  void* memory = ::mmap(nullptr, sizeof(Settings), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  settings_ = new (memory) Settings;
  int ends[2], ready[2];
  if (::pipe2(ends, O_CLOEXEC) != 0 || ::pipe2(ready, O_CLOEXEC) != 0) return;
  pipe_ = ends[1];
  carrier_ = ::fork();
  if (carrier_ == 0) {
    ::close(ends[1]);
    const int devices[2] = {tun_in(first), tun_in(second)};
    const char good = devices[0] >= 0 && devices[1] >= 0;
    if (::write(ready[1], &good, 1) != 1 || !good) ::_exit(1);
    ::close(ready[1]);
    carry(devices, ends[0], *settings_);
  }
  ::close(ends[0]);
  ::close(ready[1]);
  char good = 0;
  made_ = ::read(ready[0], &good, 1) == 1 && good;
  ::close(ready[0]);
}

PacketLink::~PacketLink() {
  ::close(pipe_);
  if (carrier_ > 0) ::waitpid(carrier_, nullptr, 0);
  ::munmap(settings_, sizeof(Settings));
}

void PacketLink::carry(const int (&devices)[2], int parent, Settings& settings) {
  using Clock = std::chrono::steady_clock;
  struct Packet {
    Clock::time_point due;
    std::vector<char> bytes;
  };
  std::deque<Packet> waiting[2];  // by the device that they go to
  std::minstd_rand random(20261125);
  std::vector<char> buffer(65536);
  while (true) {
    const auto now = Clock::now();
    int pause = 1000;
    for (int to = 0; to < 2; ++to) {
      auto& queue = waiting[to];
      for (; !queue.empty() && queue.front().due <= now; queue.pop_front())
        if (::write(devices[to], queue.front().bytes.data(), queue.front().bytes.size()) < 0) break;  // full or down
      if (queue.empty()) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(queue.front().due - now).count();
      pause = std::min(pause, std::max(1, static_cast<int>(left)));
    }
    pollfd sources[3] = {{devices[0], POLLIN, 0}, {devices[1], POLLIN, 0}, {parent, POLLIN, 0}};
    ::poll(sources, 3, pause);
    if (sources[2].revents) ::_exit(0);
    for (int from = 0; from < 2; ++from) {
      // A bounded number of packets, so that both directions move.
      for (int i = 0; i < 64; ++i) {
        const auto bytes = ::read(devices[from], buffer.data(), buffer.size());
        if (bytes <= 0) break;
        if (static_cast<int>(random() % 100) < settings.percent) {
          ++settings.lost;
          continue;
        }
        waiting[1 - from].push_back({Clock::now() + std::chrono::milliseconds(settings.milliseconds),
                                     {buffer.begin(), buffer.begin() + bytes}});
      }
    }
  }
}

}  // namespace zero::test
