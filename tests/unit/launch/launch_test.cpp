// The launcher's parts that need no ranks: hostfiles and filters, lines, interpretation of deaths and pages, order of
// deaths, and probes of the machine.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tools/launch/local/death_watch.h"
#include "tools/launch/local/line_splitter.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/machine/machine.h"
#include "tools/launch/remote/hostfile.h"
#include "tools/launch/supervise/failure.h"

namespace zero::launch::launch_test {
namespace {

using observe::CollectiveSnapshot;
using observe::CollectiveState;
using observe::StatusPhase;
using observe::StatusSnapshot;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), 2) << error.what();
    return error.what();
  }
  return "";
}

std::string shown(const std::vector<Host>& hosts) {
  std::string text;
  for (const Host& h : hosts) {
    text += (text.empty() ? "" : " ") + h.name + ":";
    for (const int s : h.slots) text += std::to_string(s);
  }
  return text;
}

TEST(Hostfile, LinesOfTheGrammar) {
  EXPECT_EQ(
      shown(parse_hostfile(
          "# comment\nworker-0 slots=4\n\nw_1.example\tslots=2  # note\r\n   # indented comment\n9th slots=1#x", "f")),
      "worker-0:0123 w_1.example:01 9th:0");
  EXPECT_EQ(parse_hostfile("a slots=1024", "f")[0].slots.size(), 1024u);
}

TEST(Hostfile, EveryOtherLineIsAnErrorWithItsPlace) {
  EXPECT_NE(error_of([] { parse_hostfile("w0 \033[2J", "f"); }).find("\\x1b[2J"), std::string::npos)
      << "no escape code in an error";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"w0 slots=0", "f:1:10: "},
      {"w0 slots=1025", "f:1:10: "},
      {"w0 slots=99999999999999999999", "f:1:10: "},
      {"w0 slots=4x", "f:1:11: "},
      {"w0 slots=-1", "f:1:10: "},
      {"w0 slots=", "f:1:10: "},
      {"w0", "f:1:3: "},
      {"w0 slot=4", "f:1:4: "},
      {"w0 slots=4 slots=5", "f:1:11: "},
      {"-oProxyCommand=x slots=1", "f:1:1: "},
      {".w slots=1", "f:1:1: "},
      {"w0;rm slots=1", "f:1:3: "},
      {" w0 slots=1", "f:1:1: "},
      {"a slots=1\n\nb slots=2\na slots=3", "f:4:1: "},
      {"# only a comment\n", "f:1:1: "},
      {"", "f:1:1: "},
      {std::string("w0 slots=1\0", 11), "f:1:11: "},
  };
  for (const auto& [text, place] : cases) {
    const std::string error = error_of([&, &text = text] { parse_hostfile(text, "f"); });
    EXPECT_EQ(error.find(place), 0u) << text << " -> " << error;
    EXPECT_NE(error.find("expected"), std::string::npos) << error;
  }
}

