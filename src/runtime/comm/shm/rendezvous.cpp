// Rank 0 listens. The others greet it and, when both sides have proved the run's secret, send a hello with their
// descriptors. When all have arrived, rank 0 sends all descriptors to all ranks and closes the socket. A fault is
// reported to all waiting ranks.
#include "comm/shm/rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "base/printable.h"
#include "comm/collective_call.h"
#include "net/descriptors.h"
#include "net/secret.h"
#include "net/socket.h"

namespace zero::comm::shm {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr std::uint64_t kMagic = 0x7a65726f2d736d33;  // "zero-sm3": changes with every layout below or in group.h
// Time for rank 0 to report its findings before the others time out.
constexpr auto kGrace = 1s;
// For a process that has connected to introduce itself.
constexpr auto kIntroduction = 5s;
constexpr auto kRetry = 5ms;
constexpr const char* kPurpose = "shm";

// Greeting: nonce. Challenge: nonce and proof of the listening side. Hello: proof of the connecting one, and
// descriptors.
enum class Kind : std::int32_t { Greeting, Challenge, Hello, Member, Refusal };

struct Message {
  std::uint64_t magic = kMagic;
  Kind kind = Kind::Greeting;
  std::int32_t rank = 0, size = 0, pid = 0;
  char nonce[net::kProofBytes] = {}, proof[net::kProofBytes] = {};
  char text[448] = {};  // Refusal: the reason
};

void put(char (&to)[net::kProofBytes], const std::string& bytes) { std::memcpy(to, bytes.data(), sizeof to); }
std::string taken(const char (&from)[net::kProofBytes]) { return {from, sizeof from}; }

// What receive_message() found.
enum class Got { Message, End, NoDescriptor };

constexpr const char* kRaise = "has no file descriptor left for its peers' memory; raise ulimit -n";

void set_text(Message& message, const std::string& text) {
  const std::size_t count = std::min(text.size(), sizeof message.text - 1);
  std::memcpy(message.text, text.data(), count);
  message.text[count] = '\0';
}

// False, with errno, if it could not be sent.
bool send_message(int socket, const Message& message, const int* fds, int num_fds) {
  iovec data{const_cast<Message*>(&message), sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (num_fds > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds, num_fds * sizeof(int));
  }
  // The number of descriptors in flight is limited per user; receivers take them as fast as they can.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (::sendmsg(socket, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof message)) return true;
    if (errno != ETOOMANYREFS && errno != EINTR) return false;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

bool send_member(int socket, int rank, const Member& member) {
  Message message;
  message.kind = Kind::Member;
  message.rank = rank;
  message.pid = member.pid;
  const int fds[2] = {member.memory.get(), member.process.get()};
  return send_message(socket, message, fds, member.process ? 2 : 1);
}

// End: also for what is no message. NoDescriptor: this process had no number for a descriptor that came with it.
Got receive_message(int socket, Message& message, Member& member) {
  iovec data{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got;
  do got = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  if (got < 0) return Got::End;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights != nullptr; rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    int fds[2] = {-1, -1};
    std::memcpy(fds, CMSG_DATA(rights), std::min<std::size_t>(count, 2) * sizeof(int));
    member.memory = base::Descriptor(fds[0]);
    member.process = base::Descriptor(fds[1]);
  }
  message.text[sizeof message.text - 1] = '\0';
  if (got != static_cast<ssize_t>(sizeof message) || message.magic != kMagic) return Got::End;
  return (header.msg_flags & MSG_CTRUNC) != 0 ? Got::NoDescriptor : Got::Message;
}

// Timeout of one poll, so that abort_check is called regularly.
constexpr auto kPollSlice = 100ms;

int slice_ms(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, kPollSlice.count()));
}

base::Descriptor open_process() {
#ifdef SYS_pidfd_open
  return base::Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
#else
  return base::Descriptor();
#endif
}

