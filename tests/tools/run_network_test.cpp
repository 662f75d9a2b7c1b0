// `zero run` and real training over two networks: network namespaces with a link between them represent two hosts.
// Requires root and the program `ip`; otherwise skipped. A separate process always removes the namespaces.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/hosts.h"
#include "support/packet_link.h"
#include "support/process.h"
#include "support/require.h"

namespace zero::test::run_network_test {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";
constexpr const char* kFirst = "10.213.77.1";
constexpr const char* kSecond = "10.213.77.2";

int shell(const std::string& command) {
  const int status = std::system((command + " >/dev/null 2>&1").c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
std::string output_of(const std::string& command) {
  std::string text;
  if (FILE* out = popen((command + " 2>&1").c_str(), "r")) {
    for (int c; (c = fgetc(out)) != EOF;) text += static_cast<char>(c);
    pclose(out);
  }
  return text;
}

// NodeTopology wa and wb, with loopback and one link.
class Network {
 public:
  enum class Link { Kernel, Packets };  // Packets: see packets()
  // Several may exist at once, each with its own names.
  explicit Network(Link kind = Link::Kernel) : number_(next_number()), prefix_("zt" + number_ + "-") {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    pipe_ = ends[1];
    cleaner_ = fork();
    if (cleaner_ == 0) {
      setsid();  // survives signals that end the test
      ::close(ends[1]);
      char byte;
      while (::read(ends[0], &byte, 1) > 0) {
      }
      for (const char* host : {"wa", "wb"}) {
        shell("ip netns pids " + prefix_ + host + " | xargs -r kill -9");
        shell("ip netns del " + prefix_ + host);
      }
      _exit(0);
    }
    ::close(ends[0]);
    std::string all = "set -e";
    for (const char* host : {"wa", "wb"})
      all += "\nip netns add " + prefix_ + host + "\nip -n " + prefix_ + host + " link set lo up";
    if (kind == Link::Packets) {
      if (shell(all) != 0) return;
      packets_ = std::make_unique<PacketLink>(prefix_ + "wa", prefix_ + "wb");
      if (!packets_->made()) return;
      all = "set -e";
    } else {
      const std::string link = "z" + number_;
      all += "\nip link add " + link + "a netns " + prefix_ + "wa type veth peer name " + link + "b netns " + prefix_ +
             "wb\nip -n " + prefix_ + "wa link set " + link + "a name link0\nip -n " + prefix_ + "wb link set " + link +
             "b name link0";
    }
    for (const auto& [host, address] : {std::pair("wa", kFirst), std::pair("wb", kSecond)}) {
      const std::string in = "\nip -n " + prefix_ + host;
      all += in + " addr add " + address + "/24 dev link0" + in + " link set link0 up";
    }
    made_ = shell(all) == 0;
  }
  ~Network() {
    packets_.reset();
    ::close(pipe_);
    waitpid(cleaner_, nullptr, 0);
  }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  bool made() const { return made_; }
  const std::string& prefix() const { return prefix_; }
  // Both directions of the link at this rate; false where this kernel has no such queue.
  bool limit_link(int mbit) const {
    for (const char* host : {"wa", "wb"})
      if (shell("ip netns exec " + prefix_ + host + " tc qdisc add dev link0 root tbf rate " + std::to_string(mbit) +
                "mbit burst 64kb latency 400ms") != 0)
        return false;
    return true;
  }
  // The link, if it is one whose packets can be lost and late.
  PacketLink& packets() const { return *packets_; }
  // What a host's end of the link has sent, headers included.
  std::uint64_t bytes_sent_by(const std::string& host) const {
    return std::stoull("0" +
                       output_of("ip netns exec " + prefix_ + host + " cat /sys/class/net/link0/statistics/tx_bytes"));
  }
  void take_link_down() { EXPECT_EQ(shell("ip -n " + prefix_ + "wb link set link0 down"), 0); }
  // Nothing runs there any more.
  bool empty(double seconds) const {
    for (int tries = 0; tries < static_cast<int>(seconds * 20) + 1; ++tries) {
      if (output_of("ip netns pids " + prefix_ + "wa; ip netns pids " + prefix_ + "wb").empty()) return true;
      usleep(50000);
    }
    return false;
  }

 private:
  static std::string next_number() {
    static int made = 0;
    return std::to_string(getpid()) + "x" + std::to_string(made++);
  }
  std::string number_, prefix_;
  int pipe_ = -1;
  pid_t cleaner_ = -1;
  bool made_ = false;
  std::unique_ptr<PacketLink> packets_;
};

// A small model; the arguments after `zero run`.
Words training(const std::string& folder, const Words& more) {
  std::ofstream out(folder + "/text.txt");
  for (unsigned i = 0, state = 7; i < 12000; ++i) {
    state = state * 1664525u + 1013904223u;
    out << (state >> 16) % 1000 << (i % 9 ? " " : "\n");
  }
  return Words{"zero",
               "train",
               ZERO_SOURCE_DIR "/configs/stage3-bf16.json",
               "--text",
               folder + "/text.txt",
               "--set",
               "libzero.model.layers=2",
               "--set",
               "libzero.model.hidden=48",
               "--set",
               "libzero.model.heads=3",
               "--set",
               "libzero.model.seq_length=32",
               "--set",
               "libzero.data.eval_batches=1"} +
         more;
}

// Step to "loss gradient norm", of the lines of rank 0.
std::map<int, std::string> losses(const std::string& out) {
  std::map<int, std::string> all;
  for (const std::string& line : lines(out)) {
    const json step = json::parse(line.substr(std::min(line.find('{'), line.size())), nullptr, false);
    if (step.is_object() && step.contains("loss") && step.contains("step"))
      all[step["step"]] = step["loss"].dump() + " " + step["grad_norm"].dump();
  }
  return all;
}

class RunNetwork : public ::testing::Test {
 protected:
  explicit RunNetwork(Network::Link link = Network::Link::Kernel) : network(link) {}
  void SetUp() override {
    static const std::string missing = [] {
      if (geteuid() != 0 || shell("ip -V") != 0) return "needs root and the program ip, for network namespaces";
      if (!Network().made()) return "this system does not let root make network namespaces with a link between them";
      return "";
    }();
    if (!missing.empty()) GTEST_SKIP() << missing;
    ASSERT_TRUE(network.made());
  }
  Words environment(const Words& more = {}) const {
    return Words{"FAKE_SSH_NETNS=" + network.prefix(), "OMP_NUM_THREADS=1",
                 "CUDA_VISIBLE_DEVICES=", "ZERO_TIMEOUT_S=60"} +
           more;
  }
  Network network;
  const std::string folder = temporary_folder();
  const std::string hosts = "wa slots=2\nwb slots=2\n";
  const Words meet{"--master_addr", kFirst};
};

TEST_F(RunNetwork, TwoNetworksAtOnce) {
  EXPECT_TRUE(Network().made());
  EXPECT_NE(output_of("ip netns list").find(network.prefix() + "wa"), std::string::npos)
      << "the first one is still there";
}

TEST_F(RunNetwork, TrainingOverTwoHostsHasTheNumbersOfOne) {
  HostsJob p(hosts, meet + training(folder, {"--json", "--steps", "12"}), environment());
  EXPECT_EQ(p.finish(200), 0) << p.err;
  const auto two_hosts = losses(p.out);
  EXPECT_EQ(two_hosts.size(), 12u) << p.out;
  EXPECT_TRUE(network.empty(20));

  Process::Settings settings;
  settings.arguments = Words{kZero, "run", "-n", "4"} + training(folder, {"--json", "--steps", "12"});
  settings.environment = {"OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="};
  Process one(settings);
  EXPECT_EQ(one.wait(200), 0) << one.err;
  EXPECT_EQ(losses(one.out), two_hosts);
}

// A slow link changes the time, not the results. The bytes on the link are those of the counters and little more: each
// shard is sent once per all-gather, not once for each rank of the other host.
TEST_F(RunNetwork, ASlowLinkChangesNoNumber) {
  if (!network.limit_link(50)) GTEST_SKIP() << "tc has no token bucket here";
  const auto run = [&](const Words& more, std::map<int, std::string>* found) {
    const auto before = network.bytes_sent_by("wa");
    HostsJob p(hosts, meet + training(folder, Words{"--json", "--steps", "12"} + more), environment());
    EXPECT_EQ(p.finish(200), 0) << p.err;
    *found = losses(p.out);
    EXPECT_EQ(found->size(), 12u) << p.out;
    return network.bytes_sent_by("wa") - before;
  };
  std::map<int, std::string> by_host, flat, second;
  const auto over_both = run({}, &by_host);
  HostsJob p(hosts, meet + training(folder, {"--json", "--steps", "12"}), environment({"ZERO_TRANSPORT=gloo"}));
  const auto before = network.bytes_sent_by("wa");
  EXPECT_EQ(p.finish(200), 0) << p.err;
  const auto over_tcp = network.bytes_sent_by("wa") - before;
  flat = losses(p.out);
  EXPECT_EQ(by_host, flat);
  // Two gathers and a reduction: 2/4 + 1/2 of the model a rank against 2/2 + 1/2.
  EXPECT_LT(static_cast<double>(over_both), 0.85 * static_cast<double>(over_tcp));
  const auto with_second = run({"--set", "zero_optimization.zero_hpz_partition_size=2"}, &second);
  EXPECT_EQ(second, flat);
  EXPECT_LT(static_cast<double>(with_second), 0.9 * static_cast<double>(over_both));
}

TEST_F(RunNetwork, ByHandOnEachHost) {
  const auto start = [&](const std::string& host, const std::string& number) {
    Process::Settings settings;
    settings.arguments =
        Words{"/usr/bin/env",          "ip", "netns", "exec", network.prefix() + host, kZero, "run", "--nnodes=2",
              "--node_rank=" + number, "-n2"} +
        meet + training(folder, {"--json", "--steps", "6"});
    settings.environment = environment({"ZERO_TOKEN=between us", "CUDA_VISIBLE_DEVICES="});
    return settings;
  };
  Process first(start("wa", "0")), second(start("wb", "1"));
  EXPECT_EQ(second.wait(200), 0) << second.err;
  EXPECT_EQ(first.wait(200), 0) << first.err;
  EXPECT_EQ(losses(first.out).size(), 6u) << first.out;
  EXPECT_TRUE(network.empty(20));
}

TEST_F(RunNetwork, AKilledRankIsNamedAndBothHostsAreEmpty) {
  HostsJob p(hosts, meet + training(folder, {"--steps", "1000000"}), environment());
  ASSERT_TRUE(p.wait_for("step 5/", 150)) << p.err;
  const pid_t victim = p.process_of(3);
  ASSERT_GT(victim, 0);
  EXPECT_NE(output_of("ip netns pids " + network.prefix() + "wb").find(std::to_string(victim)), std::string::npos);
  kill(victim, SIGKILL);
  EXPECT_EQ(p.finish(60), 6) << p.err;
  EXPECT_TRUE(
      p.says("root cause   rank 3 of 4, host wb, pid " + std::to_string(victim) + ": killed by signal 9 (SIGKILL)"))
      << p.err;
  EXPECT_TRUE(p.says("\n  where        step ")) << p.err;
  EXPECT_TRUE(p.says("collateral   rank")) << p.err;
  EXPECT_TRUE(network.empty(20));
}

TEST_F(RunNetwork, ALinkThatGoesDownIsAnErrorInTime) {
  HostsJob p(hosts, meet + training(folder, {"--steps", "1000000"}), environment({"ZERO_TIMEOUT_S=8"}));
  ASSERT_TRUE(p.wait_for("step 5/", 150)) << p.err;
  network.take_link_down();
  // 8 s for the collective, 20 s for a connection without replies; then the grace period.
  EXPECT_EQ(p.finish(60), 6) << p.err;
  EXPECT_TRUE(p.says("zero run: FAILED (exit 6)")) << p.err;
  EXPECT_TRUE(p.says("\n  error        ")) << p.err;
  EXPECT_TRUE(p.says("got no sign of life of rank ") && p.says("or its host is cut off")) << p.err;
  EXPECT_FALSE(p.says("out of memory")) << p.err;
  EXPECT_TRUE(network.empty(20));
}

// Where a collective may take longer, connections without replies tell.
TEST_F(RunNetwork, ALinkThatGoesDownIsNotTakenForADeath) {
  HostsJob p(hosts, meet + training(folder, {"--steps", "1000000"}), environment({"ZERO_TIMEOUT_S=120"}));
  ASSERT_TRUE(p.wait_for("step 5/", 150)) << p.err;
  network.take_link_down();
  EXPECT_EQ(p.finish(90), 6) << p.err;
  const auto error = p.err.substr(std::min(p.err.find("\n  error        "), p.err.size()));
  std::printf("%s\n", error.c_str());
  EXPECT_TRUE(contains(error, "got no answer from rank ") && contains(error, "'s host for 20 s (")) << p.err;
  EXPECT_TRUE(contains(error, "the network to it is cut; the rank itself may be alive")) << p.err;
  EXPECT_FALSE(p.says("out of memory")) << p.err;
  EXPECT_TRUE(network.empty(20));
}

TEST_F(RunNetwork, HostsThatCannotReachEachOther) {
  network.take_link_down();
  HostsJob p(hosts, meet + training(folder, {"--steps", "5"}), environment({"ZERO_TIMEOUT_S=3"}));
  EXPECT_EQ(p.finish(100), 6) << p.err;
  EXPECT_TRUE(p.says(kFirst)) << "the address that nobody answers at: " << p.err;
  EXPECT_TRUE(network.empty(20));
}

// --- a link that loses packets, or is late -----------------------------------------------------------

class RunPoorNetwork : public RunNetwork {
 protected:
  RunPoorNetwork() : RunNetwork(Network::Link::Packets) {}
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root and the program ip, for network namespaces";
    if (!network.made()) GTEST_SKIP() << "this system does not let root make network namespaces with TUN devices";
  }
};

// Packets that arrive 2 s late each way: a collective takes longer than its limit, and says so.
TEST_F(RunPoorNetwork, TwoSecondsOfDelayAreAnErrorInTime) {
  HostsJob p(hosts, meet + training(folder, {"--steps", "1000000"}), environment({"ZERO_TIMEOUT_S=3"}));
  ASSERT_TRUE(p.wait_for("step 5/", 150)) << p.err;
  network.packets().delay(2000);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(p.finish(60), 6) << p.err;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("2 s of delay, a limit of 3 s: ended after %.1f s\n", took.count());
  EXPECT_LT(took.count(), 20);
  EXPECT_TRUE(p.says("zero run: FAILED (exit 6)")) << p.err;
  EXPECT_TRUE(network.empty(20));
}

// Packets that are late, but within the limit: a slower run with the same numbers.
TEST_F(RunPoorNetwork, DelayAndLossWithinTheLimitChangeNoNumber) {
  std::map<int, std::string> expected, found;
  for (const bool poor : {false, true}) {
    network.packets().delay(poor ? 20 : 0);
    network.packets().lose(poor ? 3 : 0);
    HostsJob p(hosts, meet + training(folder, {"--json", "--steps", "6"}), environment());
    EXPECT_EQ(p.finish(200), 0) << p.err;
    (poor ? found : expected) = losses(p.out);
  }
  EXPECT_EQ(expected.size(), 6u);
  EXPECT_EQ(found, expected);
  EXPECT_GT(network.packets().lost(), 10);
}

// 30 % of packets lost: TCP sends them again with growing pauses. Either the steps continue with the right numbers, or
// the run ends in time with exit code 6; it never hangs.
TEST_F(RunPoorNetwork, AThirdOfThePacketsLostIsNoHang) {
  std::map<int, std::string> expected;
  {
    HostsJob p(hosts, meet + training(folder, {"--json", "--steps", "200"}), environment());
    ASSERT_EQ(p.finish(200), 0) << p.err;
    expected = losses(p.out);
  }
  HostsJob p(hosts, meet + training(folder, {"--json", "--steps", "200"}), environment({"ZERO_TIMEOUT_S=3"}));
  ASSERT_TRUE(p.wait_for("\"step\": 5,", 150)) << p.err;
  network.packets().lose(30);
  const auto began = std::chrono::steady_clock::now();
  // After some more steps, a link that is dead is an error in time.
  p.wait_for("zero run: FAILED", 20);
  network.packets().lose(100);
  const auto dead = std::chrono::steady_clock::now();
  EXPECT_EQ(p.finish(60), 6) << p.err;
  const auto since = [](auto begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto found = losses(p.out);
  std::printf("30 %% loss, a limit of 3 s: %zu steps, ended after %.1f s\n", found.size(), since(began));
  EXPECT_LT(since(dead), 20);
  for (const auto& [step, numbers] : found) EXPECT_EQ(numbers, expected[step]) << step;
  EXPECT_TRUE(network.empty(20));
}

}  // namespace
}  // namespace zero::test::run_network_test