// Any bytes result in hosts or a ConfigError; accepted hostfiles have the same meaning when written and read again.
TEST(Hostfile, SurvivesRandomChanges) {
  std::mt19937 random(20260103);
  const std::string alphabet("wW09_-. \t\r\n#=:@,slot\0\xff", 25);
  const auto mutate = [&](std::string text) {
    for (unsigned changes = random() % 4; changes-- > 0;) {
      const std::size_t at = random() % (text.size() + 1);
      const char c = alphabet[random() % alphabet.size()];
      if (at == text.size() || random() % 3 == 0) {
        text.insert(at, 1, c);
      } else if (random() % 2 == 0) {
        text.erase(at, 1 + random() % 3);
      } else {
        text[at] = c;
      }
    }
    return text;
  };
  int accepted = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string text = mutate("# c\nw0 slots=4\nw1\tslots=12 # n\n");
    try {
      const auto hosts = parse_hostfile(text, "f");
      ++accepted;
      std::string again;
      for (const Host& h : hosts) again += h.name + " slots=" + std::to_string(h.slots.size()) + "\n";
      EXPECT_EQ(shown(parse_hostfile(again, "f")), shown(hosts)) << text;
    } catch (const ConfigError&) {
      ++refused;
    }
    const std::string filter = mutate("w0:0,2@w1:11");
    try {
      const auto hosts = include_hosts(parse_hostfile("w0 slots=4\nw1 slots=12", "f"), filter);
      std::string again;
      for (const Host& h : hosts) {
        again += (again.empty() ? "" : "@") + h.name;
        for (std::size_t k = 0; k < h.slots.size(); ++k) again += (k ? "," : ":") + std::to_string(h.slots[k]);
      }
      EXPECT_EQ(shown(include_hosts(parse_hostfile("w0 slots=4\nw1 slots=12", "f"), again)), shown(hosts)) << filter;
    } catch (const ConfigError&) {
      ++refused;
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(Hostfile, Filters) {
  const std::vector<Host> hosts = parse_hostfile("w0 slots=4\nw1 slots=4", "f");
  EXPECT_EQ(shown(include_hosts(hosts, "w0@w1:0,2")), "w0:0123 w1:02");
  EXPECT_EQ(shown(include_hosts(hosts, "w1:3@w0:1@w1:0,3")), "w0:1 w1:03") << "order of the hostfile, repeats harmless";
  EXPECT_EQ(shown(include_hosts(hosts, "w1:0@w1")), "w1:0123");
  EXPECT_EQ(shown(include_hosts(hosts, "w0")), "w0:0123");
  EXPECT_EQ(shown(exclude_hosts(hosts, "w1:0")), "w0:0123 w1:123");
  EXPECT_EQ(shown(exclude_hosts(hosts, "w1")), "w0:0123");
  EXPECT_EQ(shown(exclude_hosts(hosts, "w1:0,1,2,3")), "w0:0123");
  for (const char* bad : {"", "w2", "w0:4", "w0:", "w0:1,", "@w0", "w0@", "w0@@w1", "w1@w0:1@5", "w0:1-2", "w0 w1",
                          "w0:a", "w0:99999999999"}) {
    EXPECT_NE(error_of([&] { include_hosts(hosts, bad); }), "") << bad;
    EXPECT_NE(error_of([&] { exclude_hosts(hosts, bad); }), "") << bad;
  }
  EXPECT_NE(error_of([&] { exclude_hosts(hosts, "w0@w1"); }).find("leaves nothing"), std::string::npos);
  EXPECT_NE(error_of([&] {
              include_hosts(hosts, "w0:7");
            }).find("[--include:1:4] got slot 7 of w0, expected a slot from 0 to 3"),
            std::string::npos);
}

TEST(Host, CoreLists) {
  EXPECT_EQ(parse_core_list("1,3-5,3", "--x"), (std::vector<int>{1, 3, 4, 5}));
  for (const char* bad : {"", ",", "1,", "3-1", "a", "1-", "-1", "1 2", "99999"})
    EXPECT_NE(error_of([&] { parse_core_list(bad, "--x"); }), "") << bad;
  const auto dealt = deal_cores(allowed_cores(), 1);
  EXPECT_EQ(dealt.size(), 1u);
  EXPECT_EQ(dealt[0].size(), allowed_cores().size());
}

TEST(Host, AFreePortIsFreeAndATakenOneIsNot) {
  const int port = free_port();
  EXPECT_EQ(error_of([&] { check_port(port); }), "");
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << "any port, all interfaces";
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  EXPECT_NE(error_of([&] { check_port(ntohs(address.sin_port)); }).find("Address already in use"), std::string::npos);
  close(fd);
}

// Each string is one read().
std::vector<std::string> split(const std::vector<std::string>& reads) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  const auto keep = [&](std::string_view line) { lines.emplace_back(line); };
  for (const std::string& r : reads) splitter.feed(r, keep);
  splitter.finish(keep);
  return lines;
}

TEST(Lines, WholeWhateverTheReads) {
  using Lines = std::vector<std::string>;
  EXPECT_EQ(split({"a\nb", "c\n", "\n", "d"}), (Lines{"a", "bc", "", "d"}));
  EXPECT_EQ(split({"a\r", "\nb\r\n"}), (Lines{"a", "b"}));
  EXPECT_EQ(split({"10%\r", "20%\r30%", "\n"}), (Lines{"30%"}));
  EXPECT_EQ(split({"10%\r20%\r"}), (Lines{"20%"})) << "the last state of a bar, although \\r came after it";
  EXPECT_EQ(split({}), Lines{});
  const std::string e_acute = "\xc3\xa9";
  const Lines cut = split({std::string(kLongestLine - 1, 'x') + e_acute, "tail\nnext\n"});
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_EQ(cut[0], std::string(kLongestLine - 1, 'x') + " [cut: 6 more bytes]") << "no half character";
  EXPECT_EQ(cut[1], "next");
}

StatusSnapshot page(std::int64_t step, StatusPhase phase = StatusPhase::Backward) {
  StatusSnapshot s;
  s.pid = 1;
  s.step = step;
  s.phase = phase;
  return s;
}
CollectiveSnapshot collective(std::uint64_t sequence, CollectiveState state, std::int64_t numel = 8,
                              const char* op = "all_gather") {
  CollectiveSnapshot c;
  c.sequence = sequence;
  c.state = state;
  c.numel = numel;
  c.op = op;
  c.dtype = "fp32";
  return c;
}

Evidence evidence(int ranks) {
  Evidence e;
  for (int i = 0; i < ranks; ++i) {
    e.hosts.push_back("h");
    e.pids.push_back(100 + i);
    e.pages.push_back(page(7));
  }
  return e;
}
Death ended(int rank, int code, double at = 0) {
  Death d;
  d.rank = rank;
  d.code = code;
  d.at = at;
  return d;
}
Death killed(int rank, int signal, double at = 0) {
  Death d = ended(rank, signal, at);
  d.by_signal = true;
  return d;
}

TEST(Judgement, PeerLossIsCollateralWhateverItsCode) {
  Evidence e = evidence(4);
  // 0: libzero's exit code; 1: a program with its own exit code; 3: an uncaught error; 2: the root cause.
  e.pages[1].error_code = e.pages[3].error_code = 6;
  e.deaths = {ended(0, 6, 0.1), ended(1, 1, 0.2), killed(3, SIGABRT, 0.3), ended(2, 42, 0.4)};
  const FailureReport r = find_root_cause(e);
  EXPECT_EQ(r.rank, 2);
  EXPECT_EQ(r.exit_code, 42);
  EXPECT_EQ(r.lost_peer, (std::vector<int>{0, 1, 3}));
  EXPECT_TRUE(r.stopped.empty());
  EXPECT_EQ(r.step, 7);
  EXPECT_EQ(r.phase, "backward");
}

TEST(Judgement, ShowsTheSaveInTheBackground) {
  Evidence e = evidence(2);
  e.pages[0].save = e.pages[1].save = "global_step4";
  e.pages[1].save_written = 300;
  e.pages[1].save_bytes = 1000;
  e.deaths = {killed(1, SIGKILL)};
  const FailureReport r = find_root_cause(e);
  EXPECT_NE(failure_text(r).find("  checkpoint   global_step4 was being written: 300 of 1000 bytes of this rank\n"),
            std::string::npos)
      << failure_text(r);
  EXPECT_NE(failure_json(r).find(R"("checkpoint": {"tag": "global_step4", "written": 300, "bytes": 1000}})"),
            std::string::npos)
      << failure_json(r);
  e.pages[1].save.clear();
  EXPECT_EQ(failure_text(find_root_cause(e)).find("checkpoint"), std::string::npos);
}

// A page is written by the rank's program, also by one that is broken.
TEST(Judgement, TextsOfThePageCannotCommandTheTerminal) {
  Evidence e = evidence(2);
  e.pages[1].error = "\x1b]0;owned\a\xff\nsecond line";
  e.pages[1].unit = "layers.\x1b[2J";
  e.pages[1].save = "\u202etag";
  e.deaths = {ended(1, 1, 0.1)};
  const std::string text = failure_text(find_root_cause(e));
  EXPECT_NE(text.find("\\u001b]0;owned\\u0007\\xff\nsecond line"), std::string::npos) << text;
  EXPECT_NE(text.find("unit layers.\\u001b[2J"), std::string::npos) << text;
  EXPECT_NE(text.find("\\u202etag"), std::string::npos) << text;
}

TEST(Judgement, AnAbortInsideACollectiveIsCollateral) {
  Evidence e = evidence(2);
  e.pages[0].collectives = {collective(3, CollectiveState::Inside)};
  e.deaths = {killed(0, SIGABRT), killed(1, SIGSEGV)};
  EXPECT_EQ(find_root_cause(e).rank, 1);
  e.pages[0].collectives.clear();
  EXPECT_EQ(find_root_cause(e).rank, 0) << "an abort elsewhere is a cause";
}

TEST(Judgement, AllLostTheirPeers) {
  Evidence e = evidence(3);
  e.deaths = {ended(1, 6), ended(0, 6), ended(2, 6)};
  FailureReport r = find_root_cause(e);
  EXPECT_EQ(r.rank, 1) << "the earliest";
  EXPECT_EQ(r.exit_code, 6);
  EXPECT_EQ(r.hint, "");
  e.deaths = {ended(2, 0), ended(1, 6), ended(0, 6)};
  r = find_root_cause(e);
  EXPECT_NE(r.hint.find("rank 2 had ended with exit code 0 before"), std::string::npos) << r.hint;
}

TEST(Judgement, AHostThatDoesNotAnswerIsTheCauseWhereOthersLostTheirPeers) {
  Evidence e = evidence(2);
  Death silent = ended(1, -1, 25);
  silent.lost = "its host wb did not answer";
  silent.after_stop = silent.sent = true;
  e.deaths = {ended(0, 6, 20), silent};
  EXPECT_EQ(find_root_cause(e).rank, 1);
  EXPECT_EQ(find_root_cause(e).cause, "its host wb did not answer");
  e.deaths = {ended(0, 42, 20), silent};
  EXPECT_EQ(find_root_cause(e).rank, 0) << "a rank that failed by itself";
}

TEST(Judgement, OutOfMemoryIsClaimedOnlyWithTheKernelsWord) {
  Evidence e = evidence(2);
  e.deaths = {killed(1, SIGKILL)};
  EXPECT_EQ(find_root_cause(e).cause, "killed by signal 9 (SIGKILL)");
  e.out_of_memory = {true, false};
  EXPECT_FALSE(find_root_cause(e).out_of_memory) << "another host's";
  e.out_of_memory = {false, true};
  const FailureReport r = find_root_cause(e);
  EXPECT_EQ(r.cause, "killed by signal 9 (SIGKILL); the kernel killed it because memory ran out");
  EXPECT_EQ(r.exit_code, 6);
  EXPECT_TRUE(r.out_of_memory);
  e.deaths = {killed(1, SIGSEGV)};
  EXPECT_FALSE(find_root_cause(e).out_of_memory);
}

TEST(Judgement, WhatWeStoppedIsNoCause) {
  Evidence e = evidence(3);
  Death sent = killed(0, SIGTERM, 0.5);
  sent.after_stop = sent.sent = true;
  e.deaths = {ended(1, 7, 0.1), sent};
  const FailureReport r = find_root_cause(e);
  EXPECT_EQ(r.rank, 1);
  EXPECT_EQ(r.stopped, std::vector<int>{0});
  EXPECT_DOUBLE_EQ(r.first_after, 0.4);
  EXPECT_NE(failure_text(r).find("collateral   rank 0 was stopped, 0.40-0.40 s later\n"), std::string::npos)
      << failure_text(r);
}

TEST(Judgement, ALostHostIsNamedOnceWithAllItsRanks) {
  Evidence e = evidence(4);
  e.hosts = {"w0", "w0", "w1", "w1"};
  Death lost = ended(2, -1, 0.2), with_it = ended(3, -1, 0.2);
  lost.lost = with_it.lost = "the connection to its host w1 was lost";
  e.deaths = {ended(0, 6, 0.1), lost, with_it, ended(1, 6, 0.3)};
  const FailureReport r = find_root_cause(e);
  EXPECT_EQ(r.rank, 2);
  EXPECT_EQ(r.host, "w1");
  EXPECT_EQ(r.exit_code, 6);
  EXPECT_FALSE(r.rank_exit_code.has_value());
  EXPECT_EQ(r.cause, "the connection to its host w1 was lost, and with it rank 3");
  EXPECT_EQ(r.lost_peer, (std::vector<int>{0, 1}));
  EXPECT_TRUE(r.stopped.empty());
}

TEST(Judgement, RanksAreNumberedAsInTheWorld) {
  Evidence e = evidence(2);
  e.first_rank = 4;
  e.world = 6;
  e.pages[0].collectives = {collective(3, CollectiveState::Inside)};
  e.pages[1].collectives = {collective(3, CollectiveState::Before)};
  e.deaths = {ended(1, 9, 0.1), ended(0, 6, 0.2)};
  const FailureReport r = find_root_cause(e);
  EXPECT_EQ(r.rank, 5);
  EXPECT_EQ(r.pid, 101);
  EXPECT_EQ(r.lost_peer, std::vector<int>{4});
  ASSERT_TRUE(r.collective.has_value());
  EXPECT_EQ(r.collective->inside, std::vector<int>{4});
  EXPECT_EQ(r.collective->outside, std::vector<int>{5});
  EXPECT_NE(failure_text(r).find("rank 5 of 6, host h"), std::string::npos) << failure_text(r);
}

TEST(Judgement, ExitCodesOfTheLauncher) {
  EXPECT_EQ(exit_code_of(ended(0, 3)), 3);
  EXPECT_EQ(exit_code_of(ended(0, 125)), 125);
  EXPECT_EQ(exit_code_of(ended(0, 127)), 1);
  EXPECT_EQ(exit_code_of(ended(0, 139)), 6) << "a shell's code for SIGSEGV";
  EXPECT_EQ(exit_code_of(ended(0, 255)), 1);
  EXPECT_EQ(exit_code_of(killed(0, SIGKILL)), 6);
  EXPECT_FALSE(is_failure(ended(0, 0)));
  EXPECT_FALSE(is_failure(ended(0, 75)));
  EXPECT_TRUE(is_failure(ended(0, 143)));
}

TEST(Judgement, Desync) {
  std::vector<StatusSnapshot> pages{page(1), page(1)};
  pages[0].collectives = {collective(4, CollectiveState::After),
                          collective(5, CollectiveState::Inside, 8, "reduce_scatter")};
  pages[1].collectives = {collective(4, CollectiveState::After),
                          collective(5, CollectiveState::Inside, 16, "reduce_scatter")};
  EXPECT_EQ(find_desync(pages), "#5: rank 0 called reduce_scatter of 8 fp32, rank 1 called reduce_scatter of 16 fp32");
  pages[1].collectives[1].numel = 8;
  EXPECT_EQ(find_desync(pages), "");
  // Experts: ranks send different numbers of rows.
  pages[0].collectives[1] = collective(5, CollectiveState::Inside, 8, "all_to_all");
  pages[1].collectives[1] = collective(5, CollectiveState::Inside, 16, "all_to_all");
  EXPECT_EQ(find_desync(pages), "");
  pages[1].collectives[1] = collective(5, CollectiveState::Inside, 8, "all_gather");
  EXPECT_NE(find_desync(pages), "");
}

TEST(Hangs, TheLateRankIsTheOneNotInside) {
  std::vector<StatusSnapshot> pages{page(1), page(1), page(1)};
  pages[0].collectives = pages[2].collectives = {collective(9, CollectiveState::Inside)};
  pages[1].collectives = {collective(8, CollectiveState::After)};
  EXPECT_FALSE(find_hang(pages, {9, 9, 9}, 10, 100)) << "not long enough";
  EXPECT_FALSE(find_hang(pages, {11, 1, 11}, 10, 100)) << "the late one moves";
  const auto hang = find_hang(pages, {11, 12, 11}, 10, 100);
  ASSERT_TRUE(hang);
  EXPECT_EQ(hang->rank, 1);
  EXPECT_DOUBLE_EQ(hang->idle_seconds, 12);
}

TEST(Hangs, AllInsideMeansTheLink) {
  std::vector<StatusSnapshot> pages{page(1), page(1)};
  pages[0].collectives = pages[1].collectives = {collective(9, CollectiveState::Inside)};
  const auto hang = find_hang(pages, {11, 11}, 10, 100);
  ASSERT_TRUE(hang);
  EXPECT_EQ(hang->rank, -1);
  EXPECT_FALSE(find_hang(pages, {0, 11}, 10, 100)) << "rank 0 has just entered, after a long evaluation";
  EXPECT_DOUBLE_EQ(find_hang(pages, {12, 11}, 10, 100)->idle_seconds, 11);
}

TEST(Hangs, AStoppedProcessIsNamedWhereverItStood) {
  std::vector<StatusSnapshot> pages{page(1), page(1)};
  pages[0].collectives = pages[1].collectives = {collective(9, CollectiveState::Inside)};
  const auto hang = find_hang(pages, {12, 11}, 10, 100, "ST");
  ASSERT_TRUE(hang);
  EXPECT_EQ(hang->rank, 1);
  EXPECT_NE(hang->detail.find("stopped"), std::string::npos);
  EXPECT_FALSE(find_hang({page(1), page(1)}, {9, 9}, 10, 100, "TT")) << "not long enough";
}

TEST(Hangs, ARankThatWentHomeIsNamed) {
  std::vector<StatusSnapshot> pages{page(1), page(0), page(1)};
  pages[0].collectives = pages[2].collectives = {collective(9, CollectiveState::Inside)};
  pages[1].collectives = {collective(8, CollectiveState::After)};
  const auto hang = find_hang(pages, {11, -1, 11}, 10, 100);
  ASSERT_TRUE(hang);
  EXPECT_EQ(hang->rank, 1);
  EXPECT_NE(hang->detail.find("exit code 0"), std::string::npos);
}

TEST(Hangs, SlowPhasesAndProgramsWithoutAPage) {
  EXPECT_FALSE(find_hang({page(1, StatusPhase::Save), page(1, StatusPhase::Load)}, {50, 50}, 10, 100));
  EXPECT_TRUE(find_hang({page(1, StatusPhase::Save), page(1, StatusPhase::Save)}, {101, 101}, 10, 100));
  EXPECT_FALSE(find_hang({StatusSnapshot(), StatusSnapshot()}, {1e6, 1e6}, 10, 100));
  // One rank waits longer than the limit for another that saves; the saving rank has the longer limit.
  auto waiting = page(1);
  waiting.collectives = {collective(5, CollectiveState::Inside)};
  EXPECT_FALSE(find_hang({waiting, page(1, StatusPhase::Save)}, {50, 50}, 10, 100));
  const auto hang = find_hang({waiting, page(1, StatusPhase::Save)}, {101, 101}, 10, 100);
  ASSERT_TRUE(hang);
  EXPECT_EQ(hang->rank, 1);
}

// The order of death is kept although the first to be forked dies last.
void order_of_death(bool threads) {
  constexpr int kCount = 6;
  DeathWatch watch(threads);
  int gates[kCount][2];
  std::vector<pid_t> pids;
  std::vector<int> order;
  const auto take = [&] {
    for (const int i : watch.take()) order.push_back(i);
    usleep(1000);
  };
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(pipe(gates[i]), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      char byte;
      for (int k = 0; k <= i; ++k) close(gates[k][1]);
      [[maybe_unused]] const ssize_t n = read(gates[i][0], &byte, 1);
      _exit(0);
    }
    close(gates[i][0]);
    watch.add(i, pid);
    pids.push_back(pid);
  }
  for (int i = kCount; i-- > 0;) {
    close(gates[i][1]);
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pids[static_cast<std::size_t>(i)]), &info, WEXITED | WNOWAIT);
    // Scheduling of threads is not deterministic, so the next one ends only after this end was recorded.
    while (threads && order.size() < static_cast<std::size_t>(kCount - i)) take();
  }
  while (order.size() < kCount) take();
  EXPECT_EQ(order, (std::vector<int>{5, 4, 3, 2, 1, 0}));
  for (const pid_t pid : pids) waitpid(pid, nullptr, 0);
}

