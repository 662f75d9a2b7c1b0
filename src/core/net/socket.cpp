// See socket.h. Only system calls; failure_detector.cpp defines the protocol.
#include "net/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>

#include "base/check.h"
#include "base/printable.h"
#include "net/secret.h"

namespace zero::net {
namespace {

constexpr std::uint32_t kMagic = 0x5a574331;  // "ZWC1": the protocol and its version

std::string system_text(int error) { return std::strerror(error); }

using AddressList = std::shared_ptr<addrinfo>;

AddressList resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* first = nullptr;
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first);
  if (rc != 0) {
    throw CommError(base::join("[comm::rendezvous] got '", gai_strerror(rc), "' for the host name '", host,
                               "', expected the address of rank 0's host. Hint: check MASTER_ADDR."));
  }
  return {first, freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "";
  if (getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return host;
}

bool is_literal(const std::string& host) {
  in6_addr buffer;
  return inet_pton(AF_INET, host.c_str(), &buffer) == 1 || inet_pton(AF_INET6, host.c_str(), &buffer) == 1;
}

CommError foreign_listener(const MeetingPoint& point, const ucred& owner) {
  return CommError(base::join("[comm::rendezvous] got a process of ", user_text(owner.uid), ", pid ", owner.pid,
                              ", at ", point.text(),
                              ", expected rank 0 of this run. Hint: with ZERO_TOKEN no other user can "
                              "guess the name; ask that user, or give the run another id."));
}

base::Descriptor listen_local(const MeetingPoint& point) {
  const LocalAddress address(point.name);
  base::Descriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd && bind(fd.get(), address.get(), address.length) == 0 && listen(fd.get(), 1024) == 0) return fd;
  if (errno == EADDRINUSE) {
    int error = 0;
    ucred owner{};
    if (!connect_local(address, SOCK_STREAM, &error, &owner) && error == EPERM) throw foreign_listener(point, owner);
    throw CommError(
        base::join("[comm::rendezvous] got a living rank 0 at ", point.text(),
                   ", expected none: two runs have the same run id. Hint: give each run its own id or port."));
  }
  throw CommError(base::join("[comm::rendezvous] cannot listen at ", point.text(), ": ", system_text(errno)));
}

}  // namespace

std::string MeetingPoint::text() const { return name.empty() ? base::join(host, ":", port) : "@" + name; }

std::string local_name(const char* purpose, const std::string& key) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = base::join("zero-", purpose, "-", geteuid(), "-");
  for (const unsigned char c : hmac_sha256(key, purpose).substr(0, 12)) text += {kDigits[c >> 4], kDigits[c & 15]};
  return text;
}

LocalAddress::LocalAddress(const std::string& name) {
  value.sun_family = AF_UNIX;
  // A leading zero makes the name abstract.
  std::memcpy(value.sun_path + 1, name.data(), std::min(name.size(), sizeof value.sun_path - 1));
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

ucred other_end(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) peer.uid = static_cast<uid_t>(-1);
  return peer;
}

bool is_own_user(const ucred& peer) {
  static const uid_t nobody = [] {
    uid_t user = 65534;
    std::ifstream("/proc/sys/kernel/overflowuid") >> user;
    return user;
  }();
  return peer.uid == geteuid() && (peer.uid != nobody || peer.pid != 0);
}

std::string user_text(uid_t user) {
  char buffer[4096];
  passwd entry{};
  passwd* found = nullptr;
  if (getpwuid_r(user, &entry, buffer, sizeof buffer, &found) != 0 || !found) return base::join("uid ", user);
  return base::join(base::printable(entry.pw_name, base::Lines::Escape), " (uid ", user, ")");
}

base::Descriptor connect_local(const LocalAddress& address, int type, int* error, ucred* owner) {
  // A blocking connect() waits without limit while the listener's queue is full.
  base::Descriptor fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || connect(fd.get(), address.get(), address.length) != 0) {
    *error = errno;
    return base::Descriptor();
  }
  *owner = other_end(fd.get());
  if (is_own_user(*owner)) return fd;
  *error = EPERM;
  return base::Descriptor();
}

MeetingPoint local_meeting_point(const std::string& key) { return {local_name("meet", key), "", 0}; }

