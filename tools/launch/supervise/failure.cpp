// Finds and prints the root cause. Rules, in order: a rank that failed by itself before the launcher stopped anything;
// a rank that hung; ranks that called different collectives; the first rank that lost its peers.
#include "tools/launch/supervise/failure.h"

#include <signal.h>
#include <string.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <set>

#include "base/check.h"
#include "base/json_write.h"
#include "base/newer_libc.h"
#include "base/printable.h"

namespace zero::launch {
namespace {

using base::json_quote;
using observe::CollectiveSnapshot;
using observe::CollectiveState;
using observe::StatusPhase;
using observe::StatusSnapshot;

// The earliest collective that the rank is inside.
const CollectiveSnapshot* waiting_in(const StatusSnapshot& page) {
  for (const CollectiveSnapshot& c : page.collectives)
    if (c.state == CollectiveState::Inside) return &c;
  return nullptr;
}

const CollectiveSnapshot* numbered(const StatusSnapshot& page, std::uint64_t sequence) {
  for (const CollectiveSnapshot& c : page.collectives)
    if (c.sequence == sequence) return &c;
  return nullptr;
}

// The rank has begun the collective: it is inside or past it, maybe so far that the page's ring no longer lists it.
bool entered(const StatusSnapshot& page, std::uint64_t sequence) {
  const CollectiveSnapshot* c = numbered(page, sequence);
  if (c) return c->state != CollectiveState::Before;
  return !page.collectives.empty() && page.collectives.back().sequence > sequence;
}

// The collective that ranks wait for: the earliest that one rank is inside and another has not begun. A collective that
// all ranks have begun does not show a wait, because a prefetch stays open during computation. If there is none, the
// earliest that any rank is inside; null: no rank is inside one.
const CollectiveSnapshot* awaited(const std::vector<StatusSnapshot>& pages, const std::vector<bool>& counts) {
  const CollectiveSnapshot* held = nullptr;
  const CollectiveSnapshot* any = nullptr;
  for (std::size_t r = 0; r < pages.size(); ++r) {
    if (!counts[r]) continue;
    for (const CollectiveSnapshot& c : pages[r].collectives) {
      if (c.state != CollectiveState::Inside) continue;
      if (!any || c.sequence < any->sequence) any = &c;
      if (held && held->sequence <= c.sequence) continue;
      for (std::size_t other = 0; other < pages.size(); ++other)
        if (counts[other] && !entered(pages[other], c.sequence)) held = &c;
    }
  }
  return held ? held : any;
}

bool slow_phase(const StatusSnapshot& page) {
  return page.pid == 0 || page.phase == StatusPhase::Startup || page.phase == StatusPhase::Load ||
         page.phase == StatusPhase::Save;
}

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 12 && ranks.size() > 14) return text + " ... (" + std::to_string(ranks.size()) + ")";
    text += " " + std::to_string(ranks[i]);
  }
  return text;
}

