// Each rank chooses by itself, from information that is the same on all ranks.
#include "net/transport_choice.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include <zero/config_tools.h>
#include <zero/errors.h>

#include "base/check.h"

namespace zero::net {
namespace {

std::string place_of(const ProcessInfo& identity) {
  return base::join(" (rank ", identity.rank, "/", identity.size, ")");
}

}  // namespace

std::string transport_without_gpus(const ProcessInfo& identity) {
  if (identity.size == 1) return "local";
  return identity.one_host() ? "shm" : "shm+gloo";  // all TCP if hosts are uneven, found later
}

TransportChoice choose_transport(const ProcessInfo& identity, const Environment& environment,
                                 const std::function<int()>& gpus) {
  const std::vector<std::string> names{"auto", "nccl", "gloo", "shm", "shm+gloo"};
  const auto asked = environment("ZERO_TRANSPORT").value_or("auto");
  if (std::find(names.begin(), names.end(), asked) == names.end()) {
    const auto nearest = nearest_name(asked, names);
    throw ConfigError(base::join("[Communicator::from_env] got ZERO_TRANSPORT='", asked,
                                 "', expected auto, nccl, gloo, shm or shm+gloo", place_of(identity),
                                 nearest.empty() ? "" : base::join(". Hint: did you mean '", nearest, "'?")));
  }
  const auto share = environment("ZERO_SHARE_GPU").value_or("0");
  if (share != "0" && share != "1")
    throw ConfigError(
        base::join("[Communicator::from_env] got ZERO_SHARE_GPU='", share, "', expected 0 or 1", place_of(identity)));
  if (share == "1" && asked == "nccl")
    throw ConfigError(
        base::join("[Communicator::from_env] got ZERO_SHARE_GPU=1 and ZERO_TRANSPORT=nccl, expected one of "
                   "them: NCCL needs a GPU for every rank",
                   place_of(identity), ". Hint: leave ZERO_TRANSPORT out"));
  if (identity.size == 1) return {"local"};
  if (asked == "shm" && !identity.one_host())
    throw ConfigError(base::join("[Communicator::from_env] got ZERO_TRANSPORT=shm for ", identity.size,
                                 " ranks of which ", identity.local_size, " are on this host, expected all on one host",
                                 place_of(identity), ". Hint: ZERO_TRANSPORT=auto, which is shm+gloo here"));
  if (asked == "shm+gloo" && identity.one_host())
    throw ConfigError(base::join("[Communicator::from_env] got ZERO_TRANSPORT=shm+gloo for ", identity.size,
                                 " ranks of one host, expected several hosts", place_of(identity),
                                 ". Hint: ZERO_TRANSPORT=auto, which is shm here"));
  if (asked != "auto") return {asked, true, share == "1"};
  if (share == "1") return {transport_without_gpus(identity), false, true};
  if (gpus() >= identity.local_size) return {"nccl"};
  return {transport_without_gpus(identity)};
}

std::chrono::milliseconds choose_timeout(const Environment& environment) {
  const auto text = environment("ZERO_TIMEOUT_S");
  if (!text) return std::chrono::minutes(30);
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  constexpr double kMost = 1e8;  // three years
  if (end == text->c_str() || *end != '\0' || !std::isfinite(seconds) || seconds < 0.001 || seconds > kMost)
    throw ConfigError(
        base::join("[Communicator::from_env] got ZERO_TIMEOUT_S='", *text, "', expected seconds from 0.001 to 1e8"));
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

int visible_gpus() {
  // Never closed: the driver cannot be unloaded after initialization.
  void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!driver) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned)>(::dlsym(driver, "cuInit"));
  const auto count_devices = reinterpret_cast<int (*)(int*)>(::dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  if (!init || !count_devices || init(0) != 0 || count_devices(&count) != 0) return 0;
  return count;
}

}  // namespace zero::net
