#include "gpu/simulated_nccl.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/library.h"
#include "gpu/simulated_gpu.h"
#include "gpu/simulated_memory.h"

namespace zero::test::simulated_nccl {
namespace {

using comm::nccl::Id;
using comm::nccl::kInProgress;
using comm::nccl::kSuccess;
using simulated_gpu::Machine;

constexpr int kMostRanks = 8, kMostCommunicators = 64, kRefusals = 3;

// Shared by the ranks: where the members of a communicator are.
struct Meeting {
  std::atomic<int> joined;
  std::array<std::atomic<int>, kMostRanks> wire_rank;
};
struct Shared {
  std::atomic<int> listening, created;
  std::array<Meeting, kMostCommunicators> meetings;
};

Shared* shared = nullptr;
std::vector<int> sockets;  // to each rank
std::string meeting_point;
int all_ranks = 0, own_rank = 0;
std::chrono::milliseconds patience{60000};
int refused = kSuccess;

int socket_to(int peer) { return sockets[static_cast<std::size_t>(peer)]; }

// A Unix socket without a file; its end is that of the processes that hold it.
struct Place {
  sockaddr_un address{};
  socklen_t bytes;
  explicit Place(int rank) {
    const auto name = meeting_point + "-" + std::to_string(rank);
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&address); }
};

int require(int result, const char* what) {
  if (result < 0) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
  return result;
}

struct Header {
  int communicator;
  std::size_t bytes;
};

struct Message {
  int peer;  // on the wire
  void* data;
  std::size_t bytes;
};

bool write_all(int to, const void* data, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const auto count = ::send(to, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (count <= 0) return false;
    done += static_cast<std::size_t>(count);
  }
  return true;
}

bool read_all(int from, void* data, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    pollfd ready{from, POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(patience.count())) <= 0) return false;
    const auto count = ::recv(from, static_cast<char*>(data) + done, bytes - done, 0);
    if (count <= 0) return false;
    done += static_cast<std::size_t>(count);
  }
  return true;
}

struct Communicator {
  int number, size, rank;
  std::vector<int> wire_ranks;
  std::set<int> streams;
  int unsettled = 0;  // answers "in progress" of progress()

  // The messages of one operation at once. Enqueues it with these accesses.
  int run(const char* name, int stream, const std::vector<Message>& sent, const std::vector<Message>& received,
          std::vector<HappensBefore::Access> accesses) {
    streams.insert(stream);
    if (refused != kSuccess) return std::exchange(refused, kSuccess);
    std::vector<std::thread> senders;
    for (const auto& message : sent)
      senders.emplace_back([&] {
        const Header header{number, message.bytes};
        const int to = socket_to(message.peer);
        (void)(write_all(to, &header, sizeof header) && write_all(to, message.data, message.bytes));
      });
    bool complete = true;
    for (const auto& message : received) {
      Header header{};
      const int from = socket_to(message.peer);
      complete = complete && read_all(from, &header, sizeof header);
      if (complete && (header.communicator != number || header.bytes != message.bytes))
        Machine::get().add_fault(std::string(name) + ": ranks make different calls");
      complete = complete && read_all(from, message.data, message.bytes);
    }
    if (!complete)
      for (const auto& message : sent) ::shutdown(socket_to(message.peer), SHUT_WR);  // unblocks the senders
    for (auto& sender : senders) sender.join();
    Machine::get().operation(stream, name, std::move(accesses));
    if (!complete) Machine::get().hang(stream);
    unsettled = 2;
    return kInProgress;
  }
};

// Of the thread between group_begin() and group_end().
struct Open {
  bool open = false;
  Communicator* communicator = nullptr;
  int stream = 0;
  std::vector<Message> sent, received;
  std::vector<HappensBefore::Access> accesses;
};
thread_local Open group;

Communicator& of(void* communicator) { return *static_cast<Communicator*>(communicator); }
int number_of(void* stream) { return static_cast<int>(reinterpret_cast<std::intptr_t>(stream)); }
void* reach(const void* data) { return Machine::get().reach(data); }
std::int64_t as_signed(std::size_t bytes) { return static_cast<std::int64_t>(bytes); }

int create_id(Id* id) {
  const int number = shared->created++;
  if (number >= kMostCommunicators) throw std::logic_error("too many communicators");
  std::memcpy(id->bytes, &number, sizeof number);
  return kSuccess;
}

int start(void** communicator, int size, const Id* id, int rank) {
  int number = 0;
  std::memcpy(&number, id->bytes, sizeof number);
  auto& meeting = shared->meetings[static_cast<std::size_t>(number)];
  meeting.wire_rank[static_cast<std::size_t>(rank)] = own_rank;
  ++meeting.joined;
  while (meeting.joined < size) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  auto* const made = new Communicator{number, size, rank, {}, {}, 2};
  for (int r = 0; r < size; ++r) made->wire_ranks.push_back(meeting.wire_rank[static_cast<std::size_t>(r)]);
  *communicator = made;
  return kInProgress;
}

