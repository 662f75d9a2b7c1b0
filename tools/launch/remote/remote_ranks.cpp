// All data from the remote side is frames. Output before the first frame, and ssh's own messages, are lines that
// explain a failed connection.
#include "tools/launch/remote/remote_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <zero/version.h>

#include "base/check.h"
#include "base/system.h"
#include "tools/launch/local/rank_process.h"
#include "tools/launch/machine/machine.h"
#include "tools/launch/supervise/failure.h"

extern char** environ;

namespace zero::launch {
namespace {

constexpr double kConnectSeconds = 60;
constexpr double kEndSeconds = 1;  // from the end of the connection's program to that of its streams
constexpr std::size_t kMostBeforeMark = 64 * 1024, kLastErrors = 5;
enum Tag : std::uint64_t { kOut, kErr };

}  // namespace

RemoteRanks::RemoteRanks(HostPlan plan, const RemoteShell& shell, double silence_s, RankObserver& observer)
    : plan_(std::move(plan)),
      program_(shell.launcher),
      agent_path_(own_path().string()),
      silence_s_(silence_s),
      observer_(observer),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      ranks_(static_cast<std::size_t>(plan_.ranks)) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw IoError(base::join("[RemoteRanks] cannot make a pipe: ", std::strerror(errno), ". Hint: see `ulimit -n`."));
  base::Descriptor theirs(ends[0]);
  in_ = base::Descriptor(ends[1]);
  fcntl(in_.get(), F_SETFL, O_NONBLOCK);
  SpawnSettings spawned;
  spawned.path = find_program(shell.launcher);
  spawned.arguments = remote_shell_words(shell, plan_.name, plan_.user, {agent_path_, "run", "--agent"});
  for (char** entry = environ; *entry; ++entry) spawned.environment.emplace_back(*entry);
  spawned.in = theirs.get();
  const SpawnedProcess process = spawn(spawned);
  child_ = process.pid;
  out_ = base::Descriptor(process.out);
  err_ = base::Descriptor(process.err);
  base::watch(epoll_.get(), out_.get(), kOut);
  base::watch(epoll_.get(), err_.get(), kErr);
  began_ = heard_ = said_ = ticked_ = base::steady_seconds();
  put(FrameKind::Plan, Packer().text(pack_plan(plan_)).real(silence_s_).bytes());
}

RemoteRanks::~RemoteRanks() {
  in_ = base::Descriptor();  // makes the agent end its ranks
  if (child_ <= 0) return;
  // An agent that has finished exits by itself; others exit when the connection closes.
  for (int i = 0; finished_ && i < 100 && !child_ended(); ++i) poll(nullptr, 0, 5);
  if (child_ <= 0) return;
  kill(-child_, SIGKILL);
  waitpid(child_, nullptr, 0);
}

void RemoteRanks::put(FrameKind kind, std::string_view payload) {
  if (gone_) return;
  to_send_ += frame_bytes(kind, payload);
  said_ = base::steady_seconds();
  flush();
}