std::string printed(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string json_list(const std::vector<int>& ranks) {
  std::string text = "[";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text + "]";
}

// The rank ended because its peers were gone, so it is not the root cause if another rank failed differently. A program
// that catches the error ends with its own exit code, one that does not ends by SIGABRT.
bool peer_loss(const Death& death, const std::vector<StatusSnapshot>& pages) {
  const StatusSnapshot& page = pages[static_cast<std::size_t>(death.rank)];
  const bool said = page.error_code == static_cast<int>(ExitCode::kPeer);
  if (!death.lost.empty()) return false;
  if (!death.by_signal) return death.code == static_cast<int>(ExitCode::kPeer) || (said && death.code != 0);
  return death.code == SIGABRT && (said || waiting_in(page) != nullptr);
}

// The meanings of exit codes apply only to programs that use libzero.
std::string cause_of(const Death& death, bool out_of_memory, bool ours) {
  if (!death.lost.empty()) return death.lost;
  if (death.by_signal) {
    std::string text = base::join("killed by signal ", death.code, " (", signal_name(death.code), ")");
    if (death.code == SIGKILL && out_of_memory) text += "; the kernel killed it because memory ran out";
    return text;
  }
  std::string text = base::join("exit code ", death.code);
  if (death.code > 128 && death.code <= 128 + SIGRTMAX)
    text += base::join(" (a shell's code for signal ", death.code - 128, ", ", signal_name(death.code - 128), ")");
  static constexpr const char* kMeaning[] = {"",
                                             "",
                                             "usage or configuration",
                                             "checkpoint missing or damaged",
                                             "out of memory",
                                             "I/O error or disk full",
                                             "lost its peers",
                                             "numerical failure"};
  if (ours && death.code >= 2 && death.code <= 7) text += base::join(" (", kMeaning[death.code], ")");
  return text;
}

std::string hint_of(const FailureReport& r, bool hang) {
  if (r.out_of_memory)
    return "use smaller micro-batches or a higher ZeRO stage, or offload to host memory or nvme; see `zero doctor` for "
           "the limits";
  if (hang && r.rank < 0)
    return "all ranks wait in the same collective: check the network between them, or raise --hang-timeout";
  if (hang)
    return "inspect that rank's stack with gdb before the limit, or raise --hang-timeout if the step is that slow";
  if (!r.desync.empty())
    return "all ranks must run the same collectives in the same order: look for code that depends on the rank";
  if (r.signal == SIGSEGV || r.signal == SIGABRT || r.signal == SIGBUS || r.signal == SIGFPE || r.signal == SIGILL)
    return "a crash of the program: `ulimit -c unlimited` leaves a core file, or run one rank under gdb";
  if (r.signal == SIGKILL) return "killed from outside the run: check the kernel log (dmesg) and the batch system";
  if (r.rank_exit_code == 127 || r.rank_exit_code == 126)
    return "a program or library that the rank starts was not found or is not executable";
  return "";
}

}  // namespace

