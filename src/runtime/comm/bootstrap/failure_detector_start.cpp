// The start of a FailureDetector: rank 0 gathers the others, which look for it. Both sides prove the run's secret
// before anything else that they send is believed ([Note: handshake], net/secret.h).
#include <poll.h>

#include <algorithm>
#include <cstdlib>

#include "base/check.h"
#include "base/printable.h"
#include "comm/bootstrap/failure_detector.h"
#include "comm/bootstrap/frames.h"
#include "comm/collective_call.h"

namespace zero::comm {
namespace {

// For one handshake at rank 0; the others wait longer, because rank 0 may be busy with many.
constexpr auto kIntroduction = std::chrono::seconds(5);
constexpr auto kHubAnswer = std::chrono::seconds(15);
// At its own time limit rank 0 tells the others who is absent. It may have started a little later than they, and would
// take one that leaves before for a rank that died.
constexpr auto kHubVerdict = std::chrono::seconds(2);
// While rank 0 has no descriptor for a connection that waits.
constexpr auto kRetry = std::chrono::milliseconds(10);
// Connections at rank 0 that have not proved the secret, besides one of each rank; the oldest has to go.
constexpr std::size_t kMostUnproved = 256;

constexpr const char* kPurpose = "control";
constexpr const char* kSameSecret =
    "ZERO_TOKEN, the run's id and MASTER_ADDR:MASTER_PORT must be the same on every rank";

int until_ms(net::Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - net::Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 3'600'000));
}

}  // namespace

std::string FailureDetector::missing(int* first) const {
  std::vector<bool> here(size_, false);
  here[0] = true;
  for (const auto& link : links_) {
    if (link.rank >= 0) here[link.rank] = true;
  }
  std::string text;
  *first = -1;
  for (int r = 0; r < size_; ++r) {
    if (here[r]) continue;
    if (*first < 0) *first = r;
    text += base::join(text.empty() ? "" : ", ", r);
  }
  return text;
}

// At rank 0: the next step of the handshake, if its frame is complete.
FailureDetector::Entry FailureDetector::introduce(Link& link) {
  net::Frame frame;
  const int taken = net::decode(link.in, frame);
  if (taken == 0) return Entry::Waits;
  auto& handshake = link.handshake;
  if (taken < 0) return Entry::Refused;
  if (handshake.answered.empty()) {
    if (frame.kind != frame::kHello || frame.payload.size() <= net::kProofBytes || frame.rank <= 0)
      return Entry::Refused;
    handshake = {kPurpose, std::atoi(frame.payload.c_str() + net::kProofBytes), frame.rank,
                 0,        frame.payload.substr(0, net::kProofBytes),           net::fresh_nonce()};
    link.out += net::encode(frame::kChallenge, 0, handshake.answered + handshake.proof(key_, 'L'));
    return flush(link) ? Entry::Waits : Entry::Refused;
  }
  if (frame.kind != frame::kProof || !net::equal_proofs(frame.payload, handshake.proof(key_, 'C'))) {
    unproved_ =
        base::join("a process that says it is rank ", handshake.from, " did not prove the run's secret: ", kSameSecret);
    return Entry::Refused;
  }
  if (handshake.size != size_ || handshake.from >= size_) {
    unproved_ = base::join("rank ", handshake.from, " is of a world of ", handshake.size);
    return Entry::Refused;
  }
  for (const auto& other : links_) {
    if (other.rank != handshake.from) continue;
    unproved_ = base::join("two processes say they are rank ", handshake.from);
    return Entry::Refused;
  }
  link.rank = handshake.from;
  return Entry::Proved;
}

void FailureDetector::gather_peers(base::Descriptor listener, net::Clock::time_point deadline) {
  const auto started = net::Clock::now();
  session_ = net::fresh_nonce();
  const auto fail = [&](int rank, const std::string& got, const std::string& hint) {
    const auto text =
        base::join("[comm::rendezvous] got ", got, ", expected all ", size_, " ranks (", where_, "). Hint: ", hint);
    post(frame::kAbort, 0, base::join(rank, " ", text), -1);
    throw CommError(text, rank);
  };
  int first = -1;
  bool full = false;
  for (std::string absent = missing(&first); first >= 0; absent = missing(&first)) {
    if (net::Clock::now() >= deadline) {
      const std::string look = "look at that rank's own output; it may have failed before, or cannot reach rank 0.";
      fail(
          first,
          base::join("no sign of rank ", absent, " within ",
                     duration_text(std::chrono::duration_cast<std::chrono::milliseconds>(net::Clock::now() - started))),
          full                ? "rank 0 has no descriptor left for a connection that waits; raise ulimit -n."
          : unproved_.empty() ? look
                              : base::join(unproved_, "; ", look));
    }
    std::vector<pollfd> polled{{listener.get(), POLLIN, 0}};
    for (const auto& link : links_) polled.push_back({link.fd.get(), POLLIN, 0});
    // Wake up regularly, to close connections that never identify themselves.
    poll(polled.data(), polled.size(), std::min(until_ms(deadline), 500));
    full = false;
    for (base::Descriptor fd; (fd = net::accept_from(listener, &full));) {
      links_.push_back({-1, std::move(fd), "", "", net::Clock::now(), {}, 0});
    }
    // The connection stays pending, so poll() would return at once.
    if (full) std::this_thread::sleep_for(kRetry);
    const auto unproved = static_cast<std::size_t>(
        std::count_if(links_.begin(), links_.end(), [](const Link& link) { return link.rank < 0; }));
    auto surplus = unproved - std::min(unproved, kMostUnproved + static_cast<std::size_t>(size_));
    bool news = false;
    for (std::size_t i = 0; i < links_.size(); ++i) {
      auto& link = links_[i];
      const bool alive = receive(link);
      Entry entry = link.rank >= 0 ? Entry::Proved : Entry::Waits;
      if (link.rank < 0) {
        entry = introduce(link);
        news |= entry == Entry::Proved;
      }
      bool silent = link.rank < 0 && net::Clock::now() - link.since > kIntroduction;
      if (link.rank < 0 && !silent && surplus > 0) {
        silent = true;
        --surplus;
      }
      if (alive && entry != Entry::Refused && !silent) continue;
      const int rank = link.rank;
      links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i--));
      if (rank >= 0)
        fail(rank, base::join("the end of rank ", rank, " during the start"), "look at that rank's own output.");
    }
    absent = missing(&first);
    if (news && first >= 0) post(frame::kMissing, first, absent, -1);
  }
  std::erase_if(links_, [](const Link& link) { return link.rank < 0; });
  own_address_ = "127.0.0.1";
  for (const auto& link : links_) {
    const auto address = net::local_address(link.fd.get());
    if (!address.empty() && !net::is_loopback(address)) own_address_ = address;
  }
  // A later rendezvous at the same address must not connect to this one.
  listener.close();
  post(frame::kWelcome, 0, session_ + own_address_, -1);
}