class Meeting {
 public:
  Meeting(const net::ProcessInfo& identity, int memory, std::chrono::milliseconds timeout,
          const std::function<void()>& abort_check)
      : identity_(identity),
        abort_check_(abort_check),
        key_(net::key_of(identity)),
        address_(net::local_name("shm", key_)),
        timeout_(timeout),
        deadline_(Clock::now() + timeout) {
    if (identity.size > 1) {
      // Memory and pidfd of every rank; rank 0 has a connection to each besides.
      net::reserve_descriptors((identity.rank == 0 ? 3 : 2) * identity.size,
                               base::join(identity.size, " ranks of a host"), identity.place());
    }
    mine_.pid = ::getpid();
    mine_.memory = base::Descriptor(::fcntl(memory, F_DUPFD_CLOEXEC, 0));
    mine_.process = open_process();
    if (!mine_.memory) fail(base::join("got \"", std::strerror(errno), "\" for one more descriptor"), identity.rank);
  }

  std::vector<Member> run() {
    if (identity_.size == 1) {
      std::vector<Member> members;
      members.push_back(std::move(mine_));
      return members;
    }
    for (;;) {
      abort_check();
      if (identity_.rank == 0) {
        if (const base::Descriptor listener = listen()) return gather(listener.get());
        // Another process has the name: a second rank 0, which our hello will reveal, or an earlier run that is ending.
      }
      std::vector<Member> members;
      if (visit(members)) return members;
      if (Clock::now() >= deadline_) {
        if (identity_.rank == 0 || !trouble_.empty())
          fail(trouble_.empty() ? "another process holds this run's socket and does not answer" : trouble_, 0);
        fail(base::join(identity_.name_of(0), " did not come within ", duration_text(timeout_)), 0);
      }
      std::this_thread::sleep_for(kRetry);
    }
  }

 private:
  void abort_check() const {
    if (abort_check_) abort_check_();
  }

  bool readable(int fd, Clock::time_point deadline) const {
    for (;;) {
      abort_check();
      pollfd entry{fd, POLLIN, 0};
      if (::poll(&entry, 1, slice_ms(deadline)) > 0) return true;
      if (Clock::now() >= deadline) return false;
    }
  }

  struct Visitor {
    base::Descriptor socket;
    int rank = -1;  // -1: not proved yet
    pid_t pid = 0;
    Clock::time_point since = Clock::now();
    net::Handshake handshake;
  };

  [[noreturn]] void fail(const std::string& what, int rank) const {
    throw CommError(base::join("[Shm::rendezvous] ", what, ", expected ", identity_.size, " processes of run \"",
                               identity_.run_id, "\" (", identity_.place(),
                               "). Hint: look at the output of the ranks named, or raise ZERO_TIMEOUT_S."),
                    identity_.rank_in_run(rank));
  }

  base::Descriptor listen() const {
    base::Descriptor listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (!listener) fail(base::join("got \"", std::strerror(errno), "\" for a unix socket"), 0);
    if (::bind(listener.get(), address_.get(), address_.length) != 0) return base::Descriptor();
    if (::listen(listener.get(), std::max(identity_.size, 16)) != 0) return base::Descriptor();
    return listener;
  }

  // For all ranks except the listener. False: no process listens yet, or it closed the connection without an answer.
  bool visit(std::vector<Member>& members) {
    int error = 0;
    ucred owner{};
    const auto socket = net::connect_local(address_, SOCK_SEQPACKET, &error, &owner);
    if (!socket && error == EPERM) {
      fail(base::join("the socket of this run belongs to ", net::user_text(owner.uid), ", pid ", owner.pid,
                      "; with ZERO_TOKEN no other user can guess its name"),
           0);
    }
    if (!socket && (error == EMFILE || error == ENFILE))
      fail(base::join("got \"", std::strerror(error), "\" for a unix socket"), identity_.rank);
    trouble_ = error == EAGAIN ? "the process that has the socket of this run takes no connections" : "";
    if (!socket) return false;
    ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
    if (!prove(socket.get(), owner)) return false;
    Message hello;
    hello.kind = Kind::Hello;
    hello.rank = identity_.rank;
    hello.size = identity_.size;
    hello.pid = mine_.pid;
    put(hello.proof, handshake_.proof(key_, 'C'));
    const int fds[2] = {mine_.memory.get(), mine_.process.get()};
    if (!send_message(socket.get(), hello, fds, mine_.process ? 2 : 1)) return false;
    // Rank 0 may have started later and wait longer, and it knows which ranks are missing.
    const auto until = Clock::now() + timeout_ + kGrace;
    members.resize(identity_.size);
    for (int got = 0; got < identity_.size; ++got) {
      if (!readable(socket.get(), until)) {
        fail(base::join(identity_.name_of(0), " (pid ", owner.pid, ") did not answer within ", duration_text(timeout_)),
             0);
      }
      Message message;
      Member member;
      const Got result = receive_message(socket.get(), message, member);
      if (result == Got::End) {
        members.clear();
        return false;
      }
      if (message.kind == Kind::Refusal) fail(base::printable(message.text), message.rank);
      if (result == Got::NoDescriptor) fail(base::join(identity_.name_of(identity_.rank), " ", kRaise), identity_.rank);
      if (message.rank < 0 || message.rank >= identity_.size || !member.memory) {
        fail(identity_.name_of(0) + " sent an unknown message", 0);
      }
      member.pid = message.pid;
      members[message.rank] = std::move(member);
    }
    return true;
  }

