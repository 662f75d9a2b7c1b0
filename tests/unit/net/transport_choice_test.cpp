// Selection of transport and timeout from variables, hosts and GPUs.
#include <gtest/gtest.h>

#include <map>

#include <zero/errors.h>

#include "net/transport_choice.h"

namespace zero::comm::transport_choice_test {
namespace {

net::Environment variables(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) -> std::optional<std::string> {
    const auto it = values.find(name);
    if (it == values.end()) return std::nullopt;
    return it->second;
  };
}
net::Environment asking(const std::string& transport) { return variables({{"ZERO_TRANSPORT", transport}}); }

net::ProcessInfo ranks(int size, int local_size) {
  net::ProcessInfo identity;
  identity.rank = size - 1;
  identity.size = size;
  identity.local_size = local_size;
  identity.local_rank = local_size - 1;
  return identity;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "no error";
}

std::string chosen(const net::ProcessInfo& identity, const net::Environment& environment, int gpus) {
  return net::choose_transport(identity, environment, [gpus] { return gpus; }).name;
}

TEST(TransportChoice, ByItself) {
  for (const auto& environment : {variables({}), asking("auto")}) {
    EXPECT_EQ(chosen(ranks(1, 1), environment, 8), "local");
    EXPECT_EQ(chosen(ranks(4, 4), environment, 0), "shm");
    EXPECT_EQ(chosen(ranks(4, 4), environment, 3), "shm");
    EXPECT_EQ(chosen(ranks(4, 4), environment, 4), "nccl");
    EXPECT_EQ(chosen(ranks(8, 4), environment, 0), "shm+gloo");
    EXPECT_EQ(chosen(ranks(8, 4), environment, 4), "nccl");
    EXPECT_FALSE(net::choose_transport(ranks(4, 4), environment, [] { return 4; }).asked);
  }
}

TEST(TransportChoice, Asked) {
  const auto no_gpus = []() -> int { throw std::logic_error("GPUs were counted"); };
  for (const char* name : {"shm", "gloo", "nccl"}) {
    const auto choice = net::choose_transport(ranks(2, 2), asking(name), no_gpus);
    EXPECT_EQ(choice.name, name);
    EXPECT_TRUE(choice.asked);
    EXPECT_EQ(net::choose_transport(ranks(1, 1), asking(name), no_gpus).name, "local");
  }
  EXPECT_EQ(net::choose_transport(ranks(4, 2), asking("gloo"), no_gpus).name, "gloo");
}

// Ranks share GPUs only if asked to; NCCL cannot.
TEST(TransportChoice, SharingAGpu) {
  const auto share = [](const std::string& value) { return variables({{"ZERO_SHARE_GPU", value}}); };
  const auto of = [](const net::ProcessInfo& identity, const net::Environment& environment, int gpus) {
    return net::choose_transport(identity, environment, [gpus] { return gpus; });
  };
  EXPECT_FALSE(of(ranks(4, 4), share("0"), 4).staged);
  for (const int gpus : {0, 1, 4}) {
    EXPECT_TRUE(of(ranks(4, 4), share("1"), gpus).staged);
    EXPECT_EQ(of(ranks(4, 4), share("1"), gpus).name, "shm");
    EXPECT_EQ(of(ranks(8, 4), share("1"), gpus).name, "shm+gloo");
  }
  EXPECT_FALSE(of(ranks(1, 1), share("1"), 1).staged) << "one rank has its GPU alone";
  const auto gloo = of(ranks(2, 2), variables({{"ZERO_SHARE_GPU", "1"}, {"ZERO_TRANSPORT", "gloo"}}), 1);
  EXPECT_TRUE(gloo.staged);
  EXPECT_EQ(gloo.name, "gloo");
  const auto nccl = variables({{"ZERO_SHARE_GPU", "1"}, {"ZERO_TRANSPORT", "nccl"}});
  EXPECT_NE(error_of([&] { of(ranks(2, 2), nccl, 1); }).find("ZERO_SHARE_GPU=1 and ZERO_TRANSPORT=nccl"),
            std::string::npos);
  EXPECT_NE(error_of([&] { of(ranks(2, 2), share("yes"), 1); }).find("ZERO_SHARE_GPU='yes', expected 0 or 1"),
            std::string::npos);
}

TEST(TransportChoice, UnknownNamesAndTheNearest) {
  for (const int size : {1, 2}) {
    const auto text = error_of([&] { chosen(ranks(size, size), asking("glo"), 0); });
    EXPECT_NE(text.find("ZERO_TRANSPORT='glo', expected auto, nccl, gloo, shm or shm+gloo"), std::string::npos) << text;
    EXPECT_NE(text.find("did you mean 'gloo'?"), std::string::npos) << text;
  }
  const auto text = error_of([&] { chosen(ranks(2, 2), asking("infiniband"), 0); });
  EXPECT_NE(text.find("infiniband"), std::string::npos) << text;
  EXPECT_EQ(text.find("did you mean"), std::string::npos) << text;
}

TEST(TransportChoice, SharedMemoryDoesNotReachAcrossHosts) {
  const auto text = error_of([&] { chosen(ranks(8, 4), asking("shm"), 0); });
  EXPECT_NE(text.find("8 ranks of which 4 are on this host"), std::string::npos) << text;
  EXPECT_NE(text.find("(rank 7/8)"), std::string::npos) << text;
}

TEST(TransportChoice, Timeout) {
  using Milliseconds = std::chrono::milliseconds;
  const auto timeout = [](const std::string& text) {
    return net::choose_timeout(variables({{"ZERO_TIMEOUT_S", text}}));
  };
  EXPECT_EQ(net::choose_timeout(variables({})), std::chrono::minutes(30));
  EXPECT_EQ(timeout("60"), Milliseconds(60000));
  EXPECT_EQ(timeout("0.25"), Milliseconds(250));
  EXPECT_EQ(timeout("1e3"), Milliseconds(1000000));
  for (const char* bad : {"0", "-1", "ten", "10s", "nan", "inf", "1e300", "0.0001", " "}) {
    const auto text = error_of([&] { timeout(bad); });
    EXPECT_NE(text.find(std::string("ZERO_TIMEOUT_S='") + bad + "'"), std::string::npos) << text;
  }
}

TEST(TransportChoice, CountingGpusNeedsNoDriver) { EXPECT_GE(net::visible_gpus(), 0); }

}  // namespace
}  // namespace zero::comm::transport_choice_test
