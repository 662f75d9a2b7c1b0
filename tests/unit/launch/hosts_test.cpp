// The multi-host parts of `zero run` that can be tested on one host: hostfiles, command lines for remote hosts, and
// frames between launcher and agent.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tools/launch/remote/hostfile.h"
#include "tools/launch/remote/protocol.h"
#include "tools/launch/remote/remote_shell.h"

namespace zero::launch::hosts_test {
namespace {

using Words = std::vector<std::string>;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

struct Slots {
  std::string host;
  std::size_t count;
};
void expect_hosts(const std::string& text, const std::vector<Slots>& expected) {
  std::vector<Host> hosts;
  const std::string error = error_of([&] { hosts = parse_hostfile(text, "hosts"); });
  EXPECT_EQ(error, "") << text;
  ASSERT_EQ(hosts.size(), expected.size()) << text;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    EXPECT_EQ(hosts[i].name, expected[i].host) << text;
    ASSERT_EQ(hosts[i].slots.size(), expected[i].count) << text;
    for (std::size_t s = 0; s < hosts[i].slots.size(); ++s) EXPECT_EQ(hosts[i].slots[s], static_cast<int>(s));
  }
}

TEST(Hostfiles, GoodOnes) {
  expect_hosts("w0 slots=1", {{"w0", 1}});
  expect_hosts("w0 slots=1\n", {{"w0", 1}});
  expect_hosts("w0 slots=1\r\nw1 slots=2\r\n", {{"w0", 1}, {"w1", 2}});
  expect_hosts("\n\n\nw0 slots=1\n\n\n", {{"w0", 1}});
  expect_hosts("  \t\n# a\n\t# b\nw0 slots=1", {{"w0", 1}});
  expect_hosts("w0 \t slots=8 \t ", {{"w0", 8}});
  expect_hosts("w0 slots=8#note", {{"w0", 8}});
  expect_hosts("w0 slots=8 # slots=9", {{"w0", 8}});
  expect_hosts("w0 slots=008", {{"w0", 8}});
  expect_hosts("10.0.0.1 slots=4\n10.0.0.2 slots=4", {{"10.0.0.1", 4}, {"10.0.0.2", 4}});
  expect_hosts("node-1.cluster.example.org slots=1024", {{"node-1.cluster.example.org", 1024}});
  expect_hosts("_gpu slots=2\nW0 slots=1\nw0 slots=1", {{"_gpu", 2}, {"W0", 1}, {"w0", 1}});
  expect_hosts("z slots=1\na slots=1\nm slots=1", {{"z", 1}, {"a", 1}, {"m", 1}});  // the file's order
  expect_hosts("w0- slots=1\nw0. slots=1", {{"w0-", 1}, {"w0.", 1}});
}

TEST(Hostfiles, BadOnesWithTheirPlace) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"w0:4", "hosts:1:3: error: got \":4\", expected a blank and slots=N"},
      {"w0 slots:4", "hosts:1:4: error: got \"slots:4\""},
      {"w0 slots =4", "hosts:1:4: "},
      {"w0 slots= 4", "hosts:1:10: "},
      {"w0 slots=4.0", "hosts:1:11: "},
      {"w0 slots=+4", "hosts:1:10: "},
      {"w0 slots=0x4", "hosts:1:10: "},  // 0 is no number of slots
      {"w0 slots=1x4", "hosts:1:11: "},
      {"w0 slots=four", "hosts:1:10: "},
      {"w0 Slots=4", "hosts:1:4: "},
      {"w0 slots=4 max_slots=8", "hosts:1:11: "},
      {"w0 slots=4 ; w1 slots=4", "hosts:1:11: "},
      {"w0, slots=4", "hosts:1:3: "},
      {"user@ slots=4", "hosts:1:6: "},
      {"@w0 slots=4", "hosts:1:1: "},
      {"user@-w0 slots=4", "hosts:1:6: "},
      {"-user@w0 slots=4", "hosts:1:1: "},
      {"a@b@w0 slots=4", "hosts:1:4: "},
      {"ann@w0 slots=1\nbob@w0 slots=1", "hosts:2:1: error: got host \"w0\" again"},
      {"w0/a slots=4", "hosts:1:3: "},
      {"[::1] slots=4", "hosts:1:1: "},
      {"fe80::1 slots=4", "hosts:1:5: "},
      {"--help slots=4", "hosts:1:1: "},
      {"\tw0 slots=4", "hosts:1:1: "},
      {"w\xc3\xa9 slots=4", "hosts:1:2: "},
      {"w0 slots=1\nw1", "hosts:2:3: "},
      {"# c\n\nw0 slots=1\nw1 slots=1025", "hosts:4:10: "},
      {"w0 slots=1\nw0 slots=1", "hosts:2:1: error: got host \"w0\" again, expected each host once (first in line 1)"},
      {"w0 slots=1\r\n\r\nw0 slots=2", "hosts:3:1: "},
      {"w0 slots=1\rw1 slots=1", "hosts:1:11: "},
      {"\n\n\n", "hosts:3:1: error: got no host"},
      {"\xef\xbb\xbfw0 slots=1", "hosts:1:1: "},  // a mark of byte order
  };
  for (const auto& [text, start] : cases) {
    const std::string error = error_of([&, &text = text] { parse_hostfile(text, "hosts"); });
    EXPECT_EQ(error.find(start), 0u) << text << " -> " << error;
    EXPECT_NE(error.find("Hint: a line reads"), std::string::npos) << error;
  }
}

