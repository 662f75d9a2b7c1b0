// Rendezvous when the system has no free sockets, and ranks of several hosts without a secret.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include <zero/log.h>

#include "comm/group.h"
#include "net/socket.h"
#include "support/folder.h"
#include "support/shm_ranks.h"

namespace zero::test::network_test {
namespace {

using namespace std::chrono_literals;

double cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Rank 0 has no descriptor for rank 1's connection for two seconds: it waits, and does not burn a processor.
void meet_out_of_descriptors(const std::function<Comm(int rank)>& meet) {
  const auto ends = fork_ranks(2, [&](int rank) {
    at::set_num_threads(1);
    double burnt = -1;
    std::thread other;
    if (rank == 1) std::this_thread::sleep_for(700ms);
    if (rank == 0) {
      other = std::thread([&] {
        std::this_thread::sleep_for(400ms);
        rlimit before{}, none{};
        ::getrlimit(RLIMIT_NOFILE, &before);
        const int next = ::fcntl(0, F_DUPFD, 0);
        ::close(next);
        none = {static_cast<rlim_t>(next), before.rlim_max};
        ::setrlimit(RLIMIT_NOFILE, &none);
        std::this_thread::sleep_for(500ms);
        const double begin = cpu_seconds();
        std::this_thread::sleep_for(1500ms);
        burnt = cpu_seconds() - begin;
        ::setrlimit(RLIMIT_NOFILE, &before);
      });
    }
    Comm comm;
    std::string error;
    try {
      comm = meet(rank);
    } catch (const std::exception& e) {
      error = e.what();
    }
    if (other.joinable()) other.join();
    require(error.empty(), error);
    comm->barrier();
    require(burnt < 0.3, "rank 0 burnt " + std::to_string(burnt) + " s of 1.5");
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Descriptors, MissingAtAMeetingOverTcpAreWaitedFor) {
  const auto run_id = fresh_run_id();
  meet_out_of_descriptors(
      [&](int rank) { return comm::make_communicator(comm::make_gloo(identity_of(run_id, rank, 2), 20s)); });
}

TEST(Descriptors, MissingAtAMeetingOverSharedMemoryAreWaitedFor) {
  const auto run_id = fresh_run_id();
  meet_out_of_descriptors([&](int rank) { return join_run(run_id, rank, 2, 20s); });
}

// Ranks of two simulated hosts; returns the log of rank 0.
std::string notices(const char* name, const std::string& value) {
  net::MeetingPoint point{"", "127.0.0.1", 0};
  net::listen_at(point);
  const auto ends = fork_ranks(2, [&](int rank) {
    at::set_num_threads(1);
    std::string log;
    set_log_sink([&](LogLevel, std::string_view text) { log += std::string(text) + "\n"; });
    const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
    set("RANK", std::to_string(rank));
    set("WORLD_SIZE", "2");
    set("LOCAL_RANK", "0");
    set("LOCAL_WORLD_SIZE", "1");
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(point.port));
    set("ZERO_TRANSPORT", "gloo");
    set("ZERO_TIMEOUT_S", "30");
    if (name != nullptr) set(name, value);
    Communicator::from_env()->barrier();
    throw std::runtime_error(log);
  });
  return ends[0].error;
}

TEST(Exposure, RanksOfSeveralHostsNeedASecretOrTheWordNone) {
  ::unsetenv("ZERO_TOKEN");
  ::unsetenv("ZERO_TOKEN_FILE");
  const TempFolder folder;
  const auto file = folder.file("token");
  std::ofstream(file) << "a secret\n";
  ::chmod(file.c_str(), 0600);
  const auto refused = notices(nullptr, ""), open = notices("ZERO_TOKEN", "none");
  EXPECT_TRUE(contains(refused, "got no ZERO_TOKEN for 2 ranks on several hosts")) << refused;
  EXPECT_TRUE(contains(open, "transport gloo") && contains(open, "ZERO_TOKEN=none: ")) << open;
  for (const auto& closed : {notices("ZERO_TOKEN", "a secret"), notices("ZERO_TOKEN_FILE", file)})
    EXPECT_TRUE(contains(closed, "transport gloo") && !contains(closed, "ZERO_TOKEN")) << closed;
}

}  // namespace
}  // namespace zero::test::network_test
