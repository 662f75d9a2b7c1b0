// See mesh.h.
//
// [Note: strangers] gloo knows no secret. Its listener gives the place of a peer to anyone who names that peer's number
// first, keeps silent connections for ever, and ends the process if accept() fails. Therefore the listener is closed as
// soon as all peers are connected, and every peer sends a proof over each new connection before it is used.
#include "comm/gloo/mesh.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/check.h"
#include "base/log.h"
#include "comm/bootstrap/c10d_rendezvous.h"
#include "net/descriptors.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

// For the proofs: all ranks are connected by then, or have failed.
constexpr milliseconds kProofLimit{60'000};
// Numbers of descriptors that are looked at for gloo's.
constexpr int kMostNumbers = 1 << 16;
constexpr int kProofTag = 0;

bool listens(int fd) {
  int listens = 0;
  socklen_t length = sizeof listens;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0 &&
         !net::local_address(fd).empty();
}

std::set<int> open_numbers() {
  std::set<int> found;
  int unused = 0;
  // Numbers are given from below, so a long row of unused ones is the end.
  for (int fd = 0; fd < kMostNumbers && unused < 4096; ++fd) {
    unused = fcntl(fd, F_GETFD) < 0 ? unused + 1 : 0;
    if (unused == 0) found.insert(fd);
  }
  return found;
}

// A listening socket that gives no connection: accept() finds none, as on an idle TCP listener, and the name that it
// needs leads to no data.
base::Descriptor idle_listener() {
  base::Descriptor fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un any{};
  any.sun_family = AF_UNIX;
  // Without a name, the kernel chooses an abstract one.
  if (fd && bind(fd.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any.sun_family) == 0 &&
      listen(fd.get(), 0) == 0)
    return fd;
  return base::Descriptor();
}

// Closes gloo's listener, one of the descriptors `made` with it, and puts a socket in its place to which nobody
// connects: gloo keeps the number, may call accept() at this moment, and later removes it from its epoll set. False: it
// stays open, because it cannot be told from one that another thread opened at the same time.
bool close_listener(const std::set<int>& made) {
  int listener = -1;
  for (const int fd : made) {
    if (!listens(fd)) continue;
    if (listener >= 0) return false;
    listener = fd;
  }
  const auto idle = idle_listener();
  if (listener < 0 || !idle) return false;
  for (const int epoll : made) {
    // Fails for what is no epoll set, or one without the listener.
    if (epoll_ctl(epoll, EPOLL_CTL_DEL, listener, nullptr) != 0) continue;
    const bool closed = dup3(idle.get(), listener, O_CLOEXEC) == listener;
    epoll_event none{};  // so that no handler is called
    return epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &none) == 0 && closed;
  }
  return false;
}