TEST(Hostfiles, AUserToLogInWith) {
  const auto hosts = parse_hostfile("ann.b@w0 slots=2\nw1 slots=1", "hosts");
  ASSERT_EQ(hosts.size(), 2u);
  EXPECT_EQ(hosts[0].user + " of " + hosts[0].name, "ann.b of w0");
  EXPECT_EQ(hosts[1].user, "");
  for (const auto& kept : {include_hosts(hosts, "w0:1"), exclude_hosts(hosts, "w0:0@w1")}) {
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].user + " of " + kept[0].name, "ann.b of w0");
    EXPECT_EQ(kept[0].slots, std::vector<int>{1});
  }
}

TEST(Hostfiles, AFileThatCannotBeReadIsAnError) {
  for (const std::string path : {"/no/such/file", "/tmp"}) {
    const std::string error = error_of([&] { read_hostfile(path); });
    EXPECT_EQ(error.find("[--hostfile] got "), 0u) << error;
    EXPECT_NE(error.find(path), std::string::npos) << error;
  }
}

TEST(Hostfiles, NamesThatOthersCannotReach) {
  for (const char* name : {"localhost", "127.0.0.1", "127.0.1.1", "::1"})
    EXPECT_TRUE(is_loopback(name) && is_this_host(name)) << name;
  for (const char* name : {"w0", "10.0.0.1", "localhost2", "1270.0.0.1"}) EXPECT_FALSE(is_loopback(name)) << name;
}

// What a shell makes of it is what went in.
TEST(RemoteShell, WordsSurviveAShell) {
  EXPECT_EQ(shell_word("/usr/bin/zero"), "/usr/bin/zero");
  EXPECT_EQ(shell_word(""), "''");
  for (const std::string text : {"a b", "$HOME", "`id`", "it's", "a\\b", "a\"b", "!x!", "*", "~", "#c", "a;b|c&d>e",
                                 "=ls", "-n", "\t", "\xc3\xa9"}) {
    const std::string command = "printf %s " + shell_word(text);
    const std::unique_ptr<FILE, int (*)(FILE*)> out(popen(command.c_str(), "r"), pclose);
    std::array<char, 256> bytes{};
    const std::size_t n = fread(bytes.data(), 1, bytes.size(), out.get());
    EXPECT_EQ(std::string(bytes.data(), n), text) << command;
  }
  EXPECT_NE(error_of([] { shell_word("a\nb"); }), "");
  EXPECT_NE(error_of([] { shell_word(std::string("a\0b", 3)); }), "");
}