  // The connecting side of the handshake until the proof of the other has been checked.
  bool prove(int socket, const ucred& owner) {
    handshake_ = {kPurpose, identity_.size, identity_.rank, 0, net::fresh_nonce(), ""};
    Message greeting;
    greeting.rank = identity_.rank;
    greeting.size = identity_.size;
    put(greeting.nonce, handshake_.asked);
    if (!send_message(socket, greeting, nullptr, 0)) return false;
    if (!readable(socket, Clock::now() + timeout_ + kGrace)) {
      trouble_ = base::join("the process that has the socket of this run, pid ", owner.pid, ", did not answer within ",
                            duration_text(timeout_));
      return false;
    }
    Message challenge;
    Member none;
    if (receive_message(socket, challenge, none) == Got::End) return false;
    handshake_.answered = taken(challenge.nonce);
    if (challenge.kind == Kind::Challenge && net::equal_proofs(taken(challenge.proof), handshake_.proof(key_, 'L')))
      return true;
    trouble_ = base::join("the process that has the socket of this run, pid ", owner.pid,
                          ", did not prove the run's secret: ZERO_TOKEN must be the same on every rank");
    return false;
  }

  // Rank 0: waits until all ranks have arrived.
  std::vector<Member> gather(int listener) {
    std::vector<Member> members(identity_.size);
    members[0] = std::move(mine_);
    int missing = identity_.size - 1;
    while (missing > 0) {
      std::vector<pollfd> entries{{listener, POLLIN, 0}};
      for (const Visitor& visitor : visitors_) entries.push_back({visitor.socket.get(), POLLIN, 0});
      abort_check();
      if (Clock::now() >= deadline_) refuse_absent(members);
      ::poll(entries.data(), entries.size(), slice_ms(deadline_));
      for (std::size_t i = 0; i < visitors_.size(); ++i) {
        Visitor& visitor = visitors_[i];
        if (entries[i + 1].revents == 0) continue;
        Message message;
        Member member;
        const Got got = receive_message(visitor.socket.get(), message, member);
        if (got != Got::End && visitor.rank < 0) {
          if (visitor.handshake.asked.empty()) {
            if (!challenge(visitor, message)) visitor.socket = base::Descriptor();
          } else if (message.kind != Kind::Hello ||
                     !net::equal_proofs(taken(message.proof), visitor.handshake.proof(key_, 'C'))) {
            trouble_ = base::join("a process that says it is ", identity_.name_of(visitor.handshake.from),
                                  " did not prove the run's secret: ZERO_TOKEN must be the same on every rank");
            visitor.socket = base::Descriptor();
          } else {
            if (got == Got::NoDescriptor) refuse(base::join(identity_.name_of(0), " ", kRaise), 0);
            admit(visitor, message, std::move(member), members);
            --missing;
          }
        } else if (visitor.rank >= 0) {
          refuse(base::join(identity_.name_of(visitor.rank), " (pid ", visitor.pid, ") died while the others came"),
                 visitor.rank);
        } else {
          visitor.socket = base::Descriptor();  // an unknown process, or a duplicate
        }
      }
      const auto silent = Clock::now() - kIntroduction;
      std::erase_if(visitors_, [&](const Visitor& visitor) {
        return !visitor.socket || (visitor.rank < 0 && visitor.since < silent);
      });
      if ((entries[0].revents & POLLIN) != 0) {
        Visitor visitor;
        visitor.socket = base::Descriptor(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
        full_ = !visitor.socket && (errno == EMFILE || errno == ENFILE);
        // Out of descriptors: the connection stays pending, so poll() would return at once.
        if (!visitor.socket) std::this_thread::sleep_for(kRetry);
        if (visitor.socket && net::is_own_user(net::other_end(visitor.socket.get())))
          visitors_.push_back(std::move(visitor));
      }
    }
    for (const Visitor& visitor : visitors_) {
      for (int rank = 0; visitor.rank >= 0 && rank < identity_.size; ++rank) {
        // The pidfd reveals a rank that has died meanwhile.
        if (!send_member(visitor.socket.get(), rank, members[rank])) break;
      }
    }
    return members;
  }

  // Answers a greeting. False: it is none.
  bool challenge(Visitor& visitor, const Message& greeting) {
    if (greeting.kind != Kind::Greeting) return false;
    visitor.handshake = {kPurpose, greeting.size, greeting.rank, 0, taken(greeting.nonce), net::fresh_nonce()};
    Message answer;
    answer.kind = Kind::Challenge;
    put(answer.nonce, visitor.handshake.answered);
    put(answer.proof, visitor.handshake.proof(key_, 'L'));
    return send_message(visitor.socket.get(), answer, nullptr, 0);
  }

  void admit(Visitor& visitor, Message hello, Member member, std::vector<Member>& members) {
    hello.rank = visitor.handshake.from;  // what was proved
    hello.size = visitor.handshake.size;
    const pid_t pid = net::other_end(visitor.socket.get()).pid;
    const std::string who = base::join(identity_.name_of(hello.rank), " (pid ", pid, ")");
    if (!member.memory) refuse(base::join(who, " sent an unknown message"), hello.rank);
    if (hello.size != identity_.size) refuse(base::join(who, " is of a world of ", hello.size), hello.rank);
    if (hello.rank < 0 || hello.rank >= identity_.size) refuse(base::join(who, " is out of range"), hello.rank);
    Member& place = members[hello.rank];
    if (place.memory) {
      refuse(base::join("two processes claim ", identity_.name_of(hello.rank), ": pid ", place.pid, " and pid ", pid),
             hello.rank);
    }
    visitor.rank = hello.rank;
    visitor.pid = pid;
    place = std::move(member);
    place.pid = pid;
  }

  [[noreturn]] void refuse(const std::string& what, int rank) {
    Message message;
    message.kind = Kind::Refusal;
    message.rank = rank;
    set_text(message, what);
    for (const Visitor& visitor : visitors_) {
      if (visitor.socket) send_message(visitor.socket.get(), message, nullptr, 0);
    }
    fail(what, rank);
  }

  [[noreturn]] void refuse_absent(const std::vector<Member>& members) {
    std::vector<int> absent;
    int first = 0;
    for (int rank = identity_.size - 1; rank > 0; --rank) {
      if (members[rank].memory) continue;
      absent.insert(absent.begin(), identity_.rank_in_run(rank));
      first = rank;
    }
    const auto why = full_ ? base::join("; rank 0 ", kRaise) : trouble_.empty() ? "" : "; " + trouble_;
    refuse(base::join(ranks_text(absent), " did not come within ", duration_text(timeout_), why), first);
  }

  const net::ProcessInfo& identity_;
  const std::function<void()>& abort_check_;
  const std::string key_;
  net::LocalAddress address_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  Member mine_;
  std::vector<Visitor> visitors_;
  net::Handshake handshake_;  // of this rank with rank 0
  std::string trouble_;       // why the last connection was of no use, for messages
  bool full_ = false;         // rank 0 had no descriptor for the last connection
};

}  // namespace

std::vector<Member> rendezvous(const net::ProcessInfo& identity, int memory, std::chrono::milliseconds timeout,
                               const std::function<void()>& abort_check) {
  return Meeting(identity, memory, timeout, abort_check).run();
}

}  // namespace zero::comm::shm