// Exchanges proofs with every peer over both groups. Of a recorded or forged one no byte is used.
void prove_pairs(const Mesh& mesh, const net::ProcessInfo& identity, FailureDetector& watch, milliseconds limit) {
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor bytes;
    int peer;
    std::string expected;  // empty: sent
  };
  struct Exchange {  // shared with a callback that may still run when the function has returned
    std::mutex mutex;
    std::vector<Message> messages;
  };
  const auto deadline = net::Clock::now() + std::min(limit, kProofLimit);
  const auto exchange = std::make_shared<Exchange>();
  const auto key = net::key_of(identity);
  const auto fail = [&](int peer, const std::string& got) {
    if (const auto cause = watch.cause(milliseconds(200))) throw CommError(cause->reason, cause->rank);
    const auto text = base::join("[comm::gloo] got ", got, " over the connection of rank ", peer,
                                 ", expected a proof of the run's secret (rank ", identity.rank, "/", identity.size,
                                 "). Hint: a process that is not of this run has connected in that rank's place; use a "
                                 "network of the run's own.");
    watch.abort(peer, text);
    throw CommError(text, peer);
  };
  const auto post = [&](c10d::ProcessGroupGloo& group, const char* name, int peer, bool sends) {
    auto bytes = at::empty({static_cast<std::int64_t>(net::kProofBytes)}, at::kByte);
    const net::Handshake handshake{base::join("gloo ", name),    identity.size,   sends ? identity.rank : peer,
                                   sends ? peer : identity.rank, watch.session(), ""};
    const auto text = handshake.proof(key, 'C');
    if (sends) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
    std::vector<at::Tensor> tensors{bytes};
    try {
      exchange->messages.push_back({sends ? group.send(tensors, peer, kProofTag) : group.recv(tensors, peer, kProofTag),
                                    bytes, peer, sends ? "" : text});
    } catch (const std::exception& error) {
      fail(peer, base::join("'", first_line(error), "'"));
    }
  };
  for (const bool sends : {false, true}) {
    for (int i = 1; i < identity.size; ++i) {
      const int peer = (identity.rank + i) % identity.size;
      post(*mesh.up, "up", peer, sends);
      post(*mesh.down, "down", peer, sends);
    }
  }
  watch.on_failure([exchange](const PeerFailure&) {
    const std::lock_guard lock(exchange->mutex);
    for (const auto& message : exchange->messages) message.work->abort();
  });
  struct Unwatch {
    FailureDetector& watch;
    ~Unwatch() { watch.on_failure(nullptr); }
  } unwatch{watch};
  for (const auto& message : exchange->messages) {
    std::string got;
    try {
      const auto left = std::chrono::ceil<milliseconds>(deadline - net::Clock::now());
      if (!message.work->wait(std::max(left, milliseconds(1)))) got = "no message";
    } catch (const std::exception& error) {
      got = base::join("'", first_line(error), "'");
    }
    const std::string_view bytes(static_cast<const char*>(message.bytes.const_data_ptr()), message.bytes.nbytes());
    if (got.empty() && !message.expected.empty() && !net::equal_proofs(bytes, message.expected)) got = "other bytes";
    if (!got.empty()) fail(message.peer, got);
  }
  const std::lock_guard lock(exchange->mutex);
  exchange->messages.clear();
}

}  // namespace

Mesh connect_mesh(const net::ProcessInfo& identity, FailureDetector& watch, milliseconds limit) {
  const auto deadline = net::Clock::now() + limit;
  try {
    net::reserve_descriptors(2 * identity.size, base::join("the connections over TCP of a world of ", identity.size),
                             base::join("rank ", identity.rank, "/", identity.size));
  } catch (const CommError& error) {
    watch.abort(identity.rank, error.what());
    throw CommError(error.what(), identity.rank);
  }
  Mesh mesh;
  std::set<int> made;  // descriptors of gloo, and of other threads
  try {
    auto options = c10d::ProcessGroupGloo::Options::create(limit);
    options->threads = 1;  // messages need no thread, but c10d requires one
    const auto before = open_numbers();
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    if (identity.one_host()) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    } else if (interface != nullptr && *interface != '\0') {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    } else {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(watch.own_address()));
    }
    for (const int fd : open_numbers())
      if (!before.contains(fd)) made.insert(fd);
    const auto store = store_of(watch, limit);
    mesh.up = c10::make_intrusive<c10d::ProcessGroupGloo>(store, identity.rank, identity.size, options);
    mesh.down = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("down", store),
                                                            identity.rank, identity.size, options);
  } catch (const std::exception& error) {
    if (const auto cause = watch.cause(milliseconds(200))) throw CommError(cause->reason, cause->rank);
    const auto text = base::join("[comm::gloo] got '", first_line(error), "', expected connections to all ranks (rank ",
                                 identity.rank, "/", identity.size,
                                 "). Hint: set GLOO_SOCKET_IFNAME to the interface that joins the hosts.");
    watch.abort(identity.rank, text);
    throw CommError(text, identity.rank);
  }
  if (!close_listener(made))
    base::log(LogLevel::Warning, base::join("rank ", identity.rank,
                                         ": gloo's port stays open during the run, because its "
                                         "listener was not found"));
  prove_pairs(mesh, identity, watch,
              std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline - net::Clock::now())));
  return mesh;
}

}  // namespace zero::comm