TEST(RemoteShell, ArgumentsAreSplitAsByAShell) {
  EXPECT_EQ(split_words("", "--x"), Words{});
  EXPECT_EQ(split_words("  -o  A=b\t-v ", "--x"), (Words{"-o", "A=b", "-v"}));
  EXPECT_EQ(split_words("-o 'Proxy Command' \"a b\"c '' d\\ e", "--x"),
            (Words{"-o", "Proxy Command", "a bc", "", "d e"}));
  EXPECT_EQ(split_words("'a\\b' \"c\\\"d\" \"e\\f\" $HOME", "--x"), (Words{"a\\b", "c\"d", "e\\f", "$HOME"}));
  EXPECT_EQ(error_of([] { split_words("-a 'b", "--x"); }), "[--x:1:4] got a ' without its end, expected both quotes");
}

TEST(RemoteShell, HostAndProgramOfEachLauncher) {
  const Words agent{"/opt/my tools/zero", "run", "--agent"};
  const auto tail = [](const Words& words, std::size_t n) {
    return Words(words.end() - static_cast<std::ptrdiff_t>(n), words.end());
  };
  const Words ssh = remote_shell_words({"ssh", 2222, {"-i", "key file"}}, "w1", "", agent);
  EXPECT_EQ(ssh[0], "ssh");
  EXPECT_EQ(tail(ssh, 7), (Words{"-p", "2222", "-i", "key file", "--", "w1", "'/opt/my tools/zero' run --agent"}));
  EXPECT_EQ(std::count(ssh.begin(), ssh.end(), "BatchMode=yes"), 1);
  const Words plain = remote_shell_words({}, "w1", "", agent);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), "-p"), 0) << "ssh's own configuration may name a port";
  const Words user = remote_shell_words({}, "w1", "ann", agent);
  EXPECT_EQ(std::vector<std::string>(user.end() - 5, user.end() - 1), (Words{"-l", "ann", "--", "w1"}));
  const Words srun = remote_shell_words({"srun", 0, {"--mem=0"}}, "w1", "", agent);
  EXPECT_EQ(srun[0], "srun");
  EXPECT_EQ(tail(srun, 5), (Words{"--mem=0", "--nodelist=w1", agent[0], agent[1], agent[2]}));
  const Words mpirun = remote_shell_words({"mpirun", 0, {}}, "w1", "", agent);
  EXPECT_EQ(mpirun[0], "mpirun");
  EXPECT_EQ(tail(mpirun, 5), (Words{"-host", "w1", agent[0], agent[1], agent[2]}));
}

HostPlan sample_plan() {
  HostPlan p;
  p.name = "w1";
  p.run_id = "20260103-141502-7f3a";
  p.attempt = 2;
  p.previous_world = 11;
  p.first_rank = 4;
  p.ranks = 3;
  p.world = 9;
  p.group = 1;
  p.groups = 3;
  p.program = {"./a b", "", "--x=\n\t\"'", std::string("z\0z", 3)};
  p.folder = "/home/someone/with space";
  p.slots = {0, 2, 5};
  p.bind_cores = true;
  p.core_list = "0,2-5";
  p.master_address = "w0";
  p.master_port = 29500;
  p.log_folder = "/logs/x";
  p.environment = {{"A", "1"}, {"EMPTY", ""}, {"LINES", "a\nb"}};
  p.token = "secret";
  p.pass_local_rank = true;
  return p;
}

observe::StatusSnapshot sample_page() {
  observe::StatusSnapshot s;
  s.pid = 4711;
  s.changes = 1ull << 40;
  s.step = -1;
  s.commits = 3;
  s.micro_batch = 2;
  s.phase = observe::StatusPhase::Backward;
  s.unit = "layers.7";
  s.error = "[x] got y";
  s.error_code = 7;
  s.save = "global_step200";
  s.save_written = 3ull << 32;
  s.save_bytes = 5ull << 32;
  s.world_rule = {.batch_parts = 8, .data_parallel = 4, .copy = 6, .tensor = 3, .experts = 2};
  s.collectives.push_back(
      {8812, 1048576, observe::CollectiveState::Inside, "reduce_scatter", "bf16", "layers.7", "a.cpp:1"});
  return s;
}