base::Descriptor listen_at(MeetingPoint& point) {
  if (!point.name.empty()) return listen_local(point);
  const auto list = resolve(point.host, point.port);
  int error = 0;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    sockaddr_storage address{};
    std::memcpy(&address, entry->ai_addr, entry->ai_addrlen);
    // Many systems map their host name to 127.0.1.1, which other hosts cannot reach.
    if (is_loopback(numeric(entry->ai_addr, entry->ai_addrlen)) && !is_literal(point.host) &&
        point.host != "localhost") {
      if (address.ss_family == AF_INET) reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr = INADDR_ANY;
      if (address.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr = in6addr_any;
    }
    base::Descriptor fd(socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (fd) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!fd || bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), entry->ai_addrlen) != 0 ||
        listen(fd.get(), 1024) != 0) {
      error = errno;
      continue;
    }
    socklen_t length = sizeof address;
    getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length);
    point.port = ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                                     : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
    return fd;
  }
  throw CommError(base::join("[comm::rendezvous] cannot listen at ", point.text(), ": ", system_text(error),
                             ". Hint: rank 0 must run on MASTER_ADDR, and another "
                             "MASTER_PORT may be free."));
}

base::Descriptor connect_to(const MeetingPoint& point) { return Dialer().dial(point); }

std::chrono::milliseconds Dialer::pause() {
  thread_local std::minstd_rand random(std::random_device{}());
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin_).count();
  const auto part = std::clamp<std::int64_t>(waited / 16, 10, 1000);
  return std::chrono::milliseconds(part / 2 + std::uniform_int_distribution<std::int64_t>(0, part / 2)(random));
}

base::Descriptor Dialer::dial(const MeetingPoint& point) {
  if (!point.name.empty()) {
    const LocalAddress address(point.name);
    int error = 0;
    ucred owner{};
    auto fd = connect_local(address, SOCK_STREAM, &error, &owner);
    if (!fd && error == EPERM) throw foreign_listener(point, owner);
    if (fd) prepare_connection(fd.get());
    return fd;
  }
  if (!addresses_ || point.host != resolved_.host || point.port != resolved_.port ||
      Clock::now() - asked_ > std::chrono::seconds(1)) {
    addresses_ = resolve(point.host, point.port);
    resolved_ = point;
    asked_ = Clock::now();
  }
  for (const addrinfo* entry = addresses_.get(); entry != nullptr; entry = entry->ai_next) {
    base::Descriptor fd(socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    // Without a limit, a host that drops packets would block the caller for minutes.
    const timeval limit{3, 0};
    if (fd) setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (!fd || connect(fd.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
    prepare_connection(fd.get());
    return fd;
  }
  return base::Descriptor();
}

base::Descriptor accept_from(const base::Descriptor& listener, bool* out_of_descriptors) {
  for (base::Descriptor fd; (fd = base::Descriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) continue;
    if (address.ss_family == AF_UNIX && !is_own_user(other_end(fd.get()))) continue;
    prepare_connection(fd.get());
    return fd;
  }
  *out_of_descriptors = errno != EAGAIN && errno != ECONNABORTED && errno != EINTR;
  return base::Descriptor();
}

void prepare_connection(int fd) {
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  if (local_address(fd).empty()) return;
  const int on = 1, idle_s = 5, interval_s = 5, count = 3, unanswered_ms = 20'000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

std::string local_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return "";
  return numeric(reinterpret_cast<const sockaddr*>(&address), length);
}

bool is_loopback(const std::string& address) { return address.rfind("127.", 0) == 0 || address == "::1"; }

std::string encode(char kind, std::int32_t rank, std::string_view payload) {
  payload = payload.substr(0, kMaxPayload);
  const auto length = static_cast<std::uint32_t>(payload.size());
  std::string bytes(13, '\0');
  std::memcpy(bytes.data(), &kMagic, 4);
  std::memcpy(bytes.data() + 4, &length, 4);
  bytes[8] = kind;
  std::memcpy(bytes.data() + 9, &rank, 4);
  return bytes.append(payload);
}

int decode(std::string& bytes, Frame& frame) {
  std::uint32_t magic = 0, length = 0;
  if (bytes.size() >= 4) std::memcpy(&magic, bytes.data(), 4);
  if (bytes.size() >= 4 && magic != kMagic) return -1;
  if (bytes.size() < 13) return 0;
  std::memcpy(&length, bytes.data() + 4, 4);
  if (length > kMaxPayload) return -1;
  if (bytes.size() < 13 + length) return 0;
  frame.kind = bytes[8];
  std::memcpy(&frame.rank, bytes.data() + 9, 4);
  frame.payload = bytes.substr(13, length);
  bytes.erase(0, 13 + length);
  return 1;
}

}  // namespace zero::net
