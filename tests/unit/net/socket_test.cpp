// Connecting to a place where nobody listens yet: how often the name server is asked, and how long a rank pauses. Whose
// processes are taken for those of this user.
#include <gtest/gtest.h>

#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "net/socket.h"

namespace {
std::atomic<int> questions{0};
}  // namespace

// Called in place of libc's by the whole test program.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** result) {
  static const auto original = reinterpret_cast<decltype(&getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  ++questions;
  return original(host, service, hints, result);
}

namespace zero::net::socket_test {
namespace {

using namespace std::chrono_literals;

TEST(Dialer, AsksTheNameServerAtMostOnceASecond) {
  MeetingPoint closed{"", "127.0.0.1", 0};
  listen_at(closed);
  Dialer dialer;
  questions = 0;
  const auto begin = Clock::now();
  int attempts = 0;
  while (Clock::now() - begin < 1500ms) {
    EXPECT_FALSE(dialer.dial(closed));
    ++attempts;
    std::this_thread::sleep_for(2ms);
  }
  const auto seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_GE(questions, 1);
  EXPECT_LE(questions, static_cast<int>(seconds) + 1) << attempts << " attempts";
}

TEST(Dialer, PausesLongerTheLongerItWaits) {
  Dialer dialer;
  EXPECT_GE(dialer.pause(), 5ms);
  std::this_thread::sleep_for(640ms);
  std::chrono::milliseconds shortest = 1h, longest = 0ms;
  for (int i = 0; i < 200; ++i) {
    const auto pause = dialer.pause();
    shortest = std::min(shortest, pause);
    longest = std::max(longest, pause);
  }
  EXPECT_GE(shortest, 20ms) << "half of a sixteenth of the time so far";
  EXPECT_LE(longest, 1000ms);
  EXPECT_GT(longest, shortest) << "ranks would ask at the same moments";
}

// Of a program that was started with the rights of another user (set-user-ID), the kernel shows that user at a socket.
TEST(OwnUser, IsTheOneWhoseRightsTheProcessHas) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const pid_t child = ::fork();
  if (child == 0) {
    int ends[2];
    if (::setresuid(1234, 4321, 4321) != 0 || ::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) ::_exit(2);
    auto peer = other_end(ends[0]);
    const bool own = is_own_user(peer);
    peer.uid = 1234;
    ::_exit(own && !is_own_user(peer) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "2: the child could not become another user";
}

}  // namespace
}  // namespace zero::net::socket_test