std::string signal_name(int signal) {
  const char* name = sigabbrev_np ? sigabbrev_np(signal) : nullptr;
  return name ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

bool is_failure(const Death& death) {
  return !death.lost.empty() || death.by_signal || (death.code != 0 && death.code != 75);
}

int exit_code_of(const Death& death) {
  if (!death.lost.empty() || death.by_signal || (death.code > 128 && death.code <= 128 + SIGRTMAX))
    return static_cast<int>(ExitCode::kPeer);
  return death.code <= 125 ? death.code : static_cast<int>(ExitCode::kFailed);
}

std::string find_desync(const std::vector<StatusSnapshot>& pages, int first_rank) {
  for (std::size_t a = 0; a < pages.size(); ++a) {
    for (const CollectiveSnapshot& mine : pages[a].collectives) {
      for (std::size_t b = a + 1; b < pages.size(); ++b) {
        const CollectiveSnapshot* other = numbered(pages[b], mine.sequence);
        // The fields of a collective that has not begun are not final.
        if (mine.state == CollectiveState::Before || (other && other->state == CollectiveState::Before)) continue;
        // Ranks may send different numbers of rows in an all-to-all.
        const bool same_size = !other || mine.numel == other->numel || mine.op.starts_with("all_to_all");
        if (!other || (mine.op == other->op && mine.dtype == other->dtype && same_size && mine.group == other->group))
          continue;
        const auto tell = [&](std::size_t rank, const CollectiveSnapshot& c) {
          return base::join("rank ", rank + static_cast<std::size_t>(first_rank), " called ", c.op, " of ", c.numel,
                            " ", c.dtype, c.group.empty() ? "" : " for " + c.group,
                            c.site.empty() ? "" : " at " + c.site);
        };
        return base::join("#", mine.sequence, ": ", tell(a, mine), ", ", tell(b, *other));
      }
    }
  }
  return "";
}

std::optional<Hang> find_hang(const std::vector<StatusSnapshot>& pages, const std::vector<double>& idle, double limit,
                              double slow_limit, std::string_view states) {
  const std::size_t n = pages.size();
  const bool any_page = std::any_of(pages.begin(), pages.end(), [](const StatusSnapshot& p) { return p.pid != 0; });
  bool stale = false;
  for (std::size_t r = 0; r < n; ++r)
    stale |= pages[r].pid != 0 && idle[r] >= (slow_phase(pages[r]) && !waiting_in(pages[r]) ? slow_limit : limit);
  if (!any_page || !stale) return std::nullopt;

  std::vector<bool> alive(n);
  for (std::size_t r = 0; r < n; ++r) alive[r] = idle[r] >= 0;
  // Other ranks wait for a stopped process, even if it stopped inside the same collective.
  for (std::size_t r = 0; r < n && r < states.size(); ++r)
    if (alive[r] && (states[r] == 'T' || states[r] == 't'))
      return Hang{static_cast<int>(r), idle[r], "the process is stopped (SIGSTOP or a debugger)"};
  const CollectiveSnapshot* collective = awaited(pages, alive);
  // The late rank has not begun the collective that the others wait for. Of several, the one idle for longest.
  int late = -1;
  bool somebody_outside = false;
  for (std::size_t r = 0; r < n; ++r) {
    if (!alive[r] || (collective && entered(pages[r], collective->sequence))) continue;
    somebody_outside = true;
    if (late < 0 || idle[r] > idle[static_cast<std::size_t>(late)]) late = static_cast<int>(r);
  }
  if (!somebody_outside) {
    for (std::size_t r = 0; r < n; ++r)
      if (!alive[r] && pages[r].pid != 0 && collective && !entered(pages[r], collective->sequence)) {
        const double longest = *std::max_element(idle.begin(), idle.end());
        if (longest < limit) return std::nullopt;
        return Hang{static_cast<int>(r), longest, "it ended with exit code 0 while the others wait for it"};
      }
    // Since the last rank entered: the others may have waited for longer while it computed.
    double shared = std::numeric_limits<double>::infinity();
    for (std::size_t r = 0; r < n; ++r)
      if (alive[r]) shared = std::min(shared, idle[r]);
    if (shared < limit) return std::nullopt;
    return Hang{-1, shared, ""};
  }
  const auto l = static_cast<std::size_t>(late);
  if (idle[l] < (slow_phase(pages[l]) ? slow_limit : limit)) return std::nullopt;  // slow, but within its limit
  return Hang{late, idle[l], l < states.size() && states[l] == 'D' ? "it waits for a disk or another device" : ""};
}

FailureReport find_root_cause(const Evidence& e) {
  FailureReport r;
  r.ranks = e.world > 0 ? e.world : static_cast<int>(e.pages.size());
  r.hosts = static_cast<int>(std::set<std::string>(e.hosts.begin(), e.hosts.end()).size());
  r.time = e.time;
  r.desync = find_desync(e.pages, e.first_rank);
  const Death* root = nullptr;
  for (const Death& d : e.deaths) {
    // After the stop, only a rank whose page has an error code other than a lost peer can be the root cause.
    const int said = e.pages[static_cast<std::size_t>(d.rank)].error_code;
    const bool own = !d.after_stop || (!d.sent && said != 0 && said != static_cast<int>(ExitCode::kPeer));
    if (is_failure(d) && own && !peer_loss(d, e.pages)) {
      root = &d;
      break;
    }
  }
  const bool hang = e.hang && (!root || root->after_stop);
  if (hang) root = nullptr;
  // Ranks that lost their peers notice a cut link before the launcher misses the host.
  if (!root && !hang)
    for (const Death& d : e.deaths)
      if (!d.lost.empty()) {
        root = &d;
        break;
      }
  if (!root && !hang)
    for (const Death& d : e.deaths)
      if (is_failure(d) && !d.sent) {
        root = &d;
        break;
      }
  if (!root && !hang)
    for (const Death& d : e.deaths)
      if (is_failure(d)) {
        root = &d;
        break;
      }
  ZERO_CHECK(root || hang, "a failure without a death or a hang");

  if (hang) {
    r.rank = e.hang->rank;
    r.exit_code = static_cast<int>(ExitCode::kPeer);
    r.cause = "no progress for " + printed("%.0f s", e.hang->idle_seconds);
    if (r.rank < 0) r.cause += " with all ranks inside the same collective";
    if (!e.hang->detail.empty()) r.cause += "; " + e.hang->detail;
  } else {
    r.rank = root->rank;
    r.exit_code = exit_code_of(*root);
    const bool starved = !e.out_of_memory.empty() && e.out_of_memory[static_cast<std::size_t>(root->rank)];
    r.out_of_memory = starved && root->by_signal && root->code == SIGKILL;
    r.cause = cause_of(*root, r.out_of_memory, e.pages[static_cast<std::size_t>(root->rank)].pid != 0);
    if (root->by_signal) {
      r.signal = root->code;
    } else if (root->lost.empty()) {
      r.rank_exit_code = root->code;
    }
  }
  r.host = e.hosts[r.rank >= 0 ? static_cast<std::size_t>(r.rank) : 0];
  if (r.rank >= 0) {
    const StatusSnapshot& page = e.pages[static_cast<std::size_t>(r.rank)];
    r.pid = e.pids[static_cast<std::size_t>(r.rank)];
    r.error = page.error;
    if (page.pid != 0) {
      r.step = page.step;
      r.micro_batch = page.micro_batch;
      r.phase = phase_name(page.phase);
      r.unit = page.unit;
      r.save = page.save;
      r.save_written = page.save_written;
      r.save_bytes = page.save_bytes;
    }
  }
  // The collective that the other ranks were inside at the time of the failure.
  std::vector<bool> known(e.pages.size());
  for (std::size_t i = 0; i < e.pages.size(); ++i) known[i] = e.pages[i].pid != 0;
  if (const CollectiveSnapshot* what = awaited(e.pages, known)) {
    FailureReport::Collective c;
    c.what = *what;
    for (std::size_t i = 0; i < e.pages.size(); ++i)
      if (known[i]) (entered(e.pages[i], what->sequence) ? c.inside : c.outside).push_back(static_cast<int>(i));
    r.collective = std::move(c);
  }
  std::vector<int> with_it;  // ranks lost together with the root cause's host
  for (const Death& d : e.deaths) {
    if (d.rank == r.rank || !(is_failure(d) || d.code == 75)) continue;
    if (root && !root->lost.empty() && d.lost == root->lost) {
      with_it.push_back(d.rank);
      continue;
    }
    (peer_loss(d, e.pages) && !d.sent ? r.lost_peer : r.stopped).push_back(d.rank);
    const double after = std::max(0.0, d.at - (root ? root->at : e.deaths.front().at));
    r.first_after = r.lost_peer.size() + r.stopped.size() == 1 ? after : std::min(r.first_after, after);
    r.last_after = std::max(r.last_after, after);
  }
  std::sort(r.lost_peer.begin(), r.lost_peer.end());
  std::sort(r.stopped.begin(), r.stopped.end());
  for (std::vector<int>* ranks : {&r.lost_peer, &r.stopped, &with_it})
    for (int& rank : *ranks) rank += e.first_rank;
  if (r.collective)
    for (std::vector<int>* ranks : {&r.collective->inside, &r.collective->outside})
      for (int& rank : *ranks) rank += e.first_rank;
  if (r.rank >= 0) r.rank += e.first_rank;
  if (!with_it.empty()) r.cause += ", and with it " + list(with_it);
  r.hint = hint_of(r, hang);
  if (root && !root->lost.empty()) r.hint = "check the host and its network; its processes end on their own";
  if (root && peer_loss(*root, e.pages) && r.hint.empty()) {
    // No rank failed differently; a rank that ended early with exit code 0 may be the reason.
    for (const Death& d : e.deaths) {
      if (&d == root) break;
      if (d.by_signal || d.code != 0) continue;
      r.hint = base::join("rank ", d.rank + e.first_rank,
                          " had ended with exit code 0 before: all ranks must make the same number of steps");
      break;
    }
  }
  return r;
}

std::string failure_text(const FailureReport& r) {
  std::string out = base::join("zero run: FAILED (exit ", r.exit_code, ")  run ", r.run_id, "\n");
  const auto row = [&](const char* name, const std::string& text) {
    char label[16];
    std::snprintf(label, sizeof label, "  %-12s ", name);
    out += label + base::printable(text) + "\n";  // ranks and other hosts write parts of it
  };
  if (r.rank >= 0) {
    const std::string pid = r.pid > 0 ? base::join(", pid ", r.pid) : "";
    row("root cause", base::join("rank ", r.rank, " of ", r.ranks, ", host ", r.host, pid, ": ", r.cause));
  } else {
    row("root cause",
        base::join(r.ranks, " ranks, ", r.hosts > 1 ? base::join(r.hosts, " hosts") : "host " + r.host, ": ", r.cause));
  }
  if (!r.error.empty()) row("error", r.error);
  std::string where;
  if (r.step >= 0) where += base::join("step ", r.step, ", micro-batch ", r.micro_batch, ", ");
  if (!r.phase.empty()) where += r.phase + ", ";
  if (!r.unit.empty()) where += "unit " + r.unit + ", ";
  if (!where.empty() || !r.time.empty()) row("where", where + r.time);
  if (!r.save.empty())
    row("checkpoint",
        base::join(r.save, " was being written: ", r.save_written, " of ", r.save_bytes, " bytes of this rank"));
  if (r.collective) {
    const auto& c = *r.collective;
    row("collective",
        base::join(c.what.op, " #", c.what.sequence, ", ", c.what.dtype, ", ", c.what.numel,
                   " elements: ", list(c.inside), " inside", c.outside.empty() ? "" : ", " + list(c.outside) + " not"));
  }
  if (!r.desync.empty()) row("desync", r.desync);
  std::string collateral;
  const std::string seconds = printed("%.2f", r.first_after) + "-" + printed("%.2f s later", r.last_after);
  if (!r.lost_peer.empty())
    collateral = list(r.lost_peer) + " lost " + (r.lost_peer.size() == 1 ? "its" : "their") + " peer";
  if (!r.stopped.empty())
    collateral +=
        (collateral.empty() ? "" : ", ") + list(r.stopped) + (r.stopped.size() == 1 ? " was" : " were") + " stopped";
  if (!collateral.empty()) row("collateral", collateral + ", " + seconds);
  if (!r.log_path.empty())
    row("log", r.log_path + (r.last_lines.empty() ? "" : base::join(" (last ", r.last_lines.size(), " lines above)")));
  if (!r.hint.empty()) row("hint", r.hint);
  return out;
}

std::string failure_json(const FailureReport& r) {
  std::string out = base::join(
      "{\"exit_code\": ", r.exit_code, ", \"run_id\": ", json_quote(r.run_id), ", \"attempt\": ", r.attempt,
      ", \"root_cause\": {\"rank\": ", r.rank >= 0 ? std::to_string(r.rank) : "null", ", \"ranks\": ", r.ranks,
      ", \"host\": ", json_quote(r.host), ", \"pid\": ", r.pid > 0 ? std::to_string(r.pid) : "null",
      ", \"cause\": ", json_quote(r.cause), ", \"signal\": ", r.signal ? std::to_string(r.signal) : "null",
      ", \"signal_name\": ", r.signal ? json_quote(signal_name(r.signal)) : "null",
      ", \"rank_exit_code\": ", r.rank_exit_code ? std::to_string(*r.rank_exit_code) : "null",
      ", \"out_of_memory\": ", r.out_of_memory ? "true" : "false", "}");
  if (!r.error.empty()) out += ", \"error\": " + json_quote(r.error);
  out += ", \"where\": {\"time\": " + json_quote(r.time);
  if (r.step >= 0) out += base::join(", \"step\": ", r.step, ", \"micro_batch\": ", r.micro_batch);
  if (!r.phase.empty()) out += ", \"phase\": " + json_quote(r.phase);
  if (!r.unit.empty()) out += ", \"unit\": " + json_quote(r.unit);
  if (!r.save.empty())
    out += base::join(", \"checkpoint\": {\"tag\": ", json_quote(r.save), ", \"written\": ", r.save_written,
                      ", \"bytes\": ", r.save_bytes, "}");
  out += "}";
  if (r.collective) {
    const auto& c = *r.collective;
    out += base::join(", \"collective\": {\"op\": ", json_quote(c.what.op), ", \"sequence\": ", c.what.sequence,
                      ", \"dtype\": ", json_quote(c.what.dtype), ", \"numel\": ", c.what.numel,
                      ", \"inside\": ", json_list(c.inside), ", \"outside\": ", json_list(c.outside), "}");
  }
  if (!r.desync.empty()) out += ", \"desync\": " + json_quote(r.desync);
  out += base::join(", \"collateral\": {\"lost_peer\": ", json_list(r.lost_peer),
                    ", \"stopped\": ", json_list(r.stopped), ", \"first_after_s\": ", printed("%.3f", r.first_after),
                    ", \"last_after_s\": ", printed("%.3f", r.last_after), "}");
  if (!r.log_path.empty()) out += ", \"log\": " + json_quote(r.log_path);
  out += ", \"last_lines\": [";
  for (std::size_t i = 0; i < r.last_lines.size(); ++i) out += (i ? ", " : "") + json_quote(r.last_lines[i]);
  out += "]";
  if (!r.hint.empty()) out += ", \"hint\": " + json_quote(r.hint);
  return out + "}";
}

}  // namespace zero::launch
