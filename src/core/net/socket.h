// Stream sockets and frames for the rendezvous. On one host it uses an abstract unix socket, which needs no network
// port and no file; on several hosts a TCP port of rank 0. Does not interpret frames.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/fd.h"

struct addrinfo;

namespace zero::net {

using Clock = std::chrono::steady_clock;

// A short name without special characters for one purpose of this user's run with the key key_of(). Only who has the
// secret of the run can guess it.
std::string local_name(const char* purpose, const std::string& key);

// The abstract unix address (unix(7)) of that name: no file; it disappears with its socket.
struct LocalAddress {
  sockaddr_un value{};
  socklen_t length = 0;
  explicit LocalAddress(const std::string& name);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

// Credentials of the peer of a unix socket; user -1 if unknown. An abstract name is open to all users of the host, but
// only processes of this user belong to its run. is_own_user: false for the number that the kernel shows for users that
// have none here (/proc/sys/kernel/overflowuid, "nobody") unless it also shows the process.
ucred other_end(int fd);
bool is_own_user(const ucred& peer);
// "nobody (uid 65534)" for messages.
std::string user_text(uid_t user);

// A non-blocking connection to an abstract socket of `type`. None, with `error`: ECONNREFUSED if no process listens,
// EAGAIN if the listener does not take connections, EPERM if it belongs to another user, `owner`.
base::Descriptor connect_local(const LocalAddress& address, int type, int* error, ucred* owner);

// Where rank 0 listens. `name` for an abstract unix socket (unix(7)), else host and port.
struct MeetingPoint {
  std::string name;
  std::string host;
  int port = 0;
  std::string text() const;  // for messages
};

// The abstract unix socket of this user's run with the key key_of().
MeetingPoint local_meeting_point(const std::string& key);

// Listens; replaces port 0 by the port in use. TCP listens on the address of `host`, or on all interfaces if `host`
// resolves to the loopback here. Throws CommError, for example if the port is in use.
base::Descriptor listen_at(MeetingPoint& point);

// A connection, or none if no process listens there yet. Keep-alive detects a dead TCP peer within about 20 s. Throws
// CommError if the host name does not resolve, or if a process of another user has the unix socket.
base::Descriptor connect_to(const MeetingPoint& point);

// Connects to a place at which nobody may listen yet. Asks the name server at most once a second.
class Dialer {
 public:
  base::Descriptor dial(const MeetingPoint& point);  // as connect_to()
  // What to wait before the next attempt: a sixteenth of the time so far, from 10 ms to 1 s, and a random part of it,
  // so that many ranks do not ask at the same moments.
  std::chrono::milliseconds pause();

 private:
  const Clock::time_point begin_ = Clock::now();
  MeetingPoint resolved_;
  std::shared_ptr<addrinfo> addresses_;
  Clock::time_point asked_;
};

// The next pending connection, or none. At a unix socket, connections of other users are closed. `out_of_descriptors`:
// a connection is pending but this process has no free descriptor; the listener stays readable.
base::Descriptor accept_from(const base::Descriptor& listener, bool* out_of_descriptors);
// Settings of a connection: close-on-exec, non-blocking, no delay, keep-alive.
void prepare_connection(int fd);

// The local address of a TCP connection; "" for a unix socket.
std::string local_address(int fd);
bool is_loopback(const std::string& address);

// One frame: a kind, the rank it concerns, and a payload.
struct Frame {
  char kind = 0;
  std::int32_t rank = -1;
  std::string payload;
};
constexpr std::size_t kMaxPayload = 64 * 1024;

// The bytes of a frame. A longer payload is truncated.
std::string encode(char kind, std::int32_t rank, std::string_view payload);
// Removes the first complete frame from `bytes`. 1: removed; 0: incomplete; -1: not a frame.
int decode(std::string& bytes, Frame& frame);

}  // namespace zero::net
