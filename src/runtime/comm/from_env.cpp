// Creates a Communicator from the launcher's variables: process information, transport, rendezvous.
#include <zero/communicator.h>
#include <zero/errors.h>

#include "base/check.h"
#include "base/log.h"
#include "comm/group.h"
#include "comm/transport.h"
#include "net/process_info.h"
#include "net/secret.h"
#include "net/transport_choice.h"

namespace zero {
namespace {

using net::ProcessInfo;

std::unique_ptr<comm::Transport> open_transport(const std::string& name, const ProcessInfo& identity,
                                                std::chrono::milliseconds timeout, bool asked) {
  if (name == "local") return comm::make_local();
  if (name == "shm") return comm::make_shm(identity, timeout);
  if (name == "gloo") return comm::make_gloo(identity, timeout);
  if (name == "shm+gloo") return comm::make_shm_gloo(identity, timeout, asked);
  ZERO_CHECK(name == "nccl", "transport ", name);
  return comm::make_nccl(identity, timeout);
}

std::unique_ptr<comm::Transport> rendezvous(const ProcessInfo& identity, const net::Environment& environment,
                                            std::chrono::milliseconds timeout) {
  const auto choice = net::choose_transport(identity, environment, net::visible_gpus);
  if (choice.asked || choice.name != "nccl") {
    auto transport = open_transport(choice.name, identity, timeout, choice.asked);
    return choice.staged ? comm::make_staged(std::move(transport)) : std::move(transport);
  }
  try {
    return open_transport(choice.name, identity, timeout, false);
  } catch (const ConfigError& error) {
    // If the plug-in cannot be loaded here, all ranks choose this: they have not communicated yet.
    const auto other = net::transport_without_gpus(identity);
    if (identity.rank == 0)
      base::log(LogLevel::Info, base::join("transport ", other, " although there are GPUs: ", error.what()));
    return open_transport(other, identity, timeout, false);
  }
}

}  // namespace

bool Communicator::launched() { return net::identity_from_env().launched(); }

std::shared_ptr<Communicator> Communicator::from_env() {
  const auto environment = net::process_environment();
  auto identity = net::identity_from_env();
  identity.secret = net::secret_of(identity, environment);
  const auto timeout = net::choose_timeout(environment);
  auto transport = rendezvous(identity, environment, timeout);
  transport->set_timeout(timeout);
  if (identity.rank == 0)
    base::log(LogLevel::Info,
              base::join("ranks: ", identity.size, " from ", identity.source, ", transport ", transport->name()));
  if (identity.rank == 0 && !identity.one_host() && identity.secret.empty())
    base::log(
        LogLevel::Info,
        "ZERO_TOKEN=none: ranks of several hosts prove no secret, so anyone who reaches their ports can join them: "
        "use a network of the run's own");
  return comm::make_communicator(std::move(transport));
}

}  // namespace zero
