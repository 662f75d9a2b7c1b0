// The agent makes no decisions: the launcher decides which failure ends the job, and when. The exception is a launcher
// that is gone.
#include "tools/launch/remote/agent.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <zero/version.h>

#include "base/check.h"
#include "base/system.h"
#include "tools/launch/local/local_ranks.h"
#include "tools/launch/local/process_tree.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/remote/protocol.h"

namespace zero::launch {
namespace {

constexpr double kPlanSeconds = 60;      // from our hello to the plan
constexpr double kPageSeconds = 0.25;    // how often a changed page is sent
constexpr double kFarewellSeconds = 10;  // for sending the last lines
// A launcher that is stopped for a while (Ctrl-Z, a frozen cgroup) sends nothing and is not gone: one that has ended
// closes the connection. So silence has to last much longer here than at the launcher, which hears agents all the time.
constexpr double kSilencesOfALauncher = 20;
constexpr std::size_t kMostWaiting = 1 << 20;

class Agent final : public RankObserver {
 public:
  Agent(int in, int out) : in_(in), out_(out) { heard_ = said_ = base::steady_seconds(); }

  int run() {
    waiting_ = kAgentMark;
    put(FrameKind::Hello, Packer().number(kProtocol).text(ZERO_VERSION));
    try {
      while (!over_) turn();
    } catch (const Error& error) {
      put(FrameKind::Refused, Packer().number(static_cast<int>(error.code())).text(error.what()));
      code_ = static_cast<int>(error.code());
    } catch (const std::exception& error) {
      put(FrameKind::Refused, Packer().number(static_cast<int>(ExitCode::kFailed)).text(error.what()));
      code_ = static_cast<int>(ExitCode::kFailed);
    }
    over_ = true;
    if (ranks_) {
      ranks_->begin_end();
      ranks_->finish_end(kSweepSeconds);
      send_pages(true, false);
      put(FrameKind::Finished, Packer().number(ranks_->out_of_memory()));
    }
    const double end = base::steady_seconds() + (gone_ ? 0 : kFarewellSeconds);
    while (!gone_ && !waiting_.empty() && base::steady_seconds() < end) {
      pollfd ready[2] = {{out_, POLLOUT, 0}, {in_, POLLIN, 0}};
      poll(ready, 2, 100);
      flush();
      read_frames();
    }
    return code_;
  }

  void line(int rank, Stream stream, std::string_view text) override {
    // Sent together with the others of this iteration.
    waiting_ +=
        frame_bytes(FrameKind::Line,
                    Packer().number(rank - ranks_->first_rank()).number(static_cast<int>(stream)).text(text).bytes());
  }
  void died(int rank, bool by_signal, int code) override {
    send_page(rank, false);  // send its last state before its death
    put(FrameKind::Died, Packer().number(rank - ranks_->first_rank()).number(by_signal).number(code));
  }
  void lost(int, const std::string&) override {}
  void notice(LogLevel level, std::string_view text) override {
    put(FrameKind::Notice, Packer().number(static_cast<int>(level)).text(text));
  }

 private:
  void turn() {
    pollfd ready[3] = {
        {in_, POLLIN, 0}, {ranks_ ? ranks_->fd() : -1, POLLIN, 0}, {waiting_.empty() ? -1 : out_, POLLOUT, 0}};
    poll(ready, 3, 100);
    read_frames();
    flush();
    if (ranks_ && started_ && !over_) {
      ranks_->listen(wanted_ && waiting_.size() < kMostWaiting);
      ranks_->step();
      const double t = base::steady_seconds();
      if (t >= next_tick_) {
        next_tick_ = t + kPageSeconds;
        ranks_->tick();
        send_pages(false, false);
      }
    }
    const double t = base::steady_seconds();
    if (t - said_ > silence_s_ / 4) put(FrameKind::Alive, Packer());
    if (gone_ || t - heard_ > patience_s_) {
      gone_ = over_ = true;
      code_ = static_cast<int>(ExitCode::kPeer);
    }
  }

