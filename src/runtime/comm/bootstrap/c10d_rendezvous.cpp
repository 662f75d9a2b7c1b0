// Selects the address and implements the store; see c10d_rendezvous.h.
#include "comm/bootstrap/c10d_rendezvous.h"

#include <cstdlib>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/check.h"

namespace zero::comm {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Distinguishes this run and attempt from concurrent ones in the agent's store.
std::string run_key(const net::ProcessInfo& identity) {
  return base::join(identity.run_id, "|", identity.master_addr, "|", identity.master_port, "|", identity.attempt);
}

// The agent's store, or null if no process listens yet. Connecting directly first avoids c10d's own attempts, which
// write to stderr.
c10::intrusive_ptr<c10d::Store> agent_store(const net::ProcessInfo& identity, net::Dialer& dialer,
                                            std::chrono::milliseconds timeout) {
  if (!dialer.dial({"", identity.master_addr, identity.master_port})) return nullptr;
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(identity.master_port);
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = timeout;
  return c10::make_intrusive<c10d::PrefixStore>("zero/" + run_key(identity),
                                                c10::make_intrusive<c10d::TCPStore>(identity.master_addr, options));
}

constexpr const char* kPlaceKey = "place";

std::unique_ptr<FailureDetector> meet_by_agent(const net::ProcessInfo& identity, std::chrono::milliseconds timeout) {
  const auto deadline = net::Clock::now() + timeout;
  c10::intrusive_ptr<c10d::Store> store;
  net::Dialer dialer;
  try {
    while (!(store = agent_store(identity, dialer, timeout)) && net::Clock::now() < deadline) {
      std::this_thread::sleep_for(dialer.pause());
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError(base::join("[comm::rendezvous] got '", first_line(error), "', expected the agent's store at ",
                               identity.master_addr, ":", identity.master_port,
                               ". Hint: look at the launcher's output."));
  }
  if (!store) {
    throw CommError(base::join("[comm::rendezvous] got no answer at ", identity.master_addr, ":", identity.master_port,
                               ", expected the agent's store. Hint: look at the launcher's output."));
  }
  if (identity.rank == 0) {
    net::MeetingPoint point{"", identity.master_addr, 0};
    auto listener = net::listen_at(point);
    try {
      store->set(kPlaceKey, std::to_string(point.port));
    } catch (const std::exception& error) {
      throw CommError(
          base::join("[comm::rendezvous] got '", first_line(error), "', expected the agent's store to answer."));
    }
    return std::make_unique<FailureDetector>(identity, std::move(listener), timeout);
  }
  // An earlier rendezvous of this run may have left its port in the store. No process listens on it, and the key is
  // read again.
  const auto locate = [&]() -> net::MeetingPoint {
    try {
      if (!store->check({kPlaceKey})) return {};
      return {"", identity.master_addr, std::atoi(store->get_to_str(kPlaceKey).c_str())};
    } catch (const std::exception& error) {
      throw CommError(
          base::join("[comm::rendezvous] got '", first_line(error), "', expected the agent's store to answer."));
    }
  };
  return std::make_unique<FailureDetector>(identity, locate, timeout);
}

class WatchStore : public c10d::Store {
 public:
  WatchStore(FailureDetector& watch, std::chrono::milliseconds timeout) : c10d::Store(timeout), watch_(watch) {}

  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<WatchStore>(watch_, timeout_); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    watch_.set(key, std::string(value.begin(), value.end()));
  }
  std::vector<uint8_t> get(const std::string& key) override {
    const auto value = watch_.get(key, net::Clock::now() + timeout_);
    return {value.begin(), value.end()};
  }
  bool check(const std::vector<std::string>& keys) override {
    for (const auto& key : keys) {
      if (!watch_.has(key)) return false;
    }
    return true;
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    for (const auto& key : keys) watch_.get(key, net::Clock::now() + timeout);
  }
  // Not needed by gloo's full mesh.
  int64_t add(const std::string&, int64_t) override { C10_THROW_ERROR(NotImplementedError, "add"); }
  bool deleteKey(const std::string&) override { C10_THROW_ERROR(NotImplementedError, "deleteKey"); }
  int64_t getNumKeys() override { C10_THROW_ERROR(NotImplementedError, "getNumKeys"); }

 private:
  FailureDetector& watch_;
};

}  // namespace

std::unique_ptr<FailureDetector> rendezvous(const net::ProcessInfo& identity, std::chrono::milliseconds timeout) {
  net::MeetingPoint point;
  if (identity.one_host()) {
    point = net::local_meeting_point(net::key_of(identity));
  } else if (identity.master_addr.empty() || identity.master_port == 0) {
    throw ConfigError(
        base::join("[comm::rendezvous] got no address to meet at (", identity.source, ", ", identity.size, " ranks, ",
                   identity.local_size,
                   " on this host), expected MASTER_ADDR and MASTER_PORT. "
                   "Hint: set both to the host of rank 0 and a free port of it, the same on every rank."));
  } else if (variable("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    return meet_by_agent(identity, timeout);
  } else {
    point = {"", identity.master_addr, identity.master_port};
  }
  if (identity.rank != 0) {
    return std::make_unique<FailureDetector>(
        identity, [&] { return point; }, timeout);
  }
  auto listener = net::listen_at(point);
  return std::make_unique<FailureDetector>(identity, std::move(listener), timeout);
}

c10::intrusive_ptr<c10d::Store> store_of(FailureDetector& watch, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<WatchStore>(watch, timeout);
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace zero::comm
