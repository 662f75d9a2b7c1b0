// Ranks of a run with a secret, and processes that are not of it, for tests of what these can do.
#pragma once
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "net/secret.h"
#include "net/socket.h"
#include "support/shm_ranks.h"

namespace zero::test {

using Identity = net::ProcessInfo;

inline int unused_port() {
  net::MeetingPoint point{"", "127.0.0.1", 0};
  net::listen_at(point);
  return point.port;
}

// With a port, every rank counts as a host.
inline Identity member(const std::string& run, int rank, int size, int port = 0) {
  auto identity = identity_of(run, rank, size);
  identity.secret = "the secret of this run";
  if (port != 0) identity.local_rank = 0, identity.local_size = 1, identity.master_addr = "127.0.0.1";
  identity.master_port = port;
  return identity;
}

inline Comm open_comm(const std::string& transport, const Identity& identity,
                      std::chrono::milliseconds limit = std::chrono::seconds(30)) {
  at::set_num_threads(1);
  auto opened = transport == "shm"        ? comm::make_shm(identity, limit)
                : transport == "shm+gloo" ? comm::make_shm_gloo(identity, limit, /*asked=*/true)
                                          : comm::make_gloo(identity, limit);
  return comm::make_communicator(std::move(opened));
}

// Every rank's data reach every other one.
inline void exchange(const Comm& comm) {
  const auto all = comm->all_gather_bytes("of rank " + std::to_string(comm->rank()));
  for (int r = 0; r < comm->size(); ++r)
    require(all.at(static_cast<std::size_t>(r)) == "of rank " + std::to_string(r), "another rank's data");
}

// What processes of one test tell each other.
struct Board {
  std::atomic<pid_t> pids[8];
  std::atomic<int> marks, wins;
  static Board& fresh() {
    void* memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return *new (memory) Board();
  }
  void wait_for(int count) const {
    while (marks < count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

// As shm/rendezvous.cpp has it.
struct ShmMessage {
  std::uint64_t magic = 0x7a65726f2d736d33;
  std::int32_t kind = 0, rank = 1, size = 2, pid = 0;
  char nonce[32] = {}, proof[32] = {}, text[448] = {};
};

// Sends a message with a descriptor.
inline void send_memory(int fd, ShmMessage& message, int memory) {
  iovec data{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data, header.msg_iovlen = 1;
  header.msg_control = control, header.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS, rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &memory, sizeof memory);
  ::sendmsg(fd, &header, MSG_NOSIGNAL);
}

}  // namespace zero::test