TEST(Wire, PlansAndPagesComeBackAsTheyWere) {
  const HostPlan p = sample_plan();
  const std::string bytes = pack_plan(p);
  Unpacker in(bytes);
  const HostPlan q = unpack_plan(in);
  EXPECT_EQ(pack_plan(q), bytes);
  EXPECT_EQ(q.program, p.program);
  EXPECT_EQ(q.environment, p.environment);
  EXPECT_EQ(q.slots, p.slots);
  EXPECT_EQ(std::tie(q.first_rank, q.ranks, q.world, q.group, q.groups, q.attempt, q.previous_world),
            std::tie(p.first_rank, p.ranks, p.world, p.group, p.groups, p.attempt, p.previous_world));
  EXPECT_EQ(std::tie(q.folder, q.token, q.master_address, q.log_folder),
            std::tie(p.folder, p.token, p.master_address, p.log_folder));
  EXPECT_TRUE(q.bind_cores && q.pass_local_rank);

  Packer out;
  pack_page(out, sample_page());
  Unpacker page_in(out.bytes());
  const observe::StatusSnapshot s = unpack_page(page_in);
  EXPECT_EQ(s.pid, 4711);
  EXPECT_EQ(s.changes, 1ull << 40);
  EXPECT_EQ(s.save, "global_step200");
  EXPECT_EQ(s.save_written, 3ull << 32);
  EXPECT_EQ(s.save_bytes, 5ull << 32);
  EXPECT_EQ(s.step, -1);
  EXPECT_EQ(s.phase, observe::StatusPhase::Backward);
  EXPECT_EQ(s.unit, "layers.7");
  EXPECT_EQ(s.error_code, 7);
  EXPECT_EQ(s.world_rule, sample_page().world_rule);
  ASSERT_EQ(s.collectives.size(), 1u);
  EXPECT_EQ(s.collectives[0].sequence, 8812u);
  EXPECT_EQ(s.collectives[0].state, observe::CollectiveState::Inside);
  EXPECT_EQ(s.collectives[0].site, "a.cpp:1");
  Packer real;
  real.real(0.25).number(-7).numbers({});
  Unpacker real_in(real.bytes());
  EXPECT_EQ(real_in.real(), 0.25);
  EXPECT_EQ(real_in.number(), -7);
  EXPECT_TRUE(real_in.numbers().empty());
}

TEST(Wire, FramesWhateverTheReads) {
  std::string stream;
  for (int i = 0; i < 200; ++i)
    stream += frame_bytes(FrameKind::Line, std::string(static_cast<std::size_t>(i * i), static_cast<char>(i)));
  std::mt19937 random(5);
  FrameReader reader;
  int seen = 0;
  for (std::size_t at = 0; at < stream.size();) {
    const std::size_t n = std::min<std::size_t>(stream.size() - at, random() % 3 == 0 ? 1 : random() % 70000);
    reader.feed(std::string_view(stream).substr(at, n));
    at += n;
    for (Frame frame; reader.next(frame); ++seen) {
      EXPECT_EQ(frame.kind, FrameKind::Line);
      EXPECT_EQ(frame.payload, std::string(static_cast<std::size_t>(seen * seen), static_cast<char>(seen)));
    }
  }
  EXPECT_EQ(seen, 200);
  EXPECT_EQ(reader.waiting(), 0u);
}

TEST(Wire, AnyBytesAreAnErrorAndNoMore) {
  FrameReader reader;
  reader.feed("Welcome to the cluster!\n");
  Frame frame;
  EXPECT_NE(error_of([&] { reader.next(frame); }).find("something else than zero writes to the connection"),
            std::string::npos);

  Packer page;
  pack_page(page, sample_page());
  std::mt19937 random(20260103);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = i % 2 ? pack_plan(sample_plan()) : page.bytes();
    bytes.resize(random() % (bytes.size() + 1));
    for (unsigned changes = random() % 4; changes-- > 0 && !bytes.empty();)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    Unpacker in(bytes);
    const std::string error = error_of([&] {
      if (i % 2)
        unpack_plan(in);
      else
        unpack_page(in);
    });
    refused += !error.empty();
  }
  EXPECT_GT(refused, 10000);
}

}  // namespace
}  // namespace zero::launch::hosts_test