void RemoteRanks::flush() {
  std::size_t at = 0;
  while (at < to_send_.size()) {
    const ssize_t n = ::write(in_.get(), to_send_.data() + at, to_send_.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;  // full; or broken, which reading will report
    at += static_cast<std::size_t>(n);
  }
  to_send_.erase(0, at);
}

void RemoteRanks::start() {
  started_ = true;
  put(FrameKind::Go);
}

void RemoteRanks::listen(bool lines) { put(FrameKind::Listen, Packer().number(lines).bytes()); }
void RemoteRanks::send(int signal) {
  if (started_) put(FrameKind::Signal, Packer().number(signal).bytes());
}
void RemoteRanks::note_failed(int rank) { put(FrameKind::Failed, Packer().number(rank).bytes()); }

observe::StatusSnapshot RemoteRanks::page_at_failure(int rank) const {
  return at(rank).kept_known ? at(rank).kept : at(rank).page;
}

RemoteRanks::Rank& RemoteRanks::local(std::int64_t index) {
  if (index < 0 || index >= plan_.ranks)
    throw IoError(
        base::join("[zero run] got rank ", index, " of host ", plan_.name, ", expected one of its ", plan_.ranks));
  return ranks_[static_cast<std::size_t>(index)];
}

void RemoteRanks::step() {
  if (gone_) return;
  read_errors();
  read_frames();
}

void RemoteRanks::tick() {
  if (gone_) return;
  flush();
  const double t = base::steady_seconds();
  // This process did not run meanwhile: what the agent sent then is still to be read.
  if (const double gap = t - ticked_; gap > kStoppedSeconds) {
    heard_ += gap;
    began_ += gap;
  }
  ticked_ = t;
  if (t - said_ > silence_s_ / 4) put(FrameKind::Alive);
  // Another process may hold the streams open.
  if (child_ended() && t - child_ended_at_ > kEndSeconds) return lose_connection();
  if (!ready_ && t - began_ > kConnectSeconds) fail_to_reach(base::join("no answer for ", kConnectSeconds, " s"));
  if (ready_ && t - heard_ > silence_s_)
    lose(base::join("its host ", plan_.name, " has been silent for ", silence_s_, " s"));
}

void RemoteRanks::read_errors() {
  const auto take = [&](std::string_view line) {
    last_errors_.emplace_back(line);
    if (last_errors_.size() > kLastErrors) last_errors_.pop_front();
    if (ready_) observer_.notice(LogLevel::Warning, base::join(plan_.name, ": ", line));
  };
  char bytes[4096];
  while (err_.get() >= 0) {
    const ssize_t n = ::read(err_.get(), bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;
    if (n == 0) {
      errors_.finish(take);
      err_ = base::Descriptor();
      return;
    }
    errors_.feed(std::string_view(bytes, static_cast<std::size_t>(n)), take);
  }
}

void RemoteRanks::read_frames() {
  char bytes[64 * 1024];
  ssize_t n;
  while ((n = ::read(out_.get(), bytes, sizeof bytes)) < 0 && errno == EINTR) {
  }
  if (n < 0) return;
  heard_ = base::steady_seconds();
  if (n == 0) {
    lose_connection();
    return;
  }
  std::string_view got(bytes, static_cast<std::size_t>(n));
  if (!marked_) {
    before_mark_ += got;
    const std::size_t mark = before_mark_.find(kAgentMark);
    if (mark == std::string::npos) {
      if (before_mark_.size() > kMostBeforeMark) fail_to_reach("text that does not end instead of an agent's greeting");
      return;
    }
    marked_ = true;
    frames_.feed(std::string_view(before_mark_).substr(mark + kAgentMark.size()));
    before_mark_.resize(mark);
  } else {
    frames_.feed(got);
  }
  try {
    Frame frame;
    while (!gone_ && frames_.next(frame)) take(frame);
  } catch (const Error&) {
    gone_ = true;  // later frames cannot be interpreted
    throw;
  }
}

void RemoteRanks::take(const Frame& frame) {
  Unpacker in(frame.payload);
  switch (frame.kind) {
    case FrameKind::Hello: {
      const std::int64_t protocol = in.number();
      const std::string version = in.text();
      if (protocol != kProtocol || version != ZERO_VERSION)
        throw ConfigError(base::join("[zero run] got zero ", version, " on host ", plan_.name, ", expected ",
                                     ZERO_VERSION, " as here (", agent_path_, ")"));
      greeted_ = true;
      break;
    }
    case FrameKind::Refused: {
      const auto code = static_cast<ExitCode>(in.number());
      const std::string text = base::join(in.text(), " (host ", plan_.name, ")");
      if (code == ExitCode::kConfig) throw ConfigError(text);
      if (code == ExitCode::kIo) throw IoError(text);
      throw CommError(text);
    }
    case FrameKind::Ready:
      ready_ = greeted_;
      break;
    case FrameKind::Started: {
      const std::vector<int> pids = in.numbers();
      for (std::size_t i = 0; i < pids.size(); ++i) local(static_cast<std::int64_t>(i)).pid = pids[i];
      break;
    }
    case FrameKind::Line: {
      const std::int64_t index = in.number();
      const auto stream = in.number() == 0 ? Stream::Out : Stream::Err;
      local(index);
      observer_.line(first_rank() + static_cast<int>(index), stream, in.text());
      break;
    }
    case FrameKind::Died: {
      const std::int64_t index = in.number();
      const bool by_signal = in.number() != 0;
      if (std::exchange(local(index).dead, true)) break;
      observer_.died(first_rank() + static_cast<int>(index), by_signal, in.small());
      break;
    }
    case FrameKind::Page: {
      Rank& rank = local(in.number());
      const bool kept = in.number() != 0;
      rank.state = static_cast<char>(in.number());
      rank.page = unpack_page(in);
      if (kept) {
        rank.kept = rank.page;
        rank.kept_known = true;
      }
      break;
    }
    case FrameKind::Notice: {
      const auto level = static_cast<LogLevel>(in.number());
      observer_.notice(level, base::join(plan_.name, ": ", in.text()));
      break;
    }
    case FrameKind::Finished:
      out_of_memory_ = in.number() != 0;
      finished_ = true;
      break;
    default:
      break;
  }
}

bool RemoteRanks::child_ended() {
  int status = 0;
  if (child_ > 0 && waitpid(child_, &status, WNOHANG) == child_) {
    end_text_ = WIFSIGNALED(status) ? base::join(program_, " was killed by signal ", WTERMSIG(status), ", ",
                                                 signal_name(WTERMSIG(status)))
                                    : base::join(program_, " ended with exit code ", WEXITSTATUS(status));
    child_ = -1;
    child_ended_at_ = base::steady_seconds();
  }
  return child_ < 0;
}

std::string RemoteRanks::end_of_connection() {
  for (int i = 0; i < 100 && !child_ended(); ++i) poll(nullptr, 0, 5);
  read_errors();
  return end_text_;
}

void RemoteRanks::lose_connection() {
  const std::string why = end_of_connection();
  if (!ready_) fail_to_reach(why.empty() ? "the end of the connection" : why);
  lose(base::join("the connection to its host ", plan_.name, " was lost", why.empty() ? "" : " (" + why + ")"));
}

void RemoteRanks::lose(const std::string& why) {
  if (std::exchange(gone_, true)) return;
  base::unwatch(epoll_.get(), out_.get());
  if (err_.get() >= 0) base::unwatch(epoll_.get(), err_.get());
  in_ = base::Descriptor();
  for (int i = 0; i < plan_.ranks; ++i)
    if (!std::exchange(local(i).dead, true)) observer_.lost(first_rank() + i, why);
}

void RemoteRanks::fail_to_reach(const std::string& why) {
  std::string said;
  for (const std::string& line : last_errors_) said += (said.empty() ? "" : " | ") + line;
  if (said.empty() && !before_mark_.empty()) said = before_mark_.substr(0, 200);
  const std::string login = plan_.user.empty() ? plan_.name : plan_.user + "@" + plan_.name;
  std::string hint = base::join("`", program_, " ", login, " true` must work without a question");
  if (program_ != "ssh") hint = base::join("look at what ", program_, " needs, and give it with --launcher_args");
  throw CommError(base::join("[zero run] got ", why, said.empty() ? "" : ": " + said, " for host ", plan_.name,
                             ", expected ", agent_path_, " to run there. Hint: ", hint,
                             ", and zero must lie at the same place on every host."));
}

void RemoteRanks::begin_end() { put(FrameKind::Finish); }

void RemoteRanks::finish_end(double seconds) {
  const double end = base::steady_seconds() + seconds;
  try {
    while (started_ && !gone_ && !finished_ && base::steady_seconds() < end) {
      pollfd ready{epoll_.get(), POLLIN, 0};
      poll(&ready, 1, 20);
      flush();
      step();
    }
  } catch (const Error& error) {
    observer_.notice(LogLevel::Warning, error.what());
  }
  if (started_ && !finished_) lose(base::join("its host ", plan_.name, " did not answer"));
  gone_ = true;
  in_ = base::Descriptor();
}

}  // namespace zero::launch