// At the others: checks rank 0's proof and sends the own one.
bool FailureDetector::prove_to_hub(Link& link, const net::Frame& challenge) {
  if (challenge.kind != frame::kChallenge || challenge.payload.size() != 2 * net::kProofBytes) return false;
  link.handshake.answered = challenge.payload.substr(0, net::kProofBytes);
  if (!net::equal_proofs(challenge.payload.substr(net::kProofBytes), link.handshake.proof(key_, 'L'))) {
    unproved_ = base::join(
        "the process that listens there did not prove the run's secret: it is of another run, or a "
        "stranger's; ",
        kSameSecret);
    return false;
  }
  link.rank = 0;
  link.out += net::encode(frame::kProof, rank_, link.handshake.proof(key_, 'C'));
  return flush(link);
}

void FailureDetector::join_hub(const Locate& locate, net::Clock::time_point deadline) {
  std::string absent, place;
  int first_absent = 0;
  net::Dialer dialer;
  while (net::Clock::now() < deadline) {
    const auto point = locate();
    if (!point.name.empty() || point.port != 0) place = point.text();
    Link link{-1,
              point.name.empty() && point.port == 0 ? base::Descriptor() : dialer.dial(point),
              "",
              "",
              net::Clock::now(),
              {kPurpose, size_, rank_, 0, net::fresh_nonce(), ""},
              0};
    bool alive = static_cast<bool>(link.fd);
    if (alive) {
      link.out = net::encode(frame::kHello, rank_, base::join(link.handshake.asked, size_));
      alive = flush(link);
    }
    while (alive) {
      const auto patience = link.rank >= 0 ? deadline + kHubVerdict : std::min(deadline, link.since + kHubAnswer);
      if (net::Clock::now() >= patience) {
        if (patience < deadline) unproved_ = "the process that listens there does not speak libzero's protocol";
        break;
      }
      pollfd polled{link.fd.get(), POLLIN, 0};
      poll(&polled, 1, until_ms(patience));
      alive = receive(link);
      net::Frame frame;
      for (int taken; (taken = net::decode(link.in, frame)) != 0;) {
        if (taken < 0 || (link.rank < 0 && !prove_to_hub(link, frame))) {
          alive = false;
          break;
        }
        if (frame.kind == frame::kMissing) {
          absent = base::printable(frame.payload, base::Lines::Escape);
          first_absent = frame.rank;
        } else if (frame.kind == frame::kAbort) {
          throw CommError(
              base::printable(frame.payload.substr(std::min(frame.payload.find(' ') + 1, frame.payload.size()))),
              std::atoi(frame.payload.c_str()));
        } else if (frame.kind == frame::kWelcome && frame.payload.size() > net::kProofBytes) {
          session_ = frame.payload.substr(0, net::kProofBytes);
          own_address_ = net::local_address(link.fd.get());
          if (own_address_.empty() || net::is_loopback(own_address_))
            own_address_ = frame.payload.substr(net::kProofBytes);
          links_.push_back(std::move(link));
          return;
        }
      }
    }
    // Rank 0 may not listen yet, or the socket belonged to another or an earlier run.
    std::this_thread::sleep_for(std::min<net::Clock::duration>(dialer.pause(), deadline - net::Clock::now()));
  }
  if (!absent.empty()) {
    throw CommError(base::join("[comm::rendezvous] got no sign of rank ", absent, " in time, expected all ", size_,
                               " ranks (", where_, "). Hint: look at that rank's own output."),
                    first_absent);
  }
  throw CommError(
      base::join("[comm::rendezvous] got no answer of rank 0 at ", place.empty() ? "its published place" : place,
                 " in time, expected it to listen there (", where_, "). Hint: ",
                 unproved_.empty() ? "look at rank 0's own output; all ranks must have the same address, port, run id "
                                     "and world size."
                                   : unproved_ + "."),
      0);
}

}  // namespace zero::comm