  void read_frames() {
    char bytes[64 * 1024];
    const ssize_t n = ::read(in_, bytes, sizeof bytes);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (n <= 0) {
      gone_ = true;
      return;
    }
    heard_ = base::steady_seconds();
    frames_.feed(std::string_view(bytes, static_cast<std::size_t>(n)));
    Frame frame;
    while (!over_ && frames_.next(frame)) take(frame);
  }

  void take(const Frame& frame) {
    Unpacker in(frame.payload);
    switch (frame.kind) {
      case FrameKind::Plan: {
        const std::string plan = in.text();
        silence_s_ = in.real();
        patience_s_ = silence_s_ * kSilencesOfALauncher;
        Unpacker of_plan(plan);
        ranks_ = std::make_unique<LocalRanks>(PreparedHost(unpack_plan(of_plan)), *this, children_of_self());
        put(FrameKind::Ready, Packer().text(base::host_name("localhost")));
        break;
      }
      case FrameKind::Go: {
        if (!ranks_ || std::exchange(started_, true)) break;
        changes_.assign(static_cast<std::size_t>(ranks_->ranks()), 0);  // a failed start sends pages, too
        ranks_->start();
        std::vector<int> pids;
        for (int i = 0; i < ranks_->ranks(); ++i) pids.push_back(ranks_->pid(ranks_->first_rank() + i));
        put(FrameKind::Started, Packer().numbers(pids));
        break;
      }
      case FrameKind::Signal:
        if (started_) ranks_->send(in.small());
        break;
      case FrameKind::Failed:
        if (!started_) break;
        ranks_->note_failed(in.small());
        send_pages(true, true);
        break;
      case FrameKind::Listen:
        wanted_ = in.number() != 0;
        break;
      case FrameKind::Finish:
        over_ = true;
        break;
      default:
        break;
    }
  }

  void send_page(int rank, bool kept) {
    Packer out;
    out.number(rank - ranks_->first_rank()).number(kept).number(ranks_->state(rank));
    pack_page(out, kept ? ranks_->page_at_failure(rank) : ranks_->page(rank));
    put(FrameKind::Page, out);
  }
  // Sends pages that changed or whose process is stopped, or all pages.
  void send_pages(bool all, bool kept) {
    if (!started_) return;
    for (int i = 0; i < ranks_->ranks(); ++i) {
      const int rank = ranks_->first_rank() + i;
      const std::uint64_t changes = ranks_->page(rank).changes * 256 + static_cast<unsigned char>(ranks_->state(rank));
      if (!all && changes == changes_[static_cast<std::size_t>(i)]) continue;
      changes_[static_cast<std::size_t>(i)] = changes;
      send_page(rank, kept);
    }
  }

  void put(FrameKind kind, const Packer& payload) {
    waiting_ += frame_bytes(kind, payload.bytes());
    said_ = base::steady_seconds();
    flush();
  }
  void flush() {
    std::size_t at = 0;
    while (!gone_ && at < waiting_.size()) {
      const ssize_t n = ::write(out_, waiting_.data() + at, waiting_.size() - at);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        if (errno != EAGAIN) gone_ = true;
        break;
      }
      at += static_cast<std::size_t>(n);
    }
    waiting_.erase(0, at);
  }

  int in_, out_, code_ = 0;
  FrameReader frames_;
  std::string waiting_;  // to be sent
  std::unique_ptr<LocalRanks> ranks_;
  std::vector<std::uint64_t> changes_;  // of each page when it was last sent, with the process state
  double heard_, said_, silence_s_ = kPlanSeconds, patience_s_ = kPlanSeconds, next_tick_ = 0;
  bool started_ = false, wanted_ = true, over_ = false, gone_ = false;
};

}  // namespace

int run_agent(int in, int out) {
  // The agent is ended through the connection; signals of a batch system are for the ranks.
  for (const int s : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE}) signal(s, SIG_IGN);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  fcntl(in, F_SETFL, fcntl(in, F_GETFL) | O_NONBLOCK);
  fcntl(out, F_SETFL, fcntl(out, F_GETFL) | O_NONBLOCK);
  return Agent(in, out).run();
}

}  // namespace zero::launch