int progress(void* communicator) { return of(communicator).unsettled-- > 0 ? kInProgress : kSuccess; }

int all_gather(void* communicator, const void* in, void* out, std::size_t bytes, void* stream) {
  auto& c = of(communicator);
  auto* const whole = static_cast<char*>(out);
  const auto place = [&](int r) { return whole + static_cast<std::size_t>(r) * bytes; };
  std::vector<Message> sent, received;
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank) continue;
    sent.push_back({c.wire_ranks[static_cast<std::size_t>(r)], reach(in), bytes});
    received.push_back({c.wire_ranks[static_cast<std::size_t>(r)], reach(place(r)), bytes});
  }
  if (in != place(c.rank)) std::memmove(reach(place(c.rank)), reach(in), bytes);
  return c.run("nccl::all_gather", number_of(stream), sent, received,
               {Machine::reads(in, as_signed(bytes)),
                Machine::writes(out, as_signed(bytes * static_cast<std::size_t>(c.size)))});
}

int broadcast(void* communicator, void* inout, std::size_t bytes, int root, void* stream) {
  auto& c = of(communicator);
  std::vector<Message> sent, received;
  for (int r = 0; r < c.size; ++r)
    if (c.rank == root && r != root) sent.push_back({c.wire_ranks[static_cast<std::size_t>(r)], reach(inout), bytes});
  if (c.rank != root) received.push_back({c.wire_ranks[static_cast<std::size_t>(root)], reach(inout), bytes});
  return c.run("nccl::broadcast", number_of(stream), sent, received, {Machine::writes(inout, as_signed(bytes))});
}

int add_message(void* communicator, const void* data, std::size_t bytes, int peer, void* stream, bool sends) {
  if (!group.open) throw std::logic_error("a message outside a group");
  group.communicator = &of(communicator);
  group.stream = number_of(stream);
  auto& messages = sends ? group.sent : group.received;
  messages.push_back({of(communicator).wire_ranks[static_cast<std::size_t>(peer)], reach(data), bytes});
  group.accesses.push_back(sends ? Machine::reads(data, as_signed(bytes)) : Machine::writes(data, as_signed(bytes)));
  return kSuccess;
}

int send(void* communicator, const void* in, std::size_t bytes, int peer, void* stream) {
  return add_message(communicator, in, bytes, peer, stream, true);
}

int receive(void* communicator, void* out, std::size_t bytes, int peer, void* stream) {
  return add_message(communicator, out, bytes, peer, stream, false);
}

int group_begin() {
  group = {};
  group.open = true;
  return kSuccess;
}

int group_end() {
  const auto ended = std::exchange(group, {});
  if (ended.communicator == nullptr) return kSuccess;
  return ended.communicator->run("nccl::messages", ended.stream, ended.sent, ended.received, ended.accesses);
}

int destroy(void* communicator) {
  delete &of(communicator);
  return kSuccess;
}

int abort(void* communicator) {
  for (const int stream : of(communicator).streams) Machine::get().release(stream);
  return destroy(communicator);
}

const comm::nccl::Library kLibrary{comm::nccl::kVersion,
                                   [](int result) { return result == kRefusals ? "internal error" : "other"; },
                                   create_id,
                                   start,
                                   progress,
                                   all_gather,
                                   broadcast,
                                   send,
                                   receive,
                                   group_begin,
                                   group_end,
                                   [](void*) { return kSuccess; },
                                   destroy,
                                   abort};

}  // namespace

void connect(int ranks) {
  static int calls = 0;
  all_ranks = ranks;
  meeting_point = "zero-nccl-" + std::to_string(getpid()) + "-" + std::to_string(++calls);
  auto* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
  shared = new (memory) Shared{};
}

void be_rank(int rank) {
  own_rank = rank;
  sockets.assign(static_cast<std::size_t>(all_ranks), -1);
  const int listener = require(::socket(AF_UNIX, SOCK_STREAM, 0), "socket");
  const Place own(rank);
  require(::bind(listener, own.data(), own.bytes), "bind");
  require(::listen(listener, all_ranks), "listen");
  ++shared->listening;
  while (shared->listening < all_ranks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (int peer = 0; peer < rank; ++peer) {
    const int to = require(::socket(AF_UNIX, SOCK_STREAM, 0), "socket");
    const Place place(peer);
    require(::connect(to, place.data(), place.bytes), "connect");
    write_all(to, &rank, sizeof rank);
    sockets[static_cast<std::size_t>(peer)] = to;
  }
  for (int above = rank + 1; above < all_ranks; ++above) {
    const int from = require(::accept(listener, nullptr, nullptr), "accept");
    int peer = 0;
    if (!read_all(from, &peer, sizeof peer)) throw std::runtime_error("a rank left");
    sockets[static_cast<std::size_t>(peer)] = from;
  }
  ::close(listener);
  simulated_gpu::be_device(rank, all_ranks);
  comm::nccl::serve_by(&kLibrary);
}

void be_patient(std::chrono::milliseconds limit) { patience = limit; }

void refuse_next(int result) { refused = result; }

}  // namespace zero::test::simulated_nccl