TEST(DeathWatch, TellsTheOrder) { order_of_death(false); }
TEST(DeathWatch, TellsTheOrderWithoutPidfds) { order_of_death(true); }

TEST(Machine, LibrariesAreFoundAsTheLoaderFindsThem) {
  // This test is linked with a run path to libtorch's folder.
  const auto torch = find_library(own_path(), "libtorch_cpu.so");
  EXPECT_TRUE(std::filesystem::is_regular_file(torch)) << torch;
  EXPECT_TRUE(find_library(own_path(), "libno-such-library.so").empty());
  EXPECT_TRUE(find_library("/no/such/program", "libc.so.6").empty());
  EXPECT_FALSE(find_library("/etc/passwd", "libc.so.6").empty()) << "no ELF file: the system's folders only";
  EXPECT_TRUE(in_path("no-such-program-here").empty());
  EXPECT_FALSE(in_path("sh").empty());
}

TEST(Machine, DirectIoLeavesNothingAndReportsFailures) {
  const DirectIo none = try_direct_io("/no/such/folder", 1 << 20);
  EXPECT_EQ(none.error, ENOENT);
  EXPECT_EQ(try_file_in("/no/such/folder"), ENOENT);
  EXPECT_EQ(space_of("/no/such/folder").error, ENOENT);
  EXPECT_GT(space_of("/").total_bytes, 0u);
}

TEST(Machine, MemoryOfThisHost) {
  const MemoryFacts m = memory_facts();
  const auto pages =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  EXPECT_NEAR(static_cast<double>(m.total_bytes), static_cast<double>(pages), 0.02 * static_cast<double>(pages));
  EXPECT_LE(m.available_bytes, m.total_bytes);
  EXPECT_GE(numa_nodes(), 1);
}

}  // namespace
}  // namespace zero::launch::launch_test
