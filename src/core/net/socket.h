// Stream sockets of the rendezvous: where the ranks of one run meet, and whole frames over a
// socket. On one host they meet at an abstract unix socket, so that nothing listens on the network and
// nothing can be left behind in a folder; on several at a TCP port of rank 0. What the frames mean is not known here.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/fd.h"

namespace zero::net {

using Clock = std::chrono::steady_clock;

// A short and plain name for what ranks of this user do together in the run named `key`, of any length.
std::string local_name(const char* purpose, const std::string& key);

// The abstract unix address (unix(7)) of that name: no file, and it ends with its socket.
struct LocalAddress {
  sockaddr_un value{};
  socklen_t length = 0;
  explicit LocalAddress(const std::string& name);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

// The process at the other end of a unix socket; user -1 where it is not known. An abstract name is open to every user
// of the host, and only processes of this user are ranks of its run.
ucred other_end(int fd);

// Where rank 0 listens. `name` for an abstract unix socket (unix(7)), else host and port.
struct MeetingPoint {
  std::string name;
  std::string host;
  int port = 0;
  std::string text() const;  // for messages
};

// The abstract unix socket of this user's run named `key`.
MeetingPoint local_meeting_point(const std::string& key);

// Listens; port 0 is replaced by the port in use.
// TCP listens on the address that `host` names; where that is another host's name for this one
// (it resolves to the loopback here), on all interfaces. Throws CommError, e.g. when the port is in use.
base::Descriptor listen_at(MeetingPoint& point);

// A connection, or none if nobody (of this user, at a unix socket) listens there (yet). A dead TCP peer is noticed by
// keep-alive within about 20 s. Throws CommError if the host name does not resolve.
base::Descriptor connect_to(const MeetingPoint& point);
// The next waiting connection, or none; at a unix socket those of other users are closed unheard. `out_of_descriptors`:
// one waits for which this process has no descriptor; the listener stays readable.
base::Descriptor accept_from(const base::Descriptor& listener, bool* out_of_descriptors);
// Settings of a connection: close-on-exec, non-blocking, no delay, keep-alive.
void prepare_connection(int fd);

// This end's address of a TCP connection, "" for a unix socket.
std::string local_address(int fd);
bool is_loopback(const std::string& address);

// One frame: what kind, about which rank, and a payload.
struct Frame {
  char kind = 0;
  std::int32_t rank = -1;
  std::string payload;
};
constexpr std::size_t kMaxPayload = 64 * 1024;

// The bytes of a frame; a longer payload is cut.
std::string encode(char kind, std::int32_t rank, std::string_view payload);
// Takes the first whole frame off `bytes`: 1 frame taken, 0 not whole yet, -1 not a frame.
int decode(std::string& bytes, Frame& frame);

}  // namespace zero::net
